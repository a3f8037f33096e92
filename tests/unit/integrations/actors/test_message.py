"""The answer to a request as JSON."""

from __future__ import annotations

from runtime_core.integrations.actors.message import decode_response, encode_response
from runtime_core.integrations.actors.serialization import SerializationRegistry


def test_no_response_is_null() -> None:
    assert encode_response(None, SerializationRegistry()) == b"null"
    assert decode_response(b"null", SerializationRegistry()) is None
