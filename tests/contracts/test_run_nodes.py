"""Run nodes and groups: guarded transitions, groups that always end, and waits that are woken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import cast

import pytest

from runtime_core.bus.connection import RespTransport, Transport
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.keys import Keys
from runtime_core.errors import InvalidInput, Rejected, ServerError
from runtime_core.integrations.aworld.nodes.state_manager import StateManager, StateWaits
from runtime_core.integrations.aworld.nodes.store import (
    MEMBERS_MAX,
    NEXT,
    OPEN_SECONDS,
    HandleResult,
    RunNodeBusiType,
    RunNodeStatus,
    TransitionRefused,
)
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import partition_of
from tests.contracts.broker import Broker, answer, ask, bury, complete, question, suspend

WAIT = 20.0
"""Patience of a test, which decides nothing: what is waited for comes at once."""
NEVER = 3600.0
"""The waits of these tests do not look again by themselves."""


class Buses:
    """What a client offers a StateManager, over the buses of a test."""

    def __init__(self, broker: Broker, *buses: EventBus) -> None:
        self.buses: Sequence[EventBus] = buses
        self.readers: list[Transport] = []
        self._broker = broker

    async def open_reader(self, bus: EventBus) -> Transport:
        reader = await self._broker.connect()
        self.readers.append(reader)
        return reader


@pytest.fixture
def client(broker: Broker, bus: EventBus) -> Buses:
    return Buses(broker, bus)


@pytest.fixture
async def state(client: Buses) -> AsyncIterator[StateManager]:
    async with StateManager(client, look_seconds=NEVER) as manager:
        yield manager


async def waiting(state: StateManager, broker: Broker, wait: Awaitable[object]) -> asyncio.Task[object]:
    """Start a wait, and return once it has checked the node and waits for the stream."""

    async def go() -> object:
        return await wait

    task = asyncio.create_task(go())
    async with asyncio.timeout(WAIT):
        while not (any(waits._waiting for waits in state._waits.values()) and _reading(state)) and not task.done():
            await asyncio.sleep(0.01)
    return task


def _reading(state: StateManager) -> bool:
    return all(waits._cursor for waits in state._waits.values())


async def reach(state: StateManager, node_id: str, status: RunNodeStatus) -> None:
    """Bring a new node to a status."""
    if status is RunNodeStatus.INIT:
        return
    await state.run_node(node_id)
    ways = {
        RunNodeStatus.BREAKED: state.run_break,
        RunNodeStatus.SUCCESS: state.run_succeed,
        RunNodeStatus.FAILED: state.run_failed,
        RunNodeStatus.TIMEOUT: state.run_timeout,
    }
    if status in ways:
        await ways[status](node_id)


async def test_a_node_goes_from_init_to_success(state: StateManager) -> None:
    made = await state.create_node("n", RunNodeBusiType.TOOL, "search", session_id="s", metadata={"why": "so"})
    assert (made.status, made.busi_type, made.busi_id, made.metadata) == ("INIT", "TOOL", "search", {"why": "so"})
    assert await state.run_node("n")
    assert await state.run_break("n", "waits for a person")
    broken = await state.get_node("n")
    assert broken is not None
    assert (broken.status, broken.result_msg, broken.ended) == ("BREAKED", "waits for a person", False)
    assert await state.run_node("n")
    assert await state.run_succeed("n", "found", [HandleResult("search", result=[1, "é"])])
    node = await state.get_node("n")
    assert node is not None
    assert (node.status, node.result_msg, node.ended) == ("SUCCESS", "found", True)
    assert node.results == [HandleResult("search", RunNodeStatus.SUCCESS, "", [1, "é"])]
    assert node.execute_time is not None
    assert node.end_time is not None
    assert node.create_time <= node.execute_time <= node.end_time


@pytest.mark.parametrize("start", RunNodeStatus)
async def test_a_transition_outside_the_table_is_refused(state: StateManager, start: RunNodeStatus) -> None:
    """The table in Python and the one on the broker are the same."""
    moves = {
        RunNodeStatus.RUNNING: state.run_node,
        RunNodeStatus.BREAKED: state.run_break,
        RunNodeStatus.SUCCESS: state.run_succeed,
        RunNodeStatus.FAILED: state.run_failed,
        RunNodeStatus.TIMEOUT: state.run_timeout,
    }
    for to, move in moves.items():
        node_id = f"{start}-{to}"
        await state.create_node(node_id)
        await reach(state, node_id, start)
        if to is start:
            assert not await move(node_id), "the same again changes nothing"
        elif to in NEXT[start]:
            assert await move(node_id)
        else:
            with pytest.raises(TransitionRefused, match=f"'{node_id}' is {start} and cannot become {to}") as refused:
                await move(node_id)
            assert all(allowed in str(refused.value) for allowed in NEXT[start])
            there = await state.get_node(node_id)
            assert there is not None
            assert there.status is start


async def test_only_one_of_many_claims_of_a_node_wins(state: StateManager, broker: Broker) -> None:
    await state.create_node("n")
    others = [StateManager(Buses(broker, await broker.owner())) for _ in range(5)]
    won = await asyncio.gather(*(one.run_node("n") for one in [state, *others] * 3))
    assert sorted(won) == [False] * 17 + [True]


async def test_a_repeated_call_gets_the_same_answer(state: StateManager, bus: EventBus) -> None:
    """A call whose reply was lost is sent again, and must learn that it won."""
    await state.create_node("n")
    for _ in range(2):
        assert await bus.call("node", "move", "n", 60, "RUNNING", "token", "") == [b"moved"]
    assert await bus.call("node", "move", "n", 60, "RUNNING", "another", "") == [b"same"]


async def test_a_node_is_created_once(state: StateManager) -> None:
    await state.create_node("n", busi_id="a")
    await state.run_node("n")
    again = await state.create_node("n", busi_id="a")
    assert again.status == "RUNNING"
    with pytest.raises(InvalidInput, match="node_id: a node 'n' with different content exists"):
        await state.create_node("n", busi_id="b")


async def test_results_are_kept_by_name_in_order(state: StateManager, broker: Broker) -> None:
    await state.create_node("n")
    await state.save_result("n", HandleResult("first", result=1))
    await broker.pass_time(5)
    await state.save_result("n", HandleResult("a second", result=2))
    await broker.pass_time(5)
    await state.save_result("n", HandleResult("first", result=3))
    node = await state.get_node("n")
    assert node is not None
    assert [(result.name, result.result) for result in node.results] == [("first", 3), ("a second", 2)]


# -- groups ------------------------------------------------------------------------------------------------------


async def members(state: StateManager, group: str, *roots: str) -> None:
    await state.create_group(group, roots)
    for root in roots:
        await state.create_node(root, group_id=group)
        await state.run_node(root)


async def test_a_group_ends_with_its_last_sub_group(state: StateManager) -> None:
    await members(state, "g", "a", "b")
    await state.run_succeed("a", "done a")
    assert await state.finish_sub_group("g", "a")
    assert not await state.finish_sub_group("g", "a")
    group = await state.get_group("g")
    assert group is not None
    assert (group.status, group.sub_groups) == ("RUNNING", {"a": "SUCCESS", "b": "INIT"})
    await state.run_succeed("b")
    await state.finish_sub_group("g", "b")
    group = await state.get_group("g")
    assert group is not None
    assert (group.status, group.failed_root_node_ids, group.root_node_ids) == ("SUCCESS", [], ["a", "b"])
    assert [node.node_id for node in await state.query_by_group("g")] == ["a", "b"]


@pytest.mark.parametrize("end", ["failed", "timeout"])
async def test_a_group_fails_with_a_member_and_its_waiter_continues(
    state: StateManager, broker: Broker, end: str
) -> None:
    await members(state, "g", "a", "b")
    await state.create_node("below", group_id="g", sub_group_root_id="b")
    wait = await waiting(state, broker, state.wait_for_group("g", WAIT))
    await (state.run_failed if end == "failed" else state.run_timeout)("below", "no")
    group = await wait
    assert group == await state.get_group("g")
    found = await state.get_group("g")
    assert found is not None
    assert (found.status, found.failed_root_node_ids) == ("FAILED", ["b"])
    await state.run_succeed("a")
    await state.finish_sub_group("g", "a")
    found = await state.get_group("g")
    assert found is not None
    assert (found.status, found.sub_groups) == ("FAILED", {"a": "SUCCESS", "b": "FAILED"})


async def test_a_failure_after_its_sub_group_was_finished_still_counts(state: StateManager) -> None:
    await members(state, "g", "a", "b")
    await state.finish_sub_group("g", "a")
    await state.run_failed("a")
    group = await state.get_group("g")
    assert group is not None
    assert (group.status, group.failed_root_node_ids) == ("FAILED", ["a"])


@pytest.mark.parametrize("status", ["SUCCESS", "FAILED"])
async def test_a_group_inside_another_ends_it(state: StateManager, status: str) -> None:
    await state.create_group("outer")
    await state.create_group("inner", ["a"], parent_group_id="outer")
    await state.create_node("a", group_id="inner")
    await state.finish_sub_group("inner", "a", status)
    for name, roots in (("inner", {"a": status}), ("outer", {"inner": status})):
        group = await state.get_group(name)
        assert group is not None
        assert (group.status, group.sub_groups) == (status, roots)


async def test_a_group_may_consist_of_existing_nodes(state: StateManager) -> None:
    await state.create_node("a")
    await state.create_node("b")
    await state.run_failed("b")
    group = await state.create_group("g", ["a", "b"])
    assert (group.status, group.failed_root_node_ids) == ("FAILED", ["b"])
    node = await state.get_node("a")
    assert node is not None
    assert (node.group_id, node.sub_group_root_id) == ("g", "a")


async def test_an_ended_group_accepts_no_member(state: StateManager) -> None:
    await members(state, "g", "a")
    await state.finish_sub_group("g", "a")
    with pytest.raises(InvalidInput, match="group_id: 'g' is SUCCESS"):
        await state.create_node("late", group_id="g", sub_group_root_id="a")
    with pytest.raises(InvalidInput, match="group_id: the group 'g' is SUCCESS"):
        await state.create_sub_group("g", "late")


async def test_a_sub_group_may_be_added_while_the_group_is_open(state: StateManager) -> None:
    await members(state, "g", "a")
    assert await state.create_sub_group("g", "b")
    assert not await state.create_sub_group("g", "b")
    await state.finish_sub_group("g", "a")
    group = await state.get_group("g")
    assert group is not None
    assert not group.ended


# -- errors ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[StateManager], Awaitable[object]], str]] = {
    "an id with a slash": (lambda state: state.create_node("a/b"), "node_id: 'a/b' is not a valid id"),
    "an unknown type": (lambda state: state.create_node("n", "PLANE"), "busi_type: 'PLANE' is not one of AGENT"),
    "an unknown group": (lambda state: state.create_node("n", group_id="no"), "group_id: no group 'no' is known"),
    "an unknown node": (lambda state: state.run_node("no"), "node_id: no node 'no' is known"),
    "an unknown node to wait for": (lambda state: state.wait_for_node("no"), "node_id: no node 'no' is known"),
    "an unknown run to wait for": (lambda state: state.wait_for_node("no/r"), "node_id: no node 'no/r' is known"),
    "an unknown group to wait for": (lambda state: state.wait_for_group("no"), "group_id: no group 'no' is known"),
    "no task": (lambda state: state.query_by_task(""), "task_id: '' is not an id"),
    "no session": (lambda state: state.query_by_session(cast(str, None)), "session_id: None is not an id"),
    "no agent": (lambda state: state.query_by_agent(""), "agent: '' is not an id"),
    "an unknown status": (lambda state: state.query_by_task("t", status="GONE"), "status: 'GONE' is not one of"),
    "no number": (lambda state: state.query_by_agent("a", limit=0), "limit: 0 is not a whole number of at least 1"),
    "one text for many": (lambda state: state.create_group("g", "abc"), "root_node_ids: 'abc' is a single text"),
    "a result that is no JSON": (
        lambda state: state.save_result("n", HandleResult("r", result=b"raw")),
        "results.r: bytes cannot be written as JSON",
    ),
    "too many members": (
        lambda state: state.create_group("g", [str(number) for number in range(MEMBERS_MAX + 1)]),
        f"group_id: the group 'g' has {MEMBERS_MAX} members",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_an_invalid_argument_is_named(state: StateManager, name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(InvalidInput) as error:
        await act(state)
    assert str(error.value).startswith(message)


async def test_an_unknown_sub_group_is_named(state: StateManager) -> None:
    await state.create_group("g", ["a"])
    with pytest.raises(InvalidInput, match="root_node_id: the group 'g' has no sub group 'b'"):
        await state.finish_sub_group("g", "b")
    with pytest.raises(InvalidInput, match="sub_group_root_id: the group has no sub group 'b'"):
        await state.create_node("n", group_id="g", sub_group_root_id="b")
    with pytest.raises(InvalidInput, match="status: a sub group ends with SUCCESS or FAILED, not RUNNING"):
        await state.finish_sub_group("g", "a", "RUNNING")


async def test_a_full_broker_refuses_new_nodes_and_ends_open_ones(state: StateManager, broker: Broker) -> None:
    await state.create_node("n")
    await broker.call("HSET", broker.keys.meta, "overload", "memory is short")
    with pytest.raises(Rejected, match="memory is short"):
        await state.create_node("another")
    assert await state.run_node("n")
    assert await state.run_succeed("n")


async def test_a_broker_with_memory_again_accepts_new_nodes(state: StateManager, broker: Broker) -> None:
    await broker.call("HSET", broker.keys.meta, "overload", "")
    assert (await state.create_node("n")).status == "INIT"


CREATED = ("{}", "g", "a", 60, "")
"""A node of the group's subgroup `a`, as a client creates it that has looked at the group before."""


