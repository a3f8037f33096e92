"""The agent objects of one process: one for each agent, dropped when idle if the broker has their state."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Collection
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from runtime_core.declare.schema import encode
from runtime_core.errors import WeftError
from runtime_core.integrations.actors.identity import Address

logger = logging.getLogger(__name__)

REMEMBERED_STATES = 100

Place = tuple[str, str]
"""Type and key."""


class Instance:
    """An agent object, and the state that the broker has for it."""

    def __init__(self, agent: Any, place: Place, *, keeps_state: bool, made_here: bool) -> None:
        self.agent = agent  # Any: agents of another library share no base class with ours
        self.place = place
        self.keeps_state = keeps_state
        self.made_here = made_here
        """False: the user passed the object, so it cannot be created again."""
        self._known: bytes | None = b""
        self._past = deque([hash(b"")], maxlen=REMEMBERED_STATES)
        self.holders: dict[Place, Callable[[], bool]] = {}
        """By task and run, each handler that runs in it, outermost first: whether it waits for an answer now."""
        self.freed = asyncio.Event()
        """Set when a handler leaves it, or begins to wait for an answer."""

    @property
    def known(self) -> bytes | None:
        """The broker's state that the object agrees with (empty: none yet); None: it agrees with no state."""
        return self._known

    @known.setter
    def known(self, state: bytes | None) -> None:
        self._known = state
        if state is not None:
            self._past.append(hash(state))

    def is_behind(self, state: bytes) -> bool:
        """Whether the object agrees with this state, or has agreed with it before and is newer."""
        return self._known is not None and hash(state) in self._past

    async def state(self) -> bytes:
        """Return its state as JSON. Raises InvalidInput for a state without JSON."""
        return encode(await self.agent.save_state(), f"state of agent {'/'.join(self.place)}")

    async def load(self, state: bytes) -> None:
        """Load a state from the broker into the object."""
        if state:
            await self.agent.load_state(msgspec.json.decode(state))
        self.known = state

    async def catch_up(self, state: bytes) -> None:
        """Load the state that a reentrant call changed, if another process handled the call."""
        if state and self.keeps_state and self.known != state:
            await self.load(state)

    async def operate(self, operation: str, state: bytes) -> bytes:
        """Run an operation of the runtime on the object and return its response (JSON)."""
        match operation:
            case "save_state":
                return encode(await self.agent.save_state(), "state")
            case "load_state":
                await self.agent.load_state(msgspec.json.decode(state))
                return b"null"
            case "metadata":
                metadata = self.agent.metadata
                found = metadata if isinstance(metadata, dict) else {"description": metadata.description}
                return encode({"description": found["description"]}, "metadata")
        raise WeftError(f"operation {operation!r} does not exist")

    @property
    def is_stored(self) -> bool:
        """Whether the broker has its state, so that another object can take its place."""
        return self.keeps_state and self.made_here

    @property
    def admits(self) -> bool:
        """Whether another handler may enter: all current ones are waiting for answers."""
        return all(waits() for waits in self.holders.values())


