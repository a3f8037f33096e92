"""The invariants after any number of kills: nothing is lost, repeated or left behind."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from runtime_core.client.client import TaskResponse
from runtime_core.trajectory.store import TrajectoryStore
from tests.fleet import PlainRedis, plain_redis, until

WORK = ("agent", "tool")


def check_ends(responses: Sequence[TaskResponse], expected: object) -> None:
    """Every task completed, with its own output."""
    bad = [response for response in responses if response.status != "completed" or response.output != expected]
    assert not bad, f"{len(bad)} of {len(responses)} tasks did not complete as they should; the first: {bad[0]}"


def check_effects(path: Path, tasks: Sequence[str], per_task: int) -> None:
    """Each call of each task took effect under one unique key; repeats have the same key."""
    calls: dict[str, set[str]] = defaultdict(set)
    names: dict[str, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        name, key = line.split(" ", 1)
        calls[key.partition("/")[0]].add(key)
        names[key].add(name)
    shared = {key: found for key, found in names.items() if len(found) != 1}
    assert not shared, f"one key for different calls: {shared}"
    wrong = {task: sorted(calls[task]) for task in tasks if len(calls[task]) != per_task}
    assert not wrong, (
        f"{len(wrong)} tasks have not {per_task} keys for their {per_task} calls: {list(wrong.items())[:3]}"
    )
    assert set(calls) == set(tasks), "effects of tasks that nobody submitted"


def check_ledger(path: Path, zombies: Collection[int] = ()) -> None:
    """No step has run again once the journal had its result; one that was cut midway may.

    Lines are `run <step> <process>` and `kept <step> <process>`. `zombies` are processes that were declared dead and
    lived: they may begin a step before they learn of it.
    """
    kept: dict[str, str] = {}
    again = []
    for line in path.read_text().splitlines():
        what, step, process = line.split()
        if what == "kept":
            kept.setdefault(step, process)
        elif what == "run" and step in kept and int(process) not in zombies:
            again.append(f"{step}: kept by {kept[step]}, run again by {process}")
    assert not again, f"{len(again)} finished steps ran again: {again[:5]}"


def check_once(path: Path) -> None:
    """No call of a tool that may not be repeated ran twice. Lines are `once <key> <process>`."""
    keys = Counter(line.split()[1] for line in path.read_text().splitlines() if line.startswith("once "))
    twice = {key: count for key, count in keys.items() if count > 1}
    assert not twice, f"calls that may not be repeated ran again: {twice}"


async def check_instances(redis: PlainRedis, namespace: str, seconds: float = 20.0) -> None:
    """No instance is held, no mailbox has events, no task is open, no call is marked as started."""
    base = f"{namespace}:{{0}}:"
    left: list[str] = []

    async def free() -> bool:
        left.clear()
        for pattern in ("mail:*", "nest:*"):
            left.extend([str(key) async for key in redis.scan_iter(match=base + pattern, count=1000)])
        async for key in redis.scan_iter(match=base + "inst:*", count=1000):
            busy = await redis.hget(key, "busy")
            if busy:
                left.append(f"{key} is held by {busy}")
        left.extend(f"{task} is open" for task in await redis.zrange(base + "open", 0, -1))
        left.extend(f"{call} is marked as started" for call in await redis.hkeys(base + "started"))
        return not left

    try:
        await until(free, seconds, "free instances")
    except AssertionError:
        raise AssertionError(f"left on the broker: {left[:10]}") from None


async def check_broker(
    redis: PlainRedis,
    namespace: str,
    seconds: float = 20.0,
    work: Sequence[str] = WORK,
    spare_letters_of: Collection[str] = (),
) -> None:
    """Nothing pending, no work, no timers, no dead letters; what is late is waited for.

    `work` names the streams, `spare_letters_of` tasks that may have dead letters.
    """
    spared = {task.encode() for task in spare_letters_of}
    base = f"{namespace}:{{0}}:"

    async def left() -> dict[str, object]:
        found: dict[str, object] = {}
        for stream in work:
            found[stream] = await redis.xlen(base + stream)
            for group in await redis.xinfo_groups(base + stream):
                found[f"pending {stream}"] = group["pending"]
        found["timers"] = await redis.zcard(base + "timers")
        found["delayed"] = await redis.hlen(base + "delayed")
        found["quarantine"] = await redis.hlen(base + "quarantine")
        found["ingress"] = await redis.xlen(f"{namespace}:tasks")
        letters = [fields for _, fields in await redis.xrange(base + "dead")]
        found["dead"] = len([letter for letter in letters if letter.get(b"taskid") not in spared])
        found["runs"] = [key async for key in redis.scan_iter(match=f"{base}run:*", count=1000)]
        return {what: value for what, value in found.items() if value}

    last: dict[str, object] = {}

    async def empty() -> bool:
        last.clear()
        last.update(await left())
        return not last

    try:
        await until(empty, seconds, "an empty broker")
    except AssertionError:
        letters = [entry[1] for entry in await redis.xrange(base + "dead", count=3)]
        raise AssertionError(f"left on the broker: {last}; dead letters: {letters}") from None


async def check_trajectories(
    url: str, namespace: str, responses: Sequence[TaskResponse], steps: int, seconds: float = 30.0
) -> None:
    """Each task's record is complete, with as many rows as its end counts."""
    store = await TrajectoryStore.open(url)
    try:
        for response in responses:

            async def recorded(task: str = response.task_id) -> bool:
                found = await store.task(namespace, task)
                return found is not None and found.complete

            await until(recorded, seconds, f"the complete trajectory of {response.task_id}")
            found = await store.task(namespace, response.task_id)
            assert found is not None
            assert found.end is not None
            rows = [f"{step.step} {step.kind} {step.attempt}" for step in found.steps]
            assert len(found.steps) == found.end.steps == response.steps, f"{response}: {rows}"
            assert response.steps >= steps, f"{response}: {rows}"
        assert not await store.unreadable(namespace)
    finally:
        await store.close()


async def held_of(port: int, namespace: str, tasks: Sequence[str]) -> str:
    """Return what the broker holds of these tasks and of its streams, for the message of a failed test."""
    base = f"{namespace}:{{0}}:"
    lines: list[str] = []
    async with plain_redis(port) as redis:
        for task in tasks:
            lines.append(f"{task}: {await redis.hgetall(f'{base}task:{task}')}")
            runs = [key async for key in redis.scan_iter(match=f"{base}run:{task}/*", count=1000)]
            for key in runs:
                held = await redis.hgetall(key)
                lines.append(f"{key!r}: {held}")
        for stream in WORK:
            lines.append(f"{stream}: {await redis.xlen(base + stream)} {await redis.xinfo_groups(base + stream)}")
            lines.append(f"{stream}: {await redis.xinfo_consumers(base + stream, f'{stream}-handler')}")
            lines.append(f"{stream}: {await redis.xrange(base + stream, count=5)}")
        lines.append(f"alive: {await redis.zrange(base + 'alive', 0, -1, withscores=True)}")
        lines.append(f"timers: {await redis.zrange(base + 'timers', 0, 20, withscores=True)}")
        lines.append(f"meta: {await redis.hgetall(base + 'meta')} dead: {await redis.xlen(base + 'dead')}")
        lines.append(f"quarantine: {await redis.hgetall(base + 'quarantine')}")
    return "\n".join(lines)
