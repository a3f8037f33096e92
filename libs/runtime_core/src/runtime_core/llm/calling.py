"""What an LLMAgent says of its model's calls, checked where it is declared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

from runtime_core.errors import ConfigurationError
from runtime_core.llm.prices import Price
from runtime_core.llm.settings import Calling
from runtime_core.policy import RetryPolicy


def check_calling(given: Calling) -> None:
    """Raise ConfigurationError that names the first argument that cannot be."""
    unknown = given.keys() - Calling.__annotations__.keys()
    if unknown:
        raise ConfigurationError(
            f"LLMAgent has the unknown {', '.join(sorted(unknown))}; of its calls it may say "
            f"{', '.join(sorted(Calling.__annotations__))}"
        )
    for name, value in given.items():
        wanted = _wanted(name, value)
        if wanted:
            # The value of a key is no text for logs.
            shown = "what is no text" if name == "api_key" else repr(value)
            raise ConfigurationError(f"LLMAgent has {name}={shown}: give {wanted}")


def _wanted(name: str, value: object) -> str:
    """What would do, where this value does not; else empty."""
    if name == "rate_limit_patience_seconds":
        return "" if _number(value) and value >= 0 else "seconds, from 0 on"
    if name in ("connect_seconds", "call_seconds", "silence_seconds"):
        return "" if _number(value) and 0 < value < math.inf else "seconds, more than 0"
    match name:
        case "base_url":
            url = value is None or (isinstance(value, str) and value.startswith(("http://", "https://")))
            return "" if url else "a URL that begins with http:// or https://"
        case "api_key":
            return "" if value is None or isinstance(value, str) else "text, or None for OPENAI_API_KEY"
        case "settings":
            known = isinstance(value, Mapping) and all(isinstance(setting, str) for setting in value)
            return "" if known else "a dict of the model's settings, such as max_tokens"
        case "prices":
            known = isinstance(value, Mapping) and all(
                isinstance(model, str) and isinstance(price, Price) for model, price in value.items()
            )
            return "" if known else "a dict of models' names and Price(input=…, output=…)"
        case "window":
            fits = value is None or callable(getattr(value, "fit", None))
            return "" if fits else "KeepAll(), KeepRecent(…), Summarise(…), or an object with fit"
        case "estimate":
            return "" if value is None or callable(value) else "a function of messages"
        case "stream":
            return "" if isinstance(value, bool) else "True or False"
    return "" if isinstance(value, RetryPolicy) else "a RetryPolicy"


def _number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
