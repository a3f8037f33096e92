"""`python -m examples.research_desk [--docs FOLDER] [--topic TEXT]`: one task, from its submit to its tree of runs."""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from examples.research_desk.corpus import PASSAGES_MAX, make_corpus
from examples.research_desk.desk import APP, Desk, open_desk
from examples.research_desk.documents import find_documents
from examples.research_desk.ranking import topic_words
from examples.research_desk.shown import Screen
from examples.research_desk.thinking import MODEL
from weft import Client, SubmitOptions, WeftError
from weft.errors import ConfigurationError
from weft.hosting import SERVICES, Settings, configure_logs, one_line, without_password
from weft.trajectory import TaskTrajectory, TrajectoryStore, render

ROOT = Path(__file__).resolve().parents[2]
OWN_SUFFIXES = (".md",)
"""In the project itself, only the documentation is searched."""
TOPIC = "What happens to a delivery when its consumer dies?"
NAMESPACE = "research-desk"
SHUTDOWN_SECONDS = 2.0
TASK_SECONDS = 180.0
RECORDED_SECONDS = 10.0
"""The longest wait for the recorder after the task has ended, in seconds."""


@dataclass(frozen=True)
class Wanted:
    """The command-line options."""

    docs: Path
    suffixes: tuple[str, ...]
    topic: str
    pause_seconds: float
    engine: str = ""
    """The engine that searches; empty: the tools search."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the job. Return the exit status: 0, 1 with one line on standard error, or 2 for wrong usage."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows `?` for missing characters
    try:
        wanted = _wanted(arguments)
        return asyncio.run(_until_signalled(wanted))
    except WeftError as error:
        print(f"research_desk: {one_line(str(error))}", file=sys.stderr, flush=True)
        return 1
    except BrokenPipeError:
        # The reader of the output has exited. Write nothing more, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _wanted(arguments: Sequence[str] | None) -> Wanted:
    parser = argparse.ArgumentParser(
        prog="python -m examples.research_desk",
        description="Research a topic in a folder of text files and write a report with citations.",
    )
    parser.add_argument("--docs", metavar="FOLDER", help="the folder to search; default: the project's documentation")
    parser.add_argument("--topic", default=TOPIC, help=f"the topic; default: {TOPIC}")
    parser.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="additional time per search, to watch the desk work or to kill a service meanwhile",
    )
    parser.add_argument(
        "--passages",
        type=int,
        metavar="NUMBER",
        help="search a collection of this many passages, created in the data folder, instead of a folder",
    )
    parser.add_argument(
        "--engine",
        choices=("local", "ray", "spark"),
        help="the engine that searches it: local threads (processes with WEFT_ENGINE_PROCESSES), or a cluster",
    )
    given = parser.parse_args(arguments)
    if given.passages is not None and not 1 <= given.passages <= PASSAGES_MAX:
        parser.error(f"--passages: a number from 1 to {PASSAGES_MAX}")
    if given.passages is not None and given.docs:
        parser.error("--passages: makes its own documents, so leave out --docs")
    if not 0 <= given.pause <= 50:
        parser.error("--pause: seconds from 0 to 50")
    topic = " ".join(given.topic.encode(errors="replace").decode().split())
    if not topic_words(topic):
        raise ConfigurationError(f"--topic {topic!r}: contains no word to search for")
    if given.passages is not None:
        made = make_corpus(settings_of_desk().make_data_dir(), given.passages)
        return Wanted(made, OWN_SUFFIXES, topic, given.pause, given.engine or "local")
    docs = Path(os.path.abspath(Path(given.docs).expanduser() if given.docs else ROOT))
    suffixes = () if given.docs else OWN_SUFFIXES
    shown = str(docs).encode(errors="replace").decode()
    if shown != str(docs):
        raise ConfigurationError(f"--docs {shown}: the name is not UTF-8; rename the folder")
    if not docs.is_dir():
        problem = "is not a folder" if docs.exists() else "there is no such folder"
        raise ConfigurationError(f"--docs {docs}: {problem}; name a folder with text files")
    if not find_documents(docs, suffixes).paths:
        raise ConfigurationError(f"--docs {docs}: contains no text files; name a folder with some (Markdown, txt, …)")
    return Wanted(docs, suffixes, topic, given.pause, given.engine or "")


async def _until_signalled(wanted: Wanted) -> int:
    """Run the job, or stop cleanly on a signal."""
    job = asyncio.create_task(_run(wanted), name="job")
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if not stopped_by:
            stopped_by.append(number)
            job.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, number)
    try:
        return await job
    except asyncio.CancelledError:
        if not stopped_by:
            raise
        print("stopped; the task continues at the next start", file=sys.stderr, flush=True)
        return 128 + stopped_by[0]


async def _run(wanted: Wanted) -> int:
    settings = settings_of_desk()
    configure_logs("research-desk", "warning", "text")
    screen = Screen()
    task_id = f"desk-{secrets.token_hex(4)}"
    gateways = (f"{wanted.engine}_gateway",) if wanted.engine in ("ray", "spark") else ()
    async with open_desk(settings, (*SERVICES, *gateways)) as desk:
        _announce(screen, desk, wanted)
        async with Client.connect(desk.url, namespace=settings.namespace) as client:
            job = {
                "topic": wanted.topic,
                "folder": str(wanted.docs),
                "suffixes": list(wanted.suffixes),
                "pause_seconds": wanted.pause_seconds,
                "on_engine": bool(wanted.engine),
                "with_model": bool(os.environ.get(MODEL)),
            }
            task = await client.submit(
                "researcher",
                job,
                task_id=task_id,
                stream=True,
                options=SubmitOptions(
                    timeout_seconds=TASK_SECONDS, engine=wanted.engine or None, engine_wait_seconds=TASK_SECONDS
                ),
            )
            screen.step(f"task {task_id} is accepted")
            try:
                async with asyncio.timeout(TASK_SECONDS + RECORDED_SECONDS):
                    async for event in task.stream():
                        screen.event(event)
                    response = await task.result()
            except TimeoutError:
                raise WeftError(f"task {task_id} did not end in time; see {desk.log}") from None
        response.value()  # raises the error of a failed task
        screen.line()
        screen.step("the task is completed; what it did, with timings:")
        screen.line()
        screen.line(render(await recorded(settings, task_id)))
    _how_to_look_further(screen, settings, task_id)
    return 0


def settings_of_desk() -> Settings:
    """Return this process's settings, with the desk's data folder and namespace as defaults."""
    settings = Settings.from_environment(os.environ)
    if "WEFT_DATA_DIR" not in os.environ:
        folder = settings.data_dir / "research_desk"
        settings = replace(settings, data_dir=folder)
        if "WEFT_TRAJECTORY_URL" not in os.environ:
            settings = replace(settings, trajectory_url=f"sqlite:///{folder / 'trajectory.db'}")
    if "WEFT_NAMESPACE" not in os.environ:
        # A separate namespace: on a shared broker, other apps' handlers would have to hand events on.
        settings = replace(settings, namespace=NAMESPACE)
    if "WEFT_SHUTDOWN_SECONDS" not in os.environ:
        # After Ctrl-C, do not wait for a long search; it is repeated at the next start.
        settings = replace(settings, shutdown_seconds=SHUTDOWN_SECONDS)
    return replace(settings, metrics_port=None)


def _announce(screen: Screen, desk: Desk, wanted: Wanted) -> None:
    screen.line("Research desk")
    screen.line(f"  topic      {wanted.topic}")
    screen.line(f"  documents  {wanted.docs}{' (*.md)' if wanted.suffixes else ''}")
    if wanted.engine:
        screen.line(f"  engine     {wanted.engine}")
    screen.line(f"  broker     {without_password(desk.url)}")
    if os.environ.get(MODEL):
        screen.line(f"  model      {os.environ[MODEL]}, which plans the search and writes")
    screen.line(f"  services   {', '.join(desk.services)}; what they say is in {desk.log}")
    screen.line()


async def recorded(settings: Settings, task_id: str) -> TaskTrajectory:
    """Return the task's complete trajectory."""
    store = await TrajectoryStore.open(settings.trajectory_url)
    try:
        give_up_at = time.monotonic() + RECORDED_SECONDS
        while True:
            found = await store.task(settings.namespace, task_id)
            if found is not None and (found.complete or time.monotonic() > give_up_at):
                return found
            if time.monotonic() > give_up_at:
                raise WeftError(f"the trajectory of {task_id} was not recorded; see the services' log")
            await asyncio.sleep(0.02)
    finally:
        await store.close()


def _how_to_look_further(screen: Screen, settings: Settings, task_id: str) -> None:
    weft = shlex.quote(os.path.relpath(Path(sys.executable).with_name("weft")))
    data = shlex.quote(str(settings.data_dir))
    screen.line()
    screen.line("To look further:")
    screen.line(f"  export WEFT_NAMESPACE={settings.namespace} WEFT_DATA_DIR={data}")
    screen.line(f"  {weft} trajectory show {task_id}")
    if settings.redis_url is None:
        screen.line(f"  {weft} up --app {APP}    # starts the broker and the services again; in another terminal:")
    screen.line(f"  {weft} task show {task_id}")


if __name__ == "__main__":
    sys.exit(main())
