"""The promises of every engine, as base classes of the engines' tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime_core.engines.runtime_engine import CallFailed
from runtime_core.errors import ConfigurationError
from tests.contracts.engine import functions
from weft.engines import EngineCall, RuntimeEngine
from weft.errors import InvalidInput

WAIT = 60.0
"""Patience of a test, which decides nothing."""


async def until(true: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(WAIT):
            while not true():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it never came to it: {what}") from None


def open_gate(folder: str, gate: str = "gate") -> None:
    (Path(folder) / gate).touch()


class EnginePromises:
    """Inherit it, name the class `Test…`, and give it the fixture `engine`: one that runs `workers` calls at once.

    An engine's calls must see this machine's files, since that is how tests and calls wait for each other.
    """

    workers = 3

    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        return str(tmp_path)

    async def test_results_are_in_the_order_of_the_calls(self, engine: RuntimeEngine, folder: str) -> None:
        """The first call ends last."""
        calls = [
            EngineCall(functions.hold, (folder, "a", "begun-c")),
            EngineCall(functions.hold, (folder, "b", "begun-a")),
            EngineCall(functions.hold, (folder, "c", "begun-b")),
        ]
        assert await engine.agather(*calls) == ["a", "b", "c"]
        assert await engine.map(functions.same, range(20)) == list(range(20))

    async def test_execute_returns_a_list_for_a_list_and_a_dict_for_a_dict(self, engine: RuntimeEngine) -> None:
        assert await engine.execute([functions.add, functions.add_later], 1, right=2) == [3, 3]
        assert await engine.execute({"a": functions.add, "b": EngineCall(functions.add, (7,))}, 1) == {"a": 1, "b": 7}

    async def test_empty_input_gives_empty_output(self, engine: RuntimeEngine) -> None:
        assert await engine.execute([]) == []
        assert await engine.execute({}) == {}
        assert await engine.agather() == []
        assert await engine.map(functions.add, []) == []

    async def test_an_engine_calls_functions_of_all_kinds(self, engine: RuntimeEngine) -> None:
        calls: list[Callable[..., object] | EngineCall] = [
            functools.partial(functions.add, 1, right=1),
            EngineCall(functions.add_later, (1,), {"right": 2}),
            functools.partial(functions.Adder(2).add, 2),
            functools.partial(functions.add_later, 2, 3),
            EngineCall(len, ("sechs.",)),
        ]
        assert await engine.agather(*calls) == [2, 3, 4, 5, 6]

    @pytest.mark.parametrize(
        "value",
        [
            "ünïcode 🙂 \x00",
            b"\x00" * 24_000_000,
            "x" * 8_000_000,
            list(range(300_000)),
            None,
            {"deep": [{"er": (1, 2)}]},
        ],
        ids=["unicode", "bytes", "text", "list", "none", "nested"],
    )
    async def test_values_of_any_size_go_there_and_back(self, engine: RuntimeEngine, value: object) -> None:
        assert (await engine.map(functions.same, [value, value])) == [value, value]

    async def test_at_most_the_limit_run_at_once(self, engine: RuntimeEngine, folder: str) -> None:
        running = asyncio.create_task(
            engine.agather(
                *(EngineCall(functions.hold_and_count, (folder, str(number))) for number in range(4 * self.workers))
            )
        )
        # A call that goes on before all have counted would be missing from the last one's count.
        await until(lambda: functions.count_counted(folder) >= self.workers, "all workers are busy")
        open_gate(folder)
        counts = await running
        assert max(counts) == self.workers

    async def test_the_loop_continues_while_calls_run(self, engine: RuntimeEngine, folder: str) -> None:
        """This loop opens the gate. If a call blocked it, nobody would."""
        running = asyncio.create_task(engine.agather(EngineCall(functions.hold, (folder, "a"))))
        await until(lambda: functions.count_begun(folder) == 1, "the call runs")
        open_gate(folder)
        assert await running == ["a"]

    async def test_a_failure_affects_only_its_call(self, engine: RuntimeEngine) -> None:
        calls = [
            EngineCall(functions.add, (1,)),
            EngineCall(functions.fail, ("no connection",), name="rank"),
            EngineCall(functions.add, (3,)),
        ]
        first, failed, third = await engine.agather(*calls, return_exceptions=True)
        assert (first, third) == (1, 3)
        assert isinstance(failed, CallFailed)
        assert (failed.index, failed.name, failed.type, failed.message) == (1, "rank", "ValueError", "no connection")
        assert str(failed) == "call 1 (rank): ValueError: no connection"
        assert isinstance(failed.__cause__, ValueError)

    async def test_without_return_exceptions_the_first_in_order_is_raised_when_all_have_ended(
        self, engine: RuntimeEngine, folder: str
    ) -> None:
        calls = [
            EngineCall(functions.hold, (folder, "a")),
            EngineCall(functions.fail, ("first",)),
            EngineCall(functions.fail, ("second",)),
        ]
        running = asyncio.create_task(engine.agather(*calls))
        await until(lambda: functions.count_begun(folder) == 1, "the call runs")
        open_gate(folder)
        with pytest.raises(CallFailed, match=r"call 1 \(fail\): ValueError: first"):
            await running

    async def test_fail_fast_does_not_wait_for_the_rest(self, engine: RuntimeEngine, folder: str) -> None:
        calls = [EngineCall(functions.hold, (folder, "a")), EngineCall(functions.fail, ("at once",))]
        with pytest.raises(CallFailed, match=r"call 1 \(fail\): ValueError: at once"):
            await engine.agather(*calls, fail_fast=True)
        open_gate(folder)

    @pytest.mark.parametrize(
        ("function", "kind"),
        [
            (functions.leave, "SystemExit"),
            (functions.fail_strangely, "Strange"),
            (functions.stop_iteration, "StopIteration"),
        ],
    )
    async def test_any_exception_fails_only_its_call(
        self, engine: RuntimeEngine, function: Callable[[], None], kind: str
    ) -> None:
        failed, good = await engine.agather(function, functools.partial(functions.add, 1), return_exceptions=True)
        assert isinstance(failed, CallFailed)
        assert failed.type == kind
        assert good == 1
        assert await engine.map(functions.add, [1]) == [1], "the engine goes on"

    async def test_an_invalid_function_is_refused_before_anything_begins(
        self, engine: RuntimeEngine, folder: str
    ) -> None:
        with pytest.raises(InvalidInput, match=r"calls\[1\]: 'rank' is not a function"):
            await engine.agather(EngineCall(functions.begun, (folder, "a")), EngineCall("rank"))  # type: ignore[arg-type]
        with pytest.raises(
            ConfigurationError, match=r"calls\[0\]: timeout_seconds=0 must be a number of seconds above 0"
        ):
            await engine.agather(EngineCall(functions.add, timeout_seconds=0))
        whatever: tuple[Any, ...] = (3, "rank", functions.add)
        for wrong in whatever:
            with pytest.raises(InvalidInput, match=r"funcs: .* is not a list or dict of functions"):
                await engine.execute(wrong, 1)
        assert functions.count_begun(folder) == 0

    async def test_the_limit_of_a_call_does_not_affect_others(self, engine: RuntimeEngine, folder: str) -> None:
        calls = [
            EngineCall(functions.hold, (folder, "slow", "never"), timeout_seconds=3),
            EngineCall(functions.hold, (folder, "well")),
        ]
        running = asyncio.create_task(engine.agather(*calls, return_exceptions=True))
        await until(lambda: functions.count_begun(folder) == 2, "both run")
        open_gate(folder)
        slow, well = await running
        assert well == "well"
        assert isinstance(slow, CallFailed)
        assert slow.type == "TimeoutError"
        assert slow.message.startswith("the call did not end within 3 s")
        assert await engine.map(functions.add, range(2 * self.workers)) == list(range(2 * self.workers)), (
            "its place is free again"
        )
        open_gate(folder, "never")

    async def test_a_cancel_frees_the_workers(self, engine: RuntimeEngine, folder: str) -> None:
        calls = [EngineCall(functions.hold, (folder, str(number))) for number in range(self.workers + 1)]
        running = asyncio.create_task(engine.agather(*calls))
        await until(lambda: functions.count_begun(folder) == self.workers, "all workers are busy")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await engine.map(functions.add, range(2 * self.workers)) == list(range(2 * self.workers))
        assert functions.count_begun(folder) == self.workers, "what had not begun never begins"
        open_gate(folder)

    async def test_calls_that_claim_the_same_run_one_after_the_other(self, engine: RuntimeEngine, folder: str) -> None:
        claimed = [EngineCall(functions.alone, (folder, str(number)), claims=("gpu:0", "port")) for number in range(4)]
        claimed.append(EngineCall(functions.alone, (folder, "4"), claims=("port", "gpu:0")))
        free = EngineCall(functions.hold, (folder, "free", "gate"))
        running = asyncio.create_task(engine.agather(*claimed, free))
        await until(lambda: functions.count_begun(folder) == 2, "the first of them and the one without a claim run")
        open_gate(folder)
        assert await running == [None] * 5 + ["free"]

    async def test_close_ends_running_work(self, engine: RuntimeEngine, folder: str) -> None:
        running = asyncio.create_task(engine.agather(EngineCall(functions.hold, (folder, "a")), return_exceptions=True))
        await until(lambda: functions.count_begun(folder) == 1, "the call runs")
        await engine.close()
        [failed] = await running
        assert isinstance(failed, CallFailed)
        assert failed.type == "EngineClosed"
        with pytest.raises(ConfigurationError, match=f"{type(engine).__name__} was closed"):
            await engine.map(functions.add, [1])
        open_gate(folder)
