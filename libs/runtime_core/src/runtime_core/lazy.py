"""Names of a package that are loaded when they are first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping


def loader(package: str, places: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a package: public name → the module that has it."""

    def load(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(importlib.import_module(places[name]), name)
        # The next use finds it without coming here.
        vars(sys.modules[package])[name] = found
        return found

    return load
