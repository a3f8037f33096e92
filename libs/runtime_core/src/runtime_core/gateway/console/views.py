"""A task as the console shows it: its steps as rows of a tree with bars on a time line, and its root failure."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime_core.base.text import (
    TURNS,
    amount,
    brief,
    in_bytes,
    iso,
    money,
    own_frames,
    shortened,
    span,
    utc,
    visible,
    whole,
)
from runtime_core.client.task_view import describe_wait
from runtime_core.state_manager.stuck import describe_lack
from runtime_core.wire.codec import readable
from runtime_core.wire.ids import ROOT_RUN
from runtime_core.wire.step import OPEN, Status, place

Json = Any
"""A part of a task, as JSON. (Any: JSON.)"""

SHOWN_CHARACTERS = 20_000
ROWS_MAX = 400
GIVEN = "result given to the fork"
WIDTH = 1000
"""Units of the time line."""
SEGMENTS_MAX = 100
"""Parts of other steps of each kind that a run's bar shows; closer ones are joined."""
_TICK_UNITS = (
    ("ms", 1, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
    ("s", 1_000, (1, 2, 5, 10, 15, 30)),
    ("min", 60_000, (1, 2, 5, 10, 15, 30)),
    ("h", 3_600_000, (1, 2, 3, 6, 12)),
    ("d", 86_400_000, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
)
TICKS_MAX = 4
_PARTS = ("queue", "tool", "model", "engine", "wait", "retry", "commit", "dead")
_COMMITTED = ("agent", "tool", "engine")
"""Bars that end when the code does; its commit follows. Other steps are committed with their run's turn."""
_ENTRY = re.compile(r"(\d{13})-\d+")
_WAITING = ("human", "timer", "receive", "acquire")
_QUEUED = ("mail", "nest", "queue")
"""Places of a run that has not started."""
_WORK = {"model": "model", "tool": "tool", "engine": "engine", "ray": "engine", "spark": "engine", "agent": "agent"}
KINDS = {"timer": "sleep", "receive": "message", "human": "person", "usage": "usage"}
"""Kind of a step → its name for people, if that differs."""


def now_ms() -> float:
    return time.time_ns() / 1e6


# -- values ------------------------------------------------------------------------------------------------------


def pretty(value: Json) -> str:
    """Return JSON on several lines, or a text as it is, shortened."""
    if isinstance(value, str):
        return visible(shortened(value, SHOWN_CHARACTERS))
    try:
        return visible(shortened(json.dumps(value, indent=2, ensure_ascii=False), SHOWN_CHARACTERS))
    except (TypeError, ValueError, RecursionError):
        return shortened(repr(value), SHOWN_CHARACTERS)


def as_json(value: Json) -> str:
    """Return JSON for a field that a person edits."""
    return TURNS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, indent=2, ensure_ascii=False))


