"""The process of a driver: its log lines, and engines that are not installed."""

from __future__ import annotations

import io
import logging

import pytest

from runtime_core.engines.driver.host import BACKENDS, RECORD_PREFIX, LineHandler, away, backend_of, missing, parse_line
from runtime_core.engines.protocol import Away
from runtime_core.telemetry.logs import LONGEST


def test_a_driver_logs_the_start_of_a_long_line() -> None:
    stream = io.StringIO()
    logger = logging.Logger("any")
    logger.addHandler(LineHandler(stream))
    logger.warning("%s", "word " * 1_000_000 + "\ud800")
    line = stream.getvalue()
    assert line.startswith(RECORD_PREFIX)
    level, name, text = parse_line(line.rstrip("\n"))
    assert (level, name, len(text)) == (logging.WARNING, "any", LONGEST)


def test_a_line_that_a_library_prints_is_for_debugging() -> None:
    assert parse_line("printed") == (logging.DEBUG, "", "printed")
    assert parse_line(f"{RECORD_PREFIX}no record") == (logging.DEBUG, "", "no record")
    stream = io.StringIO()
    chatty = logging.Logger("ray.worker")
    chatty.addHandler(LineHandler(stream))
    chatty.error("many words")
    assert parse_line(stream.getvalue().rstrip("\n")) == (logging.DEBUG, "ray.worker", "many words")


def test_a_parent_that_has_gone_ends_no_driver() -> None:
    stream = io.StringIO()
    stream.close()
    LineHandler(stream).emit(logging.LogRecord("any", logging.INFO, "", 0, "lost", None, None))


def test_an_engine_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "ray", ("no_such_library:Backend", "weft[ray]"))
    with pytest.raises(Away, match=r"^no_such_library is not installed \(.*\): pip install 'weft\[ray\]'$"):
        backend_of("ray")
    assert str(missing("own", ImportError("no such", name="lib"))) == "lib is not installed (no such)"
    with pytest.raises(ModuleNotFoundError):
        backend_of("no_such_module:Backend")


def test_a_call_without_a_connection_has_not_started() -> None:
    error = away("ray", "connecting")
    assert (error.cause, error.message, error.retryable) == ("away", "ray is unavailable: connecting", True)
