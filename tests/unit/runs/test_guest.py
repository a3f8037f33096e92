"""Code with its own asyncio tasks inside a run: suspended, replayed, cancelled, diverged."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_core.consumer.effects import Completed, Failed, Suspended
from runtime_core.declare.schema import encode
from runtime_core.errors import InvalidInput, LocalStepError, Retry, ToolError
from runtime_core.runs.calls import call
from runtime_core.runs.context import AgentContext
from runtime_core.runs.guest import Guest, current_guest, host
from runtime_core.runs.scheduler import Branch
from tests.unit.runs.run_world import Code, Program, World


class Library:
    """Tools and local steps for any task, as another library would use them."""

    def __init__(self, ctx: AgentContext, guest: Guest, done: list[str] | None = None) -> None:
        self.ctx = ctx
        self.guest = guest
        self.done = [] if done is None else done

    async def tool(self, name: str, argument: int = 0, group: str = "") -> Any:
        def work(branch: Branch) -> Awaitable[Any]:
            return call(self.ctx._run, branch, "tool", name, data=encode({"n": argument}, "arguments"))

        return await self.guest.perform(f"tool:{name}", work, key=str(argument), group=group)

    async def local(self, name: str, body: Callable[[], Awaitable[object]] | None = None) -> Any:
        async def once() -> object:
            self.done.append(name)
            return await body() if body is not None else {"made": name}

        async def work() -> object:
            return await self.ctx.step(once, name=name)

        return await self.guest.perform(f"local:{name}", lambda branch: work())


def hosting(program: Callable[[Library], Awaitable[Any]], done: list[str] | None = None) -> Code:
    async def code(ctx: AgentContext, input: Any) -> object:
        async def inside(guest: Guest) -> object:
            return await program(Library(ctx, guest, done))

        return await host(ctx, inside)

    return code


async def play(code: Code, **world: Any) -> tuple[Completed | Failed, World]:
    there = World(**world)
    return await there.play(code), there


async def output(code: Code, **world: Any) -> Any:
    result, _ = await play(code, **world)
    assert isinstance(result, Completed), result
    return json.loads(result.output)


@pytest.mark.parametrize("cold", [False, True])
async def test_operations_may_start_in_any_task(cold: bool) -> None:
    async def program(library: Library) -> object:
        first = await library.tool("first")
        both = await asyncio.gather(library.tool("left", 1), library.tool("right", 2))
        made = await library.local("made")
        return [first["of"], *(one["of"] for one in both), made]

    done: list[str] = []
    result, world = await play(hosting(program, done), cold=cold)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == ["first", "left", "right", {"made": "made"}]
    assert [name for _, _, name, _ in world.asked] == ["first", "left", "right"]
    assert done == ["made"]


async def test_operations_of_a_group_wake_the_run_once() -> None:
    """Three calls are made in one turn, and one turn continues."""

    async def program(library: Library) -> object:
        return len(await asyncio.gather(*(library.tool("look", place, group="batch") for place in range(3))))

    result, world = await play(hosting(program), cold=True)
    assert isinstance(result, Completed), result
    assert (json.loads(result.output), world.turns) == (3, 2)

    async def alone(library: Library) -> object:
        return len(await asyncio.gather(*(library.tool("look", place) for place in range(3))))

    _, world = await play(hosting(alone), cold=True)
    assert world.turns == 4


@pytest.mark.parametrize("cold", [False, True])
async def test_the_code_continues_after_one_result_while_others_are_missing(cold: bool) -> None:
    async def program(library: Library) -> object:
        async def chain() -> object:
            await library.tool("quick")
            return (await library.tool("next"))["of"]

        return await asyncio.gather(chain(), library.tool("slow"))

    step = ""
    world = World(cold=cold)
    world.unanswered = frozenset()
    world.run = None
    program_of = Program(hosting(program))
    assert isinstance(await world.turn(program_of), Suspended)
    step = next(step for step, _, name, _ in world.asked if name == "quick")
    world.answer_one(step)
    assert world.awake()
    if cold:
        assert world.run is not None
        await world.run.aclose()
        world.run = None
    assert isinstance(await world.turn(program_of), Suspended)
    assert [name for _, _, name, _ in world.asked] == ["quick", "slow", "next"]
    result = await world.play(program_of)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == ["next", {"of": "slow", "got": {"n": 0}}]


@pytest.mark.parametrize("cold", [False, True])
async def test_errors_are_the_same_live_and_replayed(cold: bool) -> None:
    async def program(library: Library) -> object:
        async def fails() -> object:
            raise LookupError("not there")

        seen = []
        for outside in (partial(library.tool, "bad"), partial(library.local, "fails", fails)):
            try:
                await outside()
            except (ToolError, LocalStepError) as error:
                seen.append([type(error).__name__, error.type, error.message])
        return [*seen, (await library.tool("after"))["of"]]

    assert await output(hosting(program), cold=cold) == [
        ["ToolError", "ValueError", "bad is bad"],
        ["LocalStepError", "LookupError", "not there"],
        "after",
    ]


async def test_an_invalid_request_raises_in_the_code() -> None:
    async def program(library: Library) -> object:
        try:
            await library.guest.perform("tool:x", lambda branch: library.ctx.tool("x", what=object()))
        except Exception as error:
            return type(error).__name__
        return ""

    assert await output(hosting(program)) == "InvalidInput"


@pytest.mark.parametrize("cold", [False, True])
async def test_the_first_of_several_is_the_same_at_each_replay(cold: bool) -> None:
    """The broker's times decide the order, even if all results are there."""

    async def program(library: Library) -> object:
        tasks = [asyncio.create_task(library.tool("race", place)) for place in range(3)]
        order = []
        for task in asyncio.as_completed(tasks):
            order.append((await task)["got"]["n"])
            order.append((await library.tool("after", order[-1]))["got"]["n"])
        return order

    for seed in range(10):
        result, world = await play(hosting(program), cold=cold, order=random.Random(seed))
        assert isinstance(result, Completed), result
        order = json.loads(result.output)
        again = await World(journal=dict(world.journal)).play(hosting(program))
        assert isinstance(again, Completed), again
        assert json.loads(again.output) == order