def preview(value: Json, width: int = 80) -> str:
    """Return a value on one line."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return visible(shortened(" ".join(text[: 4 * width].split()), width))


def ago(ms: float) -> str:
    """Return how long ago a time was, in its largest unit."""
    seconds = max(0.0, now_ms() - ms) / 1000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit} ago"
    return f"{int(seconds)} s ago"


WAITS = {"tool": ("tool", "engine", "ray", "spark"), "person": ("human",), "message": ("receive",),
         "timer": ("timer",), "child": ("agent",)}  # fmt: skip
"""What people select tasks by → kinds of waits."""


def waits_for(view: Mapping[str, Json], what: str) -> bool:
    """Whether a step of an open task waits for one of `WAITS`."""
    return any(wait["kind"] in WAITS[what] and wait["step"] for wait in view.get("waits_for", ()))


def waits_for_people(view: Mapping[str, Json]) -> bool:
    """Whether a task waits for people and for nothing else but its own child agents."""
    kinds = {wait["kind"] for wait in view.get("waits_for", ()) if wait["kind"] != "agent" or "place" in wait}
    return kinds == {"human"} and "without_handler" not in view


def digest(text: str) -> str:
    """Return a digest of a text in a form that does not see what browsers change: ends of lines, and outer space."""
    same = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd").strip()
    return hashlib.sha256(same.encode(errors="replace")).hexdigest()


def tokens_and_cost(usage: Mapping[str, Json]) -> tuple[float, float]:
    numbers = {name: value for name, value in usage.items() if isinstance(value, int | float)}
    tokens = numbers.get("input_tokens", 0) + numbers.get("output_tokens", 0)
    return tokens or numbers.get("tokens", 0), numbers.get("cost", 0)


# -- what a task waits for ---------------------------------------------------------------------------------------


def waits(view: Mapping[str, Json], now: float) -> list[tuple[Json, str, int]]:
    """Return what a task waits for, except people and missing handlers, in words, with the number of equal waits."""
    found: dict[str, tuple[Json, str, int]] = {}
    lacks = {(lack["kind"], lack["name"]) for lack in view.get("without_handler", ())}
    for wait in view.get("waits_for", ()):
        if wait["kind"] != "human" and (wait["kind"], wait.get("name")) not in lacks:
            text = describe_wait(wait, now)
            first, _, count = found.get(text, (wait, text, 0))
            found[text] = (first, text, count + 1)
    return list(found.values())


def reason(view: Mapping[str, Json], now: float) -> str:
    """Return on one line why a task is open: what it lacks, asks or waits for."""
    for lacking in view.get("without_handler", ()):
        return describe_lack(lacking)[0]
    for question in view.get("questions", ()):
        return f"asks a person: {preview(question['prompt'], 90)}"
    every = waits(view, now)
    more = sum(count for _, _, count in every) - 1
    return f"waits: {every[0][1]}{f', and {more:,} more' if more else ''}" if every else str(view["status"])


def process(handler: str) -> str:
    """Return where a handler runs, from its name `service@host.process.start.random`."""
    host, number = [*handler.rsplit(".", 3), ""][:2]
    return f"{host}, process {number}" if number else host


FILTERS = {
    "digest": digest,
    "pretty": pretty, "as_json": as_json, "preview": preview, "iso": iso, "utc": utc, "ago": ago, "span": span,
    "brief": brief, "whole": whole, "amount": amount, "in_bytes": in_bytes, "money": money, "own_frames": own_frames,
    "reason": reason, "lack": describe_lack, "process": process, "visible": visible,
}  # fmt: skip


# -- a task's steps as rows --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Bar:
    """A part of a time line."""

    kind: str
    """`queue`, `agent`, `tool`, `model`, `engine`, `step`, `wait`, `retry`, `dead`, `lost`, `commit`, `failed`: its
    colour and word.
    """
    start: float
    end: float
    label: str = ""

    def x(self, line: Timeline) -> float:
        return line.x(self.start)

    def width(self, line: Timeline) -> float:
        return max(line.x(self.end) - line.x(self.start), 3.0)


@dataclass(slots=True)
class StepRow:
    """A run or a step, as a row of the tree."""

    path: str
    depth: int
    kind: str
    name: str
    status: str
    started: float
    ended: float
    node: Json
    """As `to_tree` returns it; empty for an open step that only the broker knows."""
    attempts: int = 1
    queued: float = 0
    """When the last attempt of a call was put on its work stream; 0: unknown."""
    tokens: float = 0
    """Of the row and everything below it."""
    cost: float = 0
    bars: list[Bar] = field(default_factory=list)
    wait: Json = None
    """What the step waits for: an item of `waits_for`."""

    @property
    def word(self) -> str:
        return KINDS.get(self.kind, self.kind)

    @property
    def place(self) -> str:
        """The step as `weft task fork --at` names it; empty for the task's first run."""
        return self.path.partition("/")[2]

    @property
    def label(self) -> str:
        """Its bars in words."""
        return "; ".join(bar.label for bar in self.bars if bar.label)

    @property
    def span(self) -> float:
        return max(0.0, self.ended - self.started)

    @property
    def in_queue(self) -> float:
        """How long the last attempt of a call waited for a handler."""
        return max(0.0, (self.node.get("started") or 0) - self.queued) if self.queued else 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """All rows of a task with the time that they share."""

    every: list[StepRow]
    """All rows; `rows` are those that a page shows."""
    rows: list[StepRow]
    start: float
    end: float

    @property
    def hidden(self) -> int:
        """How many rows the page leaves out."""
        return len(self.every) - len(self.rows)

    def x(self, ms: float) -> float:
        return round(WIDTH * min(1.0, max(0.0, (ms - self.start) / max(self.end - self.start, 0.001))), 1)

    @property
    def kinds(self) -> frozenset[str]:
        return frozenset(bar.kind for row in self.rows for bar in row.bars)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places in per cent, and labels, of round times on the axis."""
        length = self.end - self.start
        steps = ((size * count, size, unit) for unit, size, counts in _TICK_UNITS for count in counts)
        step, size, unit = next((each for each in steps if length / each[0] <= TICKS_MAX), (length, 86_400_000, "d"))
        times = [step * number for number in range(1, int(length / step) + 1)]
        return [(0.0, "0"), *((round(100 * at / length, 1), f"{at / size:g} {unit}") for at in times)]

    def row(self, path: str) -> StepRow | None:
        return next((row for row in self.every if row.path == path), None)


def timeline(view: Mapping[str, Json], tree: Mapping[str, Json] | None, most: int = ROWS_MAX) -> Timeline:
    """Return a task's rows: from its trajectory, with the open steps that the broker knows."""
    now = now_ms()
    created = float(view.get("created") or (tree or {}).get("created") or now)
    end = float(view.get("ended") or now)
    rows = [_row(depth, node) for depth, node in _walk((tree or {}).get("runs", ()))]
    _sum_up_usage(rows)
    if not rows:
        rows.append(StepRow(ROOT_RUN, 0, "agent", "", "", created, end, {}))
    _open_steps(rows, view, created, end)
    origin = float(created) if (tree or {}).get("fork") else 0.0
    _add_replaced(rows, created)
    prompts = {path_of_request(str(each["request_id"])): each for each in view.get("questions", ())}
    for row in rows:
        if row.path in prompts:
            row.name = row.name or str(prompts[row.path]["prompt"])
    root = rows[0]
    if root.path == ROOT_RUN and not root.node.get("recorded"):
        root.name, root.kind, root.status = str(view.get("agent", "")), "agent", str(view.get("status", ""))
        root.started, root.ended = created, end
        root.node = {**root.node, "input": view.get("input"), "output": view.get("output"), "error": view.get("error")}
    shown = _shown(rows, most)
    paths = {row.path for row in shown}
    own = [row for row in rows if row.ended >= origin or not row.ended]
    for row in own:
        _draw(row, row.path in paths)
    _draw_gaps(own)
    if root.path == ROOT_RUN:
        if 0 < created < root.started:
            root.bars.insert(0, Bar("queue", created, root.started, f"admitted after {span(root.started - created)}"))
        # The broker writes the task's end, so what follows the code's own end is the last commit.
        known = any(bar.kind == "commit" for bar in root.bars)
        if view.get("ended") and root.node.get("recorded") and end > root.ended and not known:
            root.bars.append(Bar("commit", root.ended, end, f"committed in {span(end - root.ended)}"))
    _split_runs(rows)
    start = min([created, *(row.started for row in own if row.started)])
    last = max([end if not view.get("ended") else created, *(row.ended for row in rows)])
    return Timeline(rows, shown, start, max(last, start + 1))