async def test_an_expired_group_accepts_no_node(broker: Broker, bus: EventBus) -> None:
    before = await broker.snapshot()
    assert await bus.call("create_node", "node", "n", *CREATED) == [b"no_group", b"g"]
    assert await broker.snapshot() == before


async def test_an_ended_sub_group_accepts_no_node(state: StateManager, broker: Broker, bus: EventBus) -> None:
    await members(state, "g", "a", "b")
    await state.finish_sub_group("g", "a")
    before = await broker.snapshot()
    assert await bus.call("create_node", "node", "n", *CREATED) == [b"ended", b"g/a", b"SUCCESS"]
    assert await broker.snapshot() == before


async def test_a_change_of_an_expired_group_writes_nothing(broker: Broker, bus: EventBus) -> None:
    before = await broker.snapshot()
    assert await bus.call("node", "sub", "g", 60, "a") == [b"unknown"]
    assert await bus.call("node", "finish", "g", 60, "a", "SUCCESS", "") == [b"unknown"]
    assert await broker.snapshot() == before


async def test_a_finished_sub_group_keeps_its_status(state: StateManager) -> None:
    await members(state, "g", "a", "b")
    await state.finish_sub_group("g", "a", "FAILED", "no paper")
    with pytest.raises(TransitionRefused, match="FAILED"):
        await state.finish_sub_group("g", "a")
    group = await state.get_group("g")
    assert group is not None
    assert (group.status, group.result_msg, group.sub_groups["a"]) == ("FAILED", "no paper", "FAILED")


