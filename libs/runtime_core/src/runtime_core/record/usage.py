"""What work has used: amounts by name (tokens, requests, cost, …), in all and by model. Sums, limits and their JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput

MODELS = "models"
"""The name under which the JSON holds the same by model; no amount may have it."""


class Usage(msgspec.Struct, frozen=True):
    """Sums of what was used. A name that nothing was spent under has 0."""

    amounts: dict[str, float] = {}
    """By name, as `tokens`; `cost` is in the currency of whoever reports it."""
    models: dict[str, dict[str, float]] = {}
    """The same by model, for what was spent with a model's name."""

    def __getitem__(self, name: str) -> float:
        return self.amounts.get(name, 0.0)

    def __bool__(self) -> bool:
        return bool(self.amounts)

    @classmethod
    def of(cls, amounts: Mapping[str, object], model: str = "") -> Usage:
        """One report of `spend`. Raises InvalidInput (`spend.…`) for what is no amount."""
        checked = {name: _amount(name, value) for name, value in amounts.items()}
        if not checked:
            raise InvalidInput("spend", "says nothing: name an amount, as in spend(tokens=812)")
        if not isinstance(model, str):
            raise InvalidInput("spend.model", f"{model!r} is not text")
        return cls(checked, {model: checked} if model else {})

    @classmethod
    def from_json(cls, data: bytes) -> Usage:
        """As `to_json` writes it and the broker sums it; empty bytes are nothing used."""
        found: dict[str, object] = msgspec.json.decode(data) if data else {}
        models = found.pop(MODELS, {})
        return cls(
            msgspec.convert(found, dict[str, float]),
            msgspec.convert(models, dict[str, dict[str, float]]),
        )

    def to_json(self) -> bytes:
        return msgspec.json.encode({**self.amounts, MODELS: self.models} if self.models else self.amounts)


def total(parts: Iterable[Usage]) -> Usage:
    """The sum of several."""
    amounts: dict[str, float] = {}
    models: dict[str, dict[str, float]] = {}
    for part in parts:
        _add(amounts, part.amounts)
        for model, of_model in part.models.items():
            _add(models.setdefault(model, {}), of_model)
    return Usage(amounts, models)


def _add(into: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        into[name] = into.get(name, 0) + amount


def _amount(name: str, value: object) -> float:
    if name == MODELS:
        raise InvalidInput("spend.models", "is not an amount; name the model with model=")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InvalidInput(f"spend.{name}", f"{quoted(value)} is not a number from 0 on")
    return value
