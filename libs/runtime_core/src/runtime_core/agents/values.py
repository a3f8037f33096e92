"""What a recorded payload holds, and the form of JSON that digests are made of."""

from __future__ import annotations

import msgspec

from runtime_core import codec
from runtime_core.errors import WeftError

_decoder = msgspec.json.Decoder()


def from_json(payload: bytes) -> object:
    """The value of a recorded payload; an empty one is None. Raises WeftError where it is not JSON."""
    if not payload:
        return None
    try:
        return _decoder.decode(payload)
    except (ValueError, RecursionError) as error:
        raise WeftError(f"a recorded result is not JSON: {error}; whoever wrote it must send JSON") from error


def canonical(data: bytes) -> bytes:
    """The same JSON with sorted keys: its digest does not depend on the order in which a dict was filled."""
    # Without a comma no object has two members, so there is only one order.
    return codec.canonical(_decoder.decode(data)) if b"," in data else data
