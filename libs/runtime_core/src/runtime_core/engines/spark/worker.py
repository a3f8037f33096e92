"""The code on the Python workers of executors: runs the calls that it was sent and returns their outcomes as bytes.

Spark reports an error as text; here all errors of the user's code are values.

`python -m runtime_core.engines.spark.worker` is the process from which a local server forks its workers. It imports
once what every worker imports, which takes two seconds of CPU time.
"""

from __future__ import annotations

import importlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from runtime_core.engines.protocol import Error, Outcome, Pickled, Registered, StepInfo
from runtime_core.engines.results import Results

if TYPE_CHECKING:
    import pyarrow

WARMED_UP = ("runtime_core.app.app",)
"""What apps import. By name: the code here does not use it, but without it each worker spends 0.2 s of CPU on it."""
PIECE_BYTES = 1024 * 1024
"""The most bytes that one row carries through the server. Larger data uses a file if the server is local."""
BY_FILE = -1
"""The index of a row that contains a file's path instead of data."""


class MapCalls(msgspec.Struct, frozen=True, tag="items"):
    """Some calls of a map."""

    function: Registered
    over: str
    items: bytes
    """A JSON array."""


class Assignment(msgspec.Struct, frozen=True):
    """A call as the driver sends it to a worker."""

    call: Registered | MapCalls | Pickled
    step: StepInfo = StepInfo()
    results: Results = Results()
    files: str = ""
    """The folder that driver and worker share for large data; empty if there is none."""


class CallOutcomes(msgspec.Struct, frozen=True):
    """The outcomes of the calls."""

    ends: list[Outcome]
    seconds: float = 0.0
    """The time spent in the functions alone."""


def work(sent: bytes | Path, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Run the assignment and yield its answer as rows (index, piece)."""
    import pyarrow

    for _ in batches:
        pass
    data = sent if isinstance(sent, bytes) else sent.read_bytes()
    assignment = msgspec.msgpack.decode(data, type=Assignment)
    answer = msgspec.msgpack.encode(_died() if _attempt() else _answer(assignment))
    schema = pyarrow.schema([("index", pyarrow.int64()), ("piece", pyarrow.binary())])
    for index, piece in _pieces(answer, assignment.files):
        yield pyarrow.RecordBatch.from_pydict({"index": [index], "piece": [piece]}, schema=schema)


def _attempt() -> int:
    """Return how often Spark has already started this task: it retries at once when a worker dies."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return 0 if context is None else context.attemptNumber()


def _died() -> CallOutcomes:
    return CallOutcomes(
        [Error("worker", "WorkerDied", "the Python worker of the executor died, or the executor with it")]
    )


def _answer(assignment: Assignment) -> CallOutcomes:
    call = assignment.call
    # Imported here: it loads much, and the server's side of this module needs none of it.
    from runtime_core.engines.remote import NotRunnable, declared, run_items, run_pickled, run_registered

    if isinstance(call, Pickled):
        from pyspark import cloudpickle

        return CallOutcomes([run_pickled(call, cloudpickle)])

    if isinstance(call, Registered):
        return CallOutcomes([run_registered(call, assignment.step, assignment.results)])
    # Not timed: only the first call of a process imports the app. If the import fails, each item reports it.
    with suppress(NotRunnable):
        declared(call.function.app, call.function.folder, call.function.name)
    begun = time.monotonic()
    ends = list(run_items(call.function, call.over, call.items, assignment.step, assignment.results))
    return CallOutcomes(ends, time.monotonic() - begun)


def _pieces(answer: bytes, files: str) -> Iterator[tuple[int, bytes]]:
    if files and len(answer) > PIECE_BYTES:
        path = Path(files) / f"{uuid.uuid4().hex}.answer"
        path.write_bytes(answer)
        yield BY_FILE, os.fsencode(path)
        return
    for index, start in enumerate(range(0, max(len(answer), 1), PIECE_BYTES)):
        yield index, answer[start : start + PIECE_BYTES]


def joined(rows: pyarrow.Table) -> CallOutcomes:
    """Return the answer from a worker's rows; read and remove its file if there is one."""
    indexes, pieces = rows["index"].to_pylist(), rows["piece"].to_pylist()
    if indexes == [BY_FILE]:
        path = Path(os.fsdecode(pieces[0]))
        data = path.read_bytes()
        path.unlink(missing_ok=True)
        return msgspec.msgpack.decode(data, type=CallOutcomes)
    data = b"".join(piece for _, piece in sorted(zip(indexes, pieces, strict=True)))
    return msgspec.msgpack.decode(data, type=CallOutcomes)


if __name__ == "__main__":
    # A worker imports all of these when it reads its first call.
    import pandas  # noqa: F401
    import pyarrow
    import pyspark.cloudpickle
    import pyspark.sql.pandas.serializers
    import pyspark.worker  # noqa: F401
    from pyspark import daemon

    import runtime_core.engines.remote  # noqa: F401

    for name in WARMED_UP:
        importlib.import_module(name)
    daemon.manager()
