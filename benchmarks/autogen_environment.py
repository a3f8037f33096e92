"""AutoGen's environment, separate from ours, since the two pin different versions of the same packages."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.child import ROOT

FOLDER = ROOT / ".cache" / "bench-venv"
LOCK = ROOT / "benchmarks" / "requirements.txt"


def autogen_python() -> Path:
    """Its Python; created on first use and when the lock has changed. Raises SystemExit if pip cannot install it."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "installed.txt"
    if python.exists() and stamp.exists() and stamp.read_bytes() == LOCK.read_bytes():
        return python
    print(f"Installing {LOCK.relative_to(ROOT)} into {FOLDER.relative_to(ROOT)} …", file=sys.stderr, flush=True)
    venv.create(FOLDER, clear=True, with_pip=True)
    install = [
        *(str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"),
        *("--require-hashes", "--only-binary", ":all:", "--requirement", str(LOCK)),
    ]
    done = subprocess.run(install, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"AutoGen cannot be installed beside Weft: {done.stderr.strip()}")
    # Last, so that an interrupted installation is made again.
    stamp.write_bytes(LOCK.read_bytes())
    return python