async def ending(code: Code, journal: dict[str, bytes]) -> str:
    """Return how a run with this journal ends; the world answers each call by its content."""
    result = await World(journal=dict(journal), cold=True).play(code)
    return result.output.decode() if isinstance(result, Completed) else f"{result.type}: {result.message}"


async def test_each_prefix_of_the_journal_leads_to_the_same_end() -> None:
    """A process may die after any write; a repeat finds what the first attempt wrote."""

    def code(done: list[str]) -> Code:
        async def program(library: Library) -> object:
            async def one(place: int) -> list[object]:
                looked = await library.tool("look", place)
                made = await library.local(f"made-{place}")
                try:
                    await library.tool("bad", place)
                except ToolError as error:
                    return [looked["got"], made, error.message]
                return []

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(place)) for place in range(3)]
                await library.local("beside")
            return [task.result() for task in tasks]

        return hosting(program, done)

    for seed in range(8):
        done: list[str] = []
        result, world = await play(code(done), order=random.Random(seed))
        assert isinstance(result, Completed), result
        assert sorted(done) == ["beside", "made-0", "made-1", "made-2"]
        written = list(world.journal.items())
        assert len(written) == 10
        for length in range(len(written) + 1):
            again: list[str] = []
            assert await ending(code(again), dict(written[:length])) == result.output.decode()
            kept = sum(1 for step, _ in written[:length] if step in world.recorded)
            assert len(again) == 4 - kept, "done again though it was journaled"


@pytest.mark.parametrize("before", [False, True])
async def test_a_crash_at_each_write_repeats_no_stored_step(before: bool) -> None:
    async def program(library: Library) -> object:
        async def one(place: int) -> object:
            await library.tool("look", place, group="batch")
            return await library.local(f"made-{place}")

        return await asyncio.gather(*(one(place) for place in range(3)))

    wanted = await output(hosting(program))
    crashed = 0
    # The turn that asks, the three local steps; and the last turn, before its commit has reached the broker.
    for at in range(1, 6 if before else 5):
        result, world = await play(hosting(program), crash_at=at, crash_before=before, cold=True)
        assert isinstance(result, Completed), result
        assert json.loads(result.output) == wanted
        assert len(world.asked) == 3
        assert len(world.recorded) == 3
        crashed += world.writes >= at
    assert crashed == (5 if before else 4)


