"""The servers that the tests run on, by name, each started once for a test run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import pytest

from tests.servers.process import Append, Server
from tests.servers.redis import REDIS_7_0, REDIS_8_0, VALKEY_8_1, RedisServer
from tests.servers.valkey import ValkeyServer

VALKEY_9 = "valkey-9"
PROGRAMS = {program.name: program for program in (REDIS_7_0, REDIS_8_0, VALKEY_8_1)}
MATRIX = (VALKEY_9, *PROGRAMS)
SELECTION = "WEFT_TEST_SERVERS"
ALL = "all"
Case = TypeVar("Case")


def named_servers() -> frozenset[str] | None:
    """Return the names in `WEFT_TEST_SERVERS`; None if it is `all`, unset or empty."""
    names = frozenset(name.strip() for name in os.environ.get(SELECTION, "").split(","))
    return None if ALL in names or names == {""} else names


def is_full() -> bool:
    """Return whether `WEFT_TEST_SERVERS` is `all`, as `make test-matrix` sets it."""
    return ALL in os.environ.get(SELECTION, "").split(",")


def repeat_on(*kinds: str) -> list[str]:
    """Return those of `kinds` that a test is repeated on: by default, only the newest Valkey.

    Use it for a test that promises the same on every server. A test of what is special to one server names that server.
    """
    if os.environ.get(SELECTION, "").strip():
        named = named_servers()
        return [kind for kind in kinds if named is None or kind in named]
    return [kind for kind in kinds if kind == VALKEY_9]


def only_in_matrix(reason: str) -> pytest.MarkDecorator:
    """Mark a test of a variant, which `make test` leaves to the matrix; `reason` says what it varies."""
    return pytest.mark.skipif(not is_full(), reason=f"in the matrix: {reason}")


def first_of(*cases: Case, least: int = 1) -> list[Case]:
    """Return the first of cases, or as many as `least` says, that run all of the code; in the matrix, all cases."""
    return list(cases) if is_full() else list(cases[:least])


def make_server(
    kind: str,
    cache: Path,
    directory: Path,
    *,
    append: Append | None = "everysec",
    options: Sequence[str] = (),
) -> Server:
    """Return a server of the matrix, not started. Raises Unavailable if it cannot be had here."""
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
        """Return the shared server of this kind. Raises Unavailable."""
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
