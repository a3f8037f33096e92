"""AutoGen's source packages, which contain its own tests: fetched on demand, never part of the repository."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.7.5"


def source(package: str, cache: Path) -> Path:
    """The unpacked source package, as in `source("autogen-core", …)`; fetched at the first use.

    What is fetched must have a hash of the lock.

    Raises:
        subprocess.CalledProcessError: It could not be fetched.
    """
    folder = cache / f"{package.replace('-', '_')}-{VERSION}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        wanted = Path(scratch) / "wanted.txt"
        wanted.write_text(_locked(package), encoding="utf-8")
        # Without isolation: the builder that pip asks for the package's name is in this environment's lock.
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        command += ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--require-hashes", "--dest", scratch]
        subprocess.run([*command, "--requirement", str(wanted)], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (Path(scratch) / folder.name).rename(folder)
    return folder


def _locked(package: str) -> str:
    """The entry of a package in the lock: its version and the hashes of its files."""
    lock = (ROOT / "requirements" / "autogen.txt").read_text(encoding="utf-8")
    (entry,) = re.findall(rf"^{re.escape(package)}==.*\n(?:    .*\n?)*", lock, flags=re.MULTILINE)
    return str(entry)
