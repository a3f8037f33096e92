"""The files of one folder over MCP: `python files_server.py FOLDER`, on stdin and stdout.

Paths are relative to the folder, with `/`. Nothing outside it is read or written, not even by a link that leads out.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

MOST_BYTES = 200_000
MOST_FILES = 500
MOST_MATCHES = 100
LONGEST_LINE = 300

READS = ToolAnnotations(read_only_hint=True)
# Idempotent: writing the same content again changes nothing.
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True)


class Files(TypedDict):
    """The files of a folder."""

    files: list[str]
    more: int
    """The number of omitted files."""


class Match(TypedDict):
    """One line."""

    path: str
    line: int
    text: str


class Matches(TypedDict):
    """The lines that match."""

    matches: list[Match]
    complete: bool
    """False: more lines match."""


class Written(TypedDict):
    """A written file."""

    path: str
    bytes: int


class Folder:
    """Access to the files in one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def place(self, path: str) -> Path:
        """Resolve a relative path. Raises ToolError if it is outside the folder."""
        try:
            found = (self._root / path).resolve()
        except (OSError, ValueError) as error:
            raise ToolError(f"{path!r} is not a path: {error}") from None
        if not found.is_relative_to(self._root):
            raise ToolError(f"{path!r} is outside the folder: give a path inside it, such as 'src/main.py'")
        return found

    def shown(self, place: Path) -> str:
        """Return a path relative to the folder."""
        return place.relative_to(self._root).as_posix()

    def walk(self, below: Path) -> Iterator[Path]:
        """Return the files below a folder in order, without hidden ones and links to the outside."""
        for folder, names, files in os.walk(below):
            names[:] = sorted(name for name in names if not name.startswith("."))
            for name in sorted(files):
                place = Path(folder, name)
                if not name.startswith(".") and place.resolve().is_relative_to(self._root):
                    yield place

    def text(self, place: Path) -> str:
        """Read a text file. Raises ToolError if it is missing, too large or not text."""
        if not place.is_file():
            raise ToolError(f"there is no file {self.shown(place)!r}: list_files shows the files")
        if place.stat().st_size > MOST_BYTES:
            raise ToolError(f"{self.shown(place)!r} is larger than {MOST_BYTES:,} bytes: search it instead")
        try:
            return place.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ToolError(f"{self.shown(place)!r} is not text") from None


def server_of(folder: Folder) -> MCPServer:
    """Return the server for one folder."""
    server = MCPServer("files")

    @server.tool(annotations=READS)
    def list_files(path: str = ".") -> Files:
        """List all files below a folder."""
        place = folder.place(path)
        if not place.is_dir():
            raise ToolError(f"there is no folder {path!r}")
        found = [folder.shown(each) for each in folder.walk(place)]
        return {"files": found[:MOST_FILES], "more": max(0, len(found) - MOST_FILES)}

    @server.tool(annotations=READS, structured_output=False)
    def read_file(path: str) -> str:
        """Read a text file."""
        return folder.text(folder.place(path))

    @server.tool(annotations=READS)
    def search_files(pattern: str, path: str = ".") -> Matches:
        """Find lines that match a regular expression, in all text files below a folder."""
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ToolError(f"{pattern!r} is not a regular expression: {error}") from None
        found: list[Match] = []
        for place in folder.walk(folder.place(path)):
            try:
                lines = folder.text(place).splitlines()
            except ToolError:
                continue  # no text
            for number, line in enumerate(lines, 1):
                if wanted.search(line):
                    if len(found) == MOST_MATCHES:
                        return {"matches": found, "complete": False}
                    found.append({"path": folder.shown(place), "line": number, "text": line[:LONGEST_LINE]})
        return {"matches": found, "complete": True}

    @server.tool(annotations=WRITES)
    def write_file(path: str, content: str) -> Written:
        """Write a whole text file, replacing its content."""
        place, data = folder.place(path), content.encode()
        if place.is_dir():
            raise ToolError(f"{path!r} is a folder")
        place.parent.mkdir(parents=True, exist_ok=True)
        # Write a temporary file, then rename it: readers never see half a file, even after a kill.
        handle, beside = tempfile.mkstemp(dir=place.parent, prefix=".write-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(beside, place.stat().st_mode & 0o777 if place.exists() else 0o644)
            os.replace(beside, place)
        except BaseException:
            os.unlink(beside)
            raise
        return {"path": folder.shown(place), "bytes": len(data)}

    return server


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        raise SystemExit("usage: python files_server.py FOLDER")
    server_of(Folder(Path(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
