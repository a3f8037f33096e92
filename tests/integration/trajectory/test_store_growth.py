"""Turns take linear space on the record stream and in the store, within a run and over the tasks of an instance."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from pydantic_ai import messages as ai

from runtime_core.runs.model_step import ModelCall
from runtime_core.telemetry.redaction import Redactor
from runtime_core.trajectory.store import RecordEntry, TrajectoryStore
from runtime_core.wire.contents import UNSHORTENED_BYTES, SentLists
from runtime_core.wire.step import ENCODER, INCOMPLETE, STEPS, Step
from tests.integration.trajectory.stores import Database
from tests.integration.trajectory.test_store_contents import TURNS, counts, stored_bytes
from weft import AgentContext, App
from weft.testing import LocalApp

Messages = list[dict[str, Any]]  # Any: JSON of pydantic-ai


def turn(number: int) -> Messages:
    """A question and its answer in pydantic-ai's format."""
    asked = ai.ModelRequest([ai.UserPromptPart(f"question {number} " + "x" * 200)])
    said = ai.ModelResponse([ai.TextPart(f"answer {number} " + "y" * 200)], model_name="m", finish_reason="stop")
    made: Messages = ai.ModelMessagesTypeAdapter.dump_python([asked, said], mode="json")
    return made


def call(path: str, messages: Sequence[object], run: str = "r") -> Step:
    step = Step(run=run, step=path, kind="model", name="m", status="completed", started=1.0, ended=2.0, owner="me")
    step.input = msgspec.Raw(ENCODER.encode({"messages": messages, "model": "m", "settings": {}}))
    step.output = msgspec.Raw(ENCODER.encode({"message": messages[-1], "finish_reason": "stop"}))
    return step


class Recorded:
    """Commits rows to a store, as a process does."""

    def __init__(self, store: TrajectoryStore, secrets: Redactor | None = None) -> None:
        self.store = store
        self.secrets = secrets or Redactor()
        self.told = SentLists()
        self.bytes = 0
        self.entries = 0

    async def shortened(self, *rows: Step) -> bytes:
        record, new = await self.told.shortened(ENCODER.encode(rows), self.secrets.rows)
        self.told.remember(new)
        self.bytes += len(record)
        return record

    async def commit(self, task: str, *rows: Step) -> bytes:
        record = await self.shortened(*rows)
        self.entries += 1
        await self.store.write("weft", 0, 1, [RecordEntry(f"{self.entries}-0", task, record, None)])
        return record

    async def messages(self, task: str) -> list[Messages]:
        found = await self.store.task("weft", task)
        assert found is not None
        assert not any(INCOMPLETE in step.attributes for step in found.steps)
        return [json.loads(bytes(step.input))["messages"] for step in found.steps]


