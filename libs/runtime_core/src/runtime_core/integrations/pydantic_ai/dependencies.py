"""`RunContext.deps`: JSON data of the input, or what a function makes in each process that needs it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_ai.agent import AbstractAgent

from runtime_core.declaration import Place
from runtime_core.errors import ConfigurationError, InvalidInput


class Dependencies:
    """Makes the deps of an agent: in agent-handler for its code, and in tool-handler for each call of a tool.

    `make` is a function `()` or `(data)`, sync or async, of the input's `deps`; None: these are read as the agent's
    `deps_type`. What one process changes in them no other sees.
    """

    def __init__(
        self, what: str, agent: AbstractAgent[Any, Any], make: Callable[..., object] | None, place: Place
    ) -> None:
        """Raises ConfigurationError for what is no such function."""
        self._what = what
        self._type = agent.deps_type
        self._make = make
        self._takes_data = False
        if make is None:
            return
        if not callable(make):
            raise ConfigurationError(
                f"{what} ({place}) has deps={make!r}: give a function that makes them, since several processes need "
                "them; data goes into the input, as deps"
            )
        try:
            needed = len(inspect.signature(make).parameters)
        except ValueError:  # some classes of C have no signature
            needed = 0
        if needed > 1:
            raise ConfigurationError(f"{what} ({place}): deps takes {needed} arguments: take none, or the input's deps")
        self._takes_data = needed == 1

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:  # Any: the user's own type
        return TypeAdapter(self._type)

    async def make(self, data: object) -> Any:  # Any: the user's own type
        """The deps for the input's `deps`, JSON. Raises InvalidInput(`input.deps`)."""
        if self._make is not None:
            made = self._make(data) if self._takes_data else self._make()
            return await made if inspect.isawaitable(made) else made
        if self._type in (type(None), object, Any):
            return data
        name = getattr(self._type, "__name__", str(self._type))
        if data is None:
            raise InvalidInput(
                "input.deps",
                f'{self._what} needs deps of type {name}: send them as JSON, {{"prompt": …, "deps": {{…}}}}, or '
                "declare the agent with deps=, a function that makes them in each process",
            )
        try:
            return self._adapter.validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(("input.deps", *map(str, first["loc"])))
            raise InvalidInput(place, f"{first['msg']} ({name})") from None
        except Exception as error:
            raise InvalidInput(
                "input.deps",
                f"{name} cannot be read from JSON ({error}): declare {self._what} with deps=, a function that makes it",
            ) from None
