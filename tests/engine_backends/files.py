"""How a test and a backend communicate: by files in a folder.

`up` is there while the engine can be reached. `journal` has a line for everything that a backend does.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from runtime_core.engines.protocol import Away

FOLDER = "ENGINE_FOLDER"
"""The variable that names the folder."""
SLOW = "ENGINE_SLOW"
"""The variable that makes a try to connect take until the engine is up, instead of failing."""


class Files:
    """The folder, for the test and the backend."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def note(self, *words: object) -> None:
        """Append a line in one write."""
        with (self.folder / "journal").open("ab", buffering=0) as file:
            file.write((" ".join(map(str, words)) + "\n").encode())

    def journal(self) -> list[str]:
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def up(self) -> None:
        (self.folder / "up").touch()

    def down(self) -> None:
        (self.folder / "up").unlink(missing_ok=True)

    async def connect(self) -> dict[str, str]:
        """The same method of a backend. Raises Away."""
        while SLOW in os.environ and not (self.folder / "up").exists():  # a file sets no event
            await asyncio.sleep(0.02)
        if not (self.folder / "up").exists():
            raise Away("nothing answers: touch the file up")
        self.note("connected", os.getpid())
        return {"version": "1.0", "at": "a folder"}

    async def lost(self) -> str:
        """The same method of a backend."""
        while (self.folder / "up").exists():  # a file sets no event
            await asyncio.sleep(0.02)
        return "the file up has gone"
