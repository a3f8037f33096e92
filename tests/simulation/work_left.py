"""How much the broker still holds that somebody must do: counted on the broker, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from runtime_core.bus.connection import Argument
from runtime_core.bus.keys import group_of
from tests.simulation.server import SimServer

# ARGV: how many bases, these, then each work stream and its group. Returns {work, tasks that are open}.
_SCRIPT = """
local work, opened, bases = 0, 0, tonumber(ARGV[1])
for at = 2, bases + 1 do
  local base = ARGV[at]
  for each = bases + 2, #ARGV, 2 do
    work = work + redis.call('XLEN', base .. ARGV[each])
    local pending = redis.pcall('XPENDING', base .. ARGV[each], ARGV[each + 1])
    work = work + (pending[1] or 0)
  end
  work = work + redis.call('XLEN', base .. 'asks') + redis.call('XLEN', base .. 'replies')
  work = work + redis.call('ZCARD', base .. 'timers') + redis.call('ZCARD', base .. 'requests')
  work = work + redis.call('HLEN', base .. 'waiting')
  work = work + redis.call('HLEN', base .. 'delayed') + (redis.call('HGET', base .. 'meta', 'queued') or 0)
  opened = opened + redis.call('ZCARD', base .. 'open')
end
return {work, opened}
"""


class WorkLeft:
    """Counts the work of these partitions on these work streams."""

    def __init__(self, server: SimServer, bases: Sequence[str], streams: Sequence[str]) -> None:
        self._server = server
        named = [part for stream in streams for part in (stream, group_of(stream))]
        self._command: tuple[Argument, ...] = "EVAL", _SCRIPT, 0, len(bases), *bases, *named

    def count(self) -> tuple[int, int]:
        """Return how much work there is, and how many tasks are open."""
        work, opened = cast(list[int], self._server.execute(*self._command))
        return work, opened
