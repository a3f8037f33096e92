"""A registered function in the process of a worker: every way in which a call can end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_core.engines.protocol import Error, Outcome, Registered, StepInfo, Value
from runtime_core.engines.remote import run_registered
from runtime_core.engines.results import Results

ROOT = Path(__file__).parents[3]
STEP = StepInfo(task="t-1", run="r/2", attempt=3, key="t-1/r/2", deadline=9.5)


def called(name: str, results: Results | None = None, /, **arguments: object) -> Outcome:
    call = Registered("tests.apps.remote_app:app", str(ROOT), name, json.dumps(arguments).encode())
    return run_registered(call, STEP, results or Results())


def value(outcome: Outcome) -> Any:  # Any: JSON
    assert isinstance(outcome, Value), outcome
    return json.loads(outcome.data)


def refused(outcome: Outcome) -> Error:
    assert isinstance(outcome, Error), outcome
    return outcome


def test_a_call_returns_its_value() -> None:
    assert value(called("add", left=2))["sum"] == 3
    assert value(called("told", word="ü")) == ["t-1", "r/2", 3, "t-1/r/2", 9.5, "ü"]
    assert [value(called("Counter", by=2)) for _ in range(3)][-1] == value(called("Counter", by=0))


@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
))  # fmt: skip
def test_any_value_survives_a_round_trip(sent: object) -> None:
    assert value(called("echo", value=sent)) == sent


@given(st.binary(max_size=40))
def test_generated_arguments_are_refused_and_never_raise(data: bytes) -> None:
    outcome = run_registered(Registered("tests.apps.remote_app:app", str(ROOT), "add", data), STEP, Results())
    assert isinstance(outcome, Value) or outcome.cause == "invalid"


def test_a_name_and_its_versions() -> None:
    assert value(called("rank@1", passages=["b", "a"])) == ["a", "b"]
    assert value(called("rank@2", passages=["b", "a"])) == ["b", "a"]
    assert value(called("alone")) == value(called("alone@7")) == "alone"
    several = refused(called("rank", passages=[]))
    assert (several.cause, several.message) == (
        "invalid", "engine function 'rank' has several versions: use one of 'rank@1' and 'rank@2'"
    )  # fmt: skip
    assert "has no version '3'; this app declares 'rank@1' and 'rank@2'" in refused(called("rank@3")).message
    unknown = refused(called("nothing"))
    assert (unknown.cause, unknown.type) == ("invalid", "UnknownName")
    assert unknown.message == "the app tests.apps.remote_app:app has no engine function 'nothing'"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("add", {"left": "two"}, "arguments.left: Input should be a valid integer"),
        ("add", {}, "arguments.left: is missing"),
        ("add", {"left": 1, "more": 2}, "arguments.more: is not known; choose from left, right"),
        ("unreadable", {}, "result: object cannot be written as JSON"),
    ],
)
def test_an_impossible_run_is_refused_with_the_reason(name: str, arguments: dict[str, object], message: str) -> None:
    error = refused(called(name, **arguments))
    assert (error.cause, error.type, error.retryable) == ("invalid", "InvalidInput", False)
    assert error.message.startswith(message)


@pytest.mark.parametrize(
    ("how", "cause", "kind", "message", "retryable", "after"),
    [
        ("value", "function", "ValueError", "no such value: ü", True, None),
        ("exit", "function", "SystemExit", "3", True, None),
        ("interrupt", "function", "KeyboardInterrupt", "", True, None),
        ("retry", "function", "Retry", "busy", True, 7.0),
        ("reject", "function", "Refused", "not this one", False, None),
        ("import", "invalid", "ModuleNotFoundError", "No module named 'a_module_that_nobody_has'", False, None),
        ("silent", "function", "_Unreadable", "its message cannot be read", True, None),
    ],
)
def test_a_function_that_raises_is_the_error_of_its_call(
    how: str, cause: str, kind: str, message: str, retryable: bool, after: float | None
) -> None:
    error = refused(called("fail", how=how))
    assert (error.cause, error.type, error.message) == (cause, kind, message)
    assert (error.retryable, error.retry_after_seconds) == (retryable, after)
    assert how != "value" or "in fail" in error.traceback


def test_an_invalid_command_is_refused() -> None:
    assert value(called("train", epochs=3)) == ["python", "-m", "train", "3"]
    error = refused(called("train", epochs=0))
    assert (error.cause, error.type, error.retryable) == ("invalid", "InvalidResult", False)
    assert error.message == "result: [] is not a command: return a string, or a list of strings"


def in_worker(tmp_path: Path, app: str, folder: Path) -> list[Any]:
    """Return the results of two calls in a process started elsewhere, as a worker is, and whether it loads the rest."""
    script = f"""
import json, sys
from runtime_core.engines.protocol import Registered, StepInfo
from runtime_core.engines.remote import run_registered
from runtime_core.engines.results import Results
import msgspec
call = Registered({app!r}, {str(folder)!r}, "once", b"{{}}")
told = [msgspec.to_builtins(run_registered(call, StepInfo("t", "r"), Results()), builtin_types=()) for _ in "12"]
print(json.dumps(told))
"""
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    told: list[Any] = json.loads(done.stdout)
    return told


def test_a_worker_imports_the_app_once_from_the_callers_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "shop_app.py").write_text(
        "import pathlib\nfrom weft import App\napp = App('shop')\n"
        "with open(pathlib.Path(__file__).with_name('imports'), 'a') as file: file.write('i')\n"
        "@app.engine_function\ndef once() -> str:\n    return 'from home'\n"
    )
    told = in_worker(tmp_path, "shop_app:app", home)
    assert [each["end"] for each in told] == ["value", "value"]
    assert (home / "imports").read_text() == "i"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "there is no module 'shop_app' in "),
        ("import numpie_or_so\n", "ModuleNotFoundError: No module named 'numpie_or_so'"),
        ("1/0\n", "ZeroDivisionError: division by zero"),
        ("app = 1\n", "is of type int, not App"),
    ],
)
def test_an_app_that_cannot_be_imported_is_a_clear_error(tmp_path: Path, source: str | None, message: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    if source is not None:
        (home / "shop_app.py").write_text(source)
    first, second = in_worker(tmp_path, "shop_app:app", home)
    assert first == second
    assert (first["cause"], first["retryable"]) == ("invalid", False)
    assert message in first["message"]
    assert "\n" not in first["message"]