async def test_a_full_group_accepts_no_member(state: StateManager, broker: Broker) -> None:
    await members(state, "g", "a")
    nodes = [part for number in range(MEMBERS_MAX) for part in (number, f"n{number}")]
    await broker.call("ZADD", broker.keys.nodes("group/g"), *nodes)
    subgroups = [part for number in range(MEMBERS_MAX) for part in (f"sub:{number}", "INIT")]
    await broker.call("HSET", broker.keys.group("g"), *subgroups)
    full = f"group_id: the group 'g' has {MEMBERS_MAX} members"
    with pytest.raises(InvalidInput, match=full):
        await state.create_node("n", group_id="g", sub_group_root_id="a")
    with pytest.raises(InvalidInput, match=full):
        await state.create_sub_group("g", "b")


@pytest.mark.parametrize("member_first", [True, False])
async def test_a_group_runs_with_its_first_member_or_finished_sub_group(
    state: StateManager, member_first: bool
) -> None:
    await state.create_group("g", ["a", "b"])
    await state.create_node("a", group_id="g")
    await (state.run_node("a") if member_first else state.finish_sub_group("g", "a"))
    group = await state.get_group("g")
    assert group is not None
    assert group.status == "RUNNING"


async def test_each_change_extends_the_life_of_an_open_node_or_group(
    state: StateManager, broker: Broker, bus: EventBus
) -> None:
    """A node or a group that has not ended lives a week from its last change."""
    await members(state, "g", "a", "b")
    node, group = broker.keys.node("a"), broker.keys.group("g")

    async def is_kept_by(change: Awaitable[object], key: str) -> bool:
        await broker.call("EXPIRE", key, 60)
        await change
        return cast(int, await broker.call("TTL", key)) > 60

    assert await is_kept_by(state.save_result("a", HandleResult("note", result=1)), node)
    assert await is_kept_by(state.create_node("n", group_id="g", sub_group_root_id="a"), group)
    assert await is_kept_by(state.create_sub_group("g", "c"), group)
    assert await is_kept_by(state.finish_sub_group("g", "a"), group)


