"""A task's trajectory as a tree of runs: text for a terminal, dicts for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypedDict, cast

import msgspec

from runtime_core.base.text import counted, duration, plain, shortened
from runtime_core.trajectory.reading import TaskTrajectory
from runtime_core.wire.codec import readable
from runtime_core.wire.model_call import ModelAnswer, answer_of, messages_of, said_in, usage_of
from runtime_core.wire.step import PIECES, Fork, Step, StepFailure, place

PREVIEW = 48
"""Characters of an input or output per line."""
_DECODED_MAX = 4_096
_ERROR_MAX = 120
_GLYPHS = {
    "agent": "◆",
    "tool": "▸",
    "engine": "▲",
    "step": "·",
    "model": "○",
    "human": "?",
    "receive": "<",
    "release": "-",
    "acquire": "+",
    "timer": "~",
    "emit": "»",
    "send": "→",
    "message": "✉",
    "fork": "⑂",
    "hook": "◇",
    "hooks": "◇",
    "callback": "↩",
    "patch": "±",
}
_OTHER_GLYPH = "-"
SHOWN_FAILURES = 3
"""How many failed attempts of a step the tree shows: the latest ones."""
_KINDS = {"timer": "sleep"}
"""Kind of a step → its name for people, if that differs."""


class ErrorDict(TypedDict):
    """A step's error; `at`, and `started` of the failed attempt, in epoch milliseconds, 0 if unknown."""

    type: str
    message: str
    traceback: str
    at: float
    started: float


class NodeDict(TypedDict):
    """A run or a step; times in epoch milliseconds. `recorded` is false if only its children are known. `failed_at` has
    the times at which it failed for good, before each redrive.
    """

    run: str
    step: str
    kind: str
    name: str
    key: str
    status: str
    attempts: int
    started: float
    ended: float
    committed: float
    input: object
    output: object
    error: ErrorDict | None
    errors: list[ErrorDict]
    failed_at: list[float]
    usage: dict[str, float]
    attributes: dict[str, Any]  # Any: texts, numbers, booleans and lists of them
    cause: str
    owner: str
    recorded: bool
    children: list[NodeDict]


class ForkDict(TypedDict):
    """The origin of a fork: the `inherited` steps before `step` (empty: the start) belong to another task."""

    task: str
    step: str
    inherited: int


class TreeDict(TypedDict):
    """A task; times in epoch milliseconds. Members of its end are None until the end is recorded."""

    namespace: str
    task: str
    complete: bool
    steps: int
    expected_steps: int | None
    status: str | None
    agent: str | None
    session: str | None
    created: float | None
    ended: float | None
    error: ErrorDict | None
    fork: ForkDict | None
    runs: list[NodeDict]


@dataclass(slots=True)
class _Node:
    """The attempts of one (run, step), and the runs that they started."""

    run: str
    step: str
    attempts: list[Step] = field(default_factory=list)
    children: list[_Node] = field(default_factory=list)

    @property
    def last(self) -> Step | None:
        return self.attempts[-1] if self.attempts else None


def render(trajectory: TaskTrajectory) -> str:
    """Return the run tree as lines (kind, name, status, duration, attempts, input, output, error) and a total."""
    lines = [_head(trajectory)]
    if trajectory.fork is not None:
        lines.append(_fork_line(trajectory.fork, len(trajectory.inherited)))
    for indent, branch, node in _walk(_roots(trajectory)):
        lines.append(f"{indent}{branch}{_line(node)}")
    lines.append(_total(trajectory))
    return "\n".join(lines)


def to_tree(trajectory: TaskTrajectory, *, decode: bool = True) -> TreeDict:
    """Return the run tree as plain dicts, with inputs and outputs decoded; without `decode` they are `msgspec.Raw`."""
    end = trajectory.end
    roots = _roots(trajectory)
    made: list[NodeDict] = []
    pending = [(node, made) for node in reversed(roots)]
    while pending:
        node, siblings = pending.pop()
        as_dict = _node_dict(node, decode)
        siblings.append(as_dict)
        pending += [(child, as_dict["children"]) for child in reversed(node.children)]
    return {
        "namespace": trajectory.namespace,
        "task": trajectory.task,
        "complete": trajectory.complete,
        "steps": len(trajectory.steps),
        "expected_steps": end.steps if end else None,
        "status": end.status if end else None,
        "agent": end.agent if end else None,
        "session": end.session if end else None,
        "created": end.created if end else None,
        "ended": end.ended if end else None,
        "error": _error_dict(end.error) if end and end.error else None,
        "fork": _fork_dict(trajectory),
        "runs": made,
    }


def _fork_dict(trajectory: TaskTrajectory) -> ForkDict | None:
    fork = trajectory.fork
    if fork is None:
        return None
    return {"task": fork.task, "step": fork.step, "inherited": len(trajectory.inherited)}


