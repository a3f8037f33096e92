"""How a submit's input is checked by the schema of its agent."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from runtime_core.app.app import App
from runtime_core.declare.manifest import AgentEntry
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.state_manager.admission import InputCheck

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class Source(BaseModel):
    url: str


class Question(BaseModel):
    topic: str
    limit: int = 3
    sources: list[Source] = []


def entry_of(input_type: object) -> AgentEntry:
    app = App("test")

    async def it(ctx: AgentContext, value: object) -> None: ...

    it.__annotations__["value"] = input_type
    app.agent("it")(it)
    return app.manifest().agents["it"]


@pytest.mark.parametrize(
    ("schema", "value", "refusal"),
    [
        (None, object(), None),
        ({}, {"a": 1}, None),
        ({"title": "T"}, 5, None),
        ({"type": "string"}, "x", None),
        ({"type": "string"}, 5, 'data.input: 5 is not of type "string"'),
        ({"type": "integer"}, 5, None),
        ({"type": "integer"}, 5.0, None),
        ({"type": "integer"}, 5.5, 'data.input: 5.5 is not of type "integer"'),
        ({"type": "integer"}, True, 'data.input: true is not of type "integer"'),
        ({"type": "number"}, 5.5, None),
        ({"type": "number"}, False, 'data.input: false is not of type "number"'),
        ({"type": "boolean"}, False, None),
        ({"type": "boolean"}, 0, 'data.input: 0 is not of type "boolean"'),
        ({"type": "null"}, None, None),
        ({"type": "null"}, "x", 'data.input: got "x" where no value is taken; leave it out'),
        ({"type": "array"}, [1], None),
        ({"type": "array"}, {}, 'data.input: {} is not of type "array"'),
        ({"type": "object", "additionalProperties": True}, {"a": 1}, None),
        ({"type": "object", "additionalProperties": True}, [], 'data.input: [] is not of type "object"'),
        ({"type": ["string", "null"]}, None, None),
        ({"type": ["string", "null"]}, 5, 'data.input: 5 is not of types "null", "string"'),
        ({"type": "string", "minLength": 2}, "a", 'data.input: "a" is shorter than 2 characters'),
    ],
)
def test_inputs_are_checked_by_their_schema(schema: dict[str, object] | None, value: object, refusal: str) -> None:
    entry = AgentEntry(input=schema)

    if refusal is None:
        InputCheck("it", entry).value(value)
    else:
        with pytest.raises(InvalidInput) as refused:
            InputCheck("it", entry).value(value)
        assert str(refused.value) == refusal


@pytest.mark.parametrize(
    ("value", "refusal"),
    [
        ({"topic": "x"}, None),
        ({"topic": "x", "sources": [{"url": "u"}]}, None),
        ({}, "data.input.topic: is missing"),
        ({"topic": 5}, 'data.input.topic: 5 is not of type "string"'),
        ({"topic": "x", "limit": True}, 'data.input.limit: true is not of type "integer"'),
        ({"topic": "x", "sources": [{"url": "u"}, {"url": 1}]}, 'data.input.sources.1.url: 1 is not of type "string"'),
        ("x", 'data.input: "x" is not of type "object"'),
    ],
)
def test_an_input_of_some_depth_is_refused_at_its_place(value: object, refusal: str | None) -> None:
    check = InputCheck("it", entry_of(Question))

    if refusal is None:
        check.value(value)
        check.json(json.dumps(value).encode())
        return
    with pytest.raises(InvalidInput) as refused:
        check.value(value)
    assert str(refused.value) == refusal
    with pytest.raises(InvalidInput) as refused:
        check.json(json.dumps(value).encode())
    assert str(refused.value) == refusal


def test_a_huge_wrong_value_is_quoted_briefly() -> None:
    with pytest.raises(InvalidInput) as refused:
        InputCheck("it", entry_of(Question)).value({"topic": ["x" * 100_000]})

    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("schema", [{"type": "integer"}, {"type": "integer", "minimum": 1}])
def test_a_secret_in_a_refused_input_is_hidden_before_the_message_is_shortened(schema: dict[str, object]) -> None:
    key = "sk-" + "proj-Ab12Cd34Ef56Gh78Ij90"
    before = "x" * (30 if schema == {"type": "integer"} else 170)  # so that the message ends within the key
    with pytest.raises(InvalidInput) as refused:
        InputCheck("it", AgentEntry(input=schema)).value(f"{before} {key}")
    assert before in str(refused.value)
    assert key[:12] not in str(refused.value)


def test_json_is_checked_without_decoding_where_the_schema_allows() -> None:
    text = InputCheck("it", AgentEntry(input={"type": "string"}))
    text.json(b'"x"')
    InputCheck("it", AgentEntry()).json(b"anything")

    with pytest.raises(InvalidInput, match=r'^data\.input: 5 is not of type "string"'):
        text.json(b"5")
    with pytest.raises(InvalidInput, match=r"^data\.input: cannot be read"):
        text.json(b"{")


def test_an_invalid_schema_is_refused_with_the_agents_name() -> None:
    with pytest.raises(ConfigurationError, match="input of agent 'it' is not valid"):
        InputCheck("it", AgentEntry(input={"type": "strin"})).value("x")


def test_a_reference_to_elsewhere_is_refused_and_never_fetched() -> None:
    check = InputCheck("it", AgentEntry(input={"$ref": "http://127.0.0.1:9/schema.json"}))

    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1.* not fetched.* under \$defs"):
        check.value(1)


MIB = 1 << 20
WRONG = b"[%b]" % b",".join([b'""'] * (MIB // 3))
INTEGERS: dict[str, object] = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "data"),
    [
        (INTEGERS, WRONG),
        (INTEGERS, b"[%b]" % b",".join([b"1"] * (MIB // 2))),
        ({"anyOf": [INTEGERS, {"type": "null"}]}, WRONG),
        ({"items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, WRONG),
        ({"items": {"type": "string"}, "uniqueItems": True}, json.dumps([{"k": n} for n in range(80_000)]).encode()),
        ({"items": {"type": "object"}, "uniqueItems": True}, json.dumps([{"k": n} for n in range(80_000)]).encode()),
        ({"additionalProperties": False}, json.dumps({f"k{n}": n for n in range(60_000)}).encode()),
        ({"pattern": "^(a+)+$"}, b'"%b!"' % (b"a" * MIB)),
        ({"pattern": "^(?=a)(a+)+$"}, b'"%b!"' % (b"a" * MIB)),
        ({"contains": {"type": "integer"}, "maxContains": 1}, WRONG),
    ],
)
def test_a_hostile_input_of_a_mebibyte_is_checked_in_milliseconds(schema: dict[str, object], data: bytes) -> None:
    """A check occupies the loop of a service. It once took 5 s for wrong items, and hours for unique objects."""
    check = InputCheck("it", AgentEntry(input=schema))
    with suppress(InvalidInput):
        check.json(b"[]")
    began = time.thread_time()
    with suppress(InvalidInput):
        check.json(data)
    assert time.thread_time() - began < 0.5


def test_a_large_wrong_input_is_refused_without_its_place() -> None:
    with pytest.raises(InvalidInput, match=r"^data\.input: does not match its schema; with \d+ bytes"):
        InputCheck("it", AgentEntry(input=INTEGERS)).json(WRONG)


def test_an_input_with_half_of_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidInput, match="cannot be checked"):
        InputCheck("it", AgentEntry(input={"type": "string", "minLength": 1})).value("\ud800")


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}, {"$dynamicRef": "#x", "$dynamicAnchor": "x"}]
)
def test_a_schema_that_refers_to_itself_ends(schema: dict[str, object]) -> None:
    InputCheck("it", AgentEntry(input=schema)).value({"a": 1})


def test_patterns_with_lookaround_are_checked() -> None:
    check = InputCheck("it", AgentEntry(input={"pattern": "^(?!b)[a-c]+$"}))
    check.value("abc")
    with pytest.raises(InvalidInput):
        check.value("bac")


def test_a_small_input_with_alternatives_in_alternatives_is_refused_at_once() -> None:
    part = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"]}
    schema: dict[str, object] = {"$ref": "#/$defs/N", "$defs": {"N": {"anyOf": [part, {**part, "minProperties": 1}]}}}
    check = InputCheck("it", AgentEntry(input=schema))
    began = time.thread_time()
    with pytest.raises(InvalidInput, match="too deep to say where"):
        check.json(b'{"n":' * 40 + b"1" + b"}" * 40)
    assert time.thread_time() - began < 0.5