# -- memory ------------------------------------------------------------------------------------------------------


async def test_nodes_and_groups_expire(state: StateManager, broker: Broker) -> None:
    """Nothing that these functions write stays for ever: open nodes a week, ended ones as long as an ended task."""
    await broker.call("HSET", broker.keys.meta, "retention", 100)
    await members(state, "g", "a", "b")
    await state.create_node("alone", busi_id="x", task_id="t", session_id="s")
    await state.run_succeed("a")

    async def lives(key: str) -> int:
        return cast(int, await broker.call("TTL", broker.keys.base + key))

    open_keys = ["node:a", "node:b", "node:alone", "group:g", "nodes:group/g", "nodes:task/t", "nodes:session/s"]
    assert all([100 < await lives(key) <= OPEN_SECONDS for key in open_keys])
    assert 100 < await lives("nodes:busi/TASK/x") <= OPEN_SECONDS
    await state.run_node("alone")
    await state.run_succeed("alone")
    await state.run_failed("b")
    left = {key: await lives(key) for key in [*open_keys, "nodes:busi/TASK/x"]}
    assert all(0 < seconds <= 100 for seconds in left.values()), left


async def test_the_stream_of_states_is_short(state: StateManager, broker: Broker, bus: EventBus) -> None:
    await state.create_node("n")
    await state.run_node("n")
    for number in range(10_300):
        to = "BREAKED" if number % 2 == 0 else "RUNNING"
        assert await bus.call("node", "move", "n", 60, to, str(number), "") == [b"moved"]
    assert cast(int, await broker.call("XLEN", broker.keys.states)) < 10_300


