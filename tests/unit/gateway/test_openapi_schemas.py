"""The schemas of the OpenAPI document are valid, and every value of them is described."""

from __future__ import annotations

import json
from typing import Any, cast

from jsonschema import Draft202012Validator

from runtime_core.gateway.server import description


def document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(description()))


def test_its_schemas_are_valid() -> None:
    for schema in document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_value_has_a_type_or_a_description() -> None:
    def without(part: Any, path: str) -> list[str]:
        if isinstance(part, list):
            return [found for at, each in enumerate(part) for found in without(each, f"{path}/{at}")]
        if not isinstance(part, dict):
            return []
        empty = [path] if not part and path.split("/")[-2] == "properties" else []
        return empty + [
            found for name, each in part.items() if name != "example" for found in without(each, f"{path}/{name}")
        ]

    assert without(document(), "") == []
