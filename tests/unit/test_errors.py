"""What errors say, which may be repeated, and those that would end the event loop."""

from __future__ import annotations

import inspect
import signal
from contextlib import suppress
from datetime import timedelta

import pytest

from runtime_core import errors
from runtime_core.errors import (
    AgentError,
    Divergence,
    InvalidInput,
    LoopInterrupt,
    Rejected,
    Retry,
    ServerError,
    ToolError,
    WeftError,
    error_of_exit,
    is_temporary,
)


def test_each_error_is_one_of_weft_and_says_when_it_is_raised() -> None:
    found = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, BaseException)]
    assert len(found) > 30
    assert [each for each in found if not issubclass(each, WeftError)] == [LoopInterrupt]
    assert [each for each in found if not each.__doc__] == []


@pytest.mark.parametrize(
    ("text", "temporary"),
    [
        ("OOM command not allowed", True),
        ("LOADING the dataset", True),
        ("READONLY You can't write", True),
        ("NOGROUP No such key", False),
        ("ERR OOM elsewhere in the text", False),
    ],
)
def test_a_server_that_is_busy_may_accept_a_command_later(text: str, temporary: bool) -> None:
    assert is_temporary(ServerError(text)) is temporary


def test_a_refusal_names_its_field() -> None:
    error = Rejected("data.agent", "is missing", 2.0, "t")
    assert isinstance(error, InvalidInput)
    assert (str(error), error.field, error.message) == ("data.agent: is missing", "data.agent", "is missing")
    assert (error.retry_after_seconds, error.task_id) == (2.0, "t")


def test_the_error_of_a_step_names_its_type_once() -> None:
    assert str(ToolError("OSError", "gone")) == "OSError: gone"
    assert str(AgentError("", "gone")) == "gone"


def test_a_delay_is_seconds_or_a_timedelta() -> None:
    assert (Retry().after_seconds, Retry(2).after_seconds) == (0.0, 2.0)
    assert Retry(timedelta(minutes=1), "busy").after_seconds == 60.0


def test_a_divergence_names_both_calls_once_they_are_known() -> None:
    error = Divergence("r", "2", "ctx.sleep(1)", line="app.py:3 in code", trace="frames")
    assert str(error).startswith("step 2 of run r (app.py:3 in code): the journal has another step (weft task show")
    both = error.beside('ctx.tool("search")')
    assert 'the journal has ctx.tool("search"), but the code now requests ctx.sleep(1)' in str(both)
    assert (both.line, both.trace, both.recorded) == (error.line, error.trace, 'ctx.tool("search")')


def test_an_exit_of_user_code_becomes_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert str(error_of_exit("agent 'a'", SystemExit(3))) == (
        "agent 'a' called sys.exit(3): return or raise an error instead"
    )
    handler = signal.default_int_handler
    monkeypatch.setattr(signal, "getsignal", lambda number: handler if number == signal.SIGINT else None)
    with pytest.raises(KeyboardInterrupt):  # of a person
        error_of_exit("agent 'a'", KeyboardInterrupt())
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    assert str(error_of_exit("agent 'a'", KeyboardInterrupt())) == "agent 'a' raised KeyboardInterrupt"


def test_an_interrupt_of_blocking_code_escapes_its_except_clauses() -> None:
    def code() -> None:
        with suppress(Exception):  # as code that catches everything and goes on
            raise LoopInterrupt("blocked for 5 s", repeatable=False)

    with pytest.raises(LoopInterrupt) as interrupted:
        code()
    error = interrupted.value.blocked()
    assert (str(error), error.repeatable) == ("blocked for 5 s", False)
    assert error.__traceback__ is interrupted.value.__traceback__
