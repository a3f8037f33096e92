"""An instance's durable state, as one run sees it."""

from __future__ import annotations

from typing import Any

from runtime_core.declare.encoding import encode
from runtime_core.errors import WeftError
from runtime_core.runs.step import from_json


class State:
    """A dict of JSON values that is decoded at its first use and written only where it has changed."""

    __slots__ = ("_at_start", "_put", "_reported", "_value", "snapshot")

    def __init__(self, snapshot: bytes) -> None:
        self.snapshot = snapshot
        """As it was when the run began (JSON; empty: none)."""
        self._put: bytes | None = None
        self._value: dict[str, Any] | None = None  # Any: JSON values of the user's choice
        self._at_start = b""
        self._reported = b""

    def value(self) -> dict[str, Any]:
        """The working copy. Every run and every replay starts from the snapshot."""
        if self._value is None:
            decoded = from_json(self.snapshot)
            if decoded is None:
                decoded = {}
            if not isinstance(decoded, dict):
                raise WeftError(
                    f"the stored state is a JSON {type(decoded).__name__}, not an object; "
                    "delete the instance's state or repair it"
                )
            # Encoded again: the snapshot may be written with other spacing.
            self._value = decoded
            self._at_start = self._reported = encode(decoded, "state")
        return self._value

    def replace(self, state: bytes) -> None:
        """Take over what a nested run has made of the state. The dict stays the same object: code may hold it."""
        value = self.value()
        decoded = from_json(state)
        value.clear()
        if isinstance(decoded, dict):
            value.update(decoded)

    def put(self, state: bytes) -> None:
        """Write this state (JSON) with the commit that ends the run."""
        self._put = state

    def changed(self) -> bytes | None:
        """JSON of the state where it differs from the run's start. Raises InvalidInput, field `state`."""
        if self._value is None:
            return self._put
        now = encode(self._value, "state")
        return None if now == self._at_start else now

    def working_change(self) -> bytes | None:
        """As `changed`, compared with what this run has last reported."""
        if self._value is None:
            return None
        now = encode(self._value, "state")
        if now == self._reported:
            return None
        self._reported = now
        return now