def _roots(trajectory: TaskTrajectory) -> list[_Node]:
    """Link steps below their run, and a run below the step or the run that started it."""
    nodes: dict[tuple[str, str], _Node] = {}
    # Inherited steps of a fork appear where they would appear in the task itself.
    for step in (*trajectory.inherited, *trajectory.steps):
        node = nodes.get((step.run, step.step))
        if node is None:
            node = nodes[step.run, step.step] = _Node(step.run, step.step)
        node.attempts.append(step)
    # A run that is not recorded yet gets a node, so that its steps do not appear under another run.
    for run in dict.fromkeys(run for run, _ in nodes):
        while run:
            if (run, "") not in nodes:
                nodes[run, ""] = _Node(run, "")
            run = run.rpartition("/")[0]
    roots: list[_Node] = []
    for node in nodes.values():
        parent, _, started_by = node.run.rpartition("/")
        if node.step:
            nodes[node.run, ""].children.append(node)
        elif parent:
            (nodes.get((parent, started_by)) or nodes[parent, ""]).children.append(node)
        else:
            roots.append(node)
    for node in nodes.values():
        node.children.sort(key=_position)
    return sorted(roots, key=_position)


def _position(node: _Node) -> str:
    """Return the sort key of siblings: the path of the step, or of the step that started the run."""
    return place("", node.step or node.run.rpartition("/")[2])


def _walk(roots: list[_Node]) -> Iterator[tuple[str, str, _Node]]:
    # A stack, because runs may nest deeper than Python's calls.
    pending = [("", node, at == len(roots) - 1) for at, node in enumerate(roots)][::-1]
    while pending:
        indent, node, is_last = pending.pop()
        yield indent, "└─ " if is_last else "├─ ", node
        below = indent + ("   " if is_last else "│  ")
        last = len(node.children) - 1
        pending += [(below, child, at == last) for at, child in enumerate(node.children)][::-1]


def _head(trajectory: TaskTrajectory) -> str:
    end, fork = trajectory.end, trajectory.fork
    origin = f"  fork of {plain(fork.task)}" + (f" at {plain(fork.step)}" if fork.step else "") if fork else ""
    if end is None:
        return f"task {plain(trajectory.task)}{origin}"
    session = f"  session {plain(end.session)}" if end.session else ""
    return f"task {plain(trajectory.task)}  {plain(end.agent)}  {plain(end.status)}{session}{origin}"


def _fork_line(fork: Fork, inherited: int) -> str:
    if not fork.step:
        return f"fork of {plain(fork.task)} at its beginning"
    return f"fork of {plain(fork.task)} at step {plain(fork.step)}, with {counted(inherited, 'step')} of its trajectory"


def _line(node: _Node) -> str:
    step = node.last
    if step is None:
        return f"{_OTHER_GLYPH} run {plain(node.run)}  still running, or not recorded yet"
    kind = plain(_KINDS.get(step.kind, step.kind))
    parts = [f"{_GLYPHS.get(step.kind, _OTHER_GLYPH)} {kind}" + (f" {plain(step.name)}" if step.name != kind else "")]
    if step.key:
        parts[0] += f"/{plain(step.key)}"
    if place_in_task := "/".join(filter(None, (node.run.partition("/")[2], node.step))):
        parts.append(f"step {plain(place_in_task)}")
    took = duration(step.ended - step.started)
    errors = _errors_of(node)
    attempts = _attempts_of(step, errors)
    # The row of a run has the time of all its attempts, that of a call only the last one's.
    tried = f"{attempts} attempts in {took}" if step.kind == "agent" else f"{attempts} attempts, the last one {took}"
    parts += [plain(step.status), tried if attempts > 1 else took]
    failed = list(enumerate(errors, 1))[-SHOWN_FAILURES:]
    parts += [f"✗ attempt {number}: {_error_line(error)}" for number, error in failed]
    if PIECES in step.attributes:
        parts.append(counted(int(step.attributes[PIECES]), "piece"))
    if (answer := answer_of(step)) is not None:
        parts += [text for text in (_model_of(step, answer), _usage_line(step), answer.finish_reason) if text]
        if answer.retry_after is not None:
            parts.append(f"retry in {answer.retry_after:g} s")
        given, returned = _preview_of(_last_said(step)), _preview_of(answer.shown)
    else:
        given, returned = _preview(step.input), _preview(step.output)
    if given or returned:
        parts.append(" → ".join(text for text in (given, returned) if text))
    if step.error is not None:
        parts.append(f"✗ {_error_line(step.error)}")
    elif answer is not None and answer.error is not None:
        parts.append(f"✗ {_error_line(answer.error)}")
    return "  ".join(parts)


def _errors_of(node: _Node) -> list[StepFailure]:
    """Return the errors of the earlier attempts, the oldest first; those before a redrive included."""
    found: list[StepFailure] = []
    for earlier in node.attempts[:-1]:
        found += [*earlier.errors, *filter(None, [earlier.error])]
    if node.last is not None:
        found += [error for error in node.last.errors if error not in found]
    return found


def _attempts_of(step: Step, errors: list[StepFailure]) -> int:
    """Return how often a step ran in all: a redrive counts its attempts from one again."""
    return max(step.attempt, len(errors) + 1)


