"""The context of a run: each branch of it has a fork of its own, so that joining them is the same at each replay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime_core.agents.carried import snapshot_in, wrapped
from runtime_core.context.context import Context

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.run import Run


def context_of(run: Run, branch: Branch) -> Context:
    """The context of a branch, made at its first use.

    That of the run's first branch is a fork of the asking run's, or begins empty; that of a branch of `ctx.gather` is a
    fork of the branch that waits for it, which stands still until then.
    """
    if branch.context is None:
        if branch.parent is not None:
            branch.context = context_of(run, branch.parent).fork(name=f"~{branch.prefix}")
        else:
            branch.context = _first(run)
    return branch.context


def _first(run: Run) -> Context:
    agent = run.definition.name
    snapshot = snapshot_in(run.carried)
    if not snapshot:
        return Context(run.meta.get("session_id", ""), run.task_id, agent, id=f"{run.task_id}/{run.run_id}")
    return Context.restore(snapshot).fork(task_id=run.task_id, agent=agent, name=run.run_id)


def snapshot_of(run: Run, branch: Branch) -> bytes:
    """What a question of this branch carries; empty where nobody has used the context yet, and `x` says enough."""
    return context_of(run, branch).snapshot() if _in_use(branch) else b""


def _in_use(branch: Branch) -> bool:
    above: Branch | None = branch
    while above is not None:
        if above.context is not None:
            return True
        above = above.parent
    return False


def bring_in(run: Run, branch: Branch, changes: bytes) -> None:
    """Merge what a run that was asked has changed, when its result is taken."""
    context_of(run, branch).bring_in(changes)


def join(run: Run, branch: Branch, helper: Branch) -> None:
    """Merge the context of a branch that has ended into that of the branch that waited for it."""
    if helper.context is not None:
        context_of(run, branch).merge(helper.context)


def answer_of(run: Run, branch: Branch, output: bytes) -> bytes | None:
    """What the asking run's step gets, where that is more than the output."""
    context = branch.context
    if context is None or "/" not in run.run_id or not context.changed:
        return None
    return wrapped(output, context.to_branch())