# -- waits -------------------------------------------------------------------------------------------------------


async def test_a_wait_is_woken_by_the_end(state: StateManager, broker: Broker) -> None:
    await state.create_node("n")
    wait = await waiting(state, broker, state.wait_for_node("n", WAIT))
    await state.run_node("n")
    await state.run_succeed("n", "well")
    assert await wait == await state.get_node("n")


async def test_a_wait_for_an_ended_node_returns_immediately(state: StateManager) -> None:
    await state.create_node("n")
    await state.run_failed("n")
    assert (await state.wait_for_node("n", WAIT)).status == "FAILED"


async def test_a_wait_that_is_too_long_leaves_the_node_alone(state: StateManager) -> None:
    await state.create_node("n")
    with pytest.raises(TimeoutError, match=r"node n has not ended within 0\.01 s"):
        await state.wait_for_node("n", 0.01)
    node = await state.get_node("n")
    assert node is not None
    assert node.status == "INIT"


async def test_many_waits_share_one_connection(state: StateManager, client: Buses) -> None:
    names = [f"n{number}" for number in range(200)]
    for name in names:
        await state.create_node(name)
    waits = [asyncio.create_task(state.wait_for_node(name, WAIT)) for name in names]
    for name in names:
        await state.run_node(name)
        await state.run_succeed(name)
    ended = await asyncio.gather(*waits)
    assert [node.node_id for node in ended] == names
    assert len(client.readers) == 1


async def test_a_wait_checks_again_after_its_connection_broke(
    state: StateManager, broker: Broker, client: Buses, bus: EventBus
) -> None:
    """Events of the stream may be lost meanwhile."""
    await state.create_node("n")
    wait = await waiting(state, broker, state.wait_for_node("n", WAIT))
    # In one step: the reader is never told.
    await broker.call("MULTI")
    for status in ("RUNNING", "SUCCESS"):
        await broker.call("FCALL", bus._functions["node"], 1, broker.keys.base, "move", "n", 60, status, status, "")
    await broker.call("DEL", broker.keys.states)
    await broker.call("EXEC")
    assert not wait.done()
    [reader] = cast(list[RespTransport], client.readers)
    # The read may not have been sent yet.
    async with asyncio.timeout(WAIT):
        while reader._blocking is None or not reader._blocking.waiting:
            await asyncio.sleep(0)
    reader._blocking.abort()
    assert await wait == await state.get_node("n")


