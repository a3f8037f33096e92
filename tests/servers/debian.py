"""Server programs of Debian's releases, unpacked into a cache folder without installing anything.

A package runs with its own C library and its own other libraries, all from the same release, so that a
program of a newer release runs on an older machine. The mirror is the one that this machine's apt uses;
apt verifies the signatures with the keyring of Debian.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.servers.unavailable import Unavailable

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT_SECONDS = 50
"""For one command: a fetch is two of them, within the time limit of one test."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and the packages that contain it and all of its libraries."""

    name: str
    """Also the name of its folder in the cache."""
    suite: str
    """The release, as in `bookworm`."""
    binary: str
    """The program's path in the unpacked tree; it acts by the name that it is called with."""
    called: str
    packages: tuple[str, ...]


def command_of(program: Program, cache: Path) -> tuple[str, ...]:
    """Return the command line that runs the program, which is fetched and unpacked on first use.

    Raises Unavailable when there is no apt of Debian, no mirror, or no such package.
    """
    folder = cache / program.name
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{program.name}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as workspace:
                root = _fetch(program, Path(workspace))
                _command_line(program, root)
                # The last step, so that an interrupted fetch leaves no half-filled folder behind.
                root.rename(folder)
    return _command_line(program, folder)


def _fetch(program: Program, workspace: Path) -> Path:
    """Download and unpack into a new folder below `workspace`."""
    mirror = _mirror()
    archives, root = workspace / "archives", workspace / "root"
    for folder in ("lists/partial", "cache/archives/partial", "archives", "root"):
        (workspace / folder).mkdir(parents=True)
    (workspace / "status").touch()
    sources = workspace / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {program.suite} main\n")
    apt = [
        "apt-get",
        "--quiet",
        f"-oDir::Etc::SourceList={sources}",
        "-oDir::Etc::SourceParts=-",
        f"-oDir::State={workspace}",
        f"-oDir::State::Lists={workspace / 'lists'}",
        f"-oDir::State::Status={workspace / 'status'}",
        f"-oDir::Cache={workspace / 'cache'}",
        "-oAcquire::Languages=none",
        "-oAcquire::Retries=1",
        "-oAcquire::http::Timeout=15",
        "-oAcquire::https::Timeout=15",
        # apt would drop to a user that may not enter our folder.
        "-oAPT::Sandbox::User=",
    ]
    _run([*apt, "update", "--error-on=any"], workspace)
    _run([*apt, "download", *program.packages], archives)
    for archive in sorted(archives.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(root)], workspace)
    return root


def _command_line(program: Program, root: Path) -> tuple[str, ...]:
    """Return loader, library path and program of an unpacked tree, checked for missing libraries."""
    loaders = sorted(path for path in root.rglob("ld-linux-*.so.*") if path.is_file())
    binary = root / program.binary
    if not loaders or not binary.is_file():
        raise Unavailable(f"the packages of {program.name} hold no {program.binary} that can run here")
    called = binary.with_name(program.called)
    if not called.exists():
        called.symlink_to(binary.name)
    folders = sorted({str(path.parent) for path in root.rglob("*.so*")})
    # Without the cache of this machine, so that no library of another release is mixed in.
    loader = (str(loaders[0]), "--inhibit-cache", "--library-path", ":".join(folders))
    listing = _run([*loader, "--list", str(binary)], root)
    missing = [line.split()[0] for line in listing.splitlines() if "not found" in line]
    if missing:
        raise Unavailable(f"{program.name} lacks {', '.join(missing)}: add its package in tests/servers/redis.py")
    return (*loader, str(called))


def _mirror() -> str:
    """Return the Debian mirror that this machine uses."""
    if not shutil.which("apt-get") or not shutil.which("dpkg") or not KEYRING.exists():
        raise Unavailable("there is no apt of Debian on this machine")
    if os.uname().machine not in ARCHITECTURES:
        raise Unavailable(f"no packages are listed for {os.uname().machine}")
    sites = _run(["apt-get", "indextargets", "--no-release-info", "--format", "$(SITE)"], Path.cwd()).split()
    for site in sites:
        if site.rstrip("/").endswith("/debian"):
            return site
    raise Unavailable("apt is set up without a mirror of Debian")


def _run(command: list[str], folder: Path) -> str:
    """Return the command's output. Raises Unavailable with its last line."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=APT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not end within {APT_SECONDS} s: is the mirror reachable?") from None
    except OSError as error:
        raise Unavailable(f"{command[0]} could not be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise Unavailable(f"{Path(command[0]).name} failed: {said[-1] if said else done.returncode}")
    return done.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Allow one fetch at a time, even among several test runs."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
