"""The errors of Weft. Each class says when it is raised; all of them are WeftErrors."""

from __future__ import annotations

import signal
from datetime import timedelta


class WeftError(Exception):
    """Base of all errors that Weft raises on purpose."""


class ConfigurationError(WeftError):
    """A setting, an app or a namespace cannot work. The message names it and the remedy."""


class InvalidInput(WeftError):
    """Input that breaks a rule of the wire or of an agent.

    `field` names the offending attribute or data field, as in `data.conf.max_steps`.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class InvalidResult(InvalidInput):
    """A function returned a value that JSON cannot hold, or that does not fit its return type: a defect of its code."""


class ResultTooLarge(InvalidInput):
    """The result of an engine function is too large to send, or to store."""

    def __init__(self, message: str) -> None:
        super().__init__("result", message)


class Rejected(InvalidInput):
    """Weft rejected a submit with `weft.task.rejected`.

    `retry_after_seconds` is set if Weft may accept the same submit later (an overloaded namespace).
    """

    def __init__(self, field: str, message: str, retry_after_seconds: float | None = None, task_id: str = "") -> None:
        super().__init__(field, message)
        self.retry_after_seconds = retry_after_seconds
        self.task_id = task_id


class NotDurable(Rejected):
    """The command took effect, but the broker may still lose it: send the same command again to wait again.

    `retry_after_seconds` is 0 if the connection broke during the wait.
    """


class BusError(WeftError):
    """The broker is unreachable, or replied with an error."""


class BusUnavailable(BusError):
    """There is no connection, or it broke before the reply: the call may or may not have happened."""


class BusLost(BusUnavailable):
    """The server behind `memory://` has ended, and everything that it held with it: no retry can succeed."""


class ServerError(BusError):
    """The server replied with an error; `str(error)` is its text, as in `NOGROUP No such key …`."""


_TEMPORARY = (
    "OOM", "MISCONF", "BUSY", "LOADING", "READONLY", "NOREPLICAS", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "UNBLOCKED",
)  # fmt: skip


def is_temporary(error: ServerError) -> bool:
    """Return whether the server may accept the same command later."""
    return str(error).startswith(_TEMPORARY)


class StoreUnavailable(WeftError):
    """The trajectory store is unreachable, or refused. Writes are upserts, so the same one may be repeated."""


class Fenced(WeftError):
    """Other owners declared this one dead: its deliveries belong to them now."""


class TurnTaken(WeftError):
    """Another live process works on the same turn, because the consumer group was lost: leave the turn to it."""


class JournalMoved(WeftError):
    """Another process has journaled steps of this run: drop the run and replay it from the broker's journal."""


class OutputChanged(WeftError):
    """A replay has emitted different output from before: start the output over, and replay the run."""

    def __init__(self, message: str, attempt: int) -> None:
        super().__init__(message)
        self.attempt = attempt
        """The next attempt of the output."""


class JournalLost(WeftError):
    """The broker has lost its last writes, and a step of this turn with them: journal it again, then write again."""


class LimitExceeded(WeftError):
    """A task, run or journal would exceed a limit; the message names the limit and its value."""


class BlockedEventLoop(WeftError):
    """Code blocked the event loop of its process; message and traceback say where."""

    def __init__(self, message: str, *, repeatable: bool = True) -> None:
        super().__init__(message)
        self.repeatable = repeatable
        """False: it kept Python's global lock for a lease, which silences each process that tries it."""


def error_of_exit(what: str, error: SystemExit | KeyboardInterrupt) -> RuntimeError:
    """Return an error in place of one that would end the event loop, and with it all other runs of the process.

    Raises KeyboardInterrupt if Python's own handler of SIGINT is in place, since a person may have pressed Ctrl-C.
    """
    if isinstance(error, SystemExit):
        return RuntimeError(f"{what} called sys.exit({error.code!r}): return or raise an error instead")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        raise error
    return RuntimeError(f"{what} raised KeyboardInterrupt")


