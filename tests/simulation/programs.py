"""The simulated app: one small interpreter as several agents, and the programs that tasks run.

A program is a list of operations, JSON, such as `[["charge"], ["ask", "beta", "k", [["count"]]]]`.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from runtime_core.bus.topics import TopicSubscription
from runtime_core.declare.declaration import RetryPolicy
from runtime_core.declare.tool import ToolContext
from runtime_core.errors import StepError
from runtime_core.runs.context import AgentContext
from runtime_core.runs.model_step import ModelCall, ModelStep
from tests.simulation.choice_source import ChoiceSource, pick, weighted
from tests.simulation.ledger import LEDGER, Ledger
from tests.simulation.loop import PROCESS
from weft import App, Limit

Op = list[Any]  # Any: JSON
Program = list[Op]

KEYED = ("alpha", "beta")
KEYS = ("k", "l")
NARROW = "narrow"
"""An agent of which one run may be open at a time. Its runs ask only their own agent, so that they do not wait for each
other."""
FRESH, EAGER = "fresh", "eager"
"""The same, where newer runs replace those that wait, after a quiet time; and those that run, too."""
RATE, RATE_SECONDS = 3, 1.0
LATE = "late"
"""An agent that nobody knows before a client subscribes it to `UNHEARD`."""
NEWS, NOTES, UNHEARD = "news", "notes", "quiet"
CHAT, OBJECT = "chat", "object"
"""The topic of agents that are objects, and their type, which is also the name of its agent."""
TOPICS = (NEWS, NOTES, UNHEARD)
SUBSCRIPTIONS = (
    TopicSubscription(NEWS, "alpha"), TopicSubscription("ne", "beta", prefix=True), TopicSubscription(NOTES, "free"),
    TopicSubscription(CHAT, OBJECT),
)  # fmt: skip
LIMIT_SECONDS = 0.5
"""How long a tool with a time limit may take."""
MESSAGES = ("go", "stop")
"""The names of messages to running tasks."""
PATCHES = ("first", "second")
LIMITED = ("charge", "model", "tool", "try", "slim", "once", "ask", "receive", "sleep", "human", "within")
"""The operations that `ctx.wait_for` may stop."""
NO_MESSAGE = "none"
"""The result of a wait for a message that did not come in time."""
TURN_SECONDS = 60.0
"""How long a turn may take."""
RETRY = RetryPolicy(attempts=3, base_seconds=0.1, factor=2.0)


@dataclass(frozen=True, slots=True)
class Mix:
    """Which operations the programs of a history have."""

    engines: bool = False
    """Whether some are compute steps."""
    left_out: frozenset[str] = frozenset()


@cache
def simulated_app() -> App:
    """The app of all histories: declaring it takes longer than a short history runs."""
    app = App("simulated")

    async def play(ctx: AgentContext, program: list[Any]) -> int:
        ledger = LEDGER.get()
        life, said = ledger.begins(ctx.task_id, ctx.run_id), list[str]()
        SPEECH.set((life, said))
        for op in program:
            await perform(ctx, op, ledger)
        ledger.ends(ctx.task_id, ctx.run_id, life, said)
        return len(program)

    for name in ("free", *KEYED, LATE):
        app.agent(name, retry=RETRY, timeout_seconds=TURN_SECONDS)(_named(play))

    async def play_alone(ctx: AgentContext, program: list[Any]) -> int:
        with LEDGER.get().in_slot(f"agent:{ctx.agent_name}||", ctx.task_id, ctx.run_id):
            return await play(ctx, program)

    for name, limit in (
        (NARROW, Limit(running=1)),
        (FRESH, Limit(running=1, debounce=0.3)),
        (EAGER, Limit(running=1, replaces="running")),
    ):
        app.agent(name, retry=RETRY, timeout_seconds=TURN_SECONDS, limit=limit)(_named(play_alone))

    @app.tool(retry=RETRY, limit=[Limit(running=1), Limit(per="input.fails", rate=RATE, seconds=RATE_SECONDS)])
    async def slim(ctx: ToolContext, seconds: float, fails: int) -> int:
        with LEDGER.get().in_slot("tool:slim||", ctx.task_id, ctx.run_id):
            attempt = LEDGER.get().call_begins(ctx.task_id, ctx.run_id)
            await asyncio.sleep(seconds)
        if attempt <= fails:
            raise RuntimeError(f"attempt {attempt} fails")
        return attempt

    @app.tool(retry=RETRY)
    async def work(ctx: ToolContext, seconds: float, fails: int) -> int:
        attempt = LEDGER.get().call_begins(ctx.task_id, ctx.run_id)
        if seconds:
            await asyncio.sleep(seconds)
        if attempt <= fails:
            raise RuntimeError(f"attempt {attempt} fails")
        return attempt

    @app.tool(repeatable=False)
    async def once(ctx: ToolContext, seconds: float) -> int:
        LEDGER.get().once_begins(ctx.task_id, ctx.run_id)
        if seconds:
            await asyncio.sleep(seconds)
        return 1

    @app.tool(retry=RETRY, timeout_seconds=LIMIT_SECONDS)
    async def limited(ctx: ToolContext, seconds: float) -> int:
        ledger = LEDGER.get()
        ledger.call_begins(ctx.task_id, ctx.run_id)
        await asyncio.sleep(seconds)
        if seconds > LIMIT_SECONDS:
            ledger.broken.append(("over limit", f"task {ctx.task_id}, run {ctx.run_id} ran for {seconds} s"))
        return 1

    @app.engine_function(retry=RETRY)
    def compute(seconds: float, fails: int) -> int:
        raise AssertionError("simulated clusters do what it stands for")

    app.check()
    return app


def _named(play: Any) -> Any:  # Any: an agent's function
    async def played(ctx: AgentContext, program: list[Any]) -> int:
        return int(await play(ctx, program))

    return played


async def perform(ctx: AgentContext, op: Op, ledger: Ledger) -> None:
    """Do one operation of a program."""
    match op:
        case ["charge", seconds]:
            holder: list[str] = []
            step = ctx.step(functools.partial(_charge, ctx, ledger, seconds, holder), name="charge")
            holder.append(step.id)
            await step
            ledger.step_is_stored(ctx.task_id, ctx.run_id, step.id)
        case ["model", seconds]:
            model = cast(ModelStep, ctx.model("m", {"messages": []}, functools.partial(_answer, seconds)))
            await model
            ledger.step_is_stored(ctx.task_id, ctx.run_id, model.id)
        case ["tool", seconds, fails]:
            await ctx.tool("work", seconds=seconds, fails=fails)
        case ["try", seconds, fails]:
            with suppress(StepError):
                await ctx.tool("work", seconds=seconds, fails=fails)
        case ["slim", seconds, fails]:
            with suppress(StepError):
                await ctx.tool("slim", seconds=seconds, fails=fails)
        case ["once", seconds]:
            with suppress(StepError):
                await ctx.tool("once", seconds=seconds)
        case ["limited", seconds]:
            with suppress(StepError):
                await ctx.tool("limited", seconds=seconds)
        case ["ray" | "spark" as engine, seconds, fails]:
            with suppress(StepError):
                await ctx.engine(engine).call("compute", seconds=seconds, fails=fails)
        case ["ask", agent, key, program]:
            await ctx.agent(agent, program, key=key)
        case ["gather", programs]:
            await ctx.gather(*(_branch(ctx, program, ledger) for program in programs))
        case ["send", agent, key, program]:
            sent = ctx.send(agent, program, key=key)
            ledger.sends[ctx.task_id, ctx.run_id, sent.id] = f"{agent}/{key}" if key else "", await sent
        case ["publish", topic, source]:
            published = ctx.publish(topic, message(source), source=source)
            sender = f"{ctx.agent_name}/{ctx.key}" if ctx.key else ""
            ledger.publishes[ctx.task_id, ctx.run_id, published.id] = topic, source, sender
            await published
        case ["emit"]:
            await _say(ctx, "said")
        case ["stream", pieces, seconds, outside]:
            life, _ = SPEECH.get()
            # What comes from outside differs from one life of the code to the next, in its number, too.
            for number in range(pieces + (life % 3 if outside else 0)):
                await _say(ctx, f"{life if outside else ''}:{number}")
                if number % 2:
                    await asyncio.sleep(seconds)
        case ["released", program]:
            async with ctx.released():
                for inner in program:
                    await perform(ctx, inner, ledger)
        case ["sleep", seconds]:
            await ctx.sleep(seconds)
        case ["human", seconds]:
            await ctx.human("well?", timeout=seconds, default="nobody")
        case ["receive", name, seconds]:
            received = ctx.receive(name, timeout=seconds, default=NO_MESSAGE) if seconds else ctx.receive(name)
            ledger.message_is_received(ctx.task_id, ctx.run_id, received.id, SPEECH.get()[0], await received)
        case ["within", seconds, inner]:
            late = ""
            try:
                await ctx.wait_for(_branch(ctx, inner, ledger), seconds)
            except TimeoutError:
                late = "too "
            # A replay that decides otherwise requests another step, and parks the run. A part that fails ends the run,
            # since its letter may be driven again, with another result.
            await ctx.step(_nothing, name=f"{late}late")
        case ["patched", name, before, after]:
            old = PROCESS.get().release == 0 or not ctx.patched(name)
            await perform(ctx, before if old else after, ledger)
        case ["count"]:
            ctx.state.setdefault("log", []).append(f"{ctx.task_id}/{ctx.run_id}")
        case ["flaky", attempts]:
            if ctx.attempt <= attempts:
                raise RuntimeError("an attempt of the agent fails")
        case _:
            raise AssertionError(op)


SPEECH: ContextVar[tuple[int, list[str]]] = ContextVar("SPEECH")
"""The life of the code that runs, and its output so far."""


async def _say(ctx: AgentContext, piece: str) -> None:
    await ctx.emit(piece, chunk=True)
    SPEECH.get()[1].append(piece)


def message(source: str) -> Program:
    """Return the program in a published message: several agents run it."""
    return [["count"]] if source else [["charge", 0]]


async def _branch(ctx: AgentContext, program: Program, ledger: Ledger) -> None:
    for op in program:
        await perform(ctx, op, ledger)


async def _charge(ctx: AgentContext, ledger: Ledger, seconds: float, holder: list[str]) -> int:
    ledger.step_begins(ctx.task_id, ctx.run_id, holder[0])
    if seconds:
        await asyncio.sleep(seconds)
    ledger.step_ends(ctx.task_id, ctx.run_id, holder[0])
    return 1


async def _nothing() -> None:
    """Takes a step."""


async def _answer(seconds: float, request: object, call: ModelCall) -> str:
    if seconds:
        await asyncio.sleep(seconds)
    call.spend(tokens=1, model="m")
    return "answer"


def draw_mix(choice_source: ChoiceSource, *, engines: bool, narrow: bool) -> Mix:
    """Return what programs have: everything, or with `narrow` about half of it."""
    droppable = (name for _, name in OPERATIONS if name != PLAINEST) if narrow else ()
    return Mix(engines, frozenset(name for name in droppable if choice_source.choose(2)))


def draw_program(choice_source: ChoiceSource, mix: Mix, *, agent: str, depth: int = 0) -> Program:
    """Return a program for an agent."""
    count = 1 + choice_source.choose(3 if depth else 4)
    program: Program = [_draw_op(choice_source, mix, depth) for _ in range(count)]
    if agent in (*KEYED, NARROW):
        program.insert(choice_source.choose(len(program) + 1), ["count"])
        if not choice_source.choose(4 if agent in KEYED else 2):
            program.insert(choice_source.choose(len(program) + 1), _draw_released(choice_source, mix, agent, depth))
    return program


def _draw_released(choice_source: ChoiceSource, mix: Mix, agent: str, depth: int) -> Op:
    """Return a block without the key, in which the agent often asks itself, perhaps under the key that it gave up."""
    inside = [_draw_op(choice_source, mix, depth + 1) for _ in range(1 + choice_source.choose(2))]
    if not choice_source.choose(3):
        program: Program = [["count"], _draw_op(choice_source, mix, 2)]
        if depth < 2 and not choice_source.choose(2):
            program.append(_draw_released(choice_source, mix, agent, depth + 1))
        inside.insert(choice_source.choose(len(inside) + 1), ["ask", agent, pick(choice_source, KEYS), program])
    return ["released", inside]


def draw_topic(choice_source: ChoiceSource) -> tuple[str, str]:
    """Return a topic, and the source that names the instance of each receiving agent."""
    return pick(choice_source, TOPICS), pick(choice_source, (KEYS[0], KEYS[1], ""))


def _draw_limited_op(choice_source: ChoiceSource, mix: Mix, depth: int) -> Op:
    """Return an operation that may be stopped in the middle. It emits nothing: the last piece may be out or not."""
    while True:
        op = _draw_op(choice_source, mix, depth + 1)
        if op[0] in LIMITED:
            return op


def _draw_branch(choice_source: ChoiceSource, mix: Mix) -> Op:
    """Return an operation that runs beside others: often a request, perhaps to the instance that makes it."""
    if choice_source.choose(2):
        return _draw_op(choice_source, mix, 2)
    program: Program = [["count"], _draw_op(choice_source, mix, 2)]
    return ["ask", pick(choice_source, KEYED), pick(choice_source, KEYS), program]


OPERATIONS = (
    (8, "charge"), (4, "tool"), (4, "long"), (6, "ask"), (2, "once"), (1, "emit"), (2, "stream"), (3, "slim"),
    (3, "narrow"), (2, "publish"), (1, "sleep"), (2, "gather"), (1, "send"), (1, "human"), (1, "flaky"), (1, "try"),
    (1, "broken"), (3, "model"), (1, "limited"), (3, "receive"), (2, "within"), (1, "patched"),
)  # fmt: skip
PLAINEST = "charge"
COMPUTE = ((10, "ray"), (5, "spark"))
IN_PLACE = {
    "ask": "emit", "narrow": "slim", "publish": "emit", "gather": "charge", "send": "emit", "within": "receive",
    "patched": "try",
}  # fmt: skip
"""What stands in the place of an operation that has others in it, in the innermost programs."""


def _at_depth(name: str, depth: int) -> str:
    return name if depth < 2 else IN_PLACE.get(name, name)


def _draw_op(choice_source: ChoiceSource, mix: Mix, depth: int) -> Op:
    drawn = [(weight, _at_depth(name, depth)) for weight, name in OPERATIONS]
    kept = [(weight, name) for weight, name in drawn if name not in mix.left_out]
    kind = weighted(choice_source, [*(COMPUTE if mix.engines else ()), *kept])
    match kind:
        case "charge":
            return ["charge", 0]
        case "long":
            return ["charge", pick(choice_source, (0.3, 1.0, 1.0, 4.0))]
        case "model":
            return ["model", pick(choice_source, (0, 0.5))]
        case "tool":
            return ["tool", pick(choice_source, (0, 0.2, 1.0)), pick(choice_source, (0, 0, 0, 1))]
        case "slim":
            return ["slim", pick(choice_source, (0.1, 0.5, 2.0)), pick(choice_source, (0, 0, 1, 3))]
        case "narrow":
            inside = draw_program(choice_source, mix, agent=NARROW, depth=2)
            agent = pick(choice_source, (NARROW, NARROW, FRESH, EAGER))
            key = pick(choice_source, (*KEYS, "", "")) if agent == NARROW else ""
            return [pick(choice_source, ("ask", "ask", "send")), agent, key, inside]
        case "try":
            return ["try", 0, pick(choice_source, (3, 1))]
        case "broken":
            return ["tool", 0, 3]
        case "stream":
            # From outside of the run: each life of its code says something else.
            return ["stream", pick(choice_source, (3, 7)), pick(choice_source, (0, 0.3)), choice_source.choose(2)]
        case "once":
            return ["once", pick(choice_source, (0, 0.5, 2.0))]
        case "limited":
            return ["limited", pick(choice_source, (0.2, 0.7, 2.0))]
        case "ask" | "send":
            agent = pick(choice_source, ("beta", "alpha", "free"))
            key = pick(choice_source, KEYS) if agent in KEYED else ""
            return [kind, agent, key, draw_program(choice_source, mix, agent=agent, depth=depth + 1)]
        case "ray" | "spark":
            return [kind, pick(choice_source, (0.3, 1.0, 4.0)), pick(choice_source, (0, 0, 0, 1))]
        case "publish":
            return [kind, *draw_topic(choice_source)]
        case "receive":
            return ["receive", pick(choice_source, MESSAGES), pick(choice_source, (1.0, 0, 4.0))]
        case "within":
            return ["within", pick(choice_source, (0.3, 1.0)), [_draw_limited_op(choice_source, mix, depth)]]
        case "patched":
            return [
                "patched",
                pick(choice_source, PATCHES),
                _draw_op(choice_source, mix, 2),
                _draw_op(choice_source, mix, 2),
            ]
        case "gather":
            branches = [[_draw_branch(choice_source, mix)] for _ in range(2 + choice_source.choose(2))]
            return ["gather", branches]
        case "sleep":
            return ["sleep", pick(choice_source, (0.1, 1.0))]
        case "human":
            return ["human", pick(choice_source, (1.0, 3.0))]
        case "flaky":
            return ["flaky", pick(choice_source, (1, 2, 1, 2, RETRY.attempts))]
        case _:
            return [kind]
