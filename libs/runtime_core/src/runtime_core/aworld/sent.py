"""An app on its way to another process: by its name where that process can import it, else with its code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from msgspec import Struct

from runtime_core.app.app import App
from runtime_core.app.loading import load_app
from runtime_core.aworld.runner import TaskRunner
from runtime_core.aworld.task_app import Part, TasksApp, declare
from runtime_core.declare.declaration import one_line
from runtime_core.errors import ConfigurationError, InvalidInput

Dumps = Callable[[object], bytes]
Loads = Callable[[bytes], object]
_Carried = tuple[App | None, list[tuple[Any, str, object, str]]]  # Any: a Part's kind


class SentApp(Struct, frozen=True):
    """What another process makes the app of."""

    name: str
    base: str
    """`package.module:app`; empty: there is none, or it is in `pickled`."""
    folder: str
    """The working directory of who sends it."""
    paths: list[str]
    """Where who sends it imports from."""
    pickled: bytes
    """(the base or None, [(kind, name, object, field)]); empty: the base is all there is."""


def pack(made: TasksApp, reference: str, dumps: Dumps) -> SentApp:
    """Make it ready to be sent. `reference` names the base where that is known; empty: it is looked for.

    Raises InvalidInput that names what cannot be sent.
    """
    base = reference or (reference_of(made.base) if made.base is not None else "")
    carried = None if base else made.base
    parts = [(part.kind, part.name, part.value, part.field) for part in made.parts]
    pickled = b""
    if carried is not None or parts:
        try:
            pickled = dumps((carried, parts))
        except Exception as error:  # whatever the objects' own methods raise
            raise _culprit(made, carried, dumps, error) from error
    paths = [os.path.abspath(path) for path in sys.path if path and os.path.isdir(path)]
    return SentApp(made.app.name, base, os.getcwd(), paths, pickled)


def unpack(sent: SentApp, loads: Loads) -> App:
    """Make the app here. Raises ConfigurationError in one line."""
    for path in (sent.folder, *sent.paths):
        if path not in sys.path:
            sys.path.append(path)
    base: App | None = None
    parts: list[Part] = []
    if sent.pickled:
        try:
            base, described = cast(_Carried, loads(sent.pickled))
        except Exception as error:  # loading imports and runs the user's code
            raise ConfigurationError(
                f"the tasks' objects cannot be made in another process: {one_line(error)}; what they need must be "
                "importable there"
            ) from error
        parts = [Part(*one) for one in described]
    if sent.base:
        base = load_app(sent.base)
    if base is not None and not parts:
        base.add_runner(TaskRunner)
        base.check()
        return base
    app = App(sent.name)
    if base is not None:
        app.include(base)
    app.add_runner(TaskRunner)
    for part in parts:
        declare(app, part)
    app.check()
    return app


def reference_of(app: App) -> str:
    """`package.module:name` of an app that stands in an imported module; empty: there is no such name."""
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name == "__mp_main__":
            continue
        for attribute, value in list(vars(module).items()):
            if value is app:
                # A script is its own module, which nobody else may import; `python -m` says its name.
                own = getattr(getattr(module, "__spec__", None), "name", "")
                if module_name != "__main__" or own:
                    return f"{own or module_name}:{attribute}"
    return ""


def _culprit(made: TasksApp, carried: App | None, dumps: Dumps, error: Exception) -> InvalidInput:
    """Which of the objects it is that cannot be sent."""
    tried: Sequence[tuple[str, object, str]] = (
        *((part.field, part.value, f"{part.kind} {part.name!r}") for part in made.parts),
        *(("app", item, item.what) for item in (carried.functions.all() if carried is not None else ())),
    )
    for field, value, shown in tried:
        try:
            dumps(value)
        except Exception as own:
            return InvalidInput(field, f"{shown} cannot be sent to another process: {one_line(own)}")
    return InvalidInput("app", f"cannot be sent to another process: {one_line(error)}; put it into a module")