def decode(row: StepRow) -> None:
    """Decode the input and the output of the row that a page shows. A task may have thousands of others."""
    contents = {name: row.node.get(name) for name in ("input", "output")}
    row.node = {
        **row.node,
        **{name: readable(bytes(raw)) for name, raw in contents.items() if isinstance(raw, msgspec.Raw)},
    }


def _shown(rows: list[StepRow], most: int) -> list[StepRow]:
    """Return the rows of a page: those that failed or have not ended before the others, in the order of the tree."""
    if len(rows) <= most:
        return rows
    matter = [row for row in rows if row.status in (Status.FAILED, Status.WAITING, Status.RUNNING)][:most]
    kept = {row.path for row in matter}
    kept.update(row.path for row in [row for row in rows if row.path not in kept][: most - len(kept)])
    return [row for row in rows if row.path in kept]


def _walk(nodes: Sequence[Json], depth: int = 0) -> Iterator[tuple[int, Json]]:
    pending = [(depth, node) for node in reversed(nodes)]
    while pending:
        at, node = pending.pop()
        yield at, node
        pending += [(at + 1, child) for child in reversed(node["children"])]


def path_of_request(request_id: str) -> str:
    """Return the path of the step that asked a question, whose id is `run:step-digest`."""
    return request_id.rpartition("-")[0].replace(":", "/")


