"""Structured output: the schema that the model is given, and the reader of what it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import PydanticUserError, TypeAdapter, ValidationError

from runtime_core import codec
from runtime_core.declare.declaration import Place, one_line
from runtime_core.declare.manifest import Schema
from runtime_core.errors import ConfigurationError, InvalidInput
from runtime_core.llm.agent import OutputMode, OutputSpec
from runtime_core.text import shortened

NAME = "final_result"
"""What the tool, or the format, of the final answer is called."""
WRAPPED = "response"
"""The member that holds an answer which is no object, such as a list: providers want objects."""
MAX_PROBLEMS = 10
"""How many of an answer's problems the model is told at once."""
_FENCED = re.compile(r"\A\s*```[a-zA-Z]*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


class OutputInvalid(InvalidInput):
    """An answer that is not of the declared type; each of `problems` names the part and what is wrong with it."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("output", "; ".join(problems))
        self.problems = problems


class Output:
    """The declared type of a final answer."""

    def __init__(self, what: str, declared: object, mode: OutputMode, place: Place) -> None:
        """Raises ConfigurationError for a type that JSON cannot give."""
        try:
            # Any: the user's type, known at run time only
            self._adapter: TypeAdapter[Any] = TypeAdapter(declared)  # type: ignore[arg-type]
            schema = self._adapter.json_schema()
            self.result_schema: Schema = self._adapter.json_schema(mode="serialization")
        except (PydanticUserError, TypeError, NameError) as error:
            raise ConfigurationError(
                f"{what} ({place}) has output={declared!r}, of which no JSON schema can be made, "
                f"{one_line(error, 160)}: give a pydantic model, dataclass, TypedDict or plain type"
            ) from error
        self._wraps = schema.get("type") != "object"
        if self._wraps:
            definitions = schema.pop("$defs", None)
            schema = {
                "type": "object",
                "properties": {WRAPPED: schema},
                "required": [WRAPPED],
                "additionalProperties": False,
            }
            if definitions is not None:
                schema["$defs"] = definitions
        self.spec = OutputSpec(NAME, schema, mode, str(schema.get("description") or "Give the final answer."))

    def read(self, given: object) -> object:
        """The answer (JSON) from the model's arguments or text. Raises OutputInvalid."""
        if isinstance(given, str):
            given = _json(given)
        if self._wraps and isinstance(given, Mapping) and WRAPPED in given:
            given = given[WRAPPED]
        try:
            value = self._adapter.validate_json(codec.encode(given))
        except ValidationError as error:
            raise OutputInvalid(_problems(error)) from None
        result: object = self._adapter.dump_python(value, mode="json")
        return result


def told_as_text(spec: OutputSpec) -> str:
    """What is added to the instructions where the answer is asked for as text."""
    return (
        f"Give your final answer as JSON only, without any other text, by this JSON schema: {json.dumps(spec.schema)}"
    )


def _json(text: str) -> object:
    fenced = _FENCED.match(text)
    try:
        found: object = json.loads(fenced[1] if fenced else text)
    except ValueError as error:
        raise OutputInvalid([f"output: is not JSON, {error}"]) from None
    return found


def _problems(error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_context=False)
    told = []
    for each in found[:MAX_PROBLEMS]:
        where = ".".join(("output", *(str(part) for part in each["loc"])))
        got = "" if each["type"] == "missing" else f", got {codec.quoted(each['input'])}"
        told.append(shortened(f"{where}: {' '.join(each['msg'].split())}{got}", 300))
    if len(found) > MAX_PROBLEMS:
        told.append(f"and {len(found) - MAX_PROBLEMS} more")
    return told
