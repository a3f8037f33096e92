"""Conversations with a model: no recorded answer is requested again, despite kills and pauses."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from asyncio.subprocess import PIPE
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from runtime_core.client.client import Client, TaskResponse
from runtime_core.trajectory.store import TrajectoryStore
from tests.chaos.harm import harm_services, under
from tests.chaos.invariants import check_broker, check_effects, check_trajectories
from tests.fleet import Fleet, PlainRedis, plain_redis, until
from tests.openai_server.driver import Entry, OpenAIServer, Rule, Usage, answer, calls, gated, rate_limited, turns
from tests.servers.matrix import is_full, only_in_matrix
from tests.servers.process import Server

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(3600)]

CONVERSATIONS = int(os.environ.get("WEFT_CHAOS_CONVERSATIONS") or (30 if is_full() else 16))
APP = "tests.apps.conversations_app:app"
LEASE_SECONDS = 2.0
EVERY_SECONDS = 2.0
"""Between two harms: a process that asks models takes a while to start."""
SPREAD_SECONDS = 20.0 + CONVERSATIONS * 0.2
LEAST_HARM = 8
MOST_HARM = 20 if CONVERSATIONS <= 100 else 1000
"""So that a machine on which processes start slowly comes to an end with the conversations."""
RESULT_SECONDS = 240.0 + CONVERSATIONS * 3.0
SETTLED_SECONDS = 60.0
"""How long the broker and the record may take to be done, once every conversation has ended."""
LATE_SECONDS = 10.0
"""How long after a pause a process may still do what it was about to do."""
MODEL_CALLS = 7
WRONG = 2
"""The answer whose call has no arguments that fit: the agent asks again in the same turn."""
TOOL_CALLS = 10
TOOL_RESULTS = TOOL_CALLS + 1
STEPS = 1 + MODEL_CALLS + TOOL_CALLS
"""Rows of a conversation's trajectory: the agent's own, and one for each call."""
DEATHS = 2
"""How often a turn may die with its process, as far as the model has seen it: after five times it is given up."""
REPLICAS = {"agent-handler": 3, "tool-handler": 2, "state-manager": 2, "trajectory-recorder": 1}


def script(effects: Path) -> tuple[Rule, ...]:
    """Five answers with two tool calls each, between them a wrong one, then one that ends the conversation."""

    def mark(number: int) -> Rule:
        if number == WRONG:
            return calls(("mark", {"path": str(effects), "nome": "?"}), usage=usage_of(number))
        names = (f"{{conversation}}-{number}-{which}" for which in "ab")
        return calls(
            *(("mark", {"path": str(effects), "name": name}) for name in names),
            text="Let me see.",
            usage=usage_of(number),
        )

    last = MODEL_CALLS - 1
    rules = turns(*(mark(number) for number in range(last)), answer("{conversation}: {result}", usage=usage_of(last)))
    # Long enough for a kill to come in the middle of it.
    return tuple(rule.but(delay=0.1, piece_delay=0.02) for rule in rules)


def usage_of(number: int) -> Usage:
    return Usage(input=1000 + number, output=10 * (number + 1))


def output_of(conversation: str) -> str:
    return f"{conversation}: {conversation}-{MODEL_CALLS - 2}-b"


@only_in_matrix("without faults")
async def test_without_faults_each_model_call_happens_once(
    valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    tasks = [f"c-{number}" for number in range(10)]
    effects = tmp_path / "effects"
    openai_server.play(script(effects))
    async with (
        Fleet(valkey.url, namespace, tmp_path, lease_seconds=30.0, app=APP, environ=openai_server.environ) as fleet,
        Client.connect(valkey.url, namespace=namespace) as client,
    ):
        responses = await asyncio.gather(*(talk(client, task) for task in tasks))
        check_conversations(responses)
        check_effects(effects, tasks, TOOL_CALLS)
        await check_trajectories(fleet.trajectory_url, namespace, responses, STEPS, SETTLED_SECONDS)
    counts = openai_server.counts()
    assert (counts.asked, counts.complete, counts.repeated) == (10 * MODEL_CALLS, 10 * MODEL_CALLS, 0)


def fleet_of(server: Server, namespace: str, folder: Path, models: OpenAIServer) -> Fleet:
    return Fleet(
        server.url,
        namespace,
        folder,
        replicas=REPLICAS,
        lease_seconds=LEASE_SECONDS,
        app=APP,
        environ=models.environ,
    )


async def test_conversations_survive_kills_and_pauses(
    own_valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer, chaos_seed: int
) -> None:
    chance = random.Random(chaos_seed)
    tasks = [f"c-{number}" for number in range(CONVERSATIONS)]
    effects = tmp_path / "effects"
    openai_server.play(script(effects))
    async with (
        fleet_of(own_valkey, namespace, tmp_path, openai_server) as fleet,
        Client.connect(own_valkey.url, namespace=namespace) as client,
    ):

        async def one(task: str) -> TaskResponse:
            await asyncio.sleep(chance.uniform(0, SPREAD_SECONDS))
            return await talk(client, task)

        def among() -> list[str]:
            """Half of the time, prefer processes that wait for the model; never one whose turn has died twice."""
            entries = openai_server.ledger()
            repeats = Counter(entry.conversation for entry in entries)
            repeats.subtract(
                conversation for conversation, _ in {(entry.conversation, entry.digest) for entry in entries}
            )
            under_way = [entry for entry in entries if entry.ended is None]
            spared = {entry.asked_by for entry in under_way if repeats[entry.conversation] >= DEATHS}
            asking = {entry.asked_by for entry in under_way} if chance.random() < 0.5 else None
            return [
                name
                for name, member in fleet.members.items()
                if member.running and (pid := str(member.pid)) not in spared and (asking is None or pid in asking)
            ]

        async with under(harm_services(fleet, chance, EVERY_SECONDS, among, MOST_HARM)):
            responses = await asyncio.gather(*(one(task) for task in tasks))
        for name in fleet.names():
            fleet.resume(name)
        await fleet.ready()
        assert fleet.harmed >= LEAST_HARM
        check_conversations(responses)
        check_effects(effects, tasks, TOOL_CALLS)
        async with plain_redis(own_valkey.port) as redis:
            await check_broker(redis, namespace, SETTLED_SECONDS)
        kept = await kept_answers(fleet, namespace, responses)
        check_asked(openai_server.ledger(), kept, fleet)


@pytest.mark.parametrize("harm", ["killed", "paused"])
async def test_an_answer_survives_a_kill_or_pause_of_its_process(
    harm: str, own_valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    tasks = [f"c-{number}" for number in range(2)]
    effects = tmp_path / "effects"
    rules = script(effects)
    # The answer after the wrong one stops behind its second piece; whoever asks again has it at once. The wrong one is
    # in the journal by its own write alone, since the turn goes on with it.
    stopped = gated(rules[WRONG + 1], "{conversation}", after=2).but(times=1)
    openai_server.play(stopped, rules)
    async with (
        fleet_of(own_valkey, namespace, tmp_path, openai_server) as fleet,
        Client.connect(own_valkey.url, namespace=namespace) as client,
    ):
        responses = []
        for task in tasks:
            talking = asyncio.create_task(talk(client, task))
            (entry,) = await openai_server.waits(task)
            name = asker_of(fleet, entry)
            if harm == "killed":
                fleet.kill(name)
            else:
                # The answer comes whole to a process that sleeps, and is asked for again by another one meanwhile.
                fleet.pause(name)
                openai_server.release(task)
                await openai_server.until(partial(has_asked_again, task), f"{task} is asked again", RESULT_SECONDS)
                fleet.resume(name)
            responses.append(await talking)
        check_conversations(responses)
        check_effects(effects, tasks, TOOL_CALLS)
        async with plain_redis(own_valkey.port) as redis:
            await check_broker(redis, namespace, SETTLED_SECONDS)
        kept = await kept_answers(fleet, namespace, responses)
        entries = openai_server.ledger()
        check_asked(entries, kept, fleet)
    for task in tasks:
        first, *more = [entry for entry in entries if (entry.conversation, entry.model_messages) == (task, WRONG + 1)]
        assert (first.left, first.complete) == ((True, False) if harm == "killed" else (False, True)), first
        assert first.number not in kept[task]
        assert [entry.number in kept[task] for entry in more].count(True) == 1


@only_in_matrix("rate limits, through a restart of all services")
async def test_a_storm_of_rate_limits_is_waited_out_on_the_broker(
    own_valkey: Server, namespace: str, tmp_path: Path, openai_server: OpenAIServer
) -> None:
    keys = [f"c-{number}" for number in range(max(8, CONVERSATIONS // 5))]
    openai_server.play(rate_limited(after=4, until="calm"), answer("heard: {user}"))
    async with (
        Fleet(
            own_valkey.url,
            namespace,
            tmp_path,
            replicas={**REPLICAS, "tool-handler": 1},
            lease_seconds=30.0,
            app=APP,
            environ=openai_server.environ,
        ) as fleet,
        Client.connect(own_valkey.url, namespace=namespace) as client,
        plain_redis(own_valkey.port) as redis,
    ):
        handles = [
            (key, said, await client.submit("talker", said, key=key, timeout=RESULT_SECONDS))
            for key in keys
            for said in messages_of(key)
        ]

        async def all_wait() -> bool:
            return await held(redis, namespace) == (0, len(keys)) and len(await waiting(fleet)) == len(keys)

        await until(all_wait, RESULT_SECONDS, "each key's first message waits on the broker, and no process holds one")
        # No process is needed for that.
        await fleet.restart()
        await until(all_wait, RESULT_SECONDS, "all wait after the restart too")
        openai_server.release("calm")
        for key, said, handle in handles:
            response = await handle.result(timeout=RESULT_SECONDS)
            assert (response.status, response.output) == ("completed", f"heard: {said}"), (key, response)
        async with plain_redis(own_valkey.port) as redis:
            await check_broker(redis, namespace, SETTLED_SECONDS)
    entries = openai_server.ledger()
    assert {entry.status for entry in entries} == {429, 200}
    for key in keys:
        answered = [entry.number for entry in entries if entry.conversation == key and entry.status == 200]
        heard = [openai_server.request(number)["messages"][-1]["content"] for number in answered]
        assert heard == messages_of(key)


def messages_of(key: str) -> list[str]:
    """Return what the instance of this key is told, in order. The first message marks the conversation."""
    return [f"{number} to [{key}]" for number in range(3)]


async def held(redis: PlainRedis, namespace: str) -> tuple[int, int]:
    """Return how many turns processes hold or have waiting, and how many timers are set."""
    stream = f"{namespace}:{{0}}:agent"
    groups = await redis.xinfo_groups(stream)
    pending = sum(group["pending"] for group in groups)
    return pending + await redis.xlen(stream), await redis.zcard(f"{namespace}:{{0}}:timers")


async def waiting(fleet: Fleet) -> list[str]:
    """The tasks that `weft` shows as waiting."""
    arguments = ("-m", "runtime_core.cli.main", "task", "list", "--status", "waiting", "--limit", "10000", "--json")
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=fleet.environ, cwd=fleet.folder, stdout=PIPE, stderr=PIPE
    )
    printed, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return [row["task_id"] for row in json.loads(printed)]


def asker_of(fleet: Fleet, entry: Entry) -> str:
    """Return the member of the fleet that sent the request."""
    return next(name for name, member in fleet.members.items() if member.running and str(member.pid) == entry.asked_by)


def has_asked_again(task: str, entries: Sequence[Entry]) -> bool:
    return sum((entry.conversation, entry.model_messages) == (task, WRONG + 1) for entry in entries) > 1


async def talk(client: Client, task: str) -> TaskResponse:
    handle = await client.submit("talker", f"Do the work. [{task}]", task_id=task, timeout=RESULT_SECONDS)
    return await handle.result(timeout=RESULT_SECONDS)


def check_conversations(responses: Sequence[TaskResponse]) -> None:
    """Check that each task ended correctly and used exactly what its recorded answers say."""
    every = [usage_of(number) for number in range(MODEL_CALLS)]
    wanted = {
        "input_tokens": sum(usage.input for usage in every),
        "output_tokens": sum(usage.output for usage in every),
        "tokens": sum(usage.input + usage.output for usage in every),
        "requests": MODEL_CALLS,
    }
    for response in responses:
        assert (response.status, response.output) == ("completed", output_of(response.task_id)), response
        assert {name: response.usage[name] for name in wanted} == wanted, response


async def kept_answers(fleet: Fleet, namespace: str, responses: Sequence[TaskResponse]) -> dict[str, list[int]]:
    """Of each conversation, the requests whose answers were journaled, by their numbers in the model's ledger."""
    await check_trajectories(fleet.trajectory_url, namespace, responses, STEPS, SETTLED_SECONDS)
    kept = {}
    store = await TrajectoryStore.open(fleet.trajectory_url)
    try:
        for task in (response.task_id for response in responses):
            found = await store.task(namespace, task)
            assert found is not None
            outputs = [json.loads(bytes(step.output)) for step in found.steps if step.kind == "model"]
            numbers = [int(each["message"]["provider_response_id"].rpartition("-")[2]) for each in outputs]
            assert len(numbers) == MODEL_CALLS, f"{task}: {numbers}"
            kept[task] = sorted(numbers)
    finally:
        await store.close()
    return kept


