"""One real Valkey on a unix socket that runs one command at a time, with the bus's functions on a virtual clock."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import hiredis

from runtime_core.base import lifeline
from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.library import FUNCTIONS, Library
from runtime_core.bus.library import library as real_library
from runtime_core.errors import ServerError
from tests.servers.valkey import valkey_command

EPOCH_MS = 1_900_000_000_000
"""When each history begins. Later than today, so that an id that the server makes continues the stream's last one."""
CLOCK = "sim:clock"
TOUCHED = b"sim:touched"
"""Ends a function's reply that has its own reply first, and then each stream that it has changed with its newest id."""

# What stands before the functions: their `redis.call` reads the virtual clock, including the ids of new entries. It
# adds one local name, since Lua allows 200 of them in the library.
_CLOCK_SOURCE = b"""
local redis = (function()
local function sim_now() return redis.call('GET', 'sim:clock') or '1900000000000' end
local sim_touched = {}
local function sim_translated(run, command, ...)
  if command == 'TIME' then
    local ms = tonumber(sim_now())
    return {string.format('%.0f', math.floor(ms / 1000)), string.format('%.0f', (ms % 1000) * 1000)}
  end
  if command == 'XDEL' then
    sim_touched[select(1, ...)] = true
  elseif command == 'XADD' then
    local args = {...}
    sim_touched[args[1]] = true
    for i = 2, #args do
      if args[i] == '*' then
        args[i] = sim_now() .. '-*'
        local reply = redis.pcall('XADD', unpack(args))
        if type(reply) ~= 'table' or not reply.err or not string.find(reply.err, 'equal or smaller', 1, true) then
          if type(reply) == 'table' and reply.err and run == redis.call then error(reply) end
          return reply
        end
        args[i] = '*'
        return run('XADD', unpack(args))
      end
    end
  end
  return run(command, ...)
end
local function sim_call(...) return sim_translated(redis.call, ...) end
local function sim_pcall(...) return sim_translated(redis.pcall, ...) end
-- A function that has added to streams or deleted from them also returns the newest id of each, and their number.
local function sim_told(callback)
  return function(keys, args)
    sim_touched = {}
    local reply = callback(keys, args)
    if not next(sim_touched) or (type(reply) == 'table' and reply.err) then return reply end
    local told = {reply == nil and false or reply}
    for key in pairs(sim_touched) do
      local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
      told[#told + 1] = key
      told[#told + 1] = newest and newest[1] or '0-0'
    end
    told[#told + 1] = 'sim:touched'
    return told
  end
end
local function sim_register(named)
  named.callback = sim_told(named.callback)
  return redis.register_function(named)
end
local function sim_error(...) return redis.error_reply(...) end
local function sim_status(...) return redis.status_reply(...) end
local function sim_sha1hex(...) return redis.sha1hex(...) end
return {call = sim_call, pcall = sim_pcall, register_function = sim_register, error_reply = sim_error,
  status_reply = sim_status, sha1hex = sim_sha1hex}
end)()
"""


def simulated_library() -> Library:
    """Return the bus's functions with the virtual clock in place of the server's.

    The timer that frees forgotten slots of limits never comes: no function may forget one. Nothing is remembered from
    one history to the next.
    """
    real = real_library()
    head, _, body = real.source.partition(b"\n")
    for found, changed in (
        (b"CHECK_MS = 10000", b"CHECK_MS = 1000000000"),
        (b"unlooked[key] = room - 1", b"unlooked[key] = 0"),
    ):
        assert body.count(found) == 1
        body = body.replace(found, changed)
    return replace(real, source=head + b"\n" + _CLOCK_SOURCE + body)


class SimServer:
    """A server for this process alone, with nothing on disk, and one blocking connection to it."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="weft-sim-"))
        self._path = str(self._folder / "s")
        self._process = subprocess.Popen(
            [
                sys.executable, "-I", "-S", lifeline.__file__, str(_pid()), str(int(signal.SIGKILL)), "-1",
                *valkey_command(), "--port", "0",
                "--unixsocket", self._path, "--save", "", "--appendonly", "no", "--dir", str(self._folder),
                "--maxmemory-policy", "noeviction", "--hz", "1", "--latency-tracking", "no",
                # Fields keep their order: that of a hash table differs from server to server.
                "--hash-max-listpack-entries", "100000", "--hash-max-listpack-value", "100000000",
                "--set-max-listpack-entries", "100000", "--set-max-listpack-value", "100000000",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A leader shares its session: Ctrl-C does not reach it, and its session may give way to others.
            start_new_session=os.getsid(0) != os.getpid(),
        )  # fmt: skip
        self._socket = self._connected()
        self._reader = hiredis.Reader(replyError=ServerError)
        self.library = simulated_library()
        self.load_library()
        self._growing = _growing(cast(list[list[Reply]], self.execute("COMMAND")))
        self._frugal = {self.library.functions[name] for name, may_run_full in FUNCTIONS.items() if may_run_full}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def needs_memory(self, args: tuple[Argument, ...]) -> bool:
        """Whether a server at its maxmemory refuses the command: by its flags, or by those of the function."""
        if args[0] == b"FCALL":
            return args[1] not in self._frugal
        return not self._growing.isdisjoint((str(args[0]).lower(), "|".join(map(str, args[:2])).lower()))

    def load_library(self) -> None:
        self.execute("FUNCTION", "FLUSH")
        self.execute("FUNCTION", "LOAD", self.library.source)

    def execute(self, *args: Argument) -> Reply:
        """Run one command. Raises ServerError for an error reply."""
        reply = self.pipeline([args])[0]
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def pipeline(self, commands: Sequence[tuple[Argument, ...]]) -> list[Reply | ServerError]:
        """Run several commands in one round trip; error replies are values here."""
        self._socket.sendall(b"".join([hiredis.pack_command(command) for command in commands]))  # type: ignore[arg-type]  # its stub wants one-element tuples
        gets, replies = self._reader.gets, cast(list[Reply | ServerError], [])
        for _ in commands:
            while (reply := gets()) is False:
                data = self._socket.recv(65536)
                if not data:
                    raise RuntimeError("the simulation's server has ended")
                self._reader.feed(data)
            replies.append(cast(Reply | ServerError, reply))
        return replies

    def _connected(self) -> socket.socket:
        deadline = time.monotonic() + 60
        while True:
            client = socket.socket(socket.AF_UNIX)
            try:
                client.connect(self._path)
            except OSError:
                client.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                return client


def _growing(commands: list[list[Reply]]) -> frozenset[str]:
    """Names of the commands that a server at its maxmemory refuses, with those of subcommands."""
    found = set()
    for command in commands:
        name, flags = cast(bytes, command[0]).decode(), cast(list[bytes], command[2])
        if b"denyoom" in flags:
            found.add(name)
        if len(command) > 9:
            found |= _growing(cast(list[list[Reply]], command[9]))
    return frozenset(found)


def _pid() -> int:
    import os

    return os.getpid()