def path_of(node: Json) -> str:
    return f"{node['run']}/{node['step']}" if node["step"] else str(node["run"])


def _row(depth: int, node: Json) -> StepRow:
    tokens, cost = tokens_and_cost(node["usage"]) if node["usage"] else (0.0, 0.0)
    status = node["status"] or (Status.RUNNING if not node["recorded"] else "")
    name = _question_in(node["input"]) or node["name"] if node["kind"] == "human" else node["name"]
    entry = _ENTRY.fullmatch(node["cause"]) if node["kind"] in ("tool", "engine", "ray", "spark") else None
    return StepRow(
        path_of(node), depth, node["kind"] or "agent", name, status, node["started"], node["ended"], node,
        node["attempts"] or 1, float(entry[1]) if entry else 0, tokens, cost,
    )  # fmt: skip


class _Origin(msgspec.Struct):
    step: str = ""
    result: Any = None  # Any: JSON


def _add_replaced(rows: list[StepRow], created: float) -> None:
    """Add the step whose result a person gave to a fork: the record has it with the fork's origin only."""
    given = next((row.node["input"] for row in rows if row.kind == "fork"), None)
    if not isinstance(given, msgspec.Raw) or b'"result"' not in bytes(given):
        return
    origin = msgspec.json.decode(given, type=_Origin)
    path = f"r/{origin.step}"
    run, _, step = path.rpartition("/")
    if origin.step and path not in {row.path for row in rows}:
        at = max((number for number, row in enumerate(rows, 1) if f"{row.path}/".startswith(f"{run}/")), default=1)
        siblings = [(n, row.path) for n, row in enumerate(rows) if row.path.rpartition("/")[0] == run]
        at = next((n for n, other in siblings if place("", other.rpartition("/")[2]) > place("", step)), at)
        node = {"output": origin.result, "recorded": False, "started": created}
        depth = run.count("/") + 1
        rows.insert(at, StepRow(path, depth, "step", GIVEN, Status.COMPLETED, created, created, node))


class _Question(msgspec.Struct):
    prompt: str = ""


def _question_in(given: Json) -> str:
    """Return the text of a recorded question; empty if the record has none."""
    try:
        found = msgspec.json.decode(given, type=_Question) if isinstance(given, msgspec.Raw) else _Question()
    except msgspec.DecodeError:
        return ""
    return preview(found.prompt, 90)


def _sum_up_usage(rows: Sequence[StepRow]) -> None:
    """Add to each row the usage of the rows below it: an agent's own row has none."""
    below: dict[int, tuple[float, float]] = {}
    for row in reversed(rows):
        tokens, cost = below.pop(row.depth + 1, (0.0, 0.0))
        row.tokens, row.cost = row.tokens + tokens, row.cost + cost
        tokens, cost = below.get(row.depth, (0.0, 0.0))
        below[row.depth] = tokens + row.tokens, cost + row.cost


def _open_steps(rows: list[StepRow], view: Mapping[str, Json], created: float, now: float) -> None:
    """Add what the runs of an open task wait for, each below its run. In linear time: a task may wait for thousands."""
    waits = [
        (f"{wait['run']}/{wait['step']}" if wait["step"] else wait["run"], wait) for wait in view.get("waits_for", ())
    ]
    below, by_path = _Below(rows, {path for path, _ in waits}), {row.path: row for row in rows}
    for row in rows[1:]:
        if not row.node.get("recorded"):
            row.started, row.ended = below.starts.get(row.path, created), now
            row.status = row.status if not view.get("ended") else str(view["status"])
    added: dict[str, list[StepRow]] = {}
    for path, wait in waits:
        found = by_path.get(path)
        if found is not None:
            found.wait, found.ended = {"since": below.ends.get(path, found.started), **wait}, now
            found.name = found.name or str(wait.get("name", ""))
            continue
        own = by_path.get(wait["run"])
        since = wait.get("since") or below.direct_ends.get(wait["run"], own.started if own is not None else created)
        name = str(wait.get("name") or "")
        row = StepRow(path, (own.depth if own else 0) + 1, wait["kind"], name, Status.WAITING, float(since), now, {})
        row.wait, row.attempts = wait, int(wait.get("attempt") or 1)
        added.setdefault(wait["run"], []).append(row)
        by_path[path] = row
    if view.get("status") in OPEN:
        _reopen(by_path, [path for path, _ in waits], now)
    if added:
        rows[:] = _with_added(rows, added, below)