@pytest.mark.parametrize("cold", [False, True])
async def test_a_cancelled_task_of_the_code_leaves_its_operation(cold: bool) -> None:
    """The call runs on, its result is dropped, and the run does not wait for it."""

    async def program(library: Library) -> object:
        slow = asyncio.create_task(library.tool("slow"))
        await library.tool("quick")
        slow.cancel()
        try:
            await slow
        except asyncio.CancelledError:
            return (await library.tool("last"))["of"]
        return ""

    world = World(cold=cold)
    program_of = Program(hosting(program))
    assert isinstance(await world.turn(program_of), Suspended)
    slow = next(step for step, _, name, _ in world.asked if name == "slow")
    world.unanswered = frozenset({slow})
    result = await world.play(program_of)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == "last"
    assert sorted(name for _, _, name, _ in world.asked) == ["last", "quick", "slow"]


async def test_a_call_cancelled_before_it_began_is_never_sent() -> None:
    async def program(library: Library) -> object:
        task = asyncio.create_task(library.tool("never"))
        await asyncio.sleep(0)
        task.cancel()
        return (await library.tool("asked"))["of"]

    result, world = await play(hosting(program))
    assert isinstance(result, Completed), result
    assert [name for _, _, name, _ in world.asked] == ["asked"]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_timer_of_the_code_is_a_step(cold: bool) -> None:
    async def program(library: Library) -> object:
        before = asyncio.get_running_loop().time()
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time() - before >= 3600

    result, world = await play(hosting(program), cold=cold)
    assert isinstance(result, Completed), result
    assert json.loads(result.output) is True
    assert [(kind, name) for _, kind, name, _ in world.asked] == [("timer", "sleep")]


@pytest.mark.parametrize("cold", [False, True])
async def test_a_limit_that_the_code_sets_holds_at_each_replay(cold: bool) -> None:
    """The tool answers 1 s after its request, by the broker's clock: too late for the first limit."""

    async def program(library: Library) -> object:
        seen = []
        for limit in (0.5, 60.0):
            try:
                async with asyncio.timeout(limit):
                    await library.tool("look", int(limit))
                seen.append("answered")
            except TimeoutError:
                seen.append("too late")
        return seen

    for seed in range(6):
        result, world = await play(hosting(program), cold=cold, order=random.Random(seed))
        assert isinstance(result, Completed), result
        seen = json.loads(result.output)
        assert seen[0] == "too late"
        again = await World(journal=dict(world.journal)).play(hosting(program))
        assert isinstance(again, Completed), again
        assert json.loads(again.output) == seen


async def test_a_limit_ends_work_of_this_process() -> None:
    """The broker does not know the timer during the turn: the process measures and journals it."""
    begun: list[str] = []

    async def program(library: Library) -> object:
        async def endless() -> object:
            begun.append("endless")
            await asyncio.Event().wait()
            return None

        try:
            async with asyncio.timeout(0.05):
                await library.local("endless", endless)
        except TimeoutError:
            return "too late"
        return ""

    world = World()
    # The broker's clock goes on by whole seconds: the note of the timer is due.
    result = await world.play(hosting(program))
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == "too late"
    assert begun == ["endless"]
    again = await World(journal=dict(world.journal)).play(hosting(program))
    assert isinstance(again, Completed), again
    assert (json.loads(again.output), begun) == ("too late", ["endless"])


async def test_a_thread_of_the_code_keeps_the_turn_open() -> None:
    """The same turn makes the requests that follow a thread, however long the thread takes."""
    go_on = threading.Event()

    def slow() -> int:
        go_on.wait(30)
        return 7

    async def program(library: Library) -> object:
        async def beside() -> object:
            number = await asyncio.to_thread(slow)
            return (await library.tool("late", number))["got"]

        return await asyncio.gather(library.tool("early"), beside())

    world = World()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    assert isinstance(await world.turn(Program(hosting(program))), Suspended)
    assert sorted(name for _, _, name, _ in world.asked) == ["early", "late"]
    result = await world.play(hosting(program))
    assert isinstance(result, Completed), result
    assert json.loads(result.output)[1] == {"n": 7}


async def test_a_thread_that_another_library_starts_wakes_the_code() -> None:
    """Nothing waits for it: its end wakes the run while another step is running."""
    open_gate = asyncio.Event()

    async def program(library: Library) -> object:
        async def gate() -> object:
            await open_gate.wait()
            return "open"

        async def opens() -> object:
            open_gate.set()
            return "opened"

        async def beside() -> object:
            await anyio.to_thread.run_sync(lambda: go_on.wait(30))
            return await library.local("opens", opens)

        return await asyncio.gather(library.local("gate", gate), beside())

    go_on = threading.Event()
    asyncio.get_running_loop().call_later(0.1, go_on.set)
    assert await output(hosting(program)) == ["open", "opened"]