async def test_a_wait_for_a_lost_node_is_an_error(state: StateManager, broker: Broker) -> None:
    await state.create_node("n")
    await state.create_node("other")
    wait = await waiting(state, broker, state.wait_for_node("n", WAIT))
    await broker.call("DEL", broker.keys.node("n"))
    await broker.call("XADD", broker.keys.states, "*", "i", "node/n", "s", "RUNNING")
    with pytest.raises(InvalidInput, match="no node 'n' is known"):
        await wait


# -- the runs of tasks -------------------------------------------------------------------------------------------


async def test_the_runs_of_a_task_are_nodes(state: StateManager, broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t", "writer", session_id="s")
    assert [(node.node_id, node.status) for node in await state.query_by_task("t")] == [("t/r", "INIT")]
    turn = await broker.take(bus)
    assert [node.status for node in await state.query_by_task("t")] == ["RUNNING"]
    await suspend(
        bus, turn, ask("1", wait="g1"), ask("2", "editor", stream="agent", wait="g1"), question("3", wait="g1")
    )
    await state.create_node("extra", task_id="t", parent_node_id="t/r/2")
    nodes = {node.node_id: node for node in await state.query_by_task("t")}
    shown = {name: (node.busi_type, node.busi_id, node.status, node.parent_node_id) for name, node in nodes.items()}
    assert shown == {
        "t/r": ("AGENT", "writer", "BREAKED", ""),
        "t/r/1": ("TOOL", "", "RUNNING", "t/r"),
        "t/r/2": ("AGENT", "editor", "INIT", "t/r"),
        "t/r/3": ("HUMAN", "", "BREAKED", "t/r"),
        "extra": ("TASK", "", "INIT", "t/r/2"),
    }
    assert nodes["t/r/3"].metadata["question"] == {"prompt": "well?"}
    assert {node.session_id for name, node in nodes.items() if name != "extra"} == {"s"}
    [root] = await state.tree("t")
    assert sorted((tree.node.node_id, len(tree.children)) for tree in root.children) == [
        ("t/r/1", 0),
        ("t/r/2", 1),
        ("t/r/3", 0),
    ]
    assert [node.node_id for node in await state.query_by_task("t", "AGENT")] == ["t/r", "t/r/2"]
    assert {node.node_id for node in await state.query_by_task("t", status="INIT")} == {"t/r/2", "extra"}


async def test_tasks_are_found_by_session_and_agent(state: StateManager, broker: Broker, bus: EventBus) -> None:
    for number, (agent, session) in enumerate([("writer", "s"), ("editor", "s"), ("writer", "other")]):
        await broker.submit(bus, f"t{number}", agent, session_id=session)
        await broker.pass_time(2)
    await state.create_node("own", "AGENT", "writer", session_id="s")
    assert [node.node_id for node in await state.query_by_session("s")] == ["t0/r", "t1/r", "own"]
    assert [node.node_id for node in await state.query_by_agent("writer")] == ["t0/r", "t2/r", "own"]
    assert await state.query_by_agent("nobody") == []


@pytest.mark.parametrize("end", ["completed", "cancelled", "dead letter"])
async def test_a_wait_for_a_task_is_woken_by_its_end(
    state: StateManager, broker: Broker, bus: EventBus, end: str
) -> None:
    await broker.submit(bus, "t")
    turn = await broker.take(bus)
    wait = await waiting(state, broker, state.wait_for_task("t", WAIT))
    if end == "completed":
        await complete(bus, turn, output=b'"well"')
    elif end == "cancelled":
        await bus.cancel("t", "no more")
    else:
        await bury(bus, turn)
    node = await state.get_node("t/r")
    assert await wait == node
    assert node is not None
    assert node.status == ("SUCCESS" if end == "completed" else "FAILED")
    if end == "completed":
        assert node.results == [HandleResult("writer", RunNodeStatus.SUCCESS, "", "well")]
    assert (await state.wait_for_node("t", WAIT)).status == node.status


async def test_a_wait_for_a_run_inside_a_task(state: StateManager, broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    parts = [ask("1", "editor", stream="agent", wait="g1"), ask("2", wait="g1")]
    await suspend(bus, await broker.take(bus), *parts)
    wait = await waiting(state, broker, state.wait_for_node("t/r/1", WAIT))
    await complete(bus, await broker.take(bus), output=b'"edited"')
    ended = await wait
    assert ended == await state.get_node("t/r/1")
    found = await state.get_node("t/r/1")
    assert found is not None
    assert (found.status, found.results[0].result) == ("SUCCESS", "edited")
    await answer(bus, await broker.take(bus, "tool"))


async def test_a_wait_for_a_run_ends_with_its_task(state: StateManager, broker: Broker, bus: EventBus) -> None:
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    wait = await waiting(state, broker, state.wait_for_node("t/r/1", WAIT))
    await bus.cancel("t", "no more")
    node = await wait
    assert getattr(node, "status", None) == "FAILED"


async def test_a_wait_that_checks_before_its_wake_up_sees_the_end_of_the_run(
    state: StateManager, broker: Broker, bus: EventBus
) -> None:
    """A wait is woken for other reasons too, and may find the run gone before it learns why."""
    await broker.submit(bus, "t")
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream="agent"))
    wait = await waiting(state, broker, state.wait_for_node("t/r/1", WAIT))
    # Over one connection, so the wait looks after the cancel, and most likely before the stream is read.
    cancelling = asyncio.create_task(bus.cancel("t", "no more"))
    for waits in state._waits.values():
        waits._wake_all()
    await cancelling
    assert getattr(await wait, "status", None) == "FAILED"


