"""How many files a reader has to open to follow a submit, and a turn until its commit."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import runtime_core
from runtime_core.bus.connection import RespTransport
from runtime_core.bus.deliveries import Delivery
from runtime_core.consumer.in_flight import InFlight, Place
from runtime_core.state_manager import admission
from weft import AgentContext, App
from weft.testing import LocalApp

STEPS = Path(__file__).parents[2] / "docs" / "internals" / "steps.md"
CORE = Path(runtime_core.__file__).parent

app = App("path")


@app.agent("echo")
async def echo(ctx: AgentContext, text: str) -> str:
    return text


def documented(title: str) -> set[str]:
    section = STEPS.read_text(encoding="utf-8").partition(f"## {title}")[2].partition("\n## ")[0]
    return set(re.findall(r"`([a-z_/]+\.py)`", section))


def noting(passed: set[str], counts: Callable[[], bool] = lambda: True) -> Callable[[FrameType, str, object], None]:
    """Return a profile function that notes the file of each called function of the core."""

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE) and counts():
            passed.add(path.relative_to(CORE).as_posix())

    return note


async def test_a_submit_passes_at_most_nine_files(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()

    def until_written(call: Callable[..., object]) -> Callable[..., object]:
        def written(self: RespTransport, *args: object) -> object:
            made = call(self, *args)
            sys.setprofile(None)
            return made

        return written

    async with LocalApp(app) as client:
        await (await client.submit("echo", "first, which reads the manifests")).result(timeout=60)
        monkeypatch.setattr(admission, "MANIFESTS_FRESH_SECONDS", 3600.0)
        monkeypatch.setattr(RespTransport, "call", until_written(RespTransport.call))
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)  # another test may have imported it
        before = sys.getprofile()
        sys.setprofile(noting(passed))
        try:
            task = await client.submit("echo", "hi")
        finally:
            sys.setprofile(before)
        await task.result(timeout=60)
    assert passed == documented("Files that a submit passes")
    assert len(passed) <= 9


async def test_a_turn_passes_at_most_fourteen_files(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()
    handling: list[asyncio.Task[object]] = []
    handle, call = InFlight._handle, RespTransport.call
    before = sys.getprofile()

    def in_the_turn() -> bool:
        # The profiler also sees the other tasks of the event loop.
        task = asyncio.current_task()
        return task in handling or (task is not None and task.get_name().startswith("run "))

    async def handled(self: InFlight, place: Place, delivery: Delivery) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.append(task)
        sys.setprofile(noting(passed, in_the_turn))
        await handle(self, place, delivery)

    def called(self: RespTransport, *args: object) -> object:
        made = call(self, *args)  # type: ignore[arg-type]  # as the caller passes them
        if asyncio.current_task() in handling:
            sys.setprofile(before)
        return made

    async with LocalApp(app) as client:
        await (await client.submit("echo", "first, which fills caches")).result(timeout=60)
        monkeypatch.setattr(InFlight, "_handle", handled)
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)  # another test may have imported it
        monkeypatch.setattr(RespTransport, "call", called)
        try:
            await (await client.submit("echo", "hi")).result(timeout=60)
        finally:
            sys.setprofile(before)
    assert passed == documented("Files that a turn passes")
    assert len(passed) <= 14