async def test_a_request_that_became_invalid_raises_in_the_code() -> None:
    """This holds even if the journal has the operation: the code that creates it has changed."""

    def code(argument: object) -> Code:
        async def program(library: Library) -> object:
            try:
                return await library.guest.tool("tool:x", "x", encode({"n": argument}, "arguments"))
            except InvalidInput as error:
                return error.field

        return hosting(program)

    def refusing(branch: Branch) -> Awaitable[Any]:
        raise InvalidInput("arguments", "cannot be written")

    async def changed(library: Library) -> object:
        try:
            return await library.guest.perform("tool:x", refusing)
        except InvalidInput as error:
            return error.field

    world = World()
    assert isinstance(await world.turn(Program(code(1))), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    result = await world.play(Program(hosting(changed), timeout_seconds=20.0))
    assert isinstance(result, Completed), result
    assert json.loads(result.output) == "arguments"


async def test_changed_code_parks_the_run() -> None:
    async def before(library: Library) -> object:
        await library.tool("old")
        return await library.tool("more")

    async def after(library: Library) -> object:
        await library.tool("new")
        return await library.tool("more")

    world = World()
    assert isinstance(await world.turn(Program(hosting(before))), Suspended)
    world.answer_one()
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    result = await world.turn(Program(hosting(after)))
    assert isinstance(result, Failed)
    assert result.parked
    assert "tool:new" in result.message or "nothing more" in result.message
    assert [name for _, _, name, _ in world.asked] == ["old"]


async def test_other_arguments_at_the_same_place_park_the_run() -> None:
    def code(argument: str) -> Code:
        async def program(library: Library) -> object:
            return await library.guest.perform(
                "tool:look", lambda branch: call(library.ctx._run, branch, "tool", "look", data=encode(argument, "a"))
            )

        return hosting(program)

    world = World()
    assert isinstance(await world.turn(Program(code("one"))), Suspended)
    world.answer_one()
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    result = await world.turn(Program(code("other")))
    assert isinstance(result, Failed)
    assert result.parked


async def test_code_that_ends_without_a_requested_step_parks_the_run() -> None:
    async def before(library: Library) -> object:
        return await library.tool("old")

    async def after(library: Library) -> object:
        return "done"

    world = World()
    assert isinstance(await world.turn(Program(hosting(before))), Suspended)
    assert world.run is not None
    await world.run.aclose()
    world.run = None
    result = await world.turn(Program(hosting(after)))
    assert isinstance(result, Failed)
    assert result.parked


async def test_a_retry_is_not_visible_to_the_code() -> None:
    caught: list[str] = []

    async def program(library: Library) -> object:
        async def later() -> object:
            raise Retry(after=5, reason="not now")

        try:
            return await library.local("later", later)
        except Exception as error:
            caught.append(type(error).__name__)
        return ""

    result, _ = await play(hosting(program))
    assert isinstance(result, Failed)
    assert (result.type, result.retry_after_seconds, caught) == ("Retry", 5, [])


async def test_cleanup_of_the_code_runs_when_the_run_is_cancelled_or_dropped() -> None:
    ended: list[str] = []

    async def program(library: Library) -> object:
        async def guarded(name: str) -> None:
            try:
                await library.tool(name)
            finally:
                ended.append(name)

        async with asyncio.TaskGroup() as group:
            for name in ("one", "two"):
                group.create_task(guarded(name))
        return None

    for how in ("cancel", "drop"):
        ended.clear()
        world = World()
        assert isinstance(await world.turn(Program(hosting(program))), Suspended)
        assert world.run is not None
        if how == "cancel":
            world.run.cancel("enough")
            result = await world.run.advance()
            assert isinstance(result, Failed)
            assert (result.type, result.message) == ("Cancelled", "enough")
        else:
            await world.run.aclose()
        assert sorted(ended) == ["one", "two"]


async def test_a_turn_of_code_that_never_waits_is_limited() -> None:
    async def program(library: Library) -> object:
        await asyncio.Event().wait()
        return None

    result = await World().play(Program(hosting(program), timeout_seconds=0.1))
    assert isinstance(result, Failed)
    assert result.type == "TimeLimit"


@pytest.mark.parametrize("cold", [False, True])
async def test_generators_and_context_variables_of_the_code_stay_with_it(cold: bool) -> None:
    import contextvars

    mine: contextvars.ContextVar[str] = contextvars.ContextVar("mine", default="none")
    closed: list[str] = []

    async def program(library: Library) -> object:
        async def numbers() -> Any:
            try:
                for number in range(3):
                    yield (await library.tool("number", number))["got"]["n"]
            finally:
                closed.append(mine.get())

        mine.set("set")
        generator = numbers()
        found = [await anext(generator), await anext(generator)]
        await generator.aclose()
        assert current_guest() is library.guest
        return found

    hooks = sys.get_asyncgen_hooks()
    assert await output(hosting(program), cold=cold) == [0, 1]
    assert sys.get_asyncgen_hooks() == hooks
    assert closed[-1] == "set"
    assert mine.get() == "none"
    assert current_guest() is None


async def test_sockets_are_refused_with_the_remedy() -> None:
    async def program(library: Library) -> object:
        try:
            await asyncio.open_connection("127.0.0.1", 1)
        except Exception as error:
            return str(error)
        return ""

    assert "into a tool or another step" in await output(hosting(program))


async def test_exits_of_the_code_are_errors_of_the_run() -> None:
    async def program(library: Library) -> object:
        await library.tool("one")
        raise SystemExit(3)

    result, _ = await play(hosting(program))
    assert isinstance(result, Failed)
    assert "sys.exit(3)" in result.message


async def test_code_that_cancels_itself_fails_with_its_agents_name() -> None:
    async def program(library: Library) -> object:
        await library.tool("one")
        raise asyncio.CancelledError

    result, _ = await play(hosting(program))
    assert isinstance(result, Failed)
    assert result.message.startswith("the code of agent 'agent-under-test' cancelled its own task")


async def test_steps_are_named_by_their_kind() -> None:
    """Stored with each run: changed names would park runs that are under way."""

    async def program(library: Library) -> object:
        await asyncio.gather(library.tool("look", 1), library.tool("look", 2))
        await library.local("made")
        return None

    _, world = await play(hosting(program))
    assert sorted(world.journal) == ["1.0.114771419.1", "1.0.222673221.1", "1.0.36347851.1"]


Spec = tuple[str, Any]
leaves = st.one_of(
    st.tuples(st.just("tool"), st.integers(0, 2)),
    st.tuples(st.just("bad"), st.integers(0, 1)),
    st.tuples(st.just("local"), st.integers(0, 2)),
    st.tuples(st.just("sleep"), st.sampled_from([0.0, 0.5, 90.0])),
)
programs = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(["each", "all", "first"]), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=7,
)


