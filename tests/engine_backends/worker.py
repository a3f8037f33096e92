"""A worker of the folder that stands for a cluster: runs one call and stores its outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from runtime_core.base.lazy import collect_seldom

if __name__ == "__main__":
    collect_seldom()  # before the imports below

from runtime_core.engines.protocol import Error, Mapped, Outcome, Pickled, Value, Work
from runtime_core.engines.remote import run_items, run_registered
from runtime_core.engines.results import Results

WORK, PID, OUTCOME = "work", "pid", "outcome"


def outcome_of(work: Work, environ: Mapping[str, str]) -> Outcome:
    """Return the outcome of a call that runs here and now."""
    results = Results.from_environment(environ)
    call = work.call
    assert not isinstance(call, Pickled), "gateways send none"
    if not isinstance(call, Mapped):
        return run_registered(call, work.step, results)
    ends = [
        {"error": {"type": end.type, "message": end.message}}
        if isinstance(end, Error)
        else {"value": msgspec.Raw(end.data)}
        for end in run_items(call.function, call.over, call.items, work.step, results)
    ]
    return Value(msgspec.json.encode(ends))


def main(place: Path) -> None:
    leave(place, PID, str(os.getpid()).encode())
    work = msgspec.msgpack.decode((place / WORK).read_bytes(), type=Work)
    leave(place, OUTCOME, msgspec.msgpack.encode(outcome_of(work, os.environ)))


def leave(place: Path, name: str, data: bytes) -> None:
    """Write a file so that a reader sees all of it or none."""
    (place / f"{name}.new").write_bytes(data)
    (place / f"{name}.new").rename(place / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