def _reopen(by_path: Mapping[str, StepRow], paths: Sequence[str], now: float) -> None:
    """Show a redriven step, and the runs above it, as open: the record has their failure until they end again."""
    for path in {ROOT_RUN, *paths}:
        while path:
            row = by_path.get(path)
            if row is not None and row.status == Status.FAILED:
                row.status, row.ended = Status.WAITING, now
            path = path.rpartition("/")[0]


def _with_added(rows: Sequence[StepRow], added: dict[str, list[StepRow]], below: _Below) -> list[StepRow]:
    """Return the rows with others after the last one of their run."""
    ends: dict[int, list[str]] = {}
    for run in added:
        if run in below.last:
            ends.setdefault(below.last[run], []).append(run)
    found: list[StepRow] = []

    def add(run: str) -> None:
        for row in added.pop(run, ()):
            found.append(row)
            add(row.path)

    for number, row in enumerate(rows):
        found.append(row)
        for run in sorted(ends.get(number, ()), key=len, reverse=True):  # the innermost run ends first
            add(run)
    for run in list(added):
        add(run)
    return found


class _Below:
    """Data of the rows below each run, read once: to scan all rows for each run takes seconds for thousands."""

    def __init__(self, rows: Sequence[StepRow], open_paths: Collection[str] = ()) -> None:
        self.starts: dict[str, float] = {}
        """When the first step below a run began."""
        self.ends: dict[str, float] = {}
        """When the last recorded step below a run ended."""
        self.direct_ends: dict[str, float] = {}
        """When the last of a run's own steps ended that is not among `open_paths`."""
        self.last: dict[str, int] = {}
        """The number of the last row of a run, or the run's own."""
        for number, row in enumerate(rows):
            run = row.path
            self.last[run] = number
            while run := run.rpartition("/")[0]:
                self.last[run] = number
                if row.started:
                    self.starts[run] = min(self.starts.get(run, row.started), row.started)
                if row.node.get("recorded"):
                    self.ends[run] = max(self.ends.get(run, row.ended), row.ended)
            if row.path not in open_paths:
                run = row.path.rpartition("/")[0]
                self.direct_ends[run] = max(self.direct_ends.get(run, row.ended), row.ended)


def _draw(row: StepRow, labelled: bool) -> None:
    """Add the bars of a row. Without `labelled` they have no words: the page shows its run's bars, but not the row."""
    kind = "wait" if row.kind in _WAITING else _WORK.get(row.kind, "step")
    errors = [error for error in (row.node.get("errors") or (row.wait or {}).get("errors") or ()) if error.get("at")]
    begun = row.node.get("started") or row.ended
    queued = min(row.queued or begun, begun)
    if row.kind != "agent" and errors:
        row.started = errors[0].get("started") or errors[0]["at"]
        last = queued if row.node.get("started") else (row.wait or {}).get("since", 0)
        row.bars += _attempts(kind, errors, last)
    if row.queued and queued < begun:
        row.bars.append(Bar("queue", queued, begun, f"in the queue for {span(begun - queued)}" if labelled else ""))
        row.started = min(row.started, queued)
    start = row.node.get("started") or row.started
    if row.kind != "agent" and errors and not row.node.get("started"):
        start = max((row.wait or {}).get("since", 0), errors[-1]["at"])
    if row.wait is not None and row.kind not in _WAITING:
        kind = _open_kind(row.wait, kind)
    label = f"{row.word} {row.name}, {span(row.ended - start)}" if labelled else ""
    since = (row.wait or {}).get("since", start)
    if row.kind == "agent" and kind == "queue" and since > start:  # its next turn is in the queue
        row.bars.append(Bar("agent", start, since, label))
        start, label = since, f"in the queue for {span(row.ended - since)}" if labelled else ""
    row.bars.append(Bar(kind, start, max(row.ended, start), label))
    committed = row.node.get("committed") or 0.0
    if kind in _COMMITTED and committed > row.ended:
        label = f"committed in {span(committed - row.ended)}" if labelled else ""
        row.bars.append(Bar("commit", row.ended, committed, label))
    row.bars += [
        Bar(Status.FAILED, error["at"], error["at"], f"attempt {number} failed")
        for number, error in enumerate(errors, 1)
    ]
    if row.status == Status.FAILED:
        row.bars.append(Bar(Status.FAILED, row.ended, row.ended, "failed"))


