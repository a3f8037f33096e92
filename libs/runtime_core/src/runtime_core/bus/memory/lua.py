"""Lua inside the in-process broker: the same functions that a server runs, over the same commands.

Replies cross the border between the languages flat, because building tables from the other side costs more than the
commands themselves. From a command to Lua, and from a function's result to Python, the values are:

    value                 a string or number
    nothing               a null
    nothing, text         an error
    true, text            a status such as `OK`
    false, value, …       a list; lists inside it are Lua tables
    '', table, length     (from Lua only) a list too long for Lua's stack
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, TypeAlias

from lupa import lua51

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import print_lua_number
from runtime_core.bus.memory.replies import Args, Command, Status
from runtime_core.errors import ServerError

_log = logging.getLogger("weft.bus.script")
_LEVELS = (logging.DEBUG, logging.DEBUG, logging.INFO, logging.WARNING)
# More values than this do not fit on Lua's stack in one call.
_MANY = 4000

LuaFunction: TypeAlias = Callable[..., object]
"""A function of the Lua runtime, seen from Python."""


class LuaScripts:
    """One Lua 5.1 runtime whose `redis.call` runs handlers of `commands`, whatever is in that table by then."""

    def __init__(self, commands: dict[bytes, Command], forbidden: frozenset[bytes]) -> None:
        self._commands = commands
        self._forbidden = forbidden
        self._read_only = False
        self._broken: Exception | None = None
        self._runtime = lua51.LuaRuntime(
            encoding=None,
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
            attribute_filter=_no_attributes,
        )
        lent = self._runtime.table_from(
            {
                b"dispatch": self._call,
                b"sha1hex": _sha1hex,
                b"write_log": _write_log,
                b"cjson": self._chunk("cjson.lua"),
                b"cmsgpack": self._chunk(
                    "cmsgpack.lua",
                    self._runtime.table_from({b"double_bytes": _double_bytes, b"double_value": _double_value}),
                ),
            }
        )
        border = self._chunk("scripting.lua", lent)
        del self._runtime.globals()[b"python"]
        self._invoke: LuaFunction = border[b"invoke"]
        self._run: LuaFunction = border[b"run"]
        self._evaluate: LuaFunction = border[b"evaluate"]
        self._load: LuaFunction = border[b"load_library"]
        self._flatten: LuaFunction = border[b"flatten"]
        self._list: LuaFunction = border[b"list"]
        self._slice: LuaFunction = border[b"slice"]

    # Any: lupa has no types, and what a chunk returns is known only to the chunk.
    def _chunk(self, name: str, *args: object) -> Any:
        source = (files("runtime_core.bus.memory") / name).read_bytes()
        return self._runtime.execute(source, *args, name=b"@memory/" + name.encode())

    def load(self, code: bytes) -> dict[bytes, tuple[LuaFunction, frozenset[bytes], bytes | None]]:
        """Run a library's code; its functions with their flags and descriptions, by name."""
        # Any: the chunk returns name, callback, flags and description of each function in turn.
        found: tuple[Any, ...] = _several(self._load(code))
        if found[0] is not True:
            raise ServerError(_text(found[1]))
        functions = {}
        for name, callback, flags, description in zip(*[iter(found[1:])] * 4, strict=True):
            functions[name] = (callback, frozenset(flags.split(b",")) - {b""}, description or None)
        return functions

    def invoke(self, name: bytes, callback: LuaFunction, keys: Args, args: Args, read_only: bool = False) -> Reply:
        """Call a function of a library."""
        self._read_only = read_only
        if len(keys) + len(args) <= _MANY:
            raw = self._invoke(name, callback, len(keys), *keys, *args)
        else:
            raw = self._run(name, callback, self._table(keys), self._table(args))
        return self._answer(raw)

    def evaluate(self, code: bytes, keys: Args, args: Args) -> Reply:
        """Run a script."""
        self._read_only = False
        name = _sha1hex(code)
        return self._answer(self._evaluate(name, code, self._table(keys), self._table(args)))

    def _answer(self, raw: object) -> Reply:
        if self._broken is not None:
            # A fault of this broker, not of the script: it must not look like an answer.
            broken, self._broken = self._broken, None
            raise broken
        return self._reply(raw)

    def _reply(self, raw: object) -> Reply:
        kind = type(raw)
        if kind is bytes or kind is int or raw is None:
            return raw  # type: ignore[return-value]  # narrowed by the exact class, which mypy does not follow
        if kind is tuple:
            return self._several(raw)  # type: ignore[arg-type]  # as above
        if kind is float:
            return _whole(raw)  # type: ignore[arg-type]  # as above
        if raw is False:
            return []
        if raw is True:
            return 1
        return self._element(raw)

    def _several(self, raw: tuple[object, ...]) -> Reply:
        marker = raw[0]
        if marker is False:
            return [item if type(item) is bytes or type(item) is int else self._element(item) for item in raw[1:]]
        if marker is None:
            raise ServerError(_text(raw[1]))
        if marker is True:
            assert isinstance(raw[1], bytes)
            return Status(raw[1])
        _, table, length = raw
        assert isinstance(length, int)
        items: list[Reply] = []
        for first in range(1, length + 1, _MANY):
            part = self._slice(table, first, min(first + _MANY - 1, length))
            items += [self._element(item) for item in (part if isinstance(part, tuple) else (part,))]
        return items

    def _element(self, item: object) -> Reply:
        if isinstance(item, bytes):
            return item
        if item is None or item is False:
            return None
        if isinstance(item, int):
            return int(item)
        if isinstance(item, float):
            return _whole(item)
        if lua51.lua_type(item) != "table":
            return None
        try:
            return self._reply(self._flatten(item))
        except ServerError as error:
            return str(error).encode()  # an error inside a list does not end the list

    def _table(self, items: Sequence[object]) -> object:
        if len(items) <= _MANY:
            return self._list(*items)
        return self._runtime.table_from(items)

    def _call(self, *words: bytes | float) -> object:
        """`redis.call`; the values that it returns are described at the top."""
        if not words:
            return None, b"ERR Please specify at least one argument for this redis lib call"
        try:
            name, *rest = words
            command = self._commands.get(name)  # type: ignore[arg-type]  # a number as a name finds nothing
            if command is None or name in self._forbidden or self._read_only:
                command = self._permitted(name)
            args: Args = words[1:]  # type: ignore[assignment]  # numbers are printed in the next lines
            for word in rest:
                if type(word) is not bytes:
                    args = tuple([_printed(word) for word in rest])
                    break
            if not command.least <= len(args) <= command.most:
                return None, b"ERR Wrong number of args calling Redis command from script"
            reply = command.handler(args)
        except ServerError as error:
            return None, str(error).encode()
        except Exception as error:
            self._broken = error
            return None, b"ERR internal error"
        kind = type(reply)
        if kind is list:
            return self._listed(reply)  # type: ignore[arg-type]  # narrowed by the exact class
        if kind is Status:
            return True, reply
        return reply

    def _listed(self, reply: list[Reply]) -> object:
        items: list[object] = [
            item if type(item) is bytes or type(item) is int else False if item is None else self._lua_list(item)
            for item in reply
        ]
        if len(items) > _MANY:
            return self._runtime.table_from(items)
        return (False, *items)

    def _lua_list(self, item: Reply) -> object:
        if isinstance(item, list):
            return self._table([False if part is None else self._lua_list(part) for part in item])
        return item

    def _permitted(self, name: bytes | float | None) -> Command:
        if not isinstance(name, bytes):
            if name is None or isinstance(name, bool):
                raise ServerError("ERR Lua redis lib command arguments must be strings or integers")
            raise ServerError("ERR Unknown Redis command called from script")
        upper = name.upper()
        command = self._commands.get(upper)
        if command is None:
            raise ServerError("ERR Unknown Redis command called from script")
        if upper in self._forbidden:
            raise ServerError("ERR This Redis command is not allowed from script")
        if self._read_only and command.writes:
            raise ServerError("ERR Write commands are not allowed from read-only scripts.")
        return command


