"""`python -m examples.research_desk.compare [--passages NUMBER] [ENGINE …]`: one question on several engines.

Each engine searches the same collection for the same topic. The time is the recorded duration of that step, without
the start of services and clusters. The answers must be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from examples.research_desk.__main__ import OWN_SUFFIXES, TOPIC, recorded, settings_of_desk
from examples.research_desk.corpus import PASSAGES_MAX, make_corpus
from examples.research_desk.desk import open_desk
from weft import Client, SubmitOptions, WeftError
from weft.hosting import SERVICES, Settings, configure_logs, one_line

ENGINES = ("threads", "processes", "ray", "spark")
"""The first two are variants of the engine `local`."""
TASK_SECONDS = 600.0


@dataclass(frozen=True)
class Measured:
    """The result of one engine."""

    engine: str
    seconds: tuple[float, ...]
    """The duration of each search; the first one may include the start of workers."""
    report: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per engine. Return 0 if all answers are equal."""
    parser = argparse.ArgumentParser(prog="python -m examples.research_desk.compare")
    parser.add_argument("engines", nargs="*", choices=(*ENGINES, []), help=f"some of {', '.join(ENGINES)}")
    parser.add_argument("--passages", type=int, default=40_000, help=f"up to {PASSAGES_MAX}")
    parser.add_argument("--times", type=int, default=2, help="the number of searches per engine")
    given = parser.parse_args(arguments)
    if not 1 <= given.passages <= PASSAGES_MAX or given.times < 1:
        parser.error("--passages and --times: numbers from 1")
    try:
        measured = asyncio.run(compare(given.engines or ["threads", "processes", "ray"], given.passages, given.times))
    except WeftError as error:
        print(f"compare: {one_line(str(error))}", file=sys.stderr)
        return 1
    same = len({one.report for one in measured}) == 1
    print("the answers are the same" if same else "the answers differ")
    return 0 if same else 1


async def compare(engines: Sequence[str], passages: int, times: int) -> list[Measured]:
    """Run the search on each engine in turn and print the times. Raises WeftError if an engine is unavailable."""
    configure_logs("compare", "warning", "text")
    settings = settings_of_desk()
    folder = make_corpus(settings.make_data_dir(), passages)
    print(f"{passages} passages, {os.cpu_count()} CPUs", flush=True)
    measured = []
    for engine in engines:
        one = await _asked(engine, settings, folder, times)
        print(f"{engine:>10}  {'  '.join(f'{seconds:7.2f} s' for seconds in one.seconds)}", flush=True)
        measured.append(one)
    return measured


async def _asked(engine: str, settings: Settings, folder: Path, times: int) -> Measured:
    name = "local" if engine in ("threads", "processes") else engine
    processes = (os.cpu_count() or 1) if engine == "processes" else 0
    gateways = () if name == "local" else (f"{name}_gateway",)
    settings = replace(settings, engine_processes=processes)
    job = {"topic": TOPIC, "folder": str(folder), "suffixes": list(OWN_SUFFIXES), "on_engine": True}
    seconds, report = [], ""
    async with (
        open_desk(settings, (*SERVICES, *gateways)) as desk,
        Client.connect(desk.url, namespace=settings.namespace) as client,
    ):
        for _ in range(times):
            task = await client.submit(
                "researcher",
                job,
                task_id=f"compare-{secrets.token_hex(4)}",
                options=SubmitOptions(engine=name, engine_wait_seconds=TASK_SECONDS, timeout_seconds=TASK_SECONDS),
            )
            response = await task.result()
            report = response.value()["text"]
            steps = (await recorded(settings, task.task_id)).steps
            seconds += [(step.ended - step.started) / 1000 for step in steps if step.name == "find_in_shard"]
    return Measured(engine, tuple(seconds), report)


if __name__ == "__main__":
    sys.exit(main())
