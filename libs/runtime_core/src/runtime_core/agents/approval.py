"""Approvals: questions that are answered by approve, deny or edit."""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from runtime_core import codec
from runtime_core.agents.asked import Asked
from runtime_core.agents.values import from_json
from runtime_core.consumer.effects import Question
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.agents.branch import Branch
    from runtime_core.agents.run import Run

VERDICT = "verdict"
"""What such a question expects, in its event on the wire."""
VERDICTS = ("approve", "deny", "edit")


@dataclass(frozen=True, slots=True)
class Approval:
    """A human's verdict."""

    verdict: str
    """`approve`, `deny` or `edit`."""
    value: Any  # Any: JSON
    """What was edited; for the other verdicts what the human was shown."""
    reason: str = ""

    @property
    def approved(self) -> bool:
        """Whether it may be done, as it was or as it was edited."""
        return self.verdict != "deny"

    @property
    def denied(self) -> bool:
        return self.verdict == "deny"


class ApprovalQuestion(Asked[Approval]):
    """The step of a question whose answer must be a verdict; the broker refuses any other."""

    __slots__ = ()

    def __init__(
        self, run: Run, branch: Branch, prompt: str, *, data: bytes, timeout_ms: int | None, default: bool | None
    ) -> None:
        # In the place of a key, as for other questions: those with other terms have another digest.
        super().__init__(run, branch, "human", prompt, f"{VERDICT} {timeout_ms} {default}", data)
        answer = None if default is None else codec.encode(default)
        self.request = Question(
            self.id, self.digest, prompt, data, timeout_ms=timeout_ms, default=answer, expects=VERDICT
        )

    def read(self, payload: bytes) -> Approval:
        return approval_of(from_json(payload), from_json(self.data))


def approval_of(answer: object, shown: object) -> Approval:
    """What an answer stands for: true, false, or `{"verdict", "value"?, "reason"?}`. Raises InvalidInput."""
    if isinstance(answer, bool):
        return Approval("approve" if answer else "deny", shown)
    if isinstance(answer, dict) and answer.get("verdict") in VERDICTS:
        verdict = answer["verdict"]
        return Approval(verdict, answer.get("value") if verdict == "edit" else shown, str(answer.get("reason") or ""))
    raise InvalidInput("value", f"{codec.quoted(answer)} is no verdict: true, false or an object with `verdict`")


def checked_default(default: object, field: str) -> bool | None:
    """The answer at the deadline; None where there is none. Raises InvalidInput(field)."""
    if isinstance(default, EllipsisType):
        return None
    if isinstance(default, bool):
        return default
    if default in ("approve", "deny"):
        return default == "approve"
    raise InvalidInput(field, f"{codec.quoted(default)} is neither True nor False: they approve and deny")
