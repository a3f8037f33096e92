"""Holds every function that runs in this process to the rights that are read from its source."""

from __future__ import annotations

from typing import Any

import pytest

from runtime_core.acl.function_rights import OWN_STREAMS, READING, STREAMS, function_rights, key_family
from runtime_core.bus.library import library
from runtime_core.bus.memory.lua import LuaScripts

_NAMES = {full: name for name, full in library().functions.items()}
_NESTED = ("XGROUP", "XINFO")


def watch(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Collect what functions do beyond their rights, from now on."""
    beyond: set[str] = set()
    running = [""]
    base = [b""]
    invoke, call = LuaScripts.invoke, LuaScripts._call

    def watched_invoke(self: LuaScripts, name: bytes, callback: Any, keys: Any, *rest: Any, **more: Any) -> Any:
        running[0], base[0] = _NAMES.get(name, ""), keys[0] if keys else b""
        try:
            return invoke(self, name, callback, keys, *rest, **more)
        finally:
            running[0] = ""

    def watched_call(self: LuaScripts, *words: Any) -> object:
        if running[0]:
            beyond.update(_beyond(running[0], base[0], [word for word in words if isinstance(word, bytes)]))
        return call(self, *words)

    monkeypatch.setattr(LuaScripts, "invoke", watched_invoke)
    monkeypatch.setattr(LuaScripts, "_call", watched_call)
    return beyond


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