def check_asked(entries: Sequence[Entry], kept: Mapping[str, Sequence[int]], fleet: Fleet) -> None:
    """No kept answer was ever asked for again, and each answer that was paid for and not kept has its cause.

    An answer is kept when it is in the journal. The next question of a conversation comes from the journal, so the
    question before is settled when it comes. A repeat has a cause where a process that was killed, paused, or declared
    dead had asked: it was gone before its answer was in the journal, or, after a pause, asked what it was about to ask.
    """
    lost = late = 0
    for conversation, numbers in kept.items():
        asked = [entry for entry in entries if entry.conversation == conversation]
        by_turn = defaultdict(list)
        for entry in asked:
            by_turn[entry.model_messages].append(entry)
        assert sorted(by_turn) == list(range(MODEL_CALLS)), f"{conversation}: {sorted(by_turn)}"
        assert by_turn[MODEL_CALLS - 1][0].tool_results == TOOL_RESULTS, by_turn[MODEL_CALLS - 1]
        for turn, number in enumerate(numbers):
            questions = by_turn[turn]
            assert len({entry.digest for entry in questions}) == 1, (
                f"{conversation}: one question in two words: {questions}"
            )
            assert any(entry.number == number and entry.complete for entry in questions), (
                f"{conversation}: the answer {number} was kept, and is not among {questions}"
            )
            settled = min((entry.at for entry in by_turn.get(turn + 1, ())), default=float("inf"))
            for entry in questions:
                if entry.at > settled:
                    late += 1
                    assert was_harmed(fleet, entry), f"{conversation}: asked again though its answer was kept: {entry}"
                elif entry.complete and entry.number != number:
                    lost += 1
                    assert was_harmed(fleet, entry), f"{conversation}: an answer was not kept, for no cause: {entry}"
    answers = sum(entry.complete and entry.answer for entry in entries)
    print(
        f"{fleet.harmed} kills and pauses; {len(entries)} requests, {answers} whole answers: "
        f"{sum(map(len, kept.values()))} were kept, {lost} came to a process that could not keep them any more, "
        f"{late} questions were put by a process that went on after a pause, though their answers were kept"
    )


def was_harmed(fleet: Fleet, entry: Entry) -> bool:
    """Whether the process that sent the request was killed, paused or declared dead at that time."""
    pid = int(entry.asked_by or 0)
    ended = entry.ended or entry.at
    if any(
        harm.pid == pid and harm.began - LATE_SECONDS <= ended and harm.ended + LATE_SECONDS >= entry.at
        for harm in fleet.harms
    ):
        return True
    # A machine may be so busy that a process is silent for a whole lease, which no test has asked for.
    return any(
        "declared dead" in member.text() and f"(process {pid})" in member.text() for member in fleet.members.values()
    )
