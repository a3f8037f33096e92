"""Tasks per second of Weft and AutoGen in turn, and their CPU time by process."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.comparison.environment import environment
from benchmarks.comparison.running import running
from benchmarks.comparison.systems import AUTOGEN
from benchmarks.driver import Drive, Order
from benchmarks.figures import table
from benchmarks.ledger import ledger_of
from benchmarks.machine import Neighbours
from benchmarks.stack import BROKER, SERVICES, started

EVENTS = 4
"""Of one task: ask the agent, call the tool, resume the agent, the answer."""
PROCESSES = ("client", *SERVICES, BROKER)
COMMANDS = 12
"""How many of the broker's commands are listed, those first that took longest."""


@dataclass(frozen=True, slots=True)
class WeftRound:
    """A round on Weft; CPU in milliseconds per 1,000 tasks, by process."""

    drive: Drive
    cpu_ms: dict[str, float]
    commands: dict[str, tuple[float, float]]
    """Command → calls per task, microseconds per call."""
    others: float
    """Cores that other programs of the machine kept busy meanwhile."""
    alone: Drive | None = None
    """Tasks one at a time, if there were any."""


@dataclass(frozen=True, slots=True)
class AutogenRound:
    """A round on AutoGen, in one process."""

    drive: Drive
    others: float
    """As above."""


async def throughput(tasks: int, in_flight: int, rounds: int) -> dict[str, object]:
    """Measure and print. Each round has fresh processes, and is warmed up by a tenth of its tasks."""
    environment(AUTOGEN.lock)
    weft: list[WeftRound] = []
    autogen: list[AutogenRound] = []
    for number in range(1, rounds + 1):
        weft.append(await weft_round(tasks, in_flight))
        autogen.append(await autogen_round(tasks, in_flight))
        print(
            f"round {number} of {rounds}: Weft {weft[-1].drive.per_second:,.0f} tasks/s, "
            f"AutoGen {autogen[-1].drive.per_second:,.0f}, ratio {ratio(weft[-1], autogen[-1]):.2f} "
            f"(other programs kept {weft[-1].others:.2f} and {autogen[-1].others:.2f} cores busy)",
            flush=True,
        )
    figures = summary(weft, autogen)
    print(report(figures, in_flight))
    return figures


async def weft_round(tasks: int, in_flight: int, alone: int = 0) -> WeftRound:
    """Measure `tasks` concurrently and then, on request, some one at a time."""
    warm = max(1, tasks // 10)
    async with started() as stack, ledger_of(stack) as ledger:
        client = await stack.start_client()
        try:
            await client.order(Order(0, warm, in_flight))
            await ledger.until_recorded(warm)
            before, commands_before = stack.cpu_seconds(), await ledger.info("commandstats")
            neighbours = Neighbours()
            done = await client.order(Order(warm, tasks, in_flight))
            await ledger.until_recorded(warm + tasks)
            after, commands_after = stack.cpu_seconds(), await ledger.info("commandstats")
            used = {"client": done.cpu_seconds, **{name: after[name] - before[name] for name in after}}
            others = neighbours.cores(sum(used.values()))
            slowly = await client.order(Order(warm + tasks, alone, 1)) if alone else None
            await ledger.until_recorded(warm + tasks + alone)
            await ledger.until_still()
            await ledger.check(warm + tasks + alone)
            await client.stop()
        finally:
            await client.kill()
    cpu_ms = {name: used[name] * 1e6 / tasks for name in PROCESSES}
    return WeftRound(done, cpu_ms, _commands(commands_before, commands_after, tasks), others, slowly)


async def autogen_round(tasks: int, in_flight: int) -> AutogenRound:
    async with running(AUTOGEN) as started:
        await started.driver.order(Order(0, max(1, tasks // 10), in_flight))
        neighbours = Neighbours()
        done = await started.driver.order(Order(0, tasks, in_flight))
        others = neighbours.cores(done.cpu_seconds)
    return AutogenRound(done, others)


def ratio(weft: WeftRound, autogen: AutogenRound) -> float:
    """How many times as fast Weft was."""
    return weft.drive.per_second / autogen.drive.per_second


def summary(weft: Sequence[WeftRound], autogen: Sequence[AutogenRound]) -> dict[str, object]:
    """Medians over the rounds; a ratio is the median of the rounds' own ratios."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    ratios = [ratio(a, b) for a, b in zip(weft, autogen, strict=True)]
    cpu = {name: median([one.cpu_ms[name] for one in weft]) for name in PROCESSES}
    return {
        "weft_tasks_per_second": median([one.drive.per_second for one in weft]),
        "autogen_tasks_per_second": median([one.drive.per_second for one in autogen]),
        "ratio": median(ratios),
        "ratios": ratios,
        "weft_p50_ms": median([one.drive.p50_ms for one in weft]),
        "weft_p99_ms": median([one.drive.p99_ms for one in weft]),
        "autogen_p50_ms": median([one.drive.p50_ms for one in autogen]),
        "autogen_p99_ms": median([one.drive.p99_ms for one in autogen]),
        "cpu_ms_per_1000_tasks": cpu,
        "autogen_cpu_ms_per_1000_tasks": median([one.drive.cpu_seconds * 1e6 / one.drive.tasks for one in autogen]),
        "broker_us_per_event": cpu[BROKER] / EVENTS,
        "broker_commands": weft[-1].commands,
        "cores_busy_by_others": {"weft": [one.others for one in weft], "autogen": [one.others for one in autogen]},
    }


def report(figures: dict[str, object], in_flight: int) -> str:
    cpu = figures["cpu_ms_per_1000_tasks"]
    commands = figures["broker_commands"]
    assert isinstance(cpu, dict)
    assert isinstance(commands, dict)
    systems = table(
        (f"{in_flight} in flight", "tasks/s", "p50 ms", "p99 ms", "CPU ms per 1,000 tasks"),
        [
            (
                "Weft",
                *(figures[f"weft_{name}"] for name in ("tasks_per_second", "p50_ms", "p99_ms")),
                sum(cpu.values()),
            ),
            (
                "AutoGen, in memory",
                *(figures[f"autogen_{name}"] for name in ("tasks_per_second", "p50_ms", "p99_ms")),
                figures["autogen_cpu_ms_per_1000_tasks"],
            ),
        ],
    )
    return "\n".join(
        (
            "",
            systems,
            f"\nratio {figures['ratio']:.2f}; broker {figures['broker_us_per_event']:.1f} µs per event "
            f"({EVENTS} events per task)\n",
            table(("CPU ms per 1,000 tasks", *cpu), [("Weft", *cpu.values())]),
            "",
            table(
                ("command of the broker", "calls per task", "µs per call"),
                [(name, *costs) for name, costs in commands.items()],
            ),
            "",
        )
    )


def _commands(before: dict[str, str], after: dict[str, str], tasks: int) -> dict[str, tuple[float, float]]:
    spent = {}
    for name, told in after.items():
        calls, took = (_stat(told, field) - _stat(before.get(name, ""), field) for field in ("calls", "usec"))
        if calls:
            spent[name.removeprefix("cmdstat_")] = (took, calls / tasks, took / calls)
    longest = sorted(spent, key=lambda name: -spent[name][0])[:COMMANDS]
    return {name: (spent[name][1], spent[name][2]) for name in longest}


def _stat(told: str, field: str) -> float:
    return float(dict(part.split("=") for part in told.split(",") if part).get(field, 0))
