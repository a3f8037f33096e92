"""Forms of the console: their fields by a JSON schema, and the values that people type or edit."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from runtime_core.errors import InvalidInput
from runtime_core.gateway.console import views
from runtime_core.gateway.console.actions import FIELDS_MAX, edited, fields_of, value_of
from runtime_core.gateway.console.site import FOLDER

SCHEMA = {
    "type": "object",
    "required": ["topic", "days", "share", "draft", "tone"],
    "properties": {
        "topic": {"type": "string", "description": "What it is about."},
        "days": {"type": "integer"},
        "share": {"type": "number", "default": 0.5},
        "draft": {"type": "boolean"},
        "tone": {"enum": ["dry", "warm"]},
        "pages": {"type": "array"},
        "note": {"type": "string", "default": "none"},
        "size": {"enum": [1, 2]},
    },
}


def test_a_form_has_a_field_for_each_member() -> None:
    found = {field.label: field for field in fields_of(SCHEMA)}
    assert [field.name for field in found.values()] == [
        "text.topic", "whole.days", "number.share", "choice.draft", "choice.tone", "json?.pages", "text?.note",
        "choice?.size",
    ]  # fmt: skip
    assert found["topic"].hint == "What it is about."
    assert (found["share"].value, found["note"].value) == ("0.5", "none")
    assert found["tone"].options == (('"dry"', "dry"), ('"warm"', "warm"))
    assert found["size"].options[0] == ("", "-"), "it may be left out"


def test_fields_follow_definitions_and_may_be_left_empty() -> None:
    """A class, an enumeration or a value that may be null has the field of its own type."""
    schema = {
        "$ref": "#/$defs/Trip",
        "$defs": {
            "Class": {"enum": ["first", "second"], "type": "string"},
            "Trip": {
                "type": "object",
                "required": ["class", "back"],
                "properties": {
                    "class": {"$ref": "#/$defs/Class"},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "description": "Any."},
                    "other": {"anyOf": [{"$ref": "#/$defs/Class"}, {"type": "null"}], "default": None},
                    "back": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "cycle": {"$ref": "#/$defs/Unknown"},
                },
            },
        },
    }
    found = {field.label: field for field in fields_of(schema, "Answer")}
    names = ["choice.class", "text?.note", "choice?.other", "json.back", "json?.cycle"]
    assert [field.name for field in found.values()] == names
    assert (found["note"].hint, found["note"].value) == ("Any.", "")
    assert found["class"].options == (('"first"', "first"), ('"second"', "second"))


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        (None, "input"), ({}, "input"), ({"type": "string"}, "text."), ({"type": "integer"}, "whole."),
        ({"type": "array"}, "input"), ({"type": "object"}, "input"), ({"enum": [1]}, "choice."),
        ({"type": "object", "properties": {str(n): {} for n in range(FIELDS_MAX + 1)}}, "input"),
    ],
)  # fmt: skip
def test_another_schema_has_one_field(schema: dict[str, Any] | None, name: str) -> None:
    assert [field.name for field in fields_of(schema)] == [name]


def test_a_form_is_parsed_by_its_fields() -> None:
    form = {
        "token": ["x"], "agent": ["a"], "text.topic": ["42"], "whole.days": [" 3 "], "number.share": ["1.5"],
        "choice.draft": ["true"], "choice.tone": ['"dry"'], "json?.pages": ["[1]"], "text?.note": [""],
        "choice?.size": [""], "unknown.kind": ["x"],
    }  # fmt: skip
    assert value_of(form) == {
        "topic": "42", "days": 3, "share": 1.5, "draft": True, "tone": "dry", "pages": [1],
    }  # fmt: skip
    assert value_of({"text.": ["42"]}) == "42"
    assert value_of({"json.": ["42"]}) == 42
    assert value_of({"input": ["42"]}) == 42
    assert value_of({"input": ["some words"]}) == "some words"


@pytest.mark.parametrize(
    ("field", "text", "why"),
    [("whole.days", "x", "days: \"x\" is not a whole number"), ("number.share", "", "is not a number"),
     ("json.", "{", "input: \"{\" is not JSON"), ("choice.draft", "maybe", "is not one of the choices")],
)  # fmt: skip
def test_a_wrong_value_names_its_field(field: str, text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why.replace("{", r"\{")):
        value_of({field: [text]})


@pytest.mark.parametrize(
    ("shown", "sent"), [("a\nb", "a\r\nb"), ("\n\nfirst", "\r\nfirst"), ("last\n", "last"), ("\0", "\ufffd")]
)
def test_a_text_that_only_the_browser_has_changed_is_not_edited(shown: str, sent: str) -> None:
    assert edited({"text.": [sent], "before": [views.digest(shown)]}, "value") is ...


def test_the_displayed_text_is_sent() -> None:
    before = [views.digest('{"amount": 41}')]
    assert edited({"json.": ['{"amount": 1}'], "before": before}, "value") == {"amount": 1}
    assert edited({"text.": ["[draft] true"], "before": before}, "value") == "[draft] true"
    assert edited({"any.": ['{"amount": 1}'], "before": before}, "value") == {"amount": 1}
    assert edited({"any.": ["some text"], "before": before}, "value") == "some text"
    assert edited({"verdict": ["approve"]}, "value") is ...


@pytest.mark.parametrize("name", ["json.", "any."])
def test_broken_json_does_not_become_text(name: str) -> None:
    with pytest.raises(InvalidInput, match="is not JSON") as refused:
        edited({name: ['{"amount": 1'], "before": [""]}, "value")
    assert refused.value.field == "value"
    with pytest.raises(InvalidInput, match="is not JSON"):
        value_of({"input": ['{"amount": 1']})


def test_a_form_preselects_nothing() -> None:
    templates = jinja2.Environment(loader=jinja2.FileSystemLoader(FOLDER / "templates"), autoescape=True)
    templates.filters |= views.FILTERS
    fields = fields_of({**SCHEMA, "required": ["tone", "share", "size"]})
    html = str(templates.get_template("macros.html").module.schema_fields(fields))  # type: ignore[attr-defined]
    assert html.count('<option value="" disabled selected>Choose one</option>') == 2
    assert html.count(" required>") >= 2
    assert 'pages <span class="hint">optional</span> <span class="hint">as JSON</span>' in " ".join(html.split())
