"""The manifest as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from pydantic import BaseModel

from runtime_core.app.app import App
from runtime_core.declare.manifest import Manifest
from runtime_core.errors import InvalidInput

if TYPE_CHECKING:
    from runtime_core.runs.context import AgentContext


class Question(BaseModel):
    topic: str
    limit: int = 3


def test_a_manifest_survives_the_broker_and_ignores_later_fields() -> None:
    app = App("desk", version="2")

    @app.agent("it", pool="gpu")
    async def it(ctx: AgentContext, value: Question) -> list[str]:
        """Answers."""
        return []

    @app.tool
    def search(query: str) -> list[str]:
        return []

    manifest = app.manifest()
    data = manifest.to_json()
    later = json.loads(data)
    later["later"] = 1
    later["agents"]["it"]["later"] = 1

    assert Manifest.from_json(data) == manifest
    assert Manifest.from_json(json.dumps(later).encode()) == manifest
    assert app.manifest().to_json() == data
    assert manifest.agents["it"].output == {"items": {"type": "string"}, "type": "array"}


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"app": 1, "version": "1"}'])
def test_an_invalid_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^manifest: cannot be read"):
        Manifest.from_json(data)
