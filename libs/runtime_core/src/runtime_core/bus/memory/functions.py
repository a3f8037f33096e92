"""Function libraries of the in-process broker: FUNCTION, FCALL, FCALL_RO and EVAL."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from runtime_core.bus.connection import Reply
from runtime_core.bus.memory.arguments import glob, integer
from runtime_core.bus.memory.lua import LuaFunction, LuaScripts
from runtime_core.bus.memory.replies import NO_LIMIT, OK, Args, Command, shown, wrong_arity
from runtime_core.errors import ServerError

SCRIPTING = frozenset({b"FUNCTION", b"FCALL", b"FCALL_RO", b"EVAL"})
"""What a script may not call."""

_NAME = re.compile(rb"[A-Za-z0-9_]+")


@dataclass(slots=True)
class _Function:
    name: bytes
    library: bytes
    callback: LuaFunction
    flags: frozenset[bytes]
    description: bytes | None


@dataclass(slots=True)
class _Library:
    name: bytes
    code: bytes
    functions: list[_Function] = field(default_factory=list)


class FunctionCommands:
    """Handlers; `commands` is their table."""

    def __init__(self, commands: dict[bytes, Command]) -> None:
        self._scripts = LuaScripts(commands, SCRIPTING)
        self._libraries: dict[bytes, _Library] = {}
        self._functions: dict[bytes, _Function] = {}

    def commands(self) -> dict[bytes, Command]:
        """Handlers by name, in upper case."""
        return {
            b"FUNCTION": Command(self.function, 1, NO_LIMIT, True),
            b"FCALL": Command(self.fcall, 2, NO_LIMIT, True),
            b"FCALL_RO": Command(self.fcall_ro, 2, NO_LIMIT, False),
            b"EVAL": Command(self.eval, 2, NO_LIMIT, True),
        }

    def clear(self) -> None:
        """Drop all libraries."""
        self._libraries.clear()
        self._functions.clear()

    def fcall(self, args: Args) -> Reply:
        function = self._functions.get(args[0])
        if function is None:
            raise ServerError("ERR Function not found")
        keys, rest = _keys(args)
        return self._scripts.invoke(function.name, function.callback, keys, rest, b"no-writes" in function.flags)

    def fcall_ro(self, args: Args) -> Reply:
        function = self._functions.get(args[0])
        if function is None:
            raise ServerError("ERR Function not found")
        keys, rest = _keys(args)
        if b"no-writes" not in function.flags:
            raise ServerError("ERR Can not execute a script with write flag using *_ro command.")
        return self._scripts.invoke(function.name, function.callback, keys, rest, read_only=True)

    def eval(self, args: Args) -> Reply:
        keys, rest = _keys(args, "ERR value is not an integer or out of range")
        return self._scripts.evaluate(args[0], keys, rest)

    def function(self, args: Args) -> Reply:
        match args[0].upper():
            case b"LOAD":
                return self._load(args[1:])
            case b"LIST":
                return self._list(args[1:])
            case b"DELETE":
                if len(args) != 2:
                    raise wrong_arity("function|delete")
                if args[1] not in self._libraries:
                    raise ServerError("ERR Library not found")
                self._unlink(self._libraries[args[1]])
                return OK
            case b"FLUSH":
                if len(args) > 2 or (len(args) == 2 and args[1].upper() not in (b"SYNC", b"ASYNC")):
                    raise ServerError("ERR FUNCTION FLUSH only supports SYNC|ASYNC option")
                self.clear()
                return OK
        raise ServerError(f"ERR unknown subcommand '{shown(args[0])}'. Try FUNCTION HELP.")

    def _load(self, words: Args) -> bytes:
        if not words:
            raise wrong_arity("function|load")
        replace = False
        for option in words[:-1]:
            if option.upper() != b"REPLACE":
                raise ServerError(f"ERR Unknown option given: {shown(option)}")
            replace = True
        code = words[-1]
        name, body = _library_name(code)
        old = self._libraries.get(name)
        if old is not None and not replace:
            raise ServerError(f"ERR Library '{shown(name)}' already exists")
        library = _Library(name, code)
        for function, (callback, flags, description) in self._scripts.load(body).items():
            library.functions.append(_Function(function, name, callback, flags, description))
        if not library.functions:
            raise ServerError("ERR No functions registered")
        for added in library.functions:
            there = self._functions.get(added.name)
            if there is not None and there.library != name:
                raise ServerError(f"ERR Function {shown(added.name)} already exists")
        if old is not None:
            self._unlink(old)
        self._libraries[name] = library
        self._functions.update({added.name: added for added in library.functions})
        return name

    def _unlink(self, library: _Library) -> None:
        del self._libraries[library.name]
        for function in library.functions:
            del self._functions[function.name]

    def _list(self, words: Args) -> Reply:
        pattern = None
        with_code = False
        position = 0
        while position < len(words):
            option = words[position].upper()
            if option == b"WITHCODE":
                with_code = True
            elif option == b"LIBRARYNAME" and pattern is None:
                position += 1
                if position == len(words):
                    raise ServerError("ERR library name argument was not given")
                pattern = glob(words[position])
            else:
                raise ServerError(f"ERR Unknown argument {shown(words[position])}")
            position += 1
        found: list[Reply] = []
        for library in self._libraries.values():
            if pattern is not None and not pattern.fullmatch(library.name):
                continue
            functions: list[Reply] = [
                [
                    b"name",
                    function.name,
                    b"description",
                    function.description,
                    b"flags",
                    [*sorted(function.flags)],
                ]
                for function in library.functions
            ]
            shown_library: list[Reply] = [
                b"library_name",
                library.name,
                b"engine",
                b"LUA",
                b"functions",
                functions,
            ]
            if with_code:
                shown_library += (b"library_code", library.code)
            found.append(shown_library)
        return found


def _keys(args: Args, error: str = "ERR Bad number of keys provided") -> tuple[Args, Args]:
    count = integer(args[1], error)
    if count > len(args) - 2:
        raise ServerError("ERR Number of keys can't be greater than number of args")
    if count < 0:
        raise ServerError("ERR Number of keys can't be negative")
    return args[2 : 2 + count], args[2 + count :]


def _library_name(code: bytes) -> tuple[bytes, bytes]:
    """The name that the first line gives, and the code from the end of that line on."""
    if not code.startswith(b"#!"):
        raise ServerError("ERR Missing library metadata")
    end = code.find(b"\n")
    if end < 0:
        raise ServerError("ERR Invalid library metadata")
    engine, *settings = code[2:end].split() or [b""]
    name: bytes | None = None
    for setting in settings:
        key, _, value = setting.partition(b"=")
        if key.lower() != b"name":
            raise ServerError(f"ERR Invalid metadata value given: {shown(setting)}")
        if name is not None:
            raise ServerError("ERR Invalid metadata value, name argument was given multiple times")
        name = value
    if name is None:
        raise ServerError("ERR Library name was not given")
    if not _NAME.fullmatch(name):
        raise ServerError(
            "ERR Library names can only contain letters, numbers, or underscores(_) "
            "and must be at least one character long"
        )
    if engine.upper() != b"LUA":
        raise ServerError(f"ERR Engine '{shown(engine)}' not found")
    return name, code[end:]
