"""Prints what a task is, what it waits for, and how to answer its questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime_core.cli.output import Row, error_line, moment, preview, print_facts
from runtime_core.client.task_view import describe_wait
from runtime_core.text import duration
from runtime_core.wire.events import ENDED

_AMOUNTS = ("tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "requests", "cost")


def status_line(view: Row, now_ms: float) -> str:
    """Return the task's status, and for a waiting one what it waits for: a task at rest is healthy."""
    waits = view.get("waits_for") or []
    kinds = {wait["kind"] for wait in waits}
    if view["status"] in ENDED or len(kinds) != 1:
        return str(view["status"])
    since = min((wait["since"] for wait in waits if "since" in wait), default=None)
    passed = "" if since is None else f" since {duration(now_ms - since)}"
    if kinds == {"human"}:
        return f"waiting for a human{passed}"
    if kinds == {"timer"}:
        return f"sleeping{passed}"
    return str(view["status"])


def question_line(question: Row) -> str:
    """Return the text of a question, with its data, on one line."""
    data = f"  {preview(question['data'], 300)}" if question.get("data") is not None else ""
    return f"{question['prompt']}{data}"


def answers_to(question: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """Return the commands that answer a question."""
    signal = f"weft task signal {question['task_id']} {question['request_id']}"
    if question.get("expects") != "verdict":
        return [f"{signal} VALUE"]
    return [f"{signal} true", f"{signal} false", signal + """ '{"verdict": "edit", "value": …}'"""]


def changes_of(view: Row) -> list[str]:
    """Return what `weft task watch` prints of a task: its status, its error and the steps for which it waits."""
    waits = [f"{wait['kind']} {wait.get('name') or wait['step'] or wait['run']}" for wait in view.get("waits_for", ())]
    return [view["status"], *filter(None, [error_line(view.get("error"), 600)]), *waits[:5]]


def instance_of(row: Row) -> str:
    """Return the agent of a row, as `agent/key` if it has a key."""
    return f"{row['agent']}/{row['key']}" if row.get("key") else str(row["agent"])


def print_task(view: Row, now_ms: int) -> None:
    """Print what `read_task` returns, one fact a line."""
    created, ended = view.get("created"), view.get("ended")
    usage, fork = view.get("usage") or {}, view.get("forked_from")
    limits = [f"{view['max_steps']} steps"] if "max_steps" in view else []
    limits += [f"{limit:g} {name.removeprefix('max_')}" for name, limit in view.get("limits", {}).items()]
    facts: list[tuple[str, object]] = [
        ("task", view["task_id"]),
        ("status", status_line(view, now_ms)),
        ("agent", instance_of(view)),
        ("session", view.get("session_id")),
        ("fork of", fork and f"{fork['task']}, from {'step ' + fork['step'] if fork['step'] else 'its start'}"),
        ("created", created and f"{moment(created)} ({duration(now_ms - created)} ago)"),
        ("ended", created and ended and f"{moment(ended)} (after {duration(ended - created)})"),
        ("limit", ", ".join(limits)),
        ("usage", _amounts(usage)),
        *(("", f"{model}: {_amounts(amounts)}") for model, amounts in usage.get("models", {}).items()),
        ("limit", "time_limit_at" in view and f"until {moment(view['time_limit_at'])}"),
        ("input", "input" in view and preview(view["input"], 500)),
        ("output", "output" in view and preview(view["output"], 500)),
        ("error", error_line(view.get("error"), 600)),
    ]
    facts += [
        ("handler", f"no running handler has {each['kind']} {each['name']!r}: start one, or roll back")
        for each in view.get("without_handler", ())
    ]
    for parked in view.get("parked", ()):
        facts.append(
            ("parked", f"step {parked['step']} of run {parked['run']}, at {parked['line'] or 'an unknown line'}")
        )
        facts += [("", f"{what}: {parked[what]}") for what in ("code", "recorded", "now") if parked[what]]
    for wait in view.get("waits_for", ()):
        if wait["kind"] != "human":  # its question is printed below
            error = error_line((wait.get("errors") or [None])[-1])
            facts.append(("waits", describe_wait(wait, now_ms) + (f"; the last error: {error}" if error else "")))
    for question in view.get("questions", ()):
        facts.append(("question", question_line(question)))
        if "deadline" in question:
            otherwise = f", then the answer is {preview(question['default'])}" if "default" in question else ""
            facts.append(("", f"until {moment(question['deadline'])}{otherwise}"))
        facts += [("", f"answer with: {command}") for command in answers_to(question)]
    facts += [("dead", f"{letter}  see weft dead show {letter}") for letter in view.get("dead_letters", ())]
    print_facts(facts)


def _amounts(usage: Row) -> str:
    # The broker does not keep the order.
    names = sorted(usage, key=lambda name: (_AMOUNTS.index(name) if name in _AMOUNTS else len(_AMOUNTS), name))
    return ", ".join(f"{usage[name]:.10g} {name}" for name in names if name != "models")
