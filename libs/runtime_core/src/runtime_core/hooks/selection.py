"""Which hooks one run has. Fixed when the run begins, and recorded: a later deployment changes no run under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec

from runtime_core.declare.hook_points import OF_A_TASK, HookPoint, point_named
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.runs.local_steps import LocalStep
from runtime_core.runs.scheduler import Branch

if TYPE_CHECKING:
    from runtime_core.hooks.declared import HookTable
    from runtime_core.runs.run import Run
    from runtime_core.wire.commands import Submission

STEP = "0"
"""The place in the journal where a run keeps its selection: the steps of the agent's code begin at 1."""
GUARD_MARK = "!"
"""In the context of a task, before the name of a guard: a process that lacks the hook knows what its lack means."""


class Chosen(msgspec.Struct, frozen=True):
    """One hook of a run."""

    name: str
    guard: bool


class Selection(msgspec.Struct, frozen=True):
    """All hooks of a run, in the order in which they run, and the keys of callbacks."""

    hooks: dict[str, list[Chosen]] = {}
    callbacks: list[str] = []

    def at(self, point: HookPoint) -> list[Chosen]:
        return self.hooks.get(point, _NONE)


_NONE: list[Chosen] = []


def named_in_submit(submission: Submission, app: Manifest | None) -> dict[str, list[str]]:
    """What a submit names, as the task's context carries it: points by their present names, guards marked.

    `app` is that of the agent; None: nobody has published it, and the names cannot be looked up. Raises
    Rejected(`data.hooks.<point>`) for a point or name that there is not.
    """
    found: dict[str, list[str]] = {}
    for written, names in submission.hooks.items():
        field = f"data.hooks.{written}"
        try:
            point = point_named(written, field)
        except InvalidInput as error:
            raise Rejected(error.field, error.message, task_id=submission.task_id) from None
        at_point = found.setdefault(str(point), [])
        for name in names:
            marked = name if app is None else _marked(app, point, name, submission, field)
            if marked not in at_point:
                at_point.append(marked)
    return {point: names for point, names in found.items() if names}


def _marked(app: Manifest, point: HookPoint, name: str, submission: Submission, field: str) -> str:
    known = app.hooks.get(point, {})
    if name not in known:
        there = f"it declares {', '.join(sorted(known))} there" if known else "it declares none there"
        raise Rejected(field, f"app {app.app!r} has no hook {name!r} at {point}; {there}", task_id=submission.task_id)
    return GUARD_MARK + name if known[name].guard else name


def select(table: HookTable, named: Mapping[str, Iterable[str]]) -> Selection:
    """The app's hooks that always run, and those that the task named; lower `order` first."""
    ordered: dict[str, list[tuple[int, Chosen]]] = {}
    for hook in table:
        if hook.always:
            ordered.setdefault(str(hook.point), []).append((hook.order, Chosen(hook.name, hook.guard)))
    for point, names in named.items():
        at_point = ordered.setdefault(point, [])
        for marked in names:
            name = marked.removeprefix(GUARD_MARK)
            if any(chosen.name == name for _, chosen in at_point):
                continue
            known = table.find(HookPoint(point), name)
            guard = marked.startswith(GUARD_MARK) or (known is not None and known.guard)
            at_point.append((known.order if known is not None else 0, Chosen(name, guard)))
    hooks = {point: [chosen for _, chosen in sorted(each, key=_order)] for point, each in ordered.items() if each}
    return Selection(hooks, table.callback_keys)


def _order(each: tuple[int, Chosen]) -> int:
    return each[0]


async def settle(run: Run, table: HookTable, named: Mapping[str, Iterable[str]]) -> Selection:
    """The selection that this run began with; a run that begins now makes and records it.

    A run that has taken steps without a selection began before there were hooks: it goes on without them, since its
    journal has no places for theirs.
    """
    journal = run.journal
    if STEP not in journal.values and (journal.values or journal.pending):
        return Selection()
    branch = Branch("", run.flow.branch_here("hooks").now_ms)
    branch.count = int(STEP) - 1

    async def chosen() -> object:
        found = select(table, named)
        if run.meta.get("asked"):
            # The task that asks has had, and will have, the hooks of a task.
            hooks = {point: at_point for point, at_point in found.hooks.items() if point not in OF_A_TASK}
            found = Selection(hooks, found.callbacks)
        return msgspec.to_builtins(found)

    found = await LocalStep(run, branch, "hooks", "selection", chosen, b"")
    return msgspec.convert(found, Selection)


def named_before(payload: bytes) -> dict[str, list[str]]:
    """The hooks of a recorded selection, as a submit names them."""
    hooks = msgspec.json.decode(payload, type=Selection).hooks
    return {point: [chosen.name for chosen in at_point] for point, at_point in hooks.items()}
