"""One environment for each system, since they pin different versions of the same packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.child import ROOT

FOLDER = ROOT / ".cache" / "comparison"
LOCKS = Path(__file__).parent / "requirements"
RESTATE = Path(__file__).parent / "restate"


def environment(lock: str) -> Path:
    """The folder with its programs; made on first use and when the lock has changed.

    Raises SystemExit with pip's message if it cannot be made.
    """
    folder, source = FOLDER / lock, LOCKS / f"{lock}.txt"
    if _is_made(folder, source):
        return folder / "bin"
    _say(source, folder)
    venv.create(folder, clear=True, with_pip=True)
    install = [
        *(str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"),
        *("--quiet", "--require-hashes", "--only-binary", ":all:", "--requirement", str(source)),
    ]
    _install(install, ROOT, f"the packages of {source.name}")
    _made(folder, source)
    return folder / "bin"


def restate_server() -> Path:
    """The server's program, from its npm package. Raises SystemExit if npm is missing or cannot install it."""
    folder, source = FOLDER / "restate-server", RESTATE / "package-lock.json"
    if _is_made(folder, source):
        return _restate_program(folder)
    if shutil.which("npm") is None:
        raise SystemExit("Restate's server is an npm package: install npm, or leave Restate out with --without restate")
    _say(source, folder)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("package.json", source.name):
        shutil.copy(RESTATE / name, folder / name)
    # Without scripts: one of them would report the installation to somebody.
    _install(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"], folder, "Restate's server")
    _made(folder, source)
    return _restate_program(folder)


def _restate_program(folder: Path) -> Path:
    """The program itself: what npm links to is a script of Node.js that starts it as a child."""
    for program in folder.glob("node_modules/@restatedev/restate-server-*/bin/restate-server"):
        return program
    raise SystemExit("Restate has no server for this machine: leave it out with --without restate")


def _is_made(folder: Path, source: Path) -> bool:
    stamp = folder / "installed.txt"
    return stamp.exists() and stamp.read_bytes() == source.read_bytes()


def _made(folder: Path, source: Path) -> None:
    # Last, so that an interrupted installation is repeated.
    (folder / "installed.txt").write_bytes(source.read_bytes())


def _say(source: Path, folder: Path) -> None:
    print(f"Installing {source.relative_to(ROOT)} into {folder.relative_to(ROOT)} …", file=sys.stderr, flush=True)


def _install(command: list[str], folder: Path, what: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"cannot install {what}: {done.stderr.strip()}")
