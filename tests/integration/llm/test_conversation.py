"""The conversation of one agent: calls of tools, corrections, guards, memory, approvals. One process, a real server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import BaseModel

from runtime_core.declare.declaration import RetryPolicy
from runtime_core.integrations.aworld.events.replay import replay
from runtime_core.llm.tokens import KeepRecent, Price, Summarise
from tests.integration.llm.desk import Desk, ask, failure, questions, until
from tests.openai_server.driver import Call, OpenAIServer, Usage, When, answer, calls, output, refusal, turns
from weft import AgentContext, App, Approve, LLMAgent, SubmitOptions
from weft.aworld import HookPoint
from weft.hooks import Change, Deny, HookEvent
from weft.testing import LocalApp


class Report(BaseModel):
    """A report."""

    city: str
    year: int


@pytest.fixture
def desk(openai_server: OpenAIServer) -> Desk:
    return Desk(openai_server)


# ---- the loop ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["openai-chat:gpt-test", "openai-responses:gpt-test"])
async def test_tools_are_called_until_the_model_answers(desk: Desk, api: str) -> None:
    desk.add(model=api, tools=["search"], instructions="Be brief.")
    desk.server.play(
        turns(
            calls(("search", {"query": "a"}), ("search", {"query": "b", "limit": 1})),
            calls(("search", {"query": "c"})),
            answer("Done: {result}"),
        )
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client) == 'Done: {"found":"c is fine","limit":5}'
    assert sorted(desk.called) == [("search", "a"), ("search", "b"), ("search", "c")]
    assert desk.server.counts().repeated == 0


async def test_the_model_gets_instructions_tools_and_results_in_the_order_of_its_calls(desk: Desk) -> None:
    desk.add(tools=["search", "files.*"], instructions="Be brief.")
    desk.server.play(turns(calls(("search", {"query": "a"}), ("files_read_file", {"path": "b"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        await ask(client, "Read b.")
    system, user, called, *results = desk.said()
    assert (system["role"], system["content"]) == ("system", "Be brief.")
    assert (user["role"], user["content"]) == ("user", "Read b.")
    assert [call["id"] for call in called["tool_calls"]] == [result["tool_call_id"] for result in results]
    assert json.loads(results[0]["content"]) == {"found": "a is fine", "limit": 5}
    assert "FileNotFoundError: there is no b" in results[1]["content"]
    assert [tool["name"] for tool in desk.tools()] == ["search", "files_read_file"]


async def test_calls_of_one_answer_run_concurrently(desk: Desk) -> None:
    both = asyncio.Barrier(2)

    @desk.app.tool
    async def meet(name: str) -> str:
        # Each waits for the other: one after the other would wait for ever.
        await asyncio.wait_for(both.wait(), 60)
        return name

    desk.add(tools=[meet])
    desk.server.play(turns(calls(("meet", {"name": "a"}), ("meet", {"name": "b"})), answer("{results}")))
    async with LocalApp(desk.app) as client:
        assert await ask(client)
    assert desk.results() == ["a", "b"]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (("search", '{"query": '), "arguments are not a JSON object"),
        (("search", {"limit": 1}), "arguments.query: is missing"),
        (("search", {"query": "a", "limit": "many"}), "arguments.limit"),
        (("find", {"query": "a"}), "there is no tool named 'find'; the tools are: search"),
    ],
)
async def test_an_invalid_call_is_reported_to_the_model_and_not_made(
    desk: Desk, call: tuple[str, Any], told: str
) -> None:
    desk.add(tools=["search"])
    desk.server.play(turns(calls(call, ("search", {"query": "b"})), answer("Sorry.")))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Sorry."
    wrong, right = desk.results()
    assert told in wrong
    # Said before anything is sent: the tool's own refusal would read otherwise.
    assert "the call was not made" in wrong or "there is no tool" in wrong
    assert "b is fine" in right
    assert desk.called == [("search", "b")]


async def test_calls_that_stay_wrong_end_the_conversation(desk: Desk) -> None:
    desk.add(tools=["search"], tool_retries=2)
    desk.server.play(calls(("search", {"limit": 1})))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "ToolCallsInvalid"
    assert "agent 'researcher' called search wrongly 3 times (tool_retries=2)" in message
    assert "arguments.query" in message
    assert desk.server.counts().complete == 3


@pytest.mark.parametrize("result", [float("nan"), object()], ids=["nan", "object"])
async def test_a_result_that_json_cannot_hold_ends_the_conversation(desk: Desk, result: object) -> None:
    """The tool's code is wrong: the model is not asked to correct it."""

    @desk.app.tool
    def measure() -> object:
        return {"measured": result}

    desk.add(tools=[measure])
    desk.server.play(turns(calls(("measure", {})), answer("{result}")))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "InvalidResult"
    assert message.startswith("result: ")
    assert "cannot be written as JSON" in message
    assert desk.server.counts().complete == 1


