"""Declared hooks and callbacks: which of them run, in which order, and what they may return."""

from __future__ import annotations

from datetime import timedelta

import pytest

from runtime_core.app.app import App
from runtime_core.declare.manifest import HookPoint
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.runs.hooks.declared import (
    Allow,
    Ask,
    CallbackResult,
    CallbackResultType,
    Change,
    Deny,
    HookEvent,
    Selection,
    keys_of,
    recorded_callback,
    recorded_verdict,
    select,
)


@pytest.mark.parametrize(
    ("verdict", "recorded"),
    [
        (None, {"verdict": "allow"}),
        (Allow(), {"verdict": "allow"}),
        (Change({"a": 1}), {"verdict": "change", "payload": {"a": 1}}),
        (Deny(), {"verdict": "deny", "reason": "denied"}),
        (Deny("no"), {"verdict": "deny", "reason": "no"}),
        (Ask("ok?"), {"verdict": "ask", "prompt": "ok?", "timeout": None, "default": None}),
        (
            Ask("ok?", timeout=timedelta(minutes=1), default=False),
            {"verdict": "ask", "prompt": "ok?", "timeout": 60.0, "default": False},
        ),
    ],
)
def test_a_verdict_is_recorded(verdict: object, recorded: dict[str, object]) -> None:
    assert recorded_verdict(verdict, "hook 'x'", notice=False) == recorded
    if recorded == {"verdict": "allow"}:
        assert recorded_verdict(verdict, "hook 'x'", notice=True) == recorded
    else:
        with pytest.raises(TypeError, match=r"^hook 'x' returned \w+: here a hook can only observe; return None$"):
            recorded_verdict(verdict, "hook 'x'", notice=True)


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (True, "hook 'x' returned True: return None, Allow(), Change(…), Deny(…) or Ask(…)"),
        (Ask("ok?", timeout=True), "hook 'x' returned Ask(timeout=True): give seconds or a timedelta"),
        (Ask("ok?", timeout=1e300), "hook 'x' returned Ask(timeout=1e+300): give seconds or a timedelta"),
        (Ask("ok?", default=1), "hook 'x' returned Ask(default=1): give True to approve or False to deny"),  # type: ignore[arg-type]  # the point
    ],
)
def test_another_value_is_no_verdict(verdict: object, message: str) -> None:
    with pytest.raises(TypeError) as refused:
        recorded_verdict(verdict, "hook 'x'", notice=False)
    assert str(refused.value).startswith(message)


def test_a_payload_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the payload that hook 'x' returned"):
        recorded_verdict(Change(object()), "hook 'x'", notice=False)


def test_the_answer_of_a_callback_is_recorded() -> None:
    assert recorded_callback(None, "x") == {"success": True, "type": "bypass", "result_data": None}
    override = CallbackResult(False, [1], CallbackResultType.OVERRIDE)
    assert recorded_callback(override, "x") == {"success": False, "type": "override", "result_data": [1]}
    with pytest.raises(TypeError, match=r"^x returned \[1\]: return None or CallbackResult\(…\)$"):
        recorded_callback([1], "x")


def test_the_callback_of_an_action_precedes_that_of_its_tool() -> None:
    assert keys_of("browser", {"action": "click"}) == ["browser__click", "browser"]
    assert keys_of("browser", {"action": 3}) == keys_of("browser", {}) == ["browser"]


def test_an_invalid_hook_is_refused_where_it_is_declared() -> None:
    app = App("wrong")

    def generator(event: HookEvent) -> object:
        yield event

    class WithoutExec:
        pass

    for point, function, options, message in (
        ("nowhere", print, {}, "a hook ("),
        ("start", lambda event: None, {"name": "x", "order": True}, "hook 'x' at task_created"),
        ("start", generator, {}, "hook 'generator' at task_created"),
        ("start", WithoutExec, {"name": "x"}, "hook 'x' at task_created"),
        ("start", lambda: None, {"name": "x"}, "hook 'x' at task_created"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            app.hook(point, **options)(function)
        assert str(refused.value).startswith(message)
        assert "test_declared.py:" in str(refused.value)
    assert list(app.hooks) == []


def test_a_hook_is_declared_once() -> None:
    app = App("twice")
    app.hook("start", name="x")(lambda event: None)
    with pytest.raises(ConfigurationError, match=r"^hook 'x' at task_created is declared twice"):
        app.hook("start", name="x")(lambda event: None)
    app.hook("task_completed", name="x")(lambda event: None)
    app.hooks.include(app.hooks)  # its own declarations again are no second ones
    assert len(list(app.hooks)) == 2


def test_hooks_are_chosen_by_order_then_those_that_always_run_then_as_they_were_named() -> None:
    app = App("order")
    for name, order, always in (("late", 5, True), ("a", 0, False), ("b", 0, False), ("first", 0, True)):
        app.hook("start", name=name, order=order, always=always, guard=name == "b")(lambda event: None)
    chosen = select(app.hooks, {"task_created": ["b", "!elsewhere", "a", "late"]})
    assert [(one.name, one.guard) for one in chosen.at(HookPoint.TASK_CREATED)] == [
        ("first", False),
        ("b", True),
        ("elsewhere", True),
        ("a", False),
        ("late", False),
    ]
    assert select(App("none").hooks, {}) == Selection()