@pytest.mark.parametrize("tasks", [False, True], ids=["one run", "tasks of one instance"])
async def test_turns_take_linear_room(store: TrajectoryStore, database: Database, tasks: bool) -> None:
    recorded = Recorded(store)
    history: Messages = []
    sizes: list[tuple[int, int]] = []
    read: list[RecordEntry] = []
    for number in range(1, TURNS + 1):
        history += ({"role": role, "content": f"{role} {number}"} for role in ("user", "assistant"))
        rows = await recorded.shortened(call("1" if tasks else str(number), history))
        read.append(RecordEntry(f"{number}-0", f"t-{number if tasks else 0}", rows, None))
        if number % 50 == 0:
            # As a recorder does that is a little behind: many commits in one transaction.
            await store.write("weft", 0, 1, read)
            read.clear()
        if number in (TURNS // 2, TURNS):
            sizes.append((recorded.bytes, await stored_bytes(database)))
    # Output and chain both hold each answer.
    assert await counts(database) == {
        "weft_steps": TURNS,
        "weft_contents": 2 * TURNS,
        "weft_lists": 2 * TURNS,
        "weft_uses": TURNS,
    }
    (half_record, half_store), (record, stored) = sizes
    # What is told whole again now and then falls unevenly: 2 messages for each one, in all.
    assert record < 3 * half_record
    assert stored < 2.05 * half_store
    # As they are given, the messages of 1,000 turns would be 45 MB.
    assert record < 1_000 * TURNS
    recorded.entries = TURNS
    await recorded.commit("other", call("1", history))
    assert await recorded.messages("other") == [history]


async def test_restored_json_equals_the_original_byte_for_byte(store: TrajectoryStore) -> None:
    recorded, history = Recorded(store, Redactor(["a secret word"])), []
    for number in range(1, 40):
        history += turn(number)
        if number == 7:
            history.append({"kind": "odd", "text": "a secret word", "n": 1.50, "ü": ["\u2028", {}]})
    rows = [call(str(number), history[: 2 * number]) for number in range(1, 40)]
    # Another branch of the conversation, the same list again, a window over it, an empty one.
    rows += [
        call("50", [*history[:30], {"kind": "aside"}]),
        call("51", history[:40]),
        call("52", history[:40]),
        call("53", history[30:50]),
    ]
    for row in rows:
        await recorded.commit("t", row)
        # The same rows told whole, as another process would.
        whole = recorded.secrets.data(ENCODER.encode([row]))
        entry = RecordEntry(f"{recorded.entries}-1", "whole", whole, None)
        await store.write("weft", 0, 1, [entry])
    one, other = await store.task("weft", "t"), await store.task("weft", "whole")
    assert one is not None
    assert other is not None
    assert [bytes(step.input) for step in one.steps] == [bytes(step.input) for step in other.steps]
    assert b"***" in bytes(one.steps[20].input)
    assert b"a secret word" not in ENCODER.encode(one.steps)


async def test_rows_of_one_commit_build_on_each_other(store: TrajectoryStore) -> None:
    recorded, history = Recorded(store), []
    for number in range(1, 21):
        history += turn(number)
    record = await recorded.commit("t", *(call(str(number), history[: 2 * number]) for number in range(1, 21)))
    assert sum(bool(step.input_after) for step in STEPS.decode(record)) >= 15
    assert [len(messages) for messages in await recorded.messages("t")] == [2 * number for number in range(1, 21)]


async def rows_after(recorded: Recorded, *lists: Sequence[object]) -> list[bool]:
    """Return which rows of these lists hold only new messages."""
    return [bool(STEPS.decode(await recorded.shortened(call("1", messages)))[0].input_after) for messages in lists]


async def test_a_list_is_sent_in_full_at_first_and_whenever_it_has_doubled(store: TrajectoryStore) -> None:
    history = [message for number in range(1, 40) for message in turn(number)]
    assert len(ENCODER.encode([call("1", history[:6])])) > UNSHORTENED_BYTES
    recorded = Recorded(store)
    assert await rows_after(recorded, history[:6], history[:10], history[:12], history[:22], history[:24]) == [
        False,
        True,
        False,
        True,
        False,
    ]
    recorded.told.forget()
    assert await rows_after(recorded, history[:26], history[:28]) == [False, True]
    # A commit that was refused has told nothing.
    recorded.told.forget()
    await recorded.told.shortened(ENCODER.encode([call("1", history[:26])]), recorded.secrets.rows)
    assert await rows_after(recorded, history[:28]) == [False]


@pytest.mark.parametrize(
    "given", [b"[1]", b'{"messages":3}', b'{"messages":[]}', b'{"messages":', b'"messages"', b'{"messages":{}}']
)
async def test_other_rows_are_sent_unchanged(given: bytes) -> None:
    step = call("1", turn(1))
    step.input = msgspec.Raw(given)
    step.output = msgspec.Raw(b'"%b"' % (b"x" * UNSHORTENED_BYTES))
    record = ENCODER.encode([step])
    assert await SentLists().shortened(record, Redactor().rows) == (record, {})


async def test_an_erased_beginning_is_reported(store: TrajectoryStore) -> None:
    recorded, history = Recorded(store), [message for number in range(1, 20) for message in turn(number)]
    await recorded.commit("first", call("1", history[:20]))
    await store.delete("weft", "first")
    await recorded.commit("second", call("1", history[:22]))
    found = await store.task("weft", "second")
    assert found is not None
    assert found.steps[0].attributes == {INCOMPLETE: True}
    assert json.loads(bytes(found.steps[0].input))["messages"] == history[20:22]


@pytest.fixture
def talk() -> App:
    app = App("talk")

    @app.agent("talker")
    async def talker(ctx: AgentContext, turns: int) -> int:
        history: Messages = ctx.state.get("history", [])
        for _ in range(turns):
            number = len(history) // 2
            asked, said = turn(number)
            asked["parts"][0]["timestamp"] = ctx.now().isoformat()

            async def answer(request: object, call: ModelCall, said: dict[str, Any] = said) -> object:
                return {"message": said, "finish_reason": "stop", "usage": {"tokens": 1}}

            history.append(asked)
            history.append((await ctx.model("m", {"messages": history, "model": "m"}, answer))["message"])
            await ctx.sleep(0.001)
        ctx.state["history"] = history
        return len(history)

    return app


async def test_a_conversation_across_turns_and_tasks_is_read_unchanged(talk: App) -> None:
    local = LocalApp(talk, trajectory=True)
    async with local as client:
        for number in range(1, 5):
            task = await client.submit("talker", 6, key="one", task_id=f"talk-{number}")
            assert (await task.result(timeout=60)).value() == 12 * number
        found = [await local.recorded(f"talk-{number}", timeout=60) for number in range(1, 5)]
    calls = [step for trajectory in found for step in trajectory.steps if step.kind == "model"]
    lists = [json.loads(bytes(step.input))["messages"] for step in calls]
    assert [len(messages) for messages in lists] == [2 * number + 1 for number in range(24)]
    for shorter, longer in itertools.pairwise(lists):
        assert longer[: len(shorter)] == shorter
    assert not any(INCOMPLETE in step.attributes for step in calls)
