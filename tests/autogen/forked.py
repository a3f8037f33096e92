"""Weft's runtime with each type of agents in a separate process, for AutoGen's tests.

The test's process sends, publishes and asks; it runs no agent but the managers of AgentChat's teams, which write to a
queue of their team. A process is forked where a type is registered, so that
it has the factory, whatever that encloses. Where a test wants an agent object, it gets a view: each attribute is read
from, and written to, the object in its process, over a socket pair between the two.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn

from autogen_agentchat.teams._group_chat._base_group_chat_manager import BaseGroupChatManager
from autogen_core import Agent, AgentId, AgentType, BaseAgent

from runtime_core.integrations.autogen import WeftAgentRuntime
from tests.autogen.modes import LEASE_SECONDS, Shared

# Any below: what a test keeps in its agents, and what AutoGen's signatures say.
ANSWER_SECONDS = 60
_LENGTH = struct.Struct("!I")
_open: set[socket.socket] = set()
"""The test's ends of all socket pairs: a forked process closes them, so that each sees when the test is gone."""


class Child:
    """The process of one type, as the test's process sees it."""

    def __init__(self, end: socket.socket, cls: type | None, pid: int) -> None:
        self.cls = cls
        self._end = end
        self._pid = pid
        _living.append(self)

    def ask(self, verb: str, *what: Any) -> Any:
        """Wait for the answer. Raises what the other process raised."""
        _send(self._end, (verb, what))
        answer, error = pickle.loads(_received(self._end))
        if error is not None:
            raise error
        return answer

    def close(self) -> None:
        if self in _living:
            _living.remove(self)
            _open.discard(self._end)
            self._end.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


_living: list[Child] = []


def end_all() -> None:
    """End the processes that a test has left."""
    for child in _living.copy():
        child.close()


class Forked(Shared):
    """A client of processes that it forks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._options = options
        self._children: dict[str, Child] = {}

    async def register_factory(  # type: ignore[override]  # as its base
        self,
        type: str | AgentType,
        agent_factory: Callable[[], Any | Awaitable[Any]],
        *,
        expected_class: type[Any] | None = None,
        **options: Any,
    ) -> AgentType:
        name = type if isinstance(type, str) else type.type
        if expected_class is not None and issubclass(expected_class, BaseGroupChatManager):
            return await super().register_factory(type, agent_factory, expected_class=expected_class, **options)
        if name in self._children or name in self._factories:
            raise ValueError(f"agents of type {name!r} are registered already")
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run(theirs, self, name, agent_factory, expected_class)
        theirs.close()
        ours.settimeout(ANSWER_SECONDS)
        _open.add(ours)
        child = self._children[name] = Child(ours, expected_class, pid)
        child.ask("register")
        if self._started:
            child.ask("start")
        return AgentType(name)

    def start(self) -> None:
        super().start()
        for child in self._children.values():
            child.ask("start")

    async def stop(self) -> None:
        errors = []
        for child in self._children.values():
            error = await asyncio.to_thread(child.ask, "stop")
            errors += [error] if error is not None else []
        await super().stop()
        if errors:
            raise errors[0]

    async def close(self) -> None:
        await super().close()
        for child in self._children.values():
            child.close()

    async def try_get_underlying_agent_instance(  # type: ignore[override]  # as its base
        self, id: AgentId, type: Any = object
    ) -> Any:
        child = self._children.get(id.type)
        if child is None:
            return await super().try_get_underlying_agent_instance(id, type)
        child.ask("make", id.key)
        return _view(child.cls or type, child, id.key)

    async def agent_save_state(self, agent: AgentId) -> Mapping[str, Any]:  # type: ignore[override]  # as its base
        if agent.type not in self._children:
            return await super().agent_save_state(agent)
        state: Mapping[str, Any] = self._children[agent.type].ask("save", agent.key)
        return state

    async def agent_load_state(  # type: ignore[override]  # as its base
        self, agent: AgentId, state: Mapping[str, Any]
    ) -> None:
        if agent.type not in self._children:
            await super().agent_load_state(agent, state)
            return
        self._children[agent.type].ask("load", agent.key, state)

    async def save_state(self) -> Mapping[str, Any]:
        state = dict(await super().save_state())
        for child in self._children.values():
            state.update(child.ask("save all"))
        return state

    async def load_state(self, state: Mapping[str, Any]) -> None:
        for child in self._children.values():
            child.ask("load all", state)


def _view(cls: type, child: Child, key: str) -> Any:
    class View(cls):  # type: ignore[misc]  # its base is known when it is made
        def __getattribute__(self, name: str) -> Any:
            there, value = (False, None) if name.startswith("__") else child.ask("get", key, name)
            return value if there else object.__getattribute__(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            child.ask("set", key, name, value)

    return object.__new__(View)


def _run(
    end: socket.socket, parent: Forked, type: str, factory: Callable[[], Any], expected_class: type[Any] | None
) -> NoReturn:
    """The forked process. It ends when the test closes its end."""
    try:
        for other in _open:
            other.close()
        _open.clear()
        _living.clear()
        asyncio.run(_serve(end, parent, type, factory, expected_class))
    finally:
        os._exit(0)


async def _serve(
    end: socket.socket, parent: Forked, type: str, factory: Callable[[], Any], expected_class: type[Any] | None
) -> None:
    runtime = WeftAgentRuntime(namespace=parent._host.namespace, services=False, **parent._options)
    runtime._host._lease = LEASE_SECONDS
    if expected_class is not None and issubclass(expected_class, BaseAgent):
        for _, serializers in expected_class._handles_types():
            runtime.add_message_serializer(serializers)

    async def do(verb: str, what: tuple[Any, ...]) -> Any:
        if verb == "register":
            await runtime.register_factory(type, factory, expected_class=expected_class)
        elif verb == "start":
            runtime.start()
        elif verb == "stop":
            try:
                await runtime.stop()
            except Exception as error:  # what a handler raised: the test's process raises it
                return error
        elif verb == "save all":
            return await runtime.save_state()
        elif verb == "load all":
            await runtime.load_state(*what)
        else:
            return await of_agent(verb, *what)
        return None

    async def of_agent(verb: str, key: str, *what: Any) -> Any:
        id = AgentId(type, key)
        agent = await runtime.try_get_underlying_agent_instance(id, Agent)  # type: ignore[type-abstract]  # any
        if verb == "get":
            there = vars(agent)
            return (True, there[what[0]]) if what[0] in there else (False, None)
        if verb == "set":
            setattr(agent, *what)
        elif verb == "save":
            return dict(await runtime.agent_save_state(id))
        elif verb == "load":
            await runtime.agent_load_state(id, *what)
        return None

    reader, writer = await asyncio.open_connection(sock=end)
    while True:
        try:
            size = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))[0]
            verb, what = pickle.loads(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return
        try:
            answer = pickle.dumps((await do(verb, what), None))
        except Exception as error:
            answer = pickle.dumps((None, RuntimeError(f"{verb}: {error!r}")))
        writer.write(_LENGTH.pack(len(answer)) + answer)
        await writer.drain()


def _send(end: socket.socket, value: Any) -> None:
    data = pickle.dumps(value)
    end.sendall(_LENGTH.pack(len(data)) + data)


def _received(end: socket.socket) -> bytes:
    size = _LENGTH.unpack(_exactly(end, _LENGTH.size))[0]
    return _exactly(end, size)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise ConnectionError("the process of an agent type has ended")
        data += part
    return data
