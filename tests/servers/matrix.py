"""The servers that the tests run on, by name, each started once for a test run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.process import Append, Server
from tests.servers.redis import REDIS_7_0, REDIS_8_0, VALKEY_8_1, RedisServer
from tests.servers.valkey import ValkeyServer

VALKEY_9 = "valkey-9"
PROGRAMS = {program.name: program for program in (REDIS_7_0, REDIS_8_0, VALKEY_8_1)}
MATRIX = (VALKEY_9, *PROGRAMS)


def make_server(
    kind: str,
    cache: Path,
    directory: Path,
    *,
    append: Append | None = "everysec",
    options: Sequence[str] = (),
) -> Server:
    """A server of the matrix, not started. Raises Unavailable when it cannot be had here."""
    if kind == VALKEY_9:
        return ValkeyServer(directory, append=append, options=options)
    return RedisServer(PROGRAMS[kind], cache, directory, append=append, options=options)


class Servers:
    """The shared servers of a test run, started at first use and killed together."""

    def __init__(self, cache: Path, directory: Path) -> None:
        self._cache = cache
        self._directory = directory
        self._started: dict[str, Server] = {}
        self._stack = ExitStack()

    def get(self, kind: str) -> Server:
        """The shared server of this kind. Raises Unavailable."""
        if kind not in self._started:
            server = make_server(kind, self._cache, self._directory / kind)
            self._started[kind] = self._stack.enter_context(server)
        return self._started[kind]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
