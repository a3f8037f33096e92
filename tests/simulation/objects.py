"""Agents as objects: one type whose handlers call each other in the middle of a turn, several at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from runtime_core.app.app import App
from runtime_core.declare.declaration import Place
from runtime_core.integrations.actors.actor import ActorDefinition, ActorRun, Actors, current_run
from runtime_core.integrations.actors.agents import native
from runtime_core.integrations.actors.identity import AgentId, TopicId, pool_of
from runtime_core.integrations.actors.instances import Instances
from runtime_core.integrations.actors.message import Content, MessageEnvelope, encode_envelope
from runtime_core.integrations.actors.serialization import SerializationRegistry, UnknownPayload
from runtime_core.runs.definition import AgentDefinition
from runtime_core.wire.ids import step_digest
from tests.simulation.choice_source import ChoiceSource, pick, weighted
from tests.simulation.ledger import LEDGER
from tests.simulation.programs import CHAT, KEYS, OBJECT, RETRY, Op, Program

STREAM = f"agent:{pool_of(OBJECT)}"
PROGRAM = "program"
"""The type of all messages."""
INSTANCES = 1
"""How many objects a process keeps: few, so that state is loaded often."""


class Player:
    """Runs the programs that it receives. Its state lists the runs that changed it."""

    def __init__(self, actors: Actors) -> None:
        self._actors = actors
        self._log: list[str] = []

    async def on_message(self, message: UnknownPayload, *, ctx: object) -> None:
        run = current_run(self._actors)
        assert run is not None
        for op in msgspec.json.decode(message.payload):
            await self._perform(run, op)

    async def _perform(self, run: ActorRun, op: Op) -> None:
        match op:
            case ["count"]:
                self._log.append(f"{run.task_id}/{run.run_id}")
            case ["wait", seconds]:
                await asyncio.sleep(seconds)
            case ["ask", requests]:
                # A request that would wait in a circle, or whose handler fails, ends with an error: not this handler's.
                await asyncio.gather(*(self._request(run, key, program) for key, program in requests))
            case ["publish", key, program]:
                envelope = _message(program)
                # The step's id, as the run names it.
                step = f"p{step_digest('publish', CHAT, key, encode_envelope(envelope))}"
                place = run.task_id, run.run_id, f"{step}.{run._asked[step]}"
                LEDGER.get().publishes[place] = CHAT, key, f"{OBJECT}/{run.key}"
                run.publish(TopicId(CHAT, key), envelope)
            case ["flaky", attempts]:
                if run.attempt <= attempts:
                    raise RuntimeError("an attempt of the handler fails")
            case _:
                raise AssertionError(op)

    async def _request(self, run: ActorRun, key: str, program: Program) -> None:
        envelope, token = _message(program, is_rpc=True), self._actors.vocabulary.cancellation_token()
        with suppress(Exception):
            await run.request(AgentId(OBJECT, key), envelope, token)

    async def save_state(self) -> Mapping[str, Any]:  # Any: JSON
        return {"log": self._log}

    async def load_state(self, state: Mapping[str, Any]) -> None:  # Any: JSON
        self._log = list(state["log"])

    async def close(self) -> None:
        """Nothing is open."""


class AppWithObjects:
    """The simulated app and, for one process, its objects."""

    def __init__(self, app: App) -> None:
        self.name, self.version = app.name, app.version
        self.tools, self.functions, self.hooks = app.tools, app.functions, app.hooks
        vocabulary = native()

        async def build(type: str, key: str) -> Player:
            return Player(self.actors)

        instances = Instances(build, vocabulary.keeps_state, INSTANCES)
        self.actors = Actors(vocabulary, SerializationRegistry(), instances, lambda error: None)
        self.actors.shared = True
        definition = ActorDefinition(OBJECT, self.actors, Place(__file__, 1), retry=RETRY)
        self.agents: dict[str, AgentDefinition] = {**app.agents, OBJECT: definition}

    async def stop(self) -> None:
        """End the requests of handlers that still wait."""
        self.actors.stop()


def _message(program: Program, *, is_rpc: bool = False) -> MessageEnvelope:
    return MessageEnvelope(Content(PROGRAM, msgspec.Raw(msgspec.json.encode(program))), is_rpc=is_rpc)


def envelope_of(program: Program) -> dict[str, Any]:  # Any: JSON
    """Return a message to an object from a sender that is no object."""
    return {"content": {"message_type": PROGRAM, "payload": program}}


def draw_object_program(choice_source: ChoiceSource, key: str, above: tuple[str, ...] = ()) -> Program:
    """A program for the object of this key: it counts once, before, between or after its requests.

    `above` are the keys of those who wait for it.
    """
    asks = len(above) < (3 if key in above else 2)
    program = [
        _draw_op(choice_source, (*above, key), asks)
        for _ in range(choice_source.choose(3) if above else 1 + choice_source.choose(2))
    ]
    program.insert(choice_source.choose(len(program) + 1), ["count"])
    return program


def _draw_op(choice_source: ChoiceSource, above: tuple[str, ...], asks: bool) -> Op:
    kind = weighted(choice_source, [(6, "ask" if asks else "wait"), (3, "wait"), (1, "flaky"), (3, "publish")])
    match kind:
        case "ask":
            keys = [pick(choice_source, (KEYS[1], KEYS[0], "m")) for _ in range(1 + choice_source.choose(2))]
            return ["ask", [[key, draw_object_program(choice_source, key, above)] for key in keys]]
        case "wait":
            return ["wait", pick(choice_source, (0.1, 1.0, 4.0))]
        case "publish":
            return ["publish", pick(choice_source, (*KEYS, "m")), [["count"]]]
        case _:
            return ["flaky", 1]
