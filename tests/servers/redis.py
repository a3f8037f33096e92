"""Redis and Valkey of Debian's releases: the oldest servers that Weft supports, and the middle ones."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.servers.debian import Program, command_of
from tests.servers.process import Append, Server
from tests.servers.unavailable import Unavailable

_COMMON = (
    "libatomic1",
    "libc6",
    "libcap2",
    "libgcc-s1",
    "libjemalloc2",
    "liblzf1",
    "libstdc++6",
    "libsystemd0",
)
_BOOKWORM = (*_COMMON, "libgcrypt20", "libgpg-error0", "liblz4-1", "liblzma5", "libssl3", "libzstd1")
_TRIXIE = (*_COMMON, "libssl3t64", "libzstd1", "zlib1g")

REDIS_7_0 = Program("redis-7.0", "bookworm", "usr/bin/redis-check-rdb", "redis-server", ("redis-tools", *_BOOKWORM))
REDIS_8_0 = Program("redis-8.0", "trixie", "usr/bin/redis-check-rdb", "redis-server", ("redis-tools", *_TRIXIE))
VALKEY_8_1 = Program("valkey-8.1", "trixie", "usr/bin/valkey-check-rdb", "valkey-server", ("valkey-tools", *_TRIXIE))


class RedisServer(Server):
    """A server of one of Debian's releases; see `Server` for the other arguments.

    These are built with TLS, which the packaged Valkey 9 is not.
    """

    def __init__(
        self,
        program: Program,
        cache: Path,
        directory: Path,
        *,
        append: Append | None = "everysec",
        options: Sequence[str] = (),
    ) -> None:
        """`cache` is the folder that unpacked packages are kept in. Raises Unavailable."""
        super().__init__(redis_command(program, cache), directory, append=append, options=options)


def redis_command(program: Program, cache_folder: Path) -> tuple[str, ...]:
    """Return the installed program if it has this version, else Debian's. Raises Unavailable."""
    found = _look_for(program, cache_folder)
    if isinstance(found, Unavailable):
        raise Unavailable(*found.args)
    return found


@cache
def _look_for(program: Program, cache_folder: Path) -> tuple[str, ...] | Unavailable:
    """Return the command, or why there is none. Both are cached, since an unreachable mirror takes its time."""
    installed = shutil.which(program.called)
    if installed and _version(installed) == program.name.partition("-")[2]:
        return (installed,)
    try:
        return command_of(program, cache_folder)
    except Unavailable as reason:
        return reason


def _version(binary: str) -> str:
    """Major and minor, as in `7.0`; empty when the program does not say."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\d+\.\d+)", said)
    return found[1] if found else ""