async def test_a_repeated_call_gets_a_warning_and_then_ends_the_conversation(desk: Desk) -> None:
    desk.add(tools=["search"])
    desk.server.play(calls(("search", {"query": "a"})))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "RepeatedCall"
    assert "search 6 times in a row" in message
    noted = ["3 times in a row" in result or "4 times" in result or "5 times" in result for result in desk.results()]
    assert noted == [False, False, True, True, True]
    assert len(desk.called) == 5


async def test_a_conversation_without_an_end_stops_at_max_turns(desk: Desk) -> None:
    desk.add(tools=["search"], max_turns=4)
    desk.server.play(calls(("search", {"query": "{turn}"})))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "TurnLimit"
    assert "agent 'researcher' has not answered after max_turns=4 model calls" in message
    assert desk.server.counts().complete == 4


async def test_an_empty_answer_is_requested_again(desk: Desk) -> None:
    desk.add()
    desk.server.play(turns(answer(" "), answer("Here.")))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Here."
    assert "the answer is empty" in desk.said()[-1]["content"]


async def test_a_tool_that_no_app_offers_is_one_clear_error(desk: Desk) -> None:
    agent = LLMAgent("openai-chat:gpt-test", base_url=desk.server.url, api_key=desk.server.key, tools=["publish"])
    desk.app.add_agent("researcher", agent, retry=RetryPolicy(attempts=2, base_seconds=0.01))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert (kind, message) == (
        "ToolsMissing",
        "agent 'researcher' names tool 'publish', which no app offers: start the service that declares it, or correct "
        "the name",
    )


# ---- structured output -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["tool", "native", "text"])
async def test_a_structured_answer_is_read(desk: Desk, mode: str) -> None:
    desk.add(output=Report, output_mode=mode)
    said = output({"city": "Bern", "year": 2024}) if mode != "text" else answer('{"city": "Bern", "year": 2024}')
    desk.server.play(said)
    async with LocalApp(desk.app) as client:
        assert await ask(client) == {"city": "Bern", "year": 2024}
    if mode == "text":
        assert '"city"' in desk.said()[0]["content"], "the instructions hold the schema"


@pytest.mark.parametrize("mode", ["tool", "native"])
async def test_an_invalid_structured_answer_is_reported_to_the_model(desk: Desk, mode: str) -> None:
    desk.add(output=Report, output_mode=mode)
    desk.server.play(output({"city": "Bern"}).but(times=2), output({"city": "Bern", "year": 2024}))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == {"city": "Bern", "year": 2024}
    assert "output.year: Field required" in json.dumps(desk.said()[-1])
    assert desk.server.counts().complete == 3


async def test_an_answer_that_stays_wrong_ends_the_conversation(desk: Desk) -> None:
    desk.add(output=Report)
    desk.server.play(output({"city": "Bern", "year": "soon"}))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "OutputInvalid"
    assert "after 3 attempts (output_retries=2)" in message
    assert "output.year" in message
    assert desk.server.counts().complete == 3


