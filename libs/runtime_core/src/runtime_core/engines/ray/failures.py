"""Ray's errors in our words: why a call has no value though its function has not said so."""

from __future__ import annotations

import ray.exceptions as errors

from runtime_core.engines.driver.messages import Error
from runtime_core.engines.ray.worker import Begun


def failure_of(error: BaseException, begun: Begun | None) -> Error:
    """How a call ended that Ray has ended, by what awaiting it has raised."""
    where = f" ({begun})" if begun is not None else ""
    match error:
        case errors.OutOfMemoryError():
            return Error("worker", "WorkerDied", f"Ray ended the worker{where}, since its node was out of memory")
        case errors.TaskCancelledError():
            return Error("cancelled", "Cancelled", "it was stopped on the cluster")
        case errors.ActorDiedError() | errors.ActorUnavailableError():
            return Error("worker", "WorkerDied", f"the actor that ran it{where} has died: {_reason(error)}")
        case errors.NodeDiedError() | errors.LocalRayletDiedError():
            return Error("worker", "WorkerDied", f"the node that ran it{where} has died")
        case errors.WorkerCrashedError():
            return Error("worker", "WorkerDied", f"the worker process that ran it{where} has died")
        case errors.TaskUnschedulableError() | errors.ActorUnschedulableError():
            return Error("invalid", type(error).__name__, _reason(error), retryable=False)
        case errors.RuntimeEnvSetupError():
            return Error("worker", "RuntimeEnvSetupError", _reason(error))
        case errors.RayTaskError() if isinstance(error.cause, ImportError):
            # Our own code and not the function's, which is imported where errors are caught.
            message = f"a worker of the cluster cannot import Weft ({error.cause}): install it on all nodes"
            return Error("invalid", type(error.cause).__name__, message, retryable=False)
        case errors.OwnerDiedError() | errors.ObjectLostError():
            return Error("lost", "ResultLost", f"its result was lost with a node: {_reason(error)}")
        case _:
            return Error("worker", type(error).__name__, _reason(error))


def _reason(error: BaseException) -> str:
    """What Ray says, in one line without the fields that only Ray knows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if not line.partition(":")[0].endswith(("_id", "class_name", "namespace", "pid"))]
    return " ".join(said)[:500] or type(error).__name__