class Instances:
    """Keeps at most `limit` objects, unless more are in use or hold state that is nowhere else."""

    def __init__(
        self, build: Callable[[str, str], Awaitable[Any]], keeps_state: Callable[[Any], bool], limit: int
    ) -> None:
        self._build = build
        self._keeps_state = keeps_state
        self._limit = limit
        self._there: dict[Place, Instance] = {}
        self._stored: OrderedDict[Place, Instance] = OrderedDict()
        """Those whose state the broker has, the least recently used first. Others are never dropped to make room."""
        self._being_made: dict[Place, asyncio.Task[Instance]] = {}
        self._doors: WeakValueDictionary[Place, asyncio.Lock] = WeakValueDictionary()
        """What concurrent handlers pass one at a time, so that they begin in the order of their messages."""
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._there)

    def all(self) -> list[Instance]:
        """The objects in memory."""
        return list(self._there.values())

    def find(self, id: Address) -> Instance | None:
        """Return the object of this agent, or None."""
        return self._there.get((id.type, id.key))

    def put(self, id: Address, agent: Any) -> Instance:  # Any: see Instance
        """Keep an object that the user passed."""
        place = (id.type, id.key)
        instance = Instance(agent, place, keeps_state=self._keeps_state(agent), made_here=False)
        self._there[place] = instance
        self._stored.pop(place, None)
        return instance

    async def get(self, type: str, key: str) -> Instance:
        """Return the object of this agent, created once if needed. Raises its factory's error."""
        place = (type, key)
        found = self._there.get(place)
        if found is None:
            making = self._being_made.get(place)
            if making is None:
                making = self._being_made[place] = asyncio.create_task(self._make(place), name=f"make {type}/{key}")
            # If one of several waiting callers is cancelled, the others still need it.
            found = await asyncio.shield(making)
        elif place in self._stored:
            self._stored.move_to_end(place)
        return found

    async def enter(
        self,
        type: str,
        key: str,
        task: str,
        run: str,
        state: bytes,
        *,
        alone: bool,
        shared: bool,
        holders: Collection[str] = (),
        waits: Callable[[], bool] = lambda: False,
    ) -> Instance:
        """Return the object with the broker's `state` for one handler, which ends with `leave`.

        `alone`: wait for other handlers of the object, unless they wait for answers. The broker delivers their answers
        only after this one ends. `waits` returns whether this handler waits for an answer. `shared`: other processes
        may have an object of this agent, too. `holders`: of a nested run, who has the instance on the broker
        (`task|run`).
        """
        if alone:
            return await self._enter(type, key, (task, run), state, waits, holders, alone=True, shared=shared)
        # While the object is made, or its state loads, a later message would find it before those that wait for it.
        async with self._doors.setdefault((type, key), asyncio.Lock()):
            return await self._enter(type, key, (task, run), state, waits, holders, alone=False, shared=shared)

    async def _enter(
        self,
        type: str,
        key: str,
        holder: Place,
        state: bytes,
        waits: Callable[[], bool],
        holders: Collection[str],
        *,
        alone: bool,
        shared: bool,
    ) -> Instance:
        while True:
            instance = await self.get(type, key)
            if self._there.get(instance.place) is not instance:
                continue  # it was dropped while this handler waited for it
            if (
                alone
                and instance.is_stored
                and any(place == holder or "|".join(place) not in holders for place in instance.holders)
            ):
                # Handlers that are over for the broker will learn that, and may change their object until then.
                self._forget(instance)
                continue
            if not alone or instance.admits:
                break
            # A handler is about to wait, or a lost turn left it here: it is being cancelled.
            instance.freed.clear()
            await instance.freed.wait()
        instance.holders[holder] = waits
        try:
            # With concurrent handlers, a message may have been read with the state before their commits.
            agrees = instance.known == state or (not alone and instance.is_behind(state))
            first = len(instance.holders) == 1
            # A reentrant call finds the object as the waiting handler left it, unless another process handled an
            # earlier one.
            if instance.keeps_state and not agrees and (first or (alone and shared)):
                if not state and instance.made_here:
                    # The broker has no state: of handlers that are still here, it has lost the start.
                    self._forget(instance)
                    fresh = await self.get(type, key)
                    self.leave(instance, holder)
                    fresh.holders[holder] = waits
                    return fresh
                await instance.load(state)
        except BaseException:
            self.leave(instance, holder)
            raise
        return instance

    def leave(self, instance: Instance, holder: Place) -> None:
        """End a handler's use of the object."""
        instance.holders.pop(holder, None)
        instance.freed.set()
        if instance.holders:
            return
        if self._there.get(instance.place) is instance:
            self._shrink()
        else:
            self._close(instance)

    def release(self) -> None:
        """End the use by all handlers: they ended with their event loop."""
        self._being_made.clear()
        self._doors.clear()
        self._closing.clear()
        for instance in self._there.values():
            if instance.holders:
                instance.known = None
                instance.holders.clear()
            instance.freed = asyncio.Event()

    async def close(self) -> None:
        """Drop all objects."""
        instances, self._there = list(self._there.values()), {}
        self._stored.clear()
        for instance in instances:
            await _close(instance)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _make(self, place: Place) -> Instance:
        try:
            agent = await self._build(*place)
            instance = Instance(agent, place, keeps_state=self._keeps_state(agent), made_here=True)
            # Its state may be on the broker already: the first handler loads it.
            self._there[place] = instance
            if instance.is_stored:
                self._stored[place] = instance
            self._shrink(instance)
            return instance
        finally:
            self._being_made.pop(place, None)

    def _forget(self, instance: Instance) -> None:
        """Drop an object: the next handler gets another one. It is closed when its last handler leaves."""
        if self._there.get(instance.place) is instance:
            del self._there[instance.place]
            self._stored.pop(instance.place, None)
        if not instance.holders:
            self._close(instance)

    def _close(self, instance: Instance) -> None:
        closing = asyncio.create_task(_close(instance), name="close an agent")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _shrink(self, but: Instance | None = None) -> None:
        """Drop the least recently used objects, unless state would be lost."""
        excess = len(self._there) - self._limit
        if excess <= 0:
            return
        idle = (each for each in self._stored.values() if each is not but and not each.holders)
        for instance in list(islice(idle, excess)):
            self._forget(instance)


async def _close(instance: Instance) -> None:
    try:
        await instance.agent.close()
    except Exception:  # the user's own code; its agent is dropped all the same
        logger.exception("close() of agent %s/%s failed", *instance.place)


class Stepping:
    """Handlers that wait to begin, and answers that the program has not stepped over. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[asyncio.Future[None], asyncio.Future[None]]] = deque()
        """For each handler: what it waits for, and what is done when it has begun."""
        self._answers = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """The number of handlers that wait to begin."""
        return len(self._waiting)

    async def enter(self) -> asyncio.Future[None]:
        """Wait for this handler's step. The caller ends the returned future when the handler has begun, or ended."""
        loop = asyncio.get_running_loop()
        place = (loop.create_future(), loop.create_future())
        self._waiting.append(place)
        self._changed.set()
        try:
            await place[0]
        except asyncio.CancelledError:
            done(place[1])
            raise
        finally:
            if place in self._waiting:
                self._waiting.remove(place)
        return place[1]

    def note_answer(self) -> None:
        """Count an answer: it is one step too."""
        self._answers += 1
        self._changed.set()

    async def step(self) -> None:
        """Wait for the next message or answer. Returns when the message's handler has begun."""
        while not (self._answers or self._waiting):
            self._changed.clear()
            await self._changed.wait()
        if self._answers:
            self._answers -= 1
            return
        turn, begun = self._waiting.popleft()
        done(turn)
        await begun
        await asyncio.sleep(0)  # the handler continues until it waits for something

    def end(self) -> None:
        """Let all handlers begin."""
        while self._waiting:
            done(self._waiting.popleft()[0])


def done(future: asyncio.Future[None]) -> None:
    """End a future, unless it has ended."""
    if not future.done():
        future.set_result(None)
