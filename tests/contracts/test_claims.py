"""With several partitions, one source and id start one task, and a task id names one task."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import count, product
from typing import cast

import pytest

from runtime_core.bus.connection import Argument, Reply
from runtime_core.bus.event_bus import EventBus
from runtime_core.bus.tasks import Misplaced, Submitted, _SubmitAttempt, find_place, submit_once
from runtime_core.errors import Rejected
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import partition_of
from tests.contracts.broker import Broker, PassingTransport, complete, send
from tests.contracts.two_partitions import Pair, two_partitions

BOTH = (0, 1)


@pytest.fixture
async def pair(broker: Broker) -> AsyncIterator[Pair]:
    async with two_partitions(broker) as pair:
        yield pair


@dataclass
class Submit:
    """One submit; `id_home` is the partition of its source and id."""

    task: str
    target: int
    id_home: int = 0
    event_id: str = "e"
    source: str = "s"
    digest: str = "d"
    agent: str = "writer"

    async def send(self, buses: list[EventBus]) -> Submitted:
        return await submit_once(buses, self.target, self.id_home, self.make())

    def make(self) -> Submission:
        return Submission(self.task, self.source, self.event_id, self.digest, self.agent, b"1")


def task_at(home: int, name: str = "task") -> str:
    """A task id that belongs to this partition."""
    return next(f"{name}-{n}" for n in count() if partition_of(f"{name}-{n}", 2) == home)


async def started(pair: Pair) -> list[tuple[int, str, str]]:
    """Return partition, task, and source and id of each task."""
    found = []
    for side in pair.sides:
        keys = cast(list[bytes], await side.broker.call("KEYS", side.bus.keys.base + "task:*"))
        for key in keys:
            head = cast(bytes, await side.broker.call("HGET", key, "h")).decode().split("\n")
            found.append((side.bus.keys.partition, key.decode().partition("task:")[2], f"{head[7]}/{head[6]}"))
    return sorted(found)


async def places(pair: Pair) -> dict[str, str]:
    return {**await pair.here.broker.hash("places"), **await pair.there.broker.hash("places")}


class Crashed(Exception):
    """The submitter died in the middle."""


def interrupted(buses: list[EventBus], before: Callable[[str], None]) -> list[EventBus]:
    """The same partitions for a submitter that is interrupted before a call."""

    class Interrupted(PassingTransport):
        async def call(self, *args: Argument) -> Reply:
            if args[0] == b"FCALL":
                before(names[cast(bytes, args[1])])
            return await super().call(*args)

    names = {called: name for name, called in buses[0]._functions.items()}
    return [EventBus(Interrupted(bus.transport), bus.keys, bus.owner) for bus in buses]


async def crash(submit: Submit, buses: list[EventBus], calls: int) -> bool:
    """Send the submit and stop after this many calls. Return False if it needs no more."""
    left = count(calls, -1)

    def before(_: str) -> None:
        if next(left) == 0:
            raise Crashed

    try:
        await submit.send(interrupted(buses, before))
    except Crashed:
        return True
    return False


# -- the same submit, sent to two partitions -------------------------------------------------------------------------


@pytest.mark.parametrize(("task_home", "id_home", "first", "second"), [*product(BOTH, repeat=4)])
async def test_an_equal_submit_starts_one_task(
    pair: Pair, task_home: int, id_home: int, first: int, second: int
) -> None:
    """Whatever its `partitionkey` is, the repeat finds the task, even if that has ended."""
    task = task_at(task_home)
    assert (await Submit(task, first, id_home).send(pair.buses)).started
    again = await Submit(task, second, id_home).send(pair.buses)
    assert (again, again.partition) == (Submitted(task, "accepted", False), first)
    assert await started(pair) == [(first, task, "s/e")]
    assert (await find_place(pair.buses, task)).keys.partition == first
    side = pair.sides[first]
    assert await complete(side.bus, await side.broker.take(side.bus))
    for _ in range(2):
        assert await Submit(task, second, id_home).send(pair.buses) == Submitted(task, "completed", False)
        await side.broker.call("DEL", side.bus.keys.task(task))  # past its retention
    assert (await find_place(pair.buses, task)).keys.partition == first


@pytest.mark.parametrize(("task_home", "id_home", "first", "second"), [*product(BOTH, repeat=4)])
async def test_an_id_that_was_used_for_other_content_is_rejected(
    pair: Pair, task_home: int, id_home: int, first: int, second: int
) -> None:
    """For example with another key. The task id of the rejected submit stays free."""
    task, other = task_at(task_home), task_at(1 - task_home, "other")
    await Submit(task, first, id_home).send(pair.buses)
    with pytest.raises(Rejected, match="used before with different content") as error:
        await Submit(other, second, id_home, digest="x").send(pair.buses)
    assert error.value.field == "id"
    assert error.value.retry_after_seconds is None
    assert other not in await places(pair)
    assert await started(pair) == [(first, task, "s/e")]
    assert (await Submit(other, first, id_home, event_id="e2", digest="y").send(pair.buses)).started


@pytest.mark.parametrize(("task_home", "id_home", "first", "second"), [*product(BOTH, repeat=4)])
async def test_a_task_id_names_one_task(pair: Pair, task_home: int, id_home: int, first: int, second: int) -> None:
    """Equal content means that task. Other content is rejected, and its source and id stay free."""
    task = task_at(task_home)
    await Submit(task, first, id_home).send(pair.buses)
    equal = await Submit(task, second, 1 - id_home, event_id="e2").send(pair.buses)
    assert (equal, equal.partition) == (Submitted(task, "accepted", False), first)
    with pytest.raises(Rejected, match=f"a task {task} with different content exists") as error:
        await Submit(task, second, id_home, event_id="e3", digest="x").send(pair.buses)
    assert error.value.field == "task_id"
    assert await started(pair) == [(first, task, "s/e")]
    assert (await Submit(task_at(0, "new"), second, id_home, event_id="e3", digest="y").send(pair.buses)).started


async def test_a_task_that_was_cancelled_before_its_submit_is_refused_in_any_partition(pair: Pair) -> None:
    """The cancel goes to the partition of the task id."""
    task = task_at(0)
    assert await (await find_place(pair.buses, task)).cancel(task, "never mind") == ["unknown"]
    with pytest.raises(Rejected, match="cancelled before it was submitted"):
        await Submit(task, 1).send(pair.buses)
    assert await started(pair) == []


@pytest.mark.parametrize("home", BOTH)
async def test_a_task_that_a_message_started_is_found(pair: Pair, home: int) -> None:
    """It is beside its sender, or in the partition of its instance, whatever partition its id maps to."""
    beside, elsewhere = task_at(home, "beside"), task_at(home, "elsewhere")
    await Submit(task_at(0), 0).send(pair.buses)
    turn = await pair.here.broker.take(pair.here.bus)
    sent = send(beside, step="1"), send(elsewhere, "@1:editor", "k", step="2")
    assert await complete(pair.here.bus, turn, *sent)
    await pair.carry()
    assert (await find_place(pair.buses, beside)).keys.partition == 0
    bus = await find_place(pair.buses, elsewhere)
    assert bus.keys.partition == 1
    assert await bus.cancel(elsewhere, "enough") == ["cancelled"]
    assert (await find_place(pair.buses, task_at(home, "unknown"))).keys.partition == home


# -- crashes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize(("task_home", "id_home", "target", "other"), [*product(BOTH, repeat=4)])
async def test_a_repeat_finishes_a_submit_that_crashed(
    pair: Pair, task_home: int, id_home: int, target: int, other: int, calls: int
) -> None:
    """Whether it claimed its ids or started its task before it died: one task, once."""
    task = task_at(task_home)
    await crash(Submit(task, target, id_home), pair.buses, calls)
    await Submit(task, other, id_home).send(pair.buses)
    [(place, name, _)] = await started(pair)
    assert name == task
    assert (await find_place(pair.buses, task)).keys.partition == place
    assert not (await Submit(task, target, id_home).send(pair.buses)).started


@pytest.mark.parametrize("same", ["id", "task_id"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize(("task_home", "id_home", "target"), [*product(BOTH, repeat=3)])
async def test_a_claim_that_never_started_does_not_use_up_its_id(
    pair: Pair, task_home: int, id_home: int, target: int, calls: int, same: str
) -> None:
    """Other content takes the id; then the submit that crashed is rejected."""
    first = Submit(task_at(task_home), target, id_home)
    if not await crash(first, pair.buses, calls) or await started(pair):
        return  # it needs fewer calls: nothing was left claimed
    second = Submit(first.task, 1 - target, id_home, digest="x")
    if same == "id":
        second.task = task_at(1 - task_home, "other")
    else:
        second.event_id = "e2"
    sent = await second.send(pair.buses)
    assert (sent.started, sent.partition) == (True, second.target)
    with pytest.raises(Rejected) as error:
        await first.send(pair.buses)
    assert error.value.field == same
    assert [task for _, task, _ in await started(pair)] == [second.task]


@pytest.mark.parametrize(("task_home", "id_home", "target"), [*product(BOTH, repeat=3)])
async def test_a_submit_that_is_rejected_frees_its_ids(pair: Pair, task_home: int, id_home: int, target: int) -> None:
    """It also stores no partition for a task that never existed."""
    wrong = Submit(task_at(task_home), target, id_home, agent="nobody")
    with pytest.raises(Rejected, match="no agent is named nobody"):
        await wrong.send(pair.buses)
    assert await places(pair) == {}
    for side in pair.sides:
        line = await side.broker.call("LLEN", side.bus.keys.submits_in_order)
        assert line == len(await side.broker.hash("seen")), "what is freed must not be forgotten again later"
    right = Submit(wrong.task, 1 - target, id_home, digest="x")
    assert (await right.send(pair.buses)).started
    assert [task for _, task, _ in await started(pair)] == [wrong.task]


async def test_a_rejected_submit_frees_no_id_of_an_equal_one_that_has_started(pair: Pair) -> None:
    """Both have the same claims. Between the two, an app has declared the agent."""
    submit = Submit(task_at(1), 0, 1, agent="late")
    rejected = _SubmitAttempt(pair.buses, submit.target, submit.id_home, submit.make())
    with pytest.raises(Rejected, match="no agent is named late"):
        await rejected.run()
    for side in pair.sides:
        await side.broker.call("HSET", side.bus.keys.agents, "late", "agent")
    assert (await submit.send(pair.buses)).started
    await rejected.give_up()
    for other in (Submit(submit.task, 1, 1, digest="x", event_id="e2"), Submit(task_at(1, "new"), 1, 1, digest="x")):
        with pytest.raises(Rejected, match="different content"):
            await other.send(pair.buses)
    assert await started(pair) == [(0, submit.task, "s/e")]


async def test_a_late_refusal_does_not_replace_a_newer_one(pair: Pair) -> None:
    new = Submit("t", 0).make()
    for field in ("id", "task_id"):
        for token in ("100", "50"):
            assert await pair.here.bus.refuse(new, field, token) is None
    for claims in ("70|", "|70", "100|101", "101|100"):
        new.claims = claims
        with pytest.raises(Misplaced) as error:
            await pair.here.bus.submit(new)
        assert error.value.again
    new.claims = "101|101"
    assert (await pair.here.bus.submit(new)).started


async def test_a_submit_releases_only_its_own_claim(pair: Pair) -> None:
    """It was paused, and the ids have been claimed again since."""
    new, bus = Submit(task_at(0), 1).make(), pair.here.bus
    for field in ("task_id", "id"):
        [old] = await bus.claim(new, 1, [field])
        await bus.unclaim(new, field, old)
        [newer] = await bus.claim(new, 1, [field])
        assert newer != old
        before = await pair.here.broker.snapshot()
        await bus.unclaim(new, field, old)
        assert await pair.here.broker.snapshot() == before


async def test_an_overloaded_submit_keeps_its_claim(pair: Pair) -> None:
    """It is sent again, and then reaches its target."""
    submit = Submit(task_at(0), 1)
    await pair.there.broker.call("HSET", pair.there.bus.keys.meta, "overload", "full")
    with pytest.raises(Rejected, match="full"):
        await submit.send(pair.buses)
    await pair.there.broker.call("HDEL", pair.there.bus.keys.meta, "overload")
    other = await Submit(submit.task, 0).send(pair.buses)
    assert (other.started, other.partition) == (True, 1)


# -- several at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
async def test_concurrent_submits_start_each_task_once(pair: Pair, seed: int) -> None:
    """Equal and different submits, their calls in any order; some submitters crash and send again."""
    rng = random.Random(seed)
    tasks = [task_at(rng.randrange(2), name) for name in ("a", "b")]
    homes = {"e": rng.randrange(2), "e2": rng.randrange(2)}

    class Slowed(EventBus):
        async def call(self, function: str, *args: Argument) -> Reply:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                raise Crashed
            reply = await super().call(function, *args)
            if rng.random() < 0.1:
                raise Crashed
            return reply

    async def persist(submit: Submit) -> Submitted | str:
        for attempt in range(60):
            kind = Slowed if attempt < 30 else EventBus
            buses = [kind(bus.transport, bus.keys, bus.owner) for bus in pair.buses]
            try:
                return await submit.send(buses)
            except Crashed:
                continue
            except Rejected as error:
                if error.retry_after_seconds is None:
                    return error.field
        raise AssertionError("the submit never came to an end")

    submits = []
    for _ in range(rng.randrange(2, 6)):
        event = rng.choice(["e", "e", "e2"])
        # The digest is over the task id too, and over the agent and its key: not over `partitionkey`.
        task, variant = rng.choice(tasks), rng.choice("xxy")
        submits.append(Submit(task, rng.randrange(2), homes[event], event, digest=f"{task}{variant}"))
    answers = await asyncio.gather(*(persist(submit) for submit in submits))
    found = await started(pair)
    assert len({task for _, task, _ in found}) == len(found), f"one task id, two tasks: {found}"
    assert len({submit for _, _, submit in found}) == len(found), f"one submit, two tasks: {found}"
    assert found, "ids that nobody has used were used up"
    for submit, answer in zip(submits, answers, strict=True):
        if isinstance(answer, Submitted):
            assert (answer.partition, answer.task) in {(place, task) for place, task, _ in found}
            assert answer.task == submit.task
            assert (await find_place(pair.buses, answer.task)).keys.partition == answer.partition
        else:
            assert answer in ("id", "task_id")
    # What has started is known from then on, and what was rejected stays so. As in one partition, an event that named a
    # task of another event is not remembered.
    started_by = {(task, submit) for _, task, submit in found}
    for submit, answer in zip(submits, answers, strict=True):
        if isinstance(answer, Submitted) and (submit.task, f"s/{submit.event_id}") not in started_by:
            continue
        again = await persist(submit)
        assert isinstance(again, str) == isinstance(answer, str)
        assert getattr(again, "task", "") == getattr(answer, "task", "")


# -- what it costs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task_home", "id_home", "target", "expected"),
    [
        (0, 0, 0, ["submit"]),
        (1, 1, 0, ["claim", "submit"]),
        (0, 1, 0, ["claim", "submit"]),
        (1, 0, 0, ["claim", "submit"]),
        (1, 1, 1, ["submit"]),
    ],
)
async def test_a_submit_makes_few_calls(
    pair: Pair, task_home: int, id_home: int, target: int, expected: list[str]
) -> None:
    """One call if its ids belong to the task's partition, as most submits' ids do."""
    calls: list[str] = []
    await Submit(task_at(task_home), target, id_home).send(interrupted(pair.buses, calls.append))
    assert calls == expected


async def test_a_submit_is_refused_by_the_partition_of_its_id_at_once(pair: Pair) -> None:
    await Submit(task_at(0), 0, 0).send(pair.buses)
    calls: list[str] = []
    with pytest.raises(Rejected):
        await Submit(task_at(0), 1, 0, digest="x").send(interrupted(pair.buses, calls.append))
    assert calls == ["claim"]


async def test_one_partition_has_no_claims(broker: Broker, bus: EventBus) -> None:
    calls: list[str] = []
    await Submit("t", 0).send(interrupted([bus], calls.append))
    assert calls == ["submit"]
    assert await broker.hash("places") == {}
    assert await broker.hash("seen") == {"s\ne": "t\nd"}


async def test_claims_are_bounded_by_the_dedupe_window(pair: Pair) -> None:
    await pair.here.broker.call("HSET", pair.here.bus.keys.meta, "dedupe_max", 4)
    tasks = [name for name in (f"t{number}" for number in range(40)) if partition_of(name, 2) == 0]
    for number, task in enumerate(tasks):
        await Submit(task, 1, 0, event_id=f"e{number}").send(pair.buses)
        assert len(await pair.here.broker.hash("seen")) <= 5


async def test_a_place_stored_by_an_older_release_counts(pair: Pair) -> None:
    """It stored the task's partition without a claim, and may have started the task."""
    task, gone = task_at(0), task_at(0, "gone")
    older = Submit(task, 1)
    for name in (task, gone):
        await pair.here.broker.call("HSET", pair.here.bus.keys.places, name, 1)
    new = older.make()
    await pair.there.bus.submit(new)
    again = await Submit(task, 0, 1).send(pair.buses)
    assert (again.started, again.partition) == (False, 1)
    with pytest.raises(Rejected) as error:
        await Submit(task, 0, 1, event_id="e2", digest="x").send(pair.buses)
    assert error.value.field == "task_id"
    assert (await Submit(gone, 0, 1, event_id="e3").send(pair.buses)).partition == 0
    assert (await find_place(pair.buses, gone)).keys.partition == 0
