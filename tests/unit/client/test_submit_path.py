"""How many files a reader has to open to follow a submit."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import runtime_core
from runtime_core.bus.connection import RespTransport
from runtime_core.ingress import admission
from weft import AgentContext, App
from weft.testing import LocalApp

STEPS = Path(__file__).parents[3] / "docs" / "internals" / "steps.md"
CORE = Path(runtime_core.__file__).parent

app = App("path")


@app.agent("echo")
async def echo(ctx: AgentContext, text: str) -> str:
    return text


async def test_a_submit_passes_the_documented_files(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(CORE):
            passed.add(path.relative_to(CORE).as_posix())

    def until_written(call: Callable[..., object]) -> Callable[..., object]:
        def written(self: RespTransport, *args: object) -> object:
            made = call(self, *args)
            sys.setprofile(None)
            return made

        return written

    async with LocalApp(app) as client:
        await (await client.submit("echo", "first, which reads the manifests")).result(timeout=60)
        monkeypatch.setattr(admission, "MANIFEST_SECONDS", 3600.0)
        monkeypatch.setattr(RespTransport, "call", until_written(RespTransport.call))
        monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)  # another test may have imported it
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            task = await client.submit("echo", "hi")
        finally:
            sys.setprofile(before)
        await task.result(timeout=60)
    section = STEPS.read_text(encoding="utf-8").partition("## Files that a submit passes")[2]
    assert passed == set(re.findall(r"`([a-z_/]+\.py)`", section))
    assert len(passed) <= 9
