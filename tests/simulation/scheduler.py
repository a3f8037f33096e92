"""Decides what happens next in a history: a broker call, the passing of time, or a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context
from typing import TYPE_CHECKING, cast

from runtime_core.bus.connection import Argument, Reply
from runtime_core.errors import BusUnavailable, ServerError
from tests.simulation.choice_source import ChoiceSource
from tests.simulation.loop import SimLoop
from tests.simulation.server import CLOCK, EPOCH_MS, TOUCHED, SimServer
from tests.simulation.transport import Call, Read, SimTransport, position

if TYPE_CHECKING:
    from tests.simulation.processes import Process

INFO = b"# Memory\r\nused_memory:1000000\r\nmaxmemory:%d\r\nmaxmemory_policy:noeviction\r\n"
DISK_ERROR = "MISCONF Errors writing to the AOF file: No space left on device"
OOM_ERROR = "OOM command not allowed when used memory > 'maxmemory'."
BACKGROUND = (b"beat", b"promote", b"adopt", b"lead")
"""Functions that every process calls again and again; faults of calls choose others."""
MOST_HEADS = 15
"""The most connections among which one is chosen."""
NOTHING = 0, 0
"""The position before the first entry of a stream."""
CHANGE_STREAMS = ("XADD", "XDEL", "XTRIM", "XREADGROUP", "XREAD", "XGROUP", "DEL")
"""Commands after which the newest entries of streams may differ. Functions say what they have changed."""


class Scheduler:
    """Holds what may happen next, and lets one thing happen whenever no code runs."""

    def __init__(
        self, loop: SimLoop, server: SimServer, choice_source: ChoiceSource, namespace: str, partitions: int
    ) -> None:
        self.loop = loop
        self.server = server
        self.choice_source = choice_source
        self.namespace = namespace
        self.bases = [f"{namespace}:{{{number}}}:" for number in range(partitions)]
        self.active: dict[SimTransport, None] = {}
        """Transports with calls that wait, the longest first."""
        self.reads: dict[Read, None] = {}
        self.processes: list[Process] = []
        self.context = Context()
        """What the code of all processes runs in."""
        self.steps = 0
        self.log: list[tuple[float, str, tuple[Argument, ...] | str, object]] = []
        self.actions: list[tuple[int, Callable[[], None]]] = []
        """What happens at which step, the last one first."""
        self.call_fault: Callable[[SimTransport, Call], bool] | None = None
        """What goes wrong with the next call that work makes; True where it has."""
        self.release = 0
        """Which release of the code new processes run."""
        self.disk_errors = 0
        """So many writes are still refused."""
        self.full = False
        """Whether the server is at its maxmemory."""
        self.lags: dict[str, int] = {}
        """By the base of a partition, how many of its replicas have stopped to follow, and will take its place."""
        self.clock_step_ms = 0
        """How far the server's clock stands from true time."""
        self._delivered: dict[str, tuple[int, int]] = {}
        self._newest: dict[str, tuple[int, int]] = {}
        self._clock = -1
        loop.quiescent = self.step

    # -- steps -------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let one thing happen. Called when no code runs."""
        self.steps += 1
        while self.actions and self.actions[-1][0] <= self.steps:
            self.actions.pop()[1]()
            if self.loop._ready:
                return
        now = self.loop.now
        transports = [each for each in self.active if each.held_until <= now and not each.process.paused]
        reads = [each for each in self.reads if self._readable(each)]
        count = min(len(transports) + len(reads), MOST_HEADS)
        if not count:
            self._pass_time()
            return
        chosen = self.choice_source.choose(count * 8 + 1)
        if chosen == count * 8:
            self._pass_time()
            return
        at = chosen % count
        if at < len(transports):
            self._call(transports[at])
        else:
            self._read(reads[at - len(transports)])

    def at(self, step: int, action: Callable[[], None]) -> None:
        """Let something happen at a step."""
        self.actions.append((step, action))
        self.actions.sort(key=lambda each: -each[0])

    def note(self, what: str) -> None:
        """Write an event of the history into its log."""
        self.log.append((self.loop.now, "", what, None))

    def _pass_time(self) -> None:
        loop = self.loop
        while True:
            due = loop.next_timer()
            assert due is not None, "nothing can happen any more"
            loop.now = max(loop.now, due)
            process = loop.next_process()
            if process is None or not process.paused:
                break
            process.frozen += loop.take_timers(process)
        for transport in list(self.active):
            transport.answer_executed()

    # -- calls -------------------------------------------------------------------------------------------------

    def _call(self, transport: SimTransport) -> None:
        call = next((call for call in transport.waiting if not call.executed), None)
        if call is None or transport.closed:
            transport.answer_executed()
            if not transport.waiting:
                self.active.pop(transport, None)
            return
        if self.call_fault is not None and not self._background(call) and self.call_fault(transport, call):
            self.call_fault = None
            return
        self.execute(transport, call)
        transport.answer_executed()
        # To the end of the line: the plainest choice serves the processes in turn.
        self.active.pop(transport, None)
        if transport.waiting:
            self.active[transport] = None

    def execute(self, transport: SimTransport, call: Call) -> None:
        """Run a command on the server; its reply stays with the call."""
        call.executed = True
        if self.disk_errors and call.args[0] in (b"FCALL", "XADD", "XACK", "HSET", "XGROUP", "XDEL"):
            self.disk_errors -= 1
            call.reply, call.error = None, ServerError(DISK_ERROR)
        elif self.full and self.server.needs_memory(call.args):
            call.reply, call.error = None, ServerError(OOM_ERROR)
        elif call.args[0] == "WAIT":
            call.reply = self._wait(transport, cast(int, call.args[2]))
        else:
            call.reply, call.error = self.run(call.args)
        self.log.append((self.loop.now, transport.name, call.args, call.error or call.reply))

    def _wait(self, transport: SimTransport, timeout_ms: int) -> int:
        """Return how many replicas have what this connection has written. One that follows has everything at once."""
        if not self.lags.get(transport.base):
            return 1
        transport.held_until = self.loop.now + timeout_ms / 1000
        self.loop.call_later(timeout_ms / 1000, transport.answer_executed)
        return 0

    def run(self, args: tuple[Argument, ...], also: Sequence[str] = ()) -> tuple[Reply, ServerError | None]:
        """Run one command now. Also read new entries of streams with waiting readers, and of those in `also`."""
        if args[0] == "TIME":
            ms = self.server_ms()
            return [b"%d" % (ms // 1000), b"%d" % (ms % 1000 * 1000)], None
        if args[0] == "INFO":
            return INFO % (1_000_000 if self.full else 0), None  # what a real server says differs from run to run
        if args[0] == "FUNCTION" and args[1] == "LOAD":
            args = ("FUNCTION", "LOAD", self.server.library.source)
        name, commands = args[0], [args]
        if name == "XADD" and "*" in args:
            at = args.index("*")
            commands = [(*args[:at], f"{self.server_ms()}-*", *args[at + 1 :])]
        looks: Sequence[str] = ()
        if name in CHANGE_STREAMS:
            added = [str(args[1])] if name == "XADD" else []
            looks = list(dict.fromkeys((*self._watched(), *also, *added)))
            commands += [_newest(key) for key in looks]
        ms = self.server_ms()
        if ms != self._clock:
            self._clock = ms
            commands.insert(0, ("SET", CLOCK, ms))
        replies = self.server.pipeline(commands)
        reply = replies[-1 - len(looks)]
        for key, found in zip(looks, replies[len(replies) - len(looks) :], strict=True):
            self._see(key, found)
        if isinstance(reply, ServerError):
            if name == "XADD" and "equal or smaller" in str(reply):
                # The clock has stepped back: a server goes on from the stream's last id.
                again = self.server.execute(*args)
                self.read_newest_again()
                return again, None
            if name == b"FCALL":
                self.read_newest_again()
            return None, reply
        if isinstance(reply, list):
            if reply and reply[-1] == TOUCHED:
                for at in range(1, len(reply) - 1, 2):
                    self._newest[cast(bytes, reply[at]).decode()] = position(cast(bytes, reply[at + 1]))
                reply = reply[0]
            elif name == "XPENDING":
                for item in reply:
                    if isinstance(item, list) and len(item) == 4:
                        item[2] = 0  # the idle time, which is not virtual
        return reply, None

    def read_newest_again(self) -> None:
        """Read the newest entries of all streams with waiting readers."""
        keys = list(self._watched())
        for key, found in zip(keys, self.server.pipeline([_newest(key) for key in keys]) if keys else (), strict=True):
            self._see(key, found)

    def _see(self, key: str, found: Reply | ServerError) -> None:
        if isinstance(found, list) and found:
            self._newest[key] = position(cast(list[bytes], found[0])[0])
        else:
            self._newest.pop(key, None)

    def server_ms(self) -> int:
        """Return the server's clock."""
        return EPOCH_MS + round(self.loop.now * 1000) + self.clock_step_ms

    @staticmethod
    def _background(call: Call) -> bool:
        return call.args[0] == b"FCALL" and cast(bytes, call.args[1]).endswith(BACKGROUND)

    # -- reads -------------------------------------------------------------------------------------------------

    def _watched(self) -> dict[str, None]:
        return {key: None for read in self.reads for key in read.keys}

    def _readable(self, read: Read) -> bool:
        after = read.after
        for key in read.keys:
            newest = self._newest.get(key)
            if newest is not None and newest > (self._delivered.get(key, NOTHING) if after is None else after):
                return not read.held and not read.transport.process.paused
        return False

    def _read(self, read: Read) -> None:
        if self.call_fault is not None and self.call_fault(read.transport, read):
            self.call_fault = None
            return
        self.execute_read(read)
        read.answer()

    def execute_read(self, read: Read) -> None:
        """Run a blocking read as one that does not block."""
        read.executed = True
        self.reads.pop(read, None)
        if self.disk_errors and read.args[0] == "XREADGROUP":
            self.disk_errors -= 1
            read.error = ServerError(DISK_ERROR)
            return
        read.reply, read.error = self.run(read.plain, read.keys)
        self.log.append((self.loop.now, read.transport.name, read.plain, read.error or read.reply))
        if read.after is None and read.error is None:
            for key in read.keys:
                self._delivered[key] = max(self._delivered.get(key, NOTHING), self._newest.get(key, NOTHING))
            for name, entries in cast(list[tuple[bytes, list[tuple[bytes, object]]]], read.reply or []):
                self._delivered[name.decode()] = position(entries[-1][0])
        if read.reply is None and read.error is None:
            # Nothing for it after all: it goes on waiting.
            read.executed = False
            self.reads[read] = None

    def cancelled_read(self, read: Read) -> None:
        """The reader has stopped waiting; the server may have served it just before."""
        self.reads.pop(read, None)
        if (
            not read.executed
            and not read.transport.process.dead
            and self._readable(read)
            and self.choice_source.choose(2)
        ):
            self.note(f"{read.transport!r}: the read is cancelled when its reply is on the way")
            self.execute_read(read)
            self.reads.pop(read, None)

    def forget_reads(self) -> None:
        """Streams or groups have changed: read them again, and let all readers notice."""
        self._delivered.clear()
        self._newest = dict.fromkeys((*self._newest, *self._watched()), (1 << 60, 0))

    def lose_connections(self, seconds: float, base: str = "") -> None:
        """All connections break at once, as when the server restarts; with `base`, those to this partition's server."""
        used = {who: what[3] for _, who, what, _ in self.log if what[0] == b"FCALL"} if base else {}
        for process in self.processes:
            for transport in process.transports:
                if used.get(transport.name, base) in (base, base.encode()):
                    transport.break_off(seconds)
        if seconds:
            self.loop.call_later(seconds, lambda: None)


def lose_request(transport: SimTransport, call: Call, scheduler: Scheduler) -> bool:
    """The connection breaks before the server has read the call."""
    scheduler.note(f"{transport!r}: the connection breaks before {_told(call)} is executed")
    transport.break_off(0.05)
    scheduler.loop.call_later(0.05, lambda: None)
    return True


def lose_reply(transport: SimTransport, call: Call, scheduler: Scheduler) -> bool:
    """The server executes the call, and the connection breaks before the reply comes."""
    if isinstance(call, Read):
        scheduler.execute_read(call)
        if not call.future.done():
            call.future.set_exception(BusUnavailable("the connection broke during a read"))
    else:
        scheduler.execute(transport, call)
    scheduler.note(f"{transport!r}: the connection breaks before the reply of {_told(call)} comes")
    transport.break_off(0.05)
    scheduler.loop.call_later(0.05, lambda: None)
    return True


def delay_reply(transport: SimTransport, call: Call, scheduler: Scheduler, seconds: float) -> bool:
    """The server executes the call, and its reply comes late."""
    loop = scheduler.loop
    scheduler.note(f"{transport!r}: the reply of {_told(call)} comes {seconds} s late")
    if isinstance(call, Read):
        scheduler.execute_read(call)
        if not call.executed:
            return True
        call.held = True
        loop.call_later(seconds, call.answer)
        return True
    scheduler.execute(transport, call)
    transport.held_until = loop.now + seconds
    loop.call_later(seconds, transport.answer_executed)
    return True


def _newest(key: str) -> tuple[Argument, ...]:
    return "XREVRANGE", key, "+", "-", "COUNT", 1


def _told(call: Call) -> str:
    name = call.args[1] if call.args[0] == b"FCALL" else call.args[0]
    return name.decode().rpartition("_")[2] if isinstance(name, bytes) else str(name)
