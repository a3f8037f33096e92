"""A runtime whose namespace is its own: nobody else's messages keep it waiting, and nothing of it stays."""

from __future__ import annotations

import asyncio

import pytest

from runtime_core.bus.connection import Reply, Transport
from runtime_core.bus.keys import OWN_NAMESPACES
from runtime_core.bus.namespace import OWN_NAMESPACE_SILENT_MS, connect, note_own
from runtime_core.integrations.actors import host
from tests.conftest import OwnServer
from tests.fleet import until
from tests.integration.integrations.actors.agents import DEFAULT, Answer, Ask, Echo, Note, Sink
from tests.servers.cluster import CLUSTER_OPTIONS, join
from tests.servers.process import Server
from weft.runtime import AgentId, Runtime, TypeSubscription

SECONDS = 60
ECHO = AgentId("echo", "one")


@pytest.fixture(autouse=True)
def no_namespace_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_NAMESPACE", raising=False)


async def keys_of(valkey: Server, name: str) -> list[Reply]:
    transport = await connect(valkey.url)
    found = await transport.call("KEYS", f"{name}:*")
    await transport.close()
    assert isinstance(found, list)
    return found


async def program(valkey: Server) -> Runtime:
    """A program that has left a message that nobody will handle."""
    runtime = Runtime(valkey.url, own_namespace=True)
    await Echo.register(runtime, "echo", Echo)
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    runtime.start()
    assert await runtime.send_message(Ask("hi"), ECHO) == Answer("hi", by="echo/one")
    await runtime.stop()
    await runtime.publish_message(Note("left"), DEFAULT)
    return runtime


async def test_programs_in_sequence_and_in_parallel_stay_separate(valkey: Server) -> None:
    first = await program(valkey)
    second = Runtime(valkey.url, own_namespace=True)
    await Echo.register(second, "echo", Echo)
    second.start()
    await asyncio.wait_for(second.stop_when_idle(), SECONDS)
    first.start()
    await asyncio.wait_for(first.stop_when_idle(), SECONDS)
    sink = await first.try_get_underlying_agent_instance(AgentId("sink", "default"), Sink)
    assert sink.notes == ["left"]
    await first.close()
    await second.close()


async def test_a_closed_runtime_leaves_nothing_and_may_be_used_again(valkey: Server) -> None:
    runtime = await program(valkey)
    name = runtime._host.namespace
    assert await keys_of(valkey, name)
    await runtime.close()
    assert await keys_of(valkey, name) == []
    transport = await connect(valkey.url)
    assert await transport.call("ZSCORE", OWN_NAMESPACES, name) is None
    await transport.close()
    runtime.start()
    await runtime.stop()
    await runtime.close()


async def test_the_namespace_of_a_killed_program_is_erased_a_day_later(own_valkey: Server) -> None:
    transport: Transport = await connect(own_valkey.url)
    old, new = OWN_NAMESPACE_SILENT_MS + 1, OWN_NAMESPACE_SILENT_MS - 1
    for age, name in ((new, "weft-own-new"), (old, "weft-own-old"), (old, "weft-own-older")):
        await transport.call("SET", f"{name}:key", "1")
        await note_own(transport, name, 10 * OWN_NAMESPACE_SILENT_MS - age)
    await note_own(transport, "weft-own-now", 10 * OWN_NAMESPACE_SILENT_MS)
    assert await transport.call("EXISTS", "weft-own-old:key", "weft-own-older:key") == 0
    assert await transport.call("EXISTS", "weft-own-new:key") == 1
    await transport.close()


async def test_a_program_that_handles_no_messages_keeps_its_namespace(
    own_valkey: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "NOTE_SECONDS", 0.01)
    runtime = Runtime(own_valkey.url, own_namespace=True)
    await Echo.register(runtime, "echo", Echo)
    transport = await connect(own_valkey.url)
    await transport.call("ZADD", OWN_NAMESPACES, 1, runtime._host.namespace)

    async def noted() -> bool:
        return await transport.call("ZSCORE", OWN_NAMESPACES, runtime._host.namespace) != b"1"

    await until(noted, SECONDS, "the program notes that it lives")
    await transport.close()
    await runtime.close()


async def test_in_a_cluster_the_note_is_where_the_namespace_is(own_server: OwnServer) -> None:
    servers = [own_server(append=None, options=CLUSTER_OPTIONS) for _ in range(2)]
    await join(servers)
    runtime = await program(servers[0])
    [bus] = await runtime.broker()
    before = bus.transport.reconnects
    await runtime._host._note_own(bus)
    await bus.idle()
    assert bus.transport.reconnects == before, "another server has the note"
    transport = await connect(servers[1].url)
    assert await transport.call("ZCARD", OWN_NAMESPACES) == 1
    await runtime.close()
    assert await transport.call("ZCARD", OWN_NAMESPACES) == 0
    await transport.close()


async def test_a_named_namespace_is_shared_and_stays(
    valkey: Server, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = Runtime(valkey.url, namespace, own_namespace=True, services=False)
    monkeypatch.setenv("WEFT_NAMESPACE", namespace)
    by_environment = Runtime(valkey.url, own_namespace=True, services=False)
    await Echo.register(named, "echo", Echo)
    named.start()
    assert await by_environment.send_message(Ask("hi"), ECHO) == Answer("hi", by="echo/one")
    await by_environment.close()
    await named.close()
    assert await keys_of(valkey, namespace)


@pytest.mark.parametrize("replay", [True, False])
async def test_a_message_without_a_subscriber_waits_for_one_only_if_the_subscriber_wants_that(replay: bool) -> None:
    runtime = Runtime("memory://", replay_unheard=replay)
    await runtime.publish_message(Note("early"), DEFAULT)
    await Sink.register(runtime, "sink", Sink)
    await runtime.add_subscription(TypeSubscription("default", "sink"))
    await runtime.publish_message(Note("late"), DEFAULT)
    runtime.start()
    await asyncio.wait_for(runtime.stop_when_idle(), SECONDS)
    sink = await runtime.try_get_underlying_agent_instance(AgentId("sink", "default"), Sink)
    assert sink.notes == (["early", "late"] if replay else ["late"])
    await runtime.close()
