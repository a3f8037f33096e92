"""Which status of a run node may follow which. `bus/functions/node.lua` keeps to the same table, and decides."""

from __future__ import annotations

from runtime_core.errors import WeftError
from runtime_core.run_nodes.node import RunNodeStatus

_S = RunNodeStatus
NEXT: dict[RunNodeStatus, tuple[RunNodeStatus, ...]] = {
    _S.INIT: (_S.RUNNING, _S.FAILED, _S.TIMEOUT),
    _S.RUNNING: (_S.BREAKED, _S.SUCCESS, _S.FAILED, _S.TIMEOUT),
    _S.BREAKED: (_S.RUNNING, _S.SUCCESS, _S.FAILED, _S.TIMEOUT),
    _S.SUCCESS: (),
    _S.FAILED: (),
    _S.TIMEOUT: (),
}


class TransitionRefused(WeftError):
    """A node cannot go from the status that it has to the one that was asked for."""

    def __init__(self, what: str, status: RunNodeStatus, wanted: RunNodeStatus) -> None:
        allowed = ", ".join(NEXT[status])
        rest = f"from {status} it may become {allowed}" if allowed else f"{status} is final"
        super().__init__(f"{what} is {status} and cannot become {wanted}: {rest}")
        self.status = status
        self.wanted = wanted
