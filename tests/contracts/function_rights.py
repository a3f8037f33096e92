"""Checks that every function needs only the rights that its source declares."""

from __future__ import annotations

import ast
import re
import secrets
import socket
from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Self

import hiredis

from runtime_core.bus.acl.users import OWN_STREAMS, READING, STREAMS, function_rights, key_family
from runtime_core.bus.library import library
from tests.servers.process import HOST

_NAMES = {full: name for name, full in library().functions.items()}
_NESTED = ("MEMORY", "XGROUP", "XINFO")
_MANY_KEYS = (b"DEL", b"EXISTS")
_WORD = re.compile(rb'"(?:[^"\\]|\\.)*"')
_HEAD = 100
"""Where a line says when and for whom the command ran, and its name."""
_CALL = b'] "FCALL" '
_FROM_FUNCTION = b' lua] "'


Use = tuple[str, bytes, bytes, bytes]
"""A function, a command, and the key's first part and the colon after it: all that its rights depend on."""
_CHECKED: set[Use | None] = set()
"""Within the rights. The lines of tests are many, and of few kinds."""


class Watch:
    """Reads what a server runs (MONITOR): each function, and the commands that it calls."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._monitor = socket.create_connection((HOST, port))
        self._reader = hiredis.Reader()

    def __enter__(self) -> Self:
        self._monitor.sendall(b"MONITOR\r\n")
        assert self._line() == b"OK"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._monitor.close()

    def keys(self, base: str) -> set[str]:
        """Return the keys of a partition that any command has named so far, without its base."""
        start = base.encode()
        words = {_text(quoted) for line in self._lines() for quoted in _WORD.findall(line)}
        return {word[len(start) :].decode("utf-8", "replace") for word in words if word.startswith(start)}

    def beyond_their_rights(self) -> set[str]:
        """Return what functions have done beyond their rights so far."""
        found: set[str] = set()
        function, base = "", b""
        for line in self._lines():
            # The server says what a function calls right behind the call of the function itself.
            head = line[:_HEAD]
            if _CALL in head:
                _, full, _, base = _words(line)
                function = _NAMES.get(full, "")
            elif _FROM_FUNCTION not in head:
                function = ""
            elif function and (use := _use(function, base, line)) not in _CHECKED:
                beyond = _beyond(function, base, _words(line))
                found.update(beyond)
                if use is not None and not beyond:
                    _CHECKED.add(use)
        return found

    def _lines(self) -> Iterator[bytes]:
        """Yield what the server has run so far."""
        mark = secrets.token_hex(8).encode()
        with socket.create_connection((HOST, self._port)) as marker:
            marker.sendall(b"ECHO %s\r\n" % mark)
            marker.recv(64)
        while mark not in (line := self._line()):
            yield line

    def _line(self) -> bytes:
        while (line := self._reader.gets()) is False:
            data = self._monitor.recv(1 << 20)
            assert data, "the server has ended"
            self._reader.feed(data)
        assert isinstance(line, bytes)
        return line


def _words(line: bytes) -> list[bytes]:
    """Return the words of a command: the first few, but all of one that names many keys."""
    quoted = (match[0] for match in _WORD.finditer(line))
    command = _text(next(quoted))
    return [command, *map(_text, quoted if command in _MANY_KEYS else islice(quoted, 3))]


def _text(quoted: bytes) -> bytes:
    if b"\\" not in quoted:
        return quoted[1:-1]
    value = ast.literal_eval("b" + quoted.decode("ascii"))
    assert isinstance(value, bytes)
    return value


def _use(function: str, base: bytes, line: bytes) -> Use | None:
    """Return what a line is a use of; None if that is not obvious."""
    _, command, _, key, *_ = (*line.split(b'"', 4), b"", b"")
    kind, colon, _ = key[len(base) :].partition(b":")
    unclear = command in _MANY_KEYS or command.decode() in _NESTED or kind == b"leader" or b"\\" in key
    return None if unclear or not key.startswith(base) else (function, command, kind, colon)


def _beyond(function: str, base: bytes, words: list[bytes]) -> list[str]:
    rights = function_rights(function)
    command = words[0].decode().upper()
    nested = command in _NESTED
    named = f"{command}|{words[1].decode()}".lower() if nested else command.lower()
    found = [] if named in rights.commands else [f"{function} runs {named}"]
    keys = words[1:] if command in ("DEL", "EXISTS") else words[1 + nested : 2 + nested]
    for key in keys if command not in ("TIME",) else ():
        assert key.startswith(base), f"{function} leaves its partition with {key!r}"
        if key == base:
            continue  # a stream that the caller names whole: it has a grant for it
        family = key_family(key[len(base) :].decode("utf-8", "replace"))
        allowed = rights.writes | rights.reads if command in READING else rights.writes
        own = family in STREAMS and function in OWN_STREAMS
        if family not in allowed and not own and not (family.startswith("leader:") and "leader:" in allowed):
            found.append(f"{function}: {named} on {family}")
    return found
