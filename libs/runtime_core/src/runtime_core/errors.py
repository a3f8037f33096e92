"""The errors of Weft, drawn as a tree.

WeftError                     anything that Weft raises on purpose: one line that says what to do
├── ConfigurationError        a setting, an app or a namespace that cannot work: refused at start
├── InvalidInput              input that breaks the wire's or an agent's rules; names the field
│   ├── ResultTooLarge        what an engine function has returned is over the limit of a value, or of a blob
│   └── Rejected              a submit that was answered with `weft.task.rejected`
├── BusError                  the broker could not be asked, or answered with an error
│   ├── BusUnavailable        no connection; the call may or may not have happened
│   └── ServerError           the server answered with an error text
├── StoreUnavailable          the trajectory store could not be asked; the same call may be repeated
├── Fenced                    this owner was declared dead: it must drop what it holds and take a new name
├── TurnTaken                 another living process works on the same turn: leave it to that one
├── JournalMoved              another process has journaled steps of this run: replay it from the broker
├── LimitExceeded             a task, run or journal went over a limit that is named
├── NotReady                  what an attempt needs is away or not there yet: made again without counting
├── JobCancelled              a job of `ctx.background` was awaited and had been cancelled
├── Divergence                a replay asked for another step than the journal holds
├── StepError                 a step that the run waited for has failed (type and message are recorded)
│   ├── ToolError             … a tool call
│   ├── AgentError            … an agent that was asked
│   │   └── Deadlock          … whose instance waits, over others, for the very run that asked
│   ├── EngineError           … a compute step
│   ├── HumanTimeout          … a question that nobody answered in time
│   ├── LocalStepError        … a `ctx.step`
│   └── Denied                … refused by a hook, or by the human whom it asked
└── Outcome                   raised by user code to say how an attempt ends
    ├── Retry                 try again, after a delay
    └── Reject                do not try again: the run fails with this reason
"""

from __future__ import annotations

from datetime import timedelta


class WeftError(Exception):
    """Base of all errors that Weft raises on purpose."""


class ConfigurationError(WeftError):
    """A setting, an app or a namespace that cannot work. The message names it and the remedy."""


class InvalidInput(WeftError):
    """Input that breaks a rule of the wire or of an agent.

    `field` names the offending attribute or data field, as in `data.conf.max_steps`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class InvalidResult(InvalidInput):
    """A tool has returned what JSON cannot hold: a defect of its code, which no other arguments would mend."""


class ResultTooLarge(InvalidInput):
    """An engine function has returned more than may travel, or be stored."""

    def __init__(self, message: str) -> None:
        super().__init__("result", message)


class Rejected(InvalidInput):
    """A submit that was answered with `weft.task.rejected`.

    `retry_after_seconds` is set where the same submit may be accepted later (an overloaded namespace).
    """

    def __init__(self, field: str, message: str, retry_after_seconds: float | None = None, task_id: str = "") -> None:
        super().__init__(field, message)
        self.retry_after_seconds = retry_after_seconds
        self.task_id = task_id


class BusError(WeftError):
    """The broker could not be asked, or answered with an error."""


class BusUnavailable(BusError):
    """There is no connection, or it broke before the reply: the call may or may not have happened."""


class ServerError(BusError):
    """The server answered with an error; `str(error)` is its text, as in `NOGROUP No such key …`."""


_TEMPORARY = (
    "OOM", "MISCONF", "BUSY", "LOADING", "READONLY", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "UNBLOCKED",
)  # fmt: skip


def is_temporary(error: ServerError) -> bool:
    """Whether the server may do later what it refuses now."""
    return str(error).startswith(_TEMPORARY)


class StoreUnavailable(WeftError):
    """The trajectory store could not be asked, or refused. Writes are upserts: the same one may be repeated."""


class Fenced(WeftError):
    """This owner was declared dead by others: what it holds belongs to them now."""


class TurnTaken(WeftError):
    """Another living process works on the same turn, since its consumer group was lost: leave the turn to that one."""


class JournalMoved(WeftError):
    """Another process has journaled steps of this run: drop it and replay it from the broker's journal."""


class LimitExceeded(WeftError):
    """A task, run or journal went over a limit; the message names the limit and its value."""


class LoopBlocked(WeftError):
    """Code held the event loop of its process without awaiting; message and traceback say where."""


class LoopInterrupt(BaseException):
    """Raised inside code that holds the event loop; `blocked` is how its run or call has failed.

    Not an Exception: a loop that catches those and tries again would go on holding the event loop.
    """

    def blocked(self) -> LoopBlocked:
        return LoopBlocked(str(self)).with_traceback(self.__traceback__)


class Reserved(WeftError):
    """What a model call needs of a limit is held by other calls of the task; it may be free when they have ended."""


class NotReady(WeftError):
    """What an attempt needs is away, or not there yet, and nothing was done: it is made again without counting."""


class JobCancelled(WeftError):
    """A job of `ctx.background` was awaited that `job.cancel()` had stopped."""


class Divergence(WeftError):
    """A replay asked for another step than the journal holds; the message names both."""


class StepError(WeftError):
    """A step that the run waited for has failed.

    `type` is the name of the original error's class, `message` its text. Live and replayed code sees the
    same class with the same two values, since both come from the journal.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}" if type else message)
        self.type = type
        self.message = message


class TaskCancelled(StepError):
    """The code of a run has ended it as cancelled, and with it the task whose first run it is."""


class ToolError(StepError):
    """A tool call has failed for good."""


class AgentError(StepError):
    """An agent that was asked has failed for good."""


class Deadlock(AgentError):
    """The request would have waited for itself: its message names who waits for whom. Nothing was asked."""


class EngineError(StepError):
    """A compute step has failed for good."""


class HumanTimeout(StepError):
    """A question to a human passed its deadline without an answer or a default."""


class LocalStepError(StepError):
    """A function given to `ctx.step` raised."""


class Denied(StepError):
    """A hook, or the human whom it asked, has refused what the agent wanted to do; or a guard has failed."""

    def __init__(self, message: str) -> None:
        super().__init__("Denied", message)


class Outcome(WeftError):
    """Raised by user code to say how this attempt ends."""


class Retry(Outcome):
    """Try again later. It counts as an attempt like any other, so that code which always asks does end.

    `after` is a delay in seconds or a timedelta; it waits on the broker, not in memory.
    """

    def __init__(self, after: float | timedelta = 0.0, reason: str = "asked for a retry") -> None:
        super().__init__(reason)
        self.after_seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)
        self.reason = reason


class Reject(Outcome):
    """Do not try again: the run ends failed with this reason.

    `type` is what who waits for it sees as the error's type.
    """

    def __init__(self, reason: str, type: str = "Reject") -> None:
        super().__init__(reason)
        self.reason = reason
        self.type = type
