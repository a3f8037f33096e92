"""`weft task show`: all that is known of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime_core.cli.output import Json, error_line, moment, preview, print_json, without_secrets
from runtime_core.cli.task.arguments import Id
from runtime_core.text import plain

_AMOUNTS = ("tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "requests", "cost")

if TYPE_CHECKING:
    from runtime_core.trajectory.reading import TaskTrajectory


def show(task_id: Id, as_json: Json = False) -> None:
    """Show all that is known of a task.

    What it waits for, its questions and how to answer them, its error, and its runs with their times.

    \b
    Example:
      weft task show t-1
    """
    from runtime_core.cli.connection import run

    run(_show(task_id, as_json))


async def _show(task_id: str, as_json: bool) -> None:
    from runtime_core.cli.connection import broker, trajectories
    from runtime_core.cli.task.view import read_task
    from runtime_core.errors import InvalidInput
    from runtime_core.trajectory.tree import to_tree

    async with broker() as opened:
        bus = await opened.admission.find(task_id)
        view = await read_task(bus, task_id)
        async with trajectories(opened.settings) as store:
            recorded = await store.task(opened.settings.namespace, task_id) if store is not None else None
        now = await opened.now_ms()
    if view is None and recorded is None:
        raise InvalidInput("task_id", f"no task {task_id!r} is known; `weft task list` shows those that are")
    if len(opened.buses) > 1 and view is not None and "dead_letters" in view:
        view["dead_letters"] = [f"{bus.keys.partition}/{entry}" for entry in view["dead_letters"]]
    if view is None and recorded is not None:
        view = _from_store(recorded)
    assert view is not None
    if recorded is not None and recorded.fork is not None:
        view["forked_from"] = {"task": recorded.fork.task, "step": recorded.fork.step}
    # The broker keeps what was sent as it was; the record has no secrets.
    view = without_secrets(view)
    if as_json:
        print_json({**view, "trajectory": to_tree(recorded) if recorded is not None else None})
        return
    _print_task(view, now)
    _print_runs(recorded, view)


def _from_store(recorded: TaskTrajectory) -> dict[str, Any]:  # Any: JSON
    """A task that the broker has forgotten."""
    from runtime_core.trajectory.tree import decoded

    end = recorded.end
    first = next((step for step in recorded.steps if step.run == "r" and not step.step), None)
    view: dict[str, Any] = {"task_id": recorded.task, "status": end.status if end else "unknown", "agent": ""}
    if end is not None:
        view |= {"agent": end.agent, "created": end.created, "ended": end.ended, "steps": end.steps}
        if end.session:
            view["session_id"] = end.session
        if end.error is not None:
            view["error"] = {"type": end.error.type, "message": end.error.message}
    if used := _usage_of(recorded):
        view["usage"] = used
    if first is not None:
        if first.input:
            view["input"] = decoded(first.input)
        if first.output:
            view["output"] = decoded(first.output)
    return view


def _usage_of(recorded: TaskTrajectory) -> dict[str, Any]:  # Any: as the broker shows it
    """What the task has used, by its rows."""
    import msgspec

    from runtime_core.record.usage import Usage, total
    from runtime_core.telemetry.attributes import RESPONSE_MODEL

    reports = [
        Usage(step.usage, {str(step.attributes.get(RESPONSE_MODEL, step.name)): step.usage} if by_model else {})
        for step in recorded.steps
        if step.usage
        for by_model in (step.kind == "model" or (step.kind == "usage" and step.name != "usage"),)
    ]
    used: dict[str, Any] = msgspec.json.decode(total(reports).to_json()) if reports else {}
    return used


def _print_task(view: dict[str, Any], now_ms: int) -> None:  # Any: JSON
    from runtime_core.cli.task.view import answers_to, describe_wait
    from runtime_core.trajectory.tree import duration

    created, ended = view.get("created"), view.get("ended")
    usage = view.get("usage") or {}
    lines = [
        ("task", view["task_id"]),
        ("status", view["status"]),
        ("agent", view["agent"] + (f"/{view['key']}" if view.get("key") else "")),
        ("session", view.get("session_id", "")),
        ("fork of", _origin(view["forked_from"]) if "forked_from" in view else ""),
        ("created", f"{moment(created)} ({duration(now_ms - created)} ago)" if created else ""),
        ("ended", f"{moment(ended)} (after {duration(ended - created)})" if ended and created else ""),
        ("limit", _limits(view)),
        ("usage", _amounts(usage)),
        *(("", f"{model}: {_amounts(amounts)}") for model, amounts in usage.get("models", {}).items()),
        ("limit", f"until {moment(view['time_limit_at'])}" if "time_limit_at" in view else ""),
        ("input", preview(view["input"], 500) if "input" in view else ""),
        ("output", preview(view["output"], 500) if "output" in view else ""),
        ("error", error_line(view["error"], 600) if view.get("error") else ""),
    ]
    for name, text in lines:
        if text:
            print(f"{name:<9}{plain(str(text))}")
    for wait in view.get("waits_for", ()):
        if wait["kind"] == "human":
            continue  # the question stands below
        errors = wait.get("errors") or [None]
        last = f"; the last error: {error_line(errors[-1])}" if errors[-1] else ""
        print(f"waits    {plain(describe_wait(wait, now_ms))}{last}")
    for question in view.get("questions", ()):
        data = f"  {preview(question['data'], 300)}" if question.get("data") is not None else ""
        print(f"question {plain(str(question['prompt']))}{data}")
        if "deadline" in question:
            otherwise = f", then it is {preview(question['default'])}" if "default" in question else ""
            print(f"         until {moment(question['deadline'])}{otherwise}")
        for command in answers_to(question):
            print(f"         answer it: {command}")
    for letter in view.get("dead_letters", ()):
        print(f"dead     {letter}  look: weft dead show {letter}")


def _limits(view: dict[str, Any]) -> str:  # Any: JSON
    limits = [f"{view['max_steps']} steps"] if "max_steps" in view else []
    limits += [f"{limit:g} {name.removeprefix('max_')}" for name, limit in view.get("limits", {}).items()]
    return ", ".join(limits)


def _amounts(usage: dict[str, Any]) -> str:  # Any: JSON
    # The broker keeps no order.
    names = sorted(usage, key=lambda name: (_AMOUNTS.index(name) if name in _AMOUNTS else len(_AMOUNTS), name))
    return ", ".join(f"{usage[name]:.10g} {name}" for name in names if name != "models")


def _origin(fork: dict[str, str]) -> str:
    return f"{fork['task']}, from step {fork['step']}" if fork["step"] else f"{fork['task']}, from its beginning"


def _print_runs(recorded: TaskTrajectory | None, view: dict[str, Any]) -> None:  # Any: JSON
    from runtime_core.trajectory.tree import render

    print()
    if recorded is None:
        ended = "ended" in view
        print(
            "trajectory: nothing is recorded of this task: is the trajectory-recorder running?"
            if ended
            else "trajectory: nothing is recorded yet; steps are when a turn ends or a call is answered"
        )
        return
    if recorded.end is not None and "ended" not in view:
        print("opened again since; what was recorded before:")
    # The task's own line stands above already.
    print("\n".join(render(recorded).splitlines()[1:]))
