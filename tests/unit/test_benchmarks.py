"""The benchmarks' own arithmetic and shapes. No test here measures speed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import results
from benchmarks.arguments import ALL, parse
from benchmarks.child import ROOT, Child, cpu_seconds, session
from benchmarks.comparison.environment import LOCKS
from benchmarks.comparison.page import PAGE, PICTURE, picture, published, section, with_section
from benchmarks.comparison.systems import DRIVERS, SYSTEMS, System
from benchmarks.driver import Drive, Order, Refused, drive
from benchmarks.figures import percentile, shown, table
from benchmarks.question import LENGTH, answer, found, question
from benchmarks.throughput import PROCESSES, AutogenRound, WeftRound, report, summary


def test_without_names_all_run_and_results_go_to_their_folder() -> None:
    given = parse([])
    assert given.command == ALL
    assert given.results == ROOT / "benchmarks" / "results"


def test_the_help_lists_every_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    assert "75 % of the capacity" in " ".join(capsys.readouterr().out.split())


def test_numbers_are_taken_from_the_command_line() -> None:
    given = parse(["throughput", "--tasks", "50", "--in-flight", "4", "--rounds", "1"])
    assert (given.command, given.tasks, given.in_flight, given.rounds) == ("throughput", 50, 4, 1)


@pytest.mark.parametrize(
    "arguments", [["throughput", "--tasks", "0"], ["latency", "--tasks", "many"], ["nothing"], ["profile", "nobody"]]
)
def test_an_impossible_measurement_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert arguments[-1] in capsys.readouterr().err


def test_questions_differ_and_have_one_size() -> None:
    asked = [question(number) for number in range(1000)]
    assert len(set(asked)) == 1000
    assert {len(text.encode()) for text in asked} == {LENGTH}


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)])
def test_a_percentile_is_the_smallest_value_that_enough_values_do_not_pass(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 11)], percent) == value


def test_a_table_is_markdown_with_aligned_columns() -> None:
    assert table(("what", "n"), [("a", 12345), ("bcdef", 0.5)]).splitlines() == [
        "| what  |      n |",
        "| ----- | -----: |",
        "| a     | 12,345 |",
        "| bcdef |   0.50 |",
    ]


@pytest.mark.parametrize(("value", "text"), [(1234.6, "1,235"), (12.34, "12.3"), (1.234, "1.23"), (True, "True")])
def test_a_number_is_shown_with_the_digits_that_matter(value: object, text: str) -> None:
    assert shown(value) == text


async def test_every_question_of_an_order_is_asked_once_and_never_more_than_the_limit_at_once() -> None:
    under_way, most, asked = 0, 0, list[str]()

    async def ask(text: str) -> object:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        asked.append(text)
        await asyncio.sleep(0)
        under_way -= 1
        return found(text)

    done = await drive(ask, Order(first=7, tasks=20, in_flight=3))
    assert sorted(asked) == [question(number) for number in range(7, 27)]
    assert (done.tasks, most) == (20, 3)


async def test_a_wrong_answer_ends_the_drive() -> None:
    async def ask(text: str) -> object:
        return answer(1)

    with pytest.raises(ExceptionGroup) as failed:
        await drive(ask, Order(first=1, tasks=2, in_flight=1))
    assert failed.group_contains(ValueError, match="question 2 was answered wrongly")


def test_a_driver_reads_and_writes_lines() -> None:
    program = "import asyncio; from benchmarks import driver, question\nasync def ask(t): return question.found(t)\n"
    orders = "".join(json.dumps({"first": first, "tasks": 5, "in_flight": 2}) + "\n" for first in (0, 5))
    done = subprocess.run(
        [sys.executable, "-c", f"{program}asyncio.run(driver.serve(ask))"],
        input=orders, capture_output=True, text=True, check=True, cwd=ROOT, timeout=30,
    )  # fmt: skip
    ready, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert ready == "ready"
    assert [Drive(**one).tasks for one in answers] == [5, 5]


def test_the_figures_are_kept_with_commit_and_machine(tmp_path: Path) -> None:
    path = results.write(tmp_path / "made", {"latency": {"p50_ms": 1.0}}, ("abc", "abc"))
    kept = json.loads(path.read_text())
    assert kept["latency"] == {"p50_ms": 1.0}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ\.json", path.name)
    assert {"processor", "cores", "memory_bytes", "system", "python", "broker"} == kept["machine"].keys()
    assert kept["commit"] == "abc"
    assert "at" in kept


def test_a_commit_during_the_measurement_is_reported(tmp_path: Path) -> None:
    kept = json.loads(results.write(tmp_path, {}, ("abc", "def")).read_text())
    assert kept["commit"] == "abc to def"


def test_a_summary_has_medians_and_the_median_of_the_ratios() -> None:
    weft = [weft_round(per_second) for per_second in (300, 100, 200)]
    autogen = [AutogenRound(drive_at(per_second), 0.2) for per_second in (100, 100, 50)]
    figures = summary(weft, autogen)
    assert figures["weft_tasks_per_second"] == 200
    assert figures["autogen_tasks_per_second"] == 100
    assert figures["ratio"] == 3.0
    assert figures["broker_us_per_event"] == 2.0
    assert json.loads(json.dumps(figures))["cpu_ms_per_1000_tasks"] == dict.fromkeys(PROCESSES, 8.0)
    assert "ratio 3.00; broker 2.0 µs per event" in report(figures, 64)


def drive_at(per_second: float) -> Drive:
    return Drive(tasks=600, seconds=600 / per_second, cpu_seconds=0.6, p50_ms=1.0, p99_ms=2.0)


def weft_round(per_second: float) -> WeftRound:
    return WeftRound(drive_at(per_second), dict.fromkeys(PROCESSES, 8.0), {"fcall": (4.0, 17.0)}, 0.1)


def test_cpu_time_of_a_process_grows_while_it_works() -> None:
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))
    assert cpu_seconds(os.getpid()) > before


async def test_at_a_rate_a_task_counts_from_when_it_was_due() -> None:
    """A driver that is late makes the task look slow: a closed loop would hide that."""
    started: list[float] = []

    async def ask(text: str) -> object:
        if not started:
            started.append(time.perf_counter())
            time.sleep(0.1)  # the driver's own thread is busy
        return found(text)

    done = await drive(ask, Order(0, 20, 0, per_second=200.0))
    assert done.tasks == 20
    assert done.p50_ms > 20


async def test_refusals_at_a_rate_are_counted_and_have_no_time() -> None:
    async def ask(text: str) -> object:
        if int(text[:9]) % 2:
            raise Refused
        return found(text)

    done = await drive(ask, Order(0, 10, 0, per_second=10_000.0))
    assert (done.tasks, done.refused) == (5, 5)


async def test_a_refusal_in_a_closed_loop_fails_the_order() -> None:
    async def ask(_: str) -> object:
        raise Refused

    with pytest.raises(ExceptionGroup):
        await drive(ask, Order(0, 10, 2))


def test_the_page_shows_the_published_comparison() -> None:
    page = PAGE.read_text(encoding="utf-8")
    figures = published()
    assert page == with_section(page, section(figures)), "run: make bench ARGS='page benchmarks/results/published.json'"
    assert PICTURE.read_text() == picture(figures["comparison"]["systems"])


def test_a_picture_has_a_bar_for_each_system_the_fastest_first() -> None:
    def figures(per_second: float, keeps: str = "each step") -> dict[str, object]:
        return {"tasks_per_second": per_second, "keeps": keeps}

    drawn = picture({"Weft": figures(200), "slow": figures(1), "fast": figures(400, "nothing")})
    names = ElementTree.fromstring(drawn).findall("{http://www.w3.org/2000/svg}text[@text-anchor='end']")
    assert [name.text for name in names] == ["fast", "Weft", "slow"]


def test_a_page_without_a_place_for_the_comparison_is_refused() -> None:
    with pytest.raises(SystemExit, match="no place for the comparison"):
        with_section("# Performance", "figures")


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_each_system_has_its_driver_and_its_lock(system: System) -> None:
    assert (LOCKS / f"{system.lock}.in").exists()
    assert "--hash=sha256:" in (LOCKS / f"{system.lock}.txt").read_text()
    for command in (system.driver, *system.workers.values()):
        module = next(word.partition(":")[0] for word in command if word.startswith(DRIVERS))
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()


async def test_a_child_is_killed_with_the_processes_that_it_started(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print(1, flush=True); sys.stdin.read()"
    child = await Child.start("parent", [sys.executable, "-c", script], {}, tmp_path / "log")
    await child.ready()
    members = session(child.pid)
    assert len(members) == 2
    await child.kill()
    await asyncio.to_thread(_until_gone, members)


def _until_gone(members: list[int]) -> None:
    for pid in members:
        with contextlib.suppress(ProcessLookupError):  # it is gone already
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], 30)
            os.close(descriptor)