def _no_attributes(owner: object, name: object, is_setting: bool) -> object:
    raise AttributeError("Lua code has no access to Python objects")


def _several(raw: object) -> tuple[object, ...]:
    return raw if isinstance(raw, tuple) else (raw,)


def _text(raw: object) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def _whole(number: float) -> int:
    # What converting such a double to an integer gives on the usual processors.
    if not -(2.0**63) <= number < 2.0**63:
        return -(2**63)
    return int(number)


def _printed(word: bytes | float) -> bytes:
    if type(word) is bytes:
        return word
    if type(word) is int or type(word) is float:
        return print_lua_number(word)
    raise ServerError("ERR Lua redis lib command arguments must be strings or integers")


def _sha1hex(text: bytes) -> bytes:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest().encode()


def _write_log(level: float, text: bytes) -> None:
    _log.log(_LEVELS[int(level)], "%s", text.decode("utf-8", "replace"))


def _double_bytes(number: float) -> bytes:
    try:
        short = struct.pack(">f", number)
    except OverflowError:
        return b"\xcb" + struct.pack(">d", number)
    if struct.unpack(">f", short)[0] == number:
        return b"\xca" + short
    return b"\xcb" + struct.pack(">d", number)


def _double_value(packed: bytes) -> float:
    value: float = struct.unpack(">f" if len(packed) == 4 else ">d", packed)[0]
    return value
