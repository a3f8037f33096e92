"""The OpenAPI document describes what the gateway does, and its examples are right."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from runtime_core.client.client import Client
from runtime_core.gateway.access import Access
from runtime_core.gateway.requests import Limits
from runtime_core.gateway.server import description, operations
from runtime_core.gateway.tasks import StreamRoutes

HERE = "urn:document"


def document() -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(description()))


def described() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method, path, operation)
        for path, methods in document()["paths"].items()
        for method, operation in methods.items()
    ]


def contents() -> list[tuple[str, dict[str, Any]]]:
    """Return every content of a request or response that has an example, with its place."""
    found = []
    for method, path, operation in described():
        parts = {"body": operation.get("requestBody", {}), **operation["responses"]}
        for name, part in parts.items():
            given = part.get("content", {}).values()
            found += [(f"{method} {path} {name}", content) for content in given if "example" in content]
    return found


def test_it_describes_every_operation_and_no_other() -> None:
    limits = Limits(0, 1)
    access = Access(cast(Client, None))
    offered = operations(access, limits, StreamRoutes(access, limits, asyncio.Event()))
    assert {(method.upper(), path) for method, path, _ in described()} == {(one.method, one.path) for one in offered}
    roles = {(method.upper(), path): operation.get("x-role", "") for method, path, operation in described()}
    assert roles == {(one.method, one.path): one.role for one in offered}
    assert len({operation["operationId"] for _, _, operation in described()}) == len(offered)


@pytest.mark.parametrize(("place", "content"), [pytest.param(*each, id=each[0]) for each in contents()])
def test_an_example_fits_its_schema(place: str, content: dict[str, Any]) -> None:
    registry: Registry[Any] = Registry().with_resource(
        HERE, Resource.from_contents({"$schema": "https://json-schema.org/draft/2020-12/schema", **document()})
    )
    schema = _absolute(content["schema"])
    Draft202012Validator(schema, registry=registry).validate(content["example"])


def _absolute(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            name: HERE + value if name == "$ref" and isinstance(value, str) else _absolute(value)
            for name, value in schema.items()
        }
    return [_absolute(each) for each in schema] if isinstance(schema, list) else schema
