"""The agent objects of a process: who may share one, and when another takes its place."""

from __future__ import annotations

import pytest

from runtime_core.integrations.actors.instances import Instance, Instances


class Stateful:
    """An agent whose state the broker keeps."""

    def __init__(self) -> None:
        self.state: dict[str, int] = {}
        self.closed = False

    async def save_state(self) -> dict[str, int]:
        return self.state

    async def load_state(self, state: dict[str, int]) -> None:
        self.state = dict(state)

    async def close(self) -> None:
        self.closed = True


def stateful() -> Instances:
    async def build(type: str, key: str) -> Stateful:
        return Stateful()

    return Instances(build, lambda agent: True, 10)


PLACE = ("handler", "one")


@pytest.mark.parametrize("again", [("t", "r"), ("u", "r")], ids=["the same run", "another task"])
async def test_a_handler_does_not_share_an_object_with_an_ended_one(again: tuple[str, str]) -> None:
    """The broker has lost its last writes, and has given the instance away: the first handler has yet to learn that."""
    instances = stateful()
    over = await instances.enter(*PLACE, "t", "r", b'{"n":1}', alone=True, shared=True, waits=lambda: True)
    over.agent.state["n"] = 2
    now = await instances.enter(*PLACE, *again, b'{"n":1}', alone=True, shared=True)
    assert now.agent is not over.agent
    assert now.agent.state == {"n": 1}
    assert not over.agent.closed
    instances.leave(over, ("t", "r"))
    await instances.close()
    assert over.agent.closed, "with the last handler that used it"


async def test_a_reentrant_call_finds_the_object_of_the_handler_that_waits() -> None:
    instances = stateful()
    waiting = await instances.enter(*PLACE, "t", "r", b"", alone=True, shared=True, waits=lambda: True)
    waiting.known = b'{"n":1}'
    holders = ["t|r", "t|r/1"]
    called = await instances.enter(*PLACE, "t", "r/1", b'{"n":1}', alone=True, shared=True, holders=holders)
    assert called is waiting


async def test_an_object_whose_state_the_broker_has_lost_is_replaced() -> None:
    instances = stateful()
    waiting = await instances.enter(*PLACE, "t", "r", b"", alone=True, shared=True, waits=lambda: True)
    waiting.known = b'{"n":1}'
    holders = ["t|r", "t|r/1"]
    called = await instances.enter(*PLACE, "t", "r/1", b"", alone=True, shared=True, holders=holders)
    assert called is not waiting


async def use(instances: Instances, key: str) -> Stateful:
    """Handle one message of an agent and return its object."""
    place = ("handler", key)
    instance = await instances.enter(*place, key, "r", b"", alone=True, shared=False)
    instances.leave(instance, (key, "r"))
    agent = instance.agent
    assert isinstance(agent, Stateful)
    return agent


async def test_the_least_recently_used_objects_are_dropped() -> None:
    instances = stateful()
    made = {key: await use(instances, key) for key in map(str, range(10))}
    assert await use(instances, "0") is made["0"]
    await use(instances, "new")
    assert len(instances) == 10
    assert await use(instances, "0") is made["0"]
    await instances.close()
    assert all(agent.closed for agent in made.values())
    assert await use(instances, "1") is not made["1"]
    assert len(instances) == 1


async def test_an_object_in_use_is_not_dropped() -> None:
    instances = stateful()
    held = await instances.enter("handler", "held", "t", "r", b"", alone=True, shared=False)
    for key in map(str, range(20)):
        await use(instances, key)
    assert len(instances) == 10
    assert await instances.get("handler", "held") is held


async def test_objects_that_stay_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without a state on the broker stay, however many there are: no message may look at all of them."""
    looks = 0
    is_stored = vars(Instance)["is_stored"].fget

    def counted(instance: Instance) -> bool:
        nonlocal looks
        looks += 1
        return bool(is_stored(instance))

    monkeypatch.setattr(Instance, "is_stored", property(counted))

    async def build(type: str, key: str) -> Stateful:
        return Stateful()

    instances = Instances(build, lambda agent: False, 10)
    for key in map(str, range(200)):
        await use(instances, key)
    assert len(instances) == 200
    assert looks <= 3 * 200