def _attempts(kind: str, errors: Sequence[Mapping[str, Any]], last: float) -> Iterator[Bar]:  # Any: JSON
    """Yield the failed attempts of a call, and the time between them; the last one began at `last`."""
    begins = [error.get("started") or error["at"] for error in errors]
    for number, (error, begun, then) in enumerate(zip(errors, begins, [*begins[1:], last], strict=True), 1):
        if begun < error["at"]:  # earlier releases recorded only the end
            yield Bar(kind, begun, error["at"], f"attempt {number}, {span(error['at'] - begun)}")
        yield Bar("retry", error["at"], max(then, error["at"]), "waiting for the next attempt")


def _draw_gaps(rows: Sequence[StepRow]) -> None:
    """Add the times in which nothing ran, from a failure to its redrive, and those that a cancel left unrecorded."""
    below = _Below(rows)
    for number, row in enumerate(rows):
        for failed in row.node.get("failed_at", ()) if row.kind in _WORK and row.kind != "model" else ():
            within = rows[number : below.last[row.path] + 1]
            later = [error["at"] for each in within for error in each.node.get("errors", ())]
            later += [each.queued or each.node.get("started") or 0 for each in within]
            # A letter's own failure is recorded a moment after its time.
            again = min((at for at in later if at > failed + 1), default=row.ended)
            row.bars.append(Bar("dead", failed, again, f"failed, and redriven after {span(again - failed)}"))
        if row.kind == "agent" and row.status == Status.CANCELLED and not row.node.get("recorded"):
            # What ran or waited at the cancel is not recorded.
            known = below.ends.get(row.path, row.started)
            row.bars.append(Bar("lost", known, row.ended, f"not recorded, {span(row.ended - known)}: it was cancelled"))


def _open_kind(wait: Mapping[str, Json], kind: str) -> str:
    """Return what an open call or run does now: nothing until a handler takes it, or until its next attempt."""
    if "limit" in wait or wait.get("place") in _QUEUED or wait.get("handler") == "":
        return "queue"
    return "retry" if wait.get("attempt") and "handler" not in wait and kind != "agent" else kind


def _split_runs(rows: Sequence[StepRow]) -> None:
    """Add to each run's bar what its steps took, in their colours: the remainder is its own code, and its commits."""
    below: dict[str, list[StepRow]] = {}
    for row in rows:
        below.setdefault(row.path.rpartition("/")[0], []).append(row)
    for row in rows:
        if row.kind == "agent":
            parts: dict[str, list[Bar]] = {kind: [] for kind in _PARTS}
            for bar in (bar for each in below.get(row.path, ()) for bar in each.bars):
                if bar.kind in parts:
                    parts[bar.kind].append(bar)
            at = next((number for number, bar in enumerate(row.bars, 1) if bar.kind == "agent"), 0)
            row.bars[at:at] = [bar for own in parts.values() for bar in _joined(own)]


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Return bars of one kind as at most `SEGMENTS_MAX` ones: those that nearly touch become one."""
    found: list[Bar] = []
    gap = (max(bar.end for bar in bars) - min(bar.start for bar in bars)) / SEGMENTS_MAX if bars else 0
    for bar in sorted(bars, key=lambda bar: bar.start):
        if found and bar.start - found[-1].end < gap:
            found[-1].end = max(bar.end, found[-1].end)
        else:
            found.append(Bar(bar.kind, bar.start, bar.end))
    return found
