"""What a gateway and its driver process say to each other: msgpack, each message after its length (4 bytes).

near end (`process.py`)        far end (`host.py`)
  Run(id, work)      ──────>
                     <──────   State            whenever the connection to the engine comes or goes
                     <──────   Progress(id, …)
                     <──────   Ended(id, …)     once for each Run
  Cancel(id)         ──────>                    the work is stopped where it runs; Ended follows
  Forget(key)        ──────>                    its result is kept by the waiting run: let go of it
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Cause = Literal["function", "invalid", "worker", "limit", "cancelled", "lost", "away"]
"""Why a call has no value.

- `function`: the user's function raised.
- `invalid`: it cannot be run so, and no repetition helps: unknown name, wrong arguments, a result that cannot be
  encoded or is too large, an import that fails.
- `worker`: the process that ran it died.
- `limit`: it passed its time limit and was stopped.
- `cancelled`: it was stopped as asked.
- `lost`: the engine was lost while it ran; nobody knows how far it came.
- `away`: there is no connection to the engine; it has not begun.
"""


class Resources(Struct, frozen=True, omit_defaults=True):
    """What one call of a function takes of the cluster."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0: not said."""
    custom: dict[str, float] = {}
    """Resources that the cluster's nodes were given by name."""


class Registered(Struct, frozen=True, tag="registered"):
    """A function by its name in the user's app; the far end imports the app."""

    app: str
    """`package.module:app`."""
    folder: str
    """Where the app is imported from besides `sys.path`: the working directory of who asks."""
    name: str
    arguments: bytes
    """A JSON object. Of a map: what is the same in all calls."""


class Mapped(Struct, frozen=True, tag="mapped"):
    """A registered function, called once for each item."""

    function: Registered
    over: str
    """The argument that takes the item."""
    items: bytes
    """A JSON array."""
    in_flight: int
    """How many items are under way at once, at most; 0: as many as the engine takes."""


class Pickled(Struct, frozen=True, tag="pickled"):
    """Any function with its arguments, by cloudpickle: of a RuntimeEngine, never from a stream."""

    payload: bytes
    """(function, args, kwargs)."""


class Step(Struct, frozen=True, omit_defaults=True):
    """What a function may know of the step that it runs for."""

    task: str = ""
    run: str = ""
    attempt: int = 1
    key: str = ""
    """The idempotency key: the same in each attempt."""
    deadline: float = 0.0
    """Epoch seconds after which nobody wants the result; 0: there is no such time."""
    traceparent: str = ""


class Work(Struct, frozen=True):
    """One call to run."""

    call: Registered | Mapped | Pickled
    name: str
    """What errors, metrics and the engine's own pages call it."""
    key: str = ""
    """Names the work over all attempts, gateways and drivers, so that it can be found again; empty: nobody looks."""
    timeout_seconds: float = 0.0
    """Of one call, from when it begins; of a map: of each item. 0: no limit."""
    resources: Resources = Resources()
    actors: int = 0
    """How many long-lived workers are kept for this function; 0: any worker runs it."""
    batch: bool = False
    """The function gives a command, which runs as a batch job."""
    driver_side: bool = False
    """The function runs beside the driver, with the engine's session as its argument `spark`."""
    step: Step = Step()


class Value(Struct, frozen=True, tag_field="end", tag="value"):
    """What a call gave."""

    data: bytes
    """JSON (of a large result: a Reference), or a pickle where the call was one. Of a map: a JSON array with, for each
    item in order, `{"value": …}` or `{"error": {"type": …, "message": …}}`."""


class Error(Struct, frozen=True, tag_field="end", tag="error"):
    """Why a call gave nothing."""

    cause: Cause
    type: str
    message: str
    traceback: str = ""
    pickled: bytes = b""
    """The error itself, of a pickled call, where it can be sent."""
    retryable: bool = True
    retry_after_seconds: float | None = None
    """What the function asked for by raising Retry."""


Outcome = Value | Error


class Run(Struct, frozen=True, tag="run"):
    id: int
    work: Work


class Cancel(Struct, frozen=True, tag="cancel"):
    id: int


class Forget(Struct, frozen=True, tag="forget"):
    key: str


class State(Struct, frozen=True, tag="state"):
    """Whether the engine can be used now."""

    connected: bool
    reason: str = ""
    """Why not, in one line with the remedy."""
    info: dict[str, str] = {}
    """What the engine says of itself: version, address, resources."""
    trying: bool = False
    """Whether it is not connected for the only reason that the first try is under way."""


class Progress(Struct, frozen=True, tag="progress"):
    id: int
    value: bytes
    """JSON."""


class Ended(Struct, frozen=True, tag="ended"):
    id: int
    outcome: Outcome


ToDriver = Run | Cancel | Forget
FromDriver = State | Progress | Ended