async def interpreted(library: Library, spec: Spec) -> Any:
    kind, what = spec
    match kind:
        case "tool":
            return (await library.tool("look", what, group="batch"))["got"]["n"]
        case "bad":
            try:
                return await library.tool("bad", what)
            except ToolError as error:
                return error.message
        case "local":
            return (await library.local(f"made-{what}"))["made"]
        case "sleep":
            return await asyncio.sleep(what, "slept")
        case "each":
            return [await interpreted(library, each) for each in what]
        case "all":
            return list(await asyncio.gather(*(interpreted(library, each) for each in what)))
    tasks = [asyncio.create_task(interpreted(library, each)) for each in what]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return [
        [place for place, task in enumerate(tasks) if task in done],
        [task.result() for task in tasks if task in done],
    ]


@settings(max_examples=60, deadline=None)
@given(spec=programs, seed=st.integers(0, 1000), cold=st.booleans())
def test_any_program_ends_as_its_journal_says(spec: Spec, seed: int, cold: bool) -> None:
    """The whole journal leads to the same end, and so does each prefix without a race."""

    async def check() -> None:
        done: list[str] = []

        def code(done: list[str]) -> Code:
            return hosting(lambda library: interpreted(library, spec), done)

        result, world = await play(code(done), cold=cold, order=random.Random(seed))
        assert isinstance(result, Completed), result
        again: list[str] = []
        assert await ending(code(again), world.journal) == result.output.decode()
        assert not again, "done again though it was journaled"
        if "first" not in repr(spec):
            written = list(world.journal.items())
            for length in range(len(written)):
                assert await ending(code([]), dict(written[:length])) == result.output.decode()

    asyncio.run(check())