async def test_text_instead_of_the_output_tool_is_reported_to_the_model(desk: Desk) -> None:
    desk.add(output=list[int])
    desk.server.play(turns(answer("One and two."), output({"response": [1, 2]})))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == [1, 2]
    assert "include your response in a tool call" in desk.said()[-1]["content"]


async def test_calls_beside_a_final_answer_run_and_must_succeed(desk: Desk) -> None:
    desk.add(output=Report, tools=["pay", "files.*"])
    final = Call("final_result", {"city": "Bern", "year": 2024})
    desk.server.play(
        turns(
            calls(final, ("pay", {"amount": 1}), ("files_read_file", {"path": "a"})),
            calls(final, ("pay", {"amount": 2})),
        )
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client) == {"city": "Bern", "year": 2024}
    assert [name for name, _ in desk.called].count("pay") == 2
    assert "not used as the final result" in desk.results()[0]
    assert desk.server.counts().complete == 2


# ---- instructions and memory -------------------------------------------------------------------------------


async def test_instructions_may_be_a_function_whose_steps_are_journaled(desk: Desk) -> None:
    seen: list[str] = []

    async def instructions(ctx: AgentContext) -> str:
        weather = await ctx.step(lambda: seen.append("asked") or "rain")  # type: ignore[call-overload, func-returns-value]
        return f"It is {ctx.now():%Y}, with {weather}."

    desk.add(instructions=instructions, tools=["search"])
    desk.server.play(turns(calls(("search", {"query": "a"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        await ask(client)
    assert "with rain." in desk.said()[0]["content"]
    assert seen == ["asked"]


async def test_an_instance_with_a_key_remembers_its_conversation(desk: Desk) -> None:
    desk.add(instructions="Be brief.", tools=["search"])
    desk.server.play(turns(calls(("search", {"query": "a"})), answer("Found."), answer("As I said: {user}")))
    async with LocalApp(desk.app) as client:
        assert await ask(client, "Find a.", key="k") == "Found."
        assert await ask(client, "What was it?", key="k") == "As I said: What was it?"
        roles = [message["role"] for message in desk.said()]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]
        assert await ask(client, "Find a.", key="other") == "Found.", "another instance starts over"


def messages_sent(desk: Desk) -> int:
    return len(desk.said())


async def test_a_remembered_conversation_has_a_bound(desk: Desk) -> None:
    desk.add(memory=KeepRecent(max_tokens=60, keep_first=0))
    desk.server.play(answer("Noted: {user}"))
    async with LocalApp(desk.app) as client:
        sent = []
        for number in range(8):
            await ask(client, f"Number {number} {'word ' * 10}", key="k")
            sent.append(messages_sent(desk))
    assert sent[:2] == [1, 3]
    assert max(sent) == sent[-1] < 8, "only the latest exchanges are kept"


async def test_by_default_a_remembered_conversation_is_kept_within_the_state(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LLMAgent("m").memory == KeepRecent(max_tokens=50_000, keep_first=0)
    monkeypatch.setattr("runtime_core.llm.model_call.MEMORY_MAX_BYTES", 9_000)
    desk.add()
    desk.server.play(answer("Noted."))
    async with LocalApp(desk.app) as client:
        for text, known in (("One.", 1), ("Two.", 3), ("x" * 6_500, 5), ("Three.", 3), ("y" * 10_000, 5), ("Four.", 1)):
            await ask(client, text, key="k")
            assert messages_sent(desk) == known, text[:9]


async def test_a_remembered_conversation_is_summarised_by_a_model(desk: Desk) -> None:
    desk.add(memory=Summarise(max_tokens=60, keep_tokens=20, prompt="Sum up."))
    desk.server.play(answer("They count.", when=When(user="Sum up.")), answer("Noted."))
    async with LocalApp(desk.app) as client:
        for number in range(4):
            await ask(client, f"Number {number} {'word ' * 10}", key="k")
    # The last request is that for the next summary.
    first, *_, last = [message["content"] for message in desk.said(-2)]
    assert first.endswith("They count.")
    assert last.startswith("Number 3")


async def test_a_conversation_is_remembered_in_a_custom_store(desk: Desk) -> None:
    kept: dict[str, list[dict[str, Any]]] = {}

    class Store:
        async def load(self, key: str) -> list[dict[str, Any]] | None:
            return kept.get(key)

        def save(self, key: str, messages: list[dict[str, Any]]) -> None:
            kept[key] = messages

    desk.add(memory=Store())
    desk.server.play(answer("Noted."))
    for known in (1, 3):  # the second app has no state of the first
        async with LocalApp(desk.app) as client:
            await ask(client, "Again.", key="k")
            assert messages_sent(desk) == known
    assert list(kept) == ["researcher/k"]


async def test_an_agent_may_remember_nothing(desk: Desk) -> None:
    desk.add(memory=None)
    desk.server.play(answer("Noted."))
    async with LocalApp(desk.app) as client:
        for _ in range(2):
            await ask(client, "Again.", key="k")
            assert messages_sent(desk) == 1


async def test_hooks_see_the_compaction_of_a_conversation_and_may_refuse_it(desk: Desk) -> None:
    desk.add(memory=KeepRecent(max_tokens=60, keep_first=0), window=KeepRecent(max_tokens=40, keep_first=0))
    desk.server.play(answer("Noted."))
    seen: list[tuple[str, str, int]] = []
    for point in ("before_context_compact", "after_context_compact"):

        @desk.app.hook(point, name="note", always=True)
        def note(event: HookEvent) -> None:
            seen.append((str(event.point), event.name, event.payload["count"]))
            assert len(event.payload["messages"]) == event.payload["count"]

    @desk.app.hook("before_context_compact", name="keep", guard=True)
    def keep(event: HookEvent) -> Deny:
        return Deny("nothing may be left out")

    async with LocalApp(desk.app) as client:
        await ask(client, f"One {'word ' * 10}", key="k")
        assert seen == []
        await ask(client, f"Two {'word ' * 10}", key="k")
        assert seen[:2] == [("before_context_compact", "request", 3), ("after_context_compact", "request", 1)]
        assert seen[2:] == [("before_context_compact", "memory", 4), ("after_context_compact", "memory", 2)]
        task = await client.submit(
            "researcher", "Three.", key="k", options=SubmitOptions(hooks={"before_context_compact": ["keep"]})
        )
        assert "nothing may be left out" in (await task.result(timeout=60)).msg


async def test_every_declared_hook_point_fires(desk: Desk) -> None:
    fired: set[str] = set()
    for point in HookPoint:

        @desk.app.hook(point, name="note", always=True)
        def note(event: HookEvent) -> None:
            fired.add(str(event.point))

    desk.add(tools=["pay", "search"], approval=[Approve("pay")], memory=KeepRecent(max_tokens=1, keep_first=0))
    desk.server.play(calls(("pay", {"amount": 5}), ("search", {"query": "a"}), when=When(turn=0)), answer("Done."))

    @desk.app.agent("fails")
    async def fails(ctx: AgentContext) -> None:
        await ctx.tool("missing")

    async with LocalApp(desk.app) as client:
        for _ in range(2):
            task = await client.submit("researcher", "Pay.", key="k")
            async for event in task.stream():
                if event.type == "weft.human.requested":
                    await task.signal(event.data["request_id"], True)
        await (await client.submit("fails")).result(timeout=60)
    assert fired == {str(point) for point in HookPoint}


async def test_without_a_key_a_conversation_starts_over_or_from_a_given_history(desk: Desk) -> None:
    desk.add()
    desk.server.play(answer("{turn}"))
    history = [{"role": "user", "content": "My name is Ada."}, {"role": "assistant", "content": "Hello Ada."}]
    async with LocalApp(desk.app) as client:
        await ask(client, "One.")
        await ask(client, "Two.")
        assert [message["content"] for message in desk.said()] == ["Two."]
        await ask(client, {"prompt": "Who am I?", "history": history})
    assert [message["content"] for message in desk.said()] == ["My name is Ada.", "Hello Ada.", "Who am I?"]


async def test_a_structured_answer_is_remembered_with_its_call(desk: Desk) -> None:
    desk.add(output=Report)
    desk.server.play(output({"city": "Bern", "year": 2024}))
    async with LocalApp(desk.app) as client:
        await ask(client, "One.", key="k")
        assert await ask(client, "Two.", key="k") == {"city": "Bern", "year": 2024}
    roles = [message["role"] for message in desk.said()]
    assert roles == ["user", "assistant", "tool", "user"]


# ---- approval ----------------------------------------------------------------------------------------------


async def test_a_human_approves_denies_and_edits_while_other_calls_run(desk: Desk) -> None:
    desk.add(tools=["pay", "search"], approval=[Approve("pay", when=lambda arguments: arguments["amount"] > 10)])
    desk.server.play(
        turns(
            calls(
                *(("pay", {"amount": amount}) for amount in (5, 20, 30, 40)),
                ("search", {"query": "a"}),
            ),
            answer("Done."),
        )
    )
    prompt = "researcher wants to call pay"
    async with LocalApp(desk.app) as client:
        task = await client.submit("researcher", "Pay.", stream=True)
        asked: dict[int, str] = {}
        async for event in task.stream():
            if event.type == "weft.human.requested":
                assert event.data["prompt"] == prompt
                asked[event.data["data"]["amount"]] = event.data["request_id"]
                if len(asked) == 3:
                    break
        assert sorted(asked) == [20, 30, 40], "all are asked at once, the small one not at all"
        await task.signal(asked[20], True)
        await task.signal(asked[30], {"verdict": "deny", "reason": "too much"})
        await task.signal(asked[40], {"verdict": "edit", "value": {"amount": 4}})
        assert (await task.result(timeout=60)).value() == "Done."
    assert sorted(desk.called, key=str) == [("pay", 20), ("pay", 4), ("pay", 5), ("search", "a")]
    small, approved, denied, edited, found = desk.results()
    assert (small, approved) == ("paid 5", "paid 20")
    assert "a human denied it: too much" in denied
    assert json.loads(edited) == {"note": 'A human edited the arguments to {"amount":4}.', "result": "paid 4"}
    assert "a is fine" in found


async def test_independent_calls_do_not_wait_for_a_human(desk: Desk) -> None:
    desk.add(tools=["pay", "search"], approval=[Approve("pay")])
    desk.server.play(turns(calls(("pay", {"amount": 1}), ("search", {"query": "a"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        task = await client.submit("researcher", "Pay.", stream=True)
        [(_, question)] = (await questions(task, 1)).items()
        await until(lambda: desk.called == [("search", "a")], "the search is made")
        await task.signal(question["request_id"], True)
        assert (await task.result(timeout=60)).value() == "Done."


async def test_silence_is_a_denial_unless_a_default_says_otherwise(desk: Desk) -> None:
    desk.add(
        tools=["pay", "search"],
        approval=[Approve("pay", timeout=0.05), Approve("search", timeout=0.05, default=True)],
    )
    desk.server.play(turns(calls(("pay", {"amount": 1}), ("search", {"query": "a"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Done."
    assert desk.called == [("search", "a")]
    assert "nobody approved it in time" in desk.results()[0]


async def test_calls_ask_for_approval_once_the_cost_is_reached(desk: Desk) -> None:
    desk.add(
        tools=["search"],
        approval=[Approve(cost_over=1.5, timeout=0.05)],
        prices={"gpt-test": Price(input=1.0, output=1.0)},
    )
    used = Usage(input=1_000_000, output=0)
    desk.server.play(
        turns(
            calls(("search", {"query": "a"}), usage=used),
            calls(("search", {"query": "b"}), usage=used),
            answer("Done."),
        )
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Done."
    assert desk.called == [("search", "a")]


# ---- hooks -------------------------------------------------------------------------------------------------


async def test_a_hook_denies_one_call_and_changes_another(desk: Desk) -> None:
    @desk.app.hook("before_tool_call", guard=True, always=True)
    def careful(event: HookEvent) -> Deny | Change | None:
        if event.name == "pay":
            return Deny("not on Sundays")
        return Change({**event.payload, "limit": 1})

    desk.add(tools=["pay", "search"])
    desk.server.play(turns(calls(("pay", {"amount": 1}), ("search", {"query": "a"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Done."
    denied, changed = desk.results()
    assert "not on Sundays" in denied
    assert json.loads(changed) == {"found": "a is fine", "limit": 1}
    assert desk.called == [("search", "a")]


async def test_decisions_follow_the_answer_as_changed_by_a_hook(desk: Desk) -> None:
    @desk.app.hook("after_llm_call", always=True)
    def no_payments(event: HookEvent) -> Change:
        message = event.payload["message"]
        kept = [part for part in message["parts"] if part.get("tool_name") != "pay"]
        return Change({**event.payload, "message": {**message, "parts": kept}})

    desk.add(tools=["pay", "search"])
    desk.server.play(turns(calls(("pay", {"amount": 1}), ("search", {"query": "a"})), answer("Done.")))
    async with LocalApp(desk.app) as client:
        assert await ask(client) == "Done."
    assert desk.called == [("search", "a")]


async def test_a_hook_that_removes_the_answers_message_fails_the_run_with_the_point(desk: Desk) -> None:
    @desk.app.hook("after_llm_call", always=True)
    def shorten(event: HookEvent) -> Change:
        return Change({**event.payload, "message": "Done."})

    desk.add()
    desk.server.play(answer("Done."))
    async with LocalApp(desk.app) as client:
        type, message = await failure(client)
    assert type == "InvalidInput"
    assert message.startswith("message.parts: is missing")
    assert "after the hooks of after_llm_call" in message


# ---- replays -----------------------------------------------------------------------------------------------


async def test_a_recorded_conversation_is_replayed_by_other_tools_and_rules_without_a_call(desk: Desk) -> None:
    desk.add(tools=["search", "files.*"], instructions="Be brief.")
    desk.server.play(turns(calls(("search", {"query": "a"}), ("find", {})), answer("Done: {result}")))
    local = LocalApp(desk.app, trajectory=True)
    async with local as client:
        task = await client.submit("researcher", "Find a.")
        said = (await task.result(timeout=60)).value()
        trajectory = await local.recorded(task.task_id)
    later = App("desk")
    tools, rules = ["elsewhere.*", "find"], [Approve("*")]
    later.add_agent("researcher", LLMAgent("openai-chat:gpt-test", api_key="none", tools=tools, approval=rules))
    replayed = await replay(trajectory, task.task_id, later)
    assert replayed.divergences == []
    assert (replayed.run.status, replayed.run.output) == ("completed", said)
    assert desk.called == [("search", "a")]
    assert desk.server.counts().complete == 2


# ---- other ends --------------------------------------------------------------------------------------------


async def test_a_request_that_the_model_refuses_ends_the_task_with_one_line(desk: Desk) -> None:
    desk.add(api_key="sk-no-such-key")
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "WrongKey"
    assert "\n" not in message
    assert "sk-no-such-key" not in message


async def test_a_refusal_ends_the_task_with_the_text_of_the_model(desk: Desk) -> None:
    desk.add()
    desk.server.play(refusal("I must not."))
    async with LocalApp(desk.app) as client:
        kind, message = await failure(client)
    assert kind == "ContentFiltered"
    assert message.endswith(": I must not.")


async def test_a_member_of_the_app_may_be_named_by_the_object(desk: Desk) -> None:
    critic = desk.add("critic", instructions="Criticise.", description="Finds what is wrong.")
    desk.add("leader", instructions="Lead.", members=[critic])
    desk.server.play(
        answer("It is short.", when=When(system="Criticise.")),
        *turns(calls(("critic", {"content": "My draft"})), answer("Critic says: {result}")),
    )
    async with LocalApp(desk.app) as client:
        assert await ask(client, agent="leader") == "Critic says: It is short."
