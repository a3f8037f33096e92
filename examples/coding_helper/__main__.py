"""`python -m examples.coding_helper --folder FOLDER "what to do"`: asks before it writes a file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.coding_helper.app import app_for
from weft import TaskHandle, WeftError
from weft.hosting import configure_logs, one_line
from weft.testing import LocalApp


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, 1 with one line on standard error, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.coding_helper",
        description="Let a language model work in a folder. OPENAI_BASE_URL and OPENAI_API_KEY say where it is.",
    )
    parser.add_argument("--folder", default=".", help="the folder; nothing outside it is read or written")
    parser.add_argument("--model", default="openai-chat:gpt-5.2", help="as pydantic-ai names it")
    parser.add_argument("--yes", action="store_true", help="write files without asking")
    parser.add_argument("wanted", metavar="TEXT", help="what to do")
    given = parser.parse_args(arguments)
    folder = Path(given.folder).resolve()
    if not folder.is_dir():
        parser.error(f"--folder {given.folder}: there is no such folder")
    configure_logs("coding-helper", "warning", "text")
    try:
        return asyncio.run(_run(str(folder), given.model, given.wanted, given.yes))
    except WeftError as error:
        print(f"coding_helper: {one_line(str(error))}", file=sys.stderr, flush=True)
        return 1


async def _run(folder: str, model: str, wanted: str, yes: bool) -> int:
    async with LocalApp(app_for(folder, model)) as client:
        task = await client.submit("helper", wanted, stream=True)
        async for event in task.stream():
            if event.type == "weft.output.delta" and "text" in event.data:
                print(event.data["text"], end="", flush=True)
            elif event.type == "weft.human.requested":
                await _decide(task, event.data, yes)
        response = await task.result()
        response.value()  # raises the error of a failed task
        print(flush=True)
    return 0


async def _decide(task: TaskHandle, asked: Mapping[str, Any], yes: bool) -> None:  # Any: JSON
    arguments = asked["data"]
    print(f"\n[write {arguments['path']}, {len(arguments['content'].splitlines())} lines]", end=" ", flush=True)
    if yes:
        print("yes", flush=True)
        verdict: object = True
    else:
        said = (await asyncio.to_thread(input, "y, or why not: ")).strip()
        verdict = True if said in ("y", "yes") else {"verdict": "deny", "reason": said or "the user said no"}
    await task.signal(asked["request_id"], verdict)


if __name__ == "__main__":
    sys.exit(main())
