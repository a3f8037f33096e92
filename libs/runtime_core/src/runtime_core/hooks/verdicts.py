"""What a hook is told of its moment, and what it may answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import EllipsisType
from typing import Any

from runtime_core.declare.hook_points import HookPoint
from runtime_core.declare.schema import encode
from runtime_core.wire.commands import MAX_SECONDS


@dataclass(frozen=True, slots=True)
class HookEvent:
    """One moment at which a hook runs. Each hook gets a copy: changing `payload` in place has no effect."""

    point: HookPoint
    task_id: str
    run_id: str
    agent: str
    """The agent whose run it is."""
    name: str
    """The name of the tool, model or agent concerned; for a question, its prompt."""
    payload: Any  # Any: JSON whose shape depends on the point, see docs/hooks.md
    input: Any = None  # Any: JSON: at a point after an action, the action's input
    error: Mapping[str, str] | None = None
    """`type` and `message` of the error, at a point after a failure."""
    key: str = ""
    """The key of the agent's instance."""
    session_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # Any: the user's own JSON
    attempt: int = 1
    idempotency_key: str = ""
    """Stays the same when this execution is repeated after a crash, for effects that must not happen twice."""


@dataclass(frozen=True, slots=True)
class Allow:
    """Continue. The same as returning None."""


@dataclass(frozen=True, slots=True)
class Change:
    """Continue with this payload instead; later hooks see it."""

    payload: Any  # Any: JSON of the point's own shape


@dataclass(frozen=True, slots=True)
class Deny:
    """Do not continue: the agent gets `Denied` with this reason."""

    reason: str = "denied"


@dataclass(frozen=True, slots=True)
class Ask:
    """Let a human approve, deny or edit the payload; the run waits on the broker for it.

    After `timeout` (seconds or timedelta; None: no limit) the answer is `default`, True to approve and False to deny;
    without one it is a denial.
    """

    prompt: str
    timeout: float | timedelta | None = None
    default: bool | EllipsisType = ...


Verdict = Allow | Change | Deny | Ask


def recorded(verdict: object, what: str, *, notice: bool) -> dict[str, object]:
    """Return the verdict for the journal: `{"verdict": "change", "payload": …}`.

    Raises TypeError if it is not a verdict or, at a point where hooks can only observe (`notice`), not Allow;
    InvalidInput if the payload is not JSON.
    """
    if verdict is None or isinstance(verdict, Allow):
        return {"verdict": "allow"}
    if not isinstance(verdict, Change | Deny | Ask):
        raise TypeError(f"{what} returned {verdict!r}: return None, Allow(), Change(…), Deny(…) or Ask(…)")
    if notice:
        raise TypeError(f"{what} returned {type(verdict).__name__}: here it can only look on; return None")
    match verdict:
        case Change(payload):
            encode(payload, f"the payload that {what} returned")
            return {"verdict": "change", "payload": payload}
        case Deny(reason):
            return {"verdict": "deny", "reason": str(reason)}
        case Ask(prompt, timeout, default):
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (number and seconds <= MAX_SECONDS):
                raise TypeError(
                    f"{what} returned Ask(timeout={timeout!r}): give seconds or a timedelta, at most {MAX_SECONDS} s"
                )
            if not isinstance(default, bool | EllipsisType):
                raise TypeError(f"{what} returned Ask(default={default!r}): give True to approve or False to deny")
            answer = None if isinstance(default, EllipsisType) else default
            return {"verdict": "ask", "prompt": str(prompt), "timeout": seconds, "default": answer}