async def test_a_status_that_comes_right_after_another_wake_up_counts(client: Buses, bus: EventBus) -> None:
    """The wait has not gone on yet, and the stream does not repeat the status."""
    waits, looks = StateWaits(bus, client.open_reader, look_seconds=NEVER), asyncio.Queue[str]()

    async def look(reported: str) -> str | None:
        looks.put_nowait(reported)
        return reported or None

    wait = asyncio.create_task(waits.until("run/t/r/1", look))
    assert await looks.get() == ""
    waits._wake_all()
    waits._wake("run/t/r/1", "cancelled")
    assert await asyncio.wait_for(wait, WAIT) == "cancelled"
    await waits.close()


async def test_a_task_without_a_waiter_notifies_no_one(broker: Broker, bus: EventBus) -> None:
    """The ends of all other tasks add nothing to the stream."""
    await broker.submit(bus, "t")
    await complete(bus, await broker.take(bus))
    assert await broker.call("EXISTS", broker.keys.states) == 0


# -- several partitions --------------------------------------------------------------------------------------------

PARTITIONS = 3


@pytest.fixture
async def spread(broker: Broker, bus: EventBus) -> AsyncIterator[StateManager]:
    """A manager of a namespace of three partitions; tasks of the tests are in the first one."""
    transport = await broker.connect()
    broker.transports.append(transport)
    buses = [bus, *(EventBus(transport, Keys(broker.keys.namespace, number)) for number in range(1, PARTITIONS))]
    async with StateManager(Buses(broker, *buses), look_seconds=NEVER) as manager:
        yield manager


async def test_nodes_are_spread_and_found(spread: StateManager, broker: Broker) -> None:
    names = [f"n{number}" for number in range(12)]
    for name in names:
        await spread.create_node(name, busi_id="x", task_id="t")
    places = [await spread._stored().bus_of("node", name) for name in names]
    assert len({bus.keys.partition for bus in places if bus is not None}) == PARTITIONS
    assert [node.node_id for node in await spread.query_by_task("t")] == [
        node.node_id
        for node in sorted(await spread.query_by_task("t"), key=lambda node: (node.create_time, node.node_id))
    ]
    waits = [await waiting(spread, broker, spread.wait_for_node(name, WAIT)) for name in names]
    for name in names:
        await spread.run_node(name)
        await spread.run_succeed(name)
    assert [await wait for wait in waits] == [await spread.get_node(name) for name in names]
    with pytest.raises(InvalidInput, match="no node 'no' is known"):
        await spread.run_node("no")


async def test_a_session_and_its_group_share_a_partition(spread: StateManager) -> None:
    for number in range(6):
        group = f"g{number}"
        await spread.create_group(group, ["a", "b"] if number == 0 else [f"{number}-a"], session_id=f"s{number}")
        root = "a" if number == 0 else f"{number}-a"
        await spread.create_node(root, group_id=group)
        home = await spread._stored().bus_of("group", group)
        assert await spread._stored().bus_of("node", root) is home
        await spread.run_failed(root)
        found = await spread.get_group(group)
        assert found is not None
        assert found.failed_root_node_ids == [root]


