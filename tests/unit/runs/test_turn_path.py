"""How many files a reader has to open to follow a turn until its commit."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import FrameType

import pytest

import runtime_core
from runtime_core.bus.connection import RespTransport
from runtime_core.bus.deliveries import Delivery
from runtime_core.consumer.consumer import Consumer, Place
from weft import AgentContext, App
from weft.testing import LocalApp

STEPS = Path(__file__).parents[3] / "docs" / "internals" / "steps.md"
CORE = Path(runtime_core.__file__).parent

app = App("path")


@app.agent("echo")
async def echo(ctx: AgentContext, text: str) -> str:
    return text


async def test_the_files_that_a_turn_passes_are_those_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()
    handling: list[asyncio.Task[object]] = []
    handle, call = Consumer._handle, RespTransport.call
    before = sys.getprofile()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            # The profiler also sees the other tasks of the event loop.
            task = asyncio.current_task()
            if task in handling or (task is not None and task.get_name().startswith("run ")):
                passed.add(path.relative_to(CORE).as_posix())

    async def handled(self: Consumer, place: Place, delivery: Delivery) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.append(task)
        sys.setprofile(note)
        await handle(self, place, delivery)

    def called(self: RespTransport, *args: object) -> object:
        made = call(self, *args)  # type: ignore[arg-type]  # as the caller passes them
        if asyncio.current_task() in handling:
            sys.setprofile(before)
        return made

    async with LocalApp(app) as client:
        await (await client.submit("echo", "first, which fills caches")).result(timeout=60)
        monkeypatch.setattr(Consumer, "_handle", handled)
        monkeypatch.setattr(RespTransport, "call", called)
        try:
            await (await client.submit("echo", "hi")).result(timeout=60)
        finally:
            sys.setprofile(before)
    section = STEPS.read_text(encoding="utf-8").partition("## Files that a turn passes")[2].partition("\n## ")[0]
    assert passed == set(re.findall(r"`([a-z_/]+\.py)`", section))
