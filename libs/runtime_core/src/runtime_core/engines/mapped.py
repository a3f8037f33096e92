"""A map on the wire: what is asked for, and what its items gave."""

from __future__ import annotations

import msgspec

from runtime_core.engines.driver.messages import Error, Outcome, Value
from runtime_core.errors import EngineError, InvalidInput

MAP = "map"
"""In the place of an instance's key, it marks a call as a map."""
FAILED = "weft.error"
"""The member by which a failed item is known among the results."""
MOST_IN_FLIGHT = 100_000


class MapRequest(msgspec.Struct, frozen=True):
    """The data of a map's call."""

    items: list[msgspec.Raw]
    over: str = ""
    """The argument that takes the item; empty: the first that `arguments` does not give."""
    arguments: dict[str, msgspec.Raw] = {}
    """What is the same in all calls."""
    in_flight: int = 0
    """How many items are under way at once, at most; 0: as many as the engine takes."""
    return_exceptions: bool = False
    """A failed item stands among the results, and does not fail the step."""

    @classmethod
    def from_json(cls, data: bytes) -> MapRequest:
        """Raises InvalidInput(`arguments`) for what is no request."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise InvalidInput("arguments", f"are no map: {error}") from None


class _ItemError(msgspec.Struct):
    type: str = ""
    message: str = ""


class _Item(msgspec.Struct):
    value: msgspec.Raw = msgspec.Raw(b"null")
    error: _ItemError | None = None


def items_of(outcomes: list[Outcome]) -> bytes:
    """How the items of a map ended, in order, as the `Value.data` of a map."""
    return msgspec.json.encode(
        [
            {"value": msgspec.Raw(outcome.data)}
            if isinstance(outcome, Value)
            else {"error": {"type": outcome.type, "message": outcome.message}}
            for outcome in outcomes
        ]
    )


def map_outcome(data: bytes, return_exceptions: bool) -> Outcome:
    """What a step gets of the items of a map: the array of results, or the error of the first item that failed.

    That is not tried again: most of the items would be done twice.
    """
    items = msgspec.json.decode(data, type=list[_Item])
    failed = [(index, item.error) for index, item in enumerate(items) if item.error is not None]
    if failed and not return_exceptions:
        index, first = failed[0]
        message = f"item {index}: {first.message} ({len(failed)} of {len(items)} failed)"
        return Error("function", first.type, message, retryable=False)
    return Value(msgspec.json.encode([item.value if item.error is None else {FAILED: item.error} for item in items]))


def with_errors(value: object) -> object:
    """The results of a map as its caller sees them: an EngineError in the place of each failed item."""
    return [_seen(item) for item in value] if isinstance(value, list) else value


def _seen(item: object) -> object:
    if isinstance(item, dict) and item.keys() == {FAILED}:
        error = msgspec.convert(item[FAILED], _ItemError)
        return EngineError(error.type, error.message)
    return item
