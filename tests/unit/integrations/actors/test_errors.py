"""Errors of handlers by name: recreated where their class is known, and never by an import."""

from __future__ import annotations

import pytest

from runtime_core.integrations.actors.errors import Failures, text_of
from weft.runtime import (
    RemoteError,
)


class Awkward(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")


@pytest.mark.parametrize("error", [ValueError("text"), ValueError(), KeyError("k"), Awkward(3, why="so")])
def test_an_error_is_recreated_with_its_class(error: Exception) -> None:
    sent = Failures().name(error), text_of(error)
    back = Failures().error(*sent)
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_an_error_of_a_class_made_in_a_function_comes_back_where_it_was_seen() -> None:
    class Local(Exception):
        pass

    failures = Failures()
    assert type(failures.error(failures.name(Local("x")), "x")) is Local


@pytest.mark.parametrize("name", ["no.such.Error", "builtins.int", "int", "SystemExit", "os.system"])
def test_any_other_name_gives_an_error_that_keeps_it(name: str) -> None:
    error = Failures().error(name, "why")
    assert isinstance(error, RemoteError)
    assert (error.type, error.message) == (name, "why")