async def test_nodes_in_another_partition_than_their_group_are_refused(spread: StateManager) -> None:
    names = [f"n{number}" for number in range(6)]
    for name in names:
        await spread.create_node(name)
    with pytest.raises(InvalidInput, match=r"root_node_ids: the node 'n.' is in another partition than the group"):
        await spread.create_group("g", names)


async def test_a_run_in_another_partition_is_a_node_of_the_task(
    spread: StateManager, broker: Broker, bus: EventBus
) -> None:
    task = next(f"t{number}" for number in range(99) if partition_of(f"t{number}", PARTITIONS) == 0)
    there = next(f"c{number}" for number in range(99) if partition_of(f"c{number}", PARTITIONS) == 1)
    other = spread._buses()[1]
    await broker.call("HSET", other.keys.agents, "editor", "agent")
    await broker.submit(bus, task)
    await suspend(bus, await broker.take(bus), ask("1", "editor", stream=f"@1:{there}", key="e"))
    # What the relay does.
    await other.submit(Submission(there, "relay", there, "d", "editor", b"1"))
    nodes = {node.node_id: node.parent_node_id for node in await spread.query_by_task(task)}
    assert nodes == {f"{task}/r": "", f"{there}/r": f"{task}/r/1".rpartition("/")[0]}
    wait = await waiting(spread, broker, spread.wait_for_node(f"{task}/r/1", WAIT))
    await other.cancel(there, "no more")
    ended = await wait
    assert ended == await spread.get_node(f"{there}/r")


async def test_a_change_during_the_check_is_not_missed(state: StateManager, bus: EventBus, client: Buses) -> None:
    """The wait is registered before it checks: an end right after the check still wakes it."""
    await state.create_node("n")
    await state.run_node("n")
    waits = StateWaits(bus, client.open_reader, look_seconds=NEVER)
    try:
        # The reader is at the end of the stream, so that its own start wakes nobody.
        early: asyncio.Task[object] = asyncio.create_task(waits.until("node/other", lambda told: _none(told)))
        async with asyncio.timeout(WAIT):
            while not waits._cursor:
                await asyncio.sleep(0.01)
        looks = 0

        async def look(told: str) -> str | None:
            nonlocal looks
            looks += 1
            if looks == 1:
                await state.run_succeed("n")
                async with asyncio.timeout(WAIT):
                    while await waits._last() != waits._cursor:
                        await asyncio.sleep(0.01)
            return told or None

        assert await asyncio.wait_for(waits.until("node/n", look), WAIT) == "SUCCESS"
        early.cancel()
    finally:
        await waits.close()


async def _none(told: str) -> None:
    return None


async def test_groups_lie_in_at_most_100_others(broker: Broker, bus: EventBus) -> None:
    names = [f"deep-{number}" for number in range(102)]
    for around, name in zip(["", *names], names, strict=False):
        created = bus.call("create_node", "group", name, "{}", around, "", 60, "")
        if name != names[-1]:
            assert await created == [b"created"]
            continue
        with pytest.raises(ServerError, match="group deep-0 lies in over 100 groups, or in itself"):
            await created
    await broker.call("DEL", *(f"{broker.keys.base}group:{name}" for name in names))


async def test_a_group_that_lies_in_itself_does_not_stop_the_server(broker: Broker, bus: EventBus) -> None:
    """An id that expired may be created again, inside a group that outlived it."""
    assert await bus.call("create_node", "group", "outer", "{}", "", "", 60, "") == [b"created"]
    assert await bus.call("create_node", "group", "inner", "{}", "outer", "", 60, "") == [b"created"]
    await broker.call("DEL", broker.keys.base + "group:outer")
    assert await bus.call("create_node", "group", "outer", "{}", "inner", "", 60, "") == [b"created"]
    async with asyncio.timeout(WAIT):
        with pytest.raises(ServerError, match="lies in over 100 groups, or in itself"):
            await bus.call("create_node", "node", "n", "{}", "inner", "outer", 60, "")
        # What has a way out stays as before.
        assert await bus.call("create_node", "group", "apart", "{}", "", "", 60, "") == [b"created"]
    await broker.call("DEL", *(f"{broker.keys.base}group:{name}" for name in ("outer", "inner", "apart")))