class LoopInterrupt(BaseException):
    """Raised inside code that blocks the event loop; `blocked` gives the error of its run or call.

    Not an Exception: a loop that catches exceptions and tries again would keep blocking the event loop.
    """

    def __init__(self, message: str, *, repeatable: bool = True) -> None:
        super().__init__(message)
        self._repeatable = repeatable

    def blocked(self) -> BlockedEventLoop:
        return BlockedEventLoop(str(self), repeatable=self._repeatable).with_traceback(self.__traceback__)


class Reserved(WeftError):
    """Other calls of the task have reserved the budget that a model call needs; they may free it when they end."""


class NotReady(WeftError):
    """An attempt needs something that is not available yet. Nothing was done, so Weft retries without counting."""


class JobCancelled(WeftError):
    """The code awaited a job of `ctx.background` after `job.cancel()`."""


class HookFailed(WeftError):
    """A hook or a callback that is not a guard failed: its run ends. `type` is the class name of its error."""

    def __init__(self, type: str, message: str) -> None:
        super().__init__(message)
        self.type = type


class Divergence(WeftError):
    """A replay requested a different step than the journal holds; the message names both as calls."""

    def __init__(self, run: str, step: str, now: str, *, recorded: str = "", line: str = "", trace: str = "") -> None:
        there = recorded or "another step (weft task show names it)"
        super().__init__(
            f"step {step} of run {run}{f' ({line})' if line else ''}: the journal has {there}, but the code now "
            f"requests {now}: the code has changed, or it depends on a clock, random numbers or other outside values "
            "(use ctx.now, ctx.random, ctx.step). Fix it or roll back, then redrive; or cancel the task; see the page "
            '"Change code under running tasks"'
        )
        self.run = run
        self.step = step
        self.now = now
        """What the code requests, as a call: `ctx.tool("search", query="x")`."""
        self.recorded = recorded
        """What the journal has, as a call; empty if that is not known."""
        self.line = line
        """The line of the user's code, as `app.py:12 in report`; empty if that is not known."""
        self.trace = trace
        """The frames of the user's code, as in a traceback."""

    def beside(self, recorded: str) -> Divergence:
        """Return this error with the recorded call."""
        return Divergence(self.run, self.step, self.now, recorded=recorded, line=self.line, trace=self.trace)


class StepError(WeftError):
    """A step that the run waited for failed.

    `type` is the class name of the original error, `message` its text. Live and replayed code gets the same class
    with the same two values, because both come from the journal.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(f"{type}: {message}" if type else message)
        self.type = type
        self.message = message
        self.output: object = None
        """The result so far (JSON), if a runner has ended with one."""
        self.chosen = False
        """Whether a runner has chosen this end, so that no code has raised it."""


class TaskCancelled(StepError):
    """The code of a run ended it as cancelled; if it is the task's first run, the task is cancelled too."""


class ToolError(StepError):
    """A tool call failed and will not be retried."""


class AgentError(StepError):
    """A call of another agent failed and will not be retried."""


class Deadlock(AgentError):
    """The request would wait for itself; the message names the circle. Weft sent nothing."""


class EngineError(StepError):
    """A compute step failed and will not be retried."""


class HumanTimeout(StepError):
    """A question to a human passed its deadline, with no answer and no default."""


class ReceiveTimeout(StepError):
    """A `ctx.receive` passed its deadline, with no message and no default."""


class LocalStepError(StepError):
    """A function given to `ctx.step` raised."""


class Denied(StepError):
    """A hook, or the human whom it asked, refused an action of the agent; or a guard failed."""

    def __init__(self, message: str) -> None:
        super().__init__("Denied", message)


class Outcome(WeftError):
    """Raised by user code to choose how this attempt ends."""


class Retry(Outcome):
    """Try again later. It counts as an attempt, so code that always raises it ends too.

    `after` is a delay in seconds or a timedelta. The delivery waits on the broker, not in memory.
    """

    def __init__(self, after: float | timedelta = 0.0, reason: str = "asked for a retry") -> None:
        super().__init__(reason)
        self.after_seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)
        self.reason = reason


class Reject(Outcome):
    """Do not try again: the run fails with this reason.

    `type` is the error type that callers of the run get.
    """

    def __init__(self, reason: str, type: str = "Reject") -> None:
        super().__init__(reason)
        self.reason = reason
        self.type = type
