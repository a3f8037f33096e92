"""`weft task show`: all that is known of a task, and everything that its runs wait for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import typer

from runtime_core.bus.event_bus import EventBus
from runtime_core.cli.output import Json, error_line, moment, preview, print_json, without_secrets
from runtime_core.text import plain
from runtime_core.wire.results import ENDED, shown

if TYPE_CHECKING:
    from runtime_core.trajectory.reading import TaskTrajectory


LOOKED_AT_MAX = 20_000
"""Tasks on the broker that a list looks through."""

Id = Annotated[str, typer.Argument(metavar="ID", help="The task's id.")]


_KINDS = {"t": "tool", "a": "agent", "r": "ray", "s": "spark", "i": "timer", "h": "human"}
_PLACES = {
    "queue": "for its tenant's turn to start",
    "mail": "for its turn in the mailbox of",
    "nest": "for its turn, called from within, on",
    "pend": "until a nested call is done on",
    "park": "parked: it asked for other steps than before; mend the code, then redrive its dead letter:",
}


@dataclass(frozen=True, slots=True)
class _Retry:
    """A delivery that waits for its next attempt."""

    name: str
    attempt: int
    due_ms: int
    errors: list[dict[str, Any]]  # Any: JSON


async def read_task(bus: EventBus, task: str) -> dict[str, Any] | None:  # Any: JSON
    """The task in words, None where the broker does not know it (any more).

    Adds to what `shown` says: `max_steps`, `time_limit_at`, `waits_for` and `questions` of all runs (each with
    `run`, `step`, `kind`, and where known `name`, `due`, `attempt`, `errors`,
    `task_id` of an agent asked elsewhere), and `dead_letters` (ids).
    """
    call, keys = bus.transport.call, bus.keys
    fields = await hash_at(bus, keys.task(task))
    if not fields:
        return None
    view = shown(task, fields)
    header = fields.get(b"h", b"").decode().split("\n")
    if len(header) > 5 and header[5] not in ("", "0"):
        view["max_steps"] = int(header[5])
    letters = cast(list[bytes], await call("ZRANGE", keys.base + "letters", 0, -1))
    own = [letter.rpartition(b"|")[2].decode() for letter in letters if letter.rpartition(b"|")[0] == task.encode()]
    if own:
        view["dead_letters"] = own
    view.pop("waits_for", None)
    view.pop("questions", None)
    if view["status"] in ENDED:
        return view
    limit = await _due(bus, f"d|{task}")
    if limit is not None:
        view["time_limit_at"] = limit
    runs = {"r": fields}
    for name in fields:
        if name.startswith(b"k:"):
            run = name[2:].decode()
            runs[run] = await hash_at(bus, f"{keys.base}run:{task}/{run}")
    retries = await _retries(bus, fields)
    waits: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    for run, of_run in sorted(runs.items()):
        waits += _run_waits(run, of_run, retries)
        for name, value in sorted(of_run.items()):
            if name.startswith(b"m:"):
                step = name[2:].decode()
                waits.append(await _step_wait(bus, task, run, step, chr(value[8]), runs, retries))
                if b"q:" + name[2:] in of_run:
                    question = msgspec.json.decode(of_run[b"q:" + name[2:]][13:])
                    due = await _due(bus, f"s|{task}|{run}|{step}")
                    questions.append(question if due is None else {**question, "deadline": due})
    view["waits_for"], view["questions"] = waits, questions
    return view


def describe_wait(wait: Mapping[str, Any], now_ms: float) -> str:  # Any: JSON
    """One thing that a task waits for, on one line without what users wrote."""
    from runtime_core.trajectory.tree import duration

    if "place" in wait:
        return f"{_PLACES[wait['place']]} {wait['name']}"
    text = f"{wait['kind']} {wait.get('name') or wait['step'] or wait['run']}"
    if "task_id" in wait:
        text += f", which works on it as task {wait['task_id']}"
    if wait.get("attempt"):
        text += f", attempt {wait['attempt']}"
    if "due" in wait:
        left = wait["due"] - now_ms
        text += f", in {duration(left)}" if left > 0 else ", due now"
    return text


def answers_to(question: Mapping[str, Any]) -> list[str]:  # Any: JSON
    """What to type to answer a question, one command a line."""
    signal = f"weft task signal {question['task_id']} {question['request_id']}"
    if question.get("expects") != "verdict":
        return [f"{signal} VALUE"]
    return [
        f"{signal} true",
        f"{signal} false",
        signal + """ '{"verdict": "edit", "value": …}'""",
    ]


def _run_waits(run: str, fields: dict[bytes, bytes], retries: Mapping[str, _Retry]) -> list[dict[str, Any]]:
    """What the run itself waits for: its next attempt, or its instance."""
    cur = fields.get(b"cur", b"").decode()
    header = [*fields.get(b"h", b"").decode().split("\n"), "", "", ""]
    name = f"{header[1]}/{header[2]}" if header[2] else header[1]
    if cur in _PLACES:
        return [{"run": run, "step": "", "kind": "agent", "name": name, "place": cur}]
    if cur == "retry" and run in retries:
        return [{"run": run, "step": "", "kind": "agent", **_retry_fields(retries[run])}]
    return []


async def _step_wait(
    bus: EventBus,
    task: str,
    run: str,
    step: str,
    kind: str,
    runs: Mapping[str, dict[bytes, bytes]],
    retries: Mapping[str, _Retry],
) -> dict[str, Any]:  # Any: JSON
    wait: dict[str, Any] = {"run": run, "step": step, "kind": _KINDS.get(kind, "?")}
    child = f"{run}/{step}"
    if child in retries and kind != "a":
        wait |= _retry_fields(retries[child])
    elif kind == "a":
        elsewhere = runs["r"].get(b"k:" + child.encode(), b"").decode()
        if elsewhere.startswith("@"):  # `@partition:task`: the instance lives in another partition
            wait["task_id"] = elsewhere.partition(":")[2]
        wait["name"] = runs.get(child, {}).get(b"h", b"\n").decode().split("\n")[1]
    else:
        due = await _due(bus, f"s|{task}|{run}|{step}")
        if due is not None:
            wait["due"] = due
    return wait


def _retry_fields(retry: _Retry) -> dict[str, Any]:  # Any: JSON
    return {"name": retry.name, "attempt": retry.attempt, "due": retry.due_ms, "errors": retry.errors}


async def _retries(bus: EventBus, task_fields: Mapping[bytes, bytes]) -> dict[str, _Retry]:
    """Deliveries of the task that wait in the timers, by run (a call's run is its own)."""
    found: dict[str, _Retry] = {}
    for field in task_fields:
        if not field.startswith(b"z:e|"):
            continue
        member = field[2:]
        packed = cast(bytes | None, await bus.transport.call("HGET", bus.keys.base + "delayed", member))
        due = await _due(bus, member.decode())
        fields = unpacked(packed)
        header = fields.get(b"h", b"").decode().split("\n")
        if due is None or len(header) < 7:
            continue
        errors = msgspec.json.decode(fields[b"e"]) if b"e" in fields else []
        found[header[3]] = _Retry(header[4], int(header[6]), due, errors)
    return found


def unpacked(packed: bytes | None) -> dict[bytes, bytes]:
    """The fields of a delivery that waits in the timers; none where they cannot be read."""
    if packed is None:
        return {}
    try:
        flat = msgspec.msgpack.decode(packed, type=list[str])
    except msgspec.MsgspecError:
        return {}
    return {name.encode(): value.encode() for name, value in zip(flat[::2], flat[1::2], strict=False)}


async def hash_at(bus: EventBus, key: str) -> dict[bytes, bytes]:
    """A hash of the broker; empty where there is none."""
    flat = cast(list[bytes], await bus.transport.call("HGETALL", key))
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def _due(bus: EventBus, member: str) -> int | None:
    score = await bus.transport.call("ZSCORE", bus.keys.timers, member)
    return None if score is None else int(float(cast(bytes, score)))


_AMOUNTS = ("tokens", "input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "requests", "cost")


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