def last_failure(trajectory: TaskTrajectory) -> tuple[Step, StepFailure] | None:
    """Return the latest error with a traceback, and its step; None if there is none.

    Of a run that failed because a step of it did, it is the error of that step.
    """
    last = {(step.run, step.step): step for step in trajectory.steps}  # without what a redrive has replaced
    failures = [
        (error.at, number, step, error)
        for number, step in enumerate(last.values())
        for error in (*step.errors, *filter(None, [step.error]))
        if error.traceback
    ]
    if not failures:
        return None
    _, _, step, error = max(failures, key=lambda failure: failure[:2])
    below: dict[str, list[Step]] = {}
    for each in last.values():
        below.setdefault(each.run if each.step else each.run.rpartition("/")[0], []).append(each)
    while not step.step:
        causes = [
            (cause.ended, number, cause, cause.error)
            for number, cause in enumerate(below.get(step.run, ()))
            if cause.error is not None and cause.error.traceback and cause.error.message in error.message
        ]
        if not causes:
            break
        _, _, step, error = max(causes, key=lambda cause: cause[:2])
    return step, error


def _model_of(step: Step, answer: ModelAnswer) -> str:
    model = answer.model or str(step.attributes.get("gen_ai.request.model", ""))
    return plain(model) if model != step.name else ""


def _usage_line(step: Step) -> str:
    """Return tokens in and out, and the cost: `1204 → 56 tokens, 0.0031 cost`."""
    usage = usage_of(step)
    texts = []
    if "input_tokens" in usage or "output_tokens" in usage:
        texts.append(f"{usage.get('input_tokens', 0):g} → {usage.get('output_tokens', 0):g} tokens")
    elif "tokens" in usage:
        texts.append(f"{usage['tokens']:g} tokens")
    if usage.get("cost"):
        texts.append(f"{usage['cost']:.4g} cost")
    return ", ".join(texts)


def _last_said(step: Step) -> object:
    """Return the model's last input message: the new one of a long conversation."""
    messages = messages_of(step)
    return said_in(messages[-1]) if messages else None


def _preview_of(value: object) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
    return shortened(plain(text[:_DECODED_MAX]), PREVIEW)


def _total(trajectory: TaskTrajectory) -> str:
    end, steps = trajectory.end, trajectory.steps
    if end is not None:
        text = f"{plain(end.status)} in {duration(end.ended - end.created)}"
        if end.error is not None:
            text += f" with {_error_line(end.error)}"
    elif steps:
        text = f"{duration(max(s.ended for s in steps) - min(s.started for s in steps))} so far"
    else:
        text = "nothing recorded"
    kinds = ", ".join(f"{count} {plain(kind)}" for kind, count in Counter(s.kind for s in steps).most_common())
    text += f": {counted(len(steps), 'step')}" + (f" ({kinds})" if kinds else "")
    if trajectory.complete:
        return text
    missing = (
        f"{len(steps)} of {end.steps} steps are recorded"
        if end
        else "the task is still running, or its last steps are not recorded yet"
    )
    return f"{text}\nnot complete: {missing}"


def _preview(raw: msgspec.Raw) -> str:
    data = bytes(raw)
    if not data:
        return ""
    text = ""
    if len(data) <= _DECODED_MAX:
        # Decode and encode again, to remove the sender's line breaks and escapes.
        try:
            text = msgspec.json.encode(msgspec.json.decode(data)).decode()
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
            text = ""
    return shortened(plain(text or data[:_DECODED_MAX].decode("utf-8", "replace")), PREVIEW)


def _error_line(error: StepFailure) -> str:
    first = (error.message.splitlines() or [""])[0]
    return shortened(plain(f"{error.type}: {first}" if first else error.type), _ERROR_MAX)


def _node_dict(node: _Node, decode: bool) -> NodeDict:
    step = node.last
    recorded = step is not None
    if step is None:
        step = Step(run=node.run, kind="", name="", status="", started=0.0, ended=0.0)
    errors = _errors_of(node)
    return {
        "run": node.run,
        "step": node.step,
        "kind": step.kind,
        "name": step.name,
        "key": step.key,
        "status": step.status,
        "attempts": _attempts_of(step, errors) if recorded else 0,
        "started": step.started,
        "ended": step.ended,
        "committed": step.committed,
        "input": decoded(step.input) if decode else step.input,
        "output": decoded(step.output) if decode else step.output,
        "error": _error_dict(step.error) if step.error else None,
        "errors": [_error_dict(error) for error in errors],
        "failed_at": [earlier.ended for earlier in node.attempts[:-1] if earlier.error is not None],
        "usage": step.usage,
        "attributes": step.attributes,
        "cause": step.cause,
        "owner": step.owner,
        "recorded": recorded,
        "children": [],
    }


def _error_dict(error: StepFailure) -> ErrorDict:
    text = {"type": error.type, "message": error.message, "traceback": error.traceback}
    return cast(ErrorDict, {**text, "at": error.at, "started": error.started})


def decoded(raw: msgspec.Raw) -> object:
    """Decode JSON. Return None for no data, and the text itself if it is not JSON."""
    return readable(bytes(raw))
