"""Classes by name: what travels names its class with its module, so that two of one name are never mixed up."""

from __future__ import annotations

import sys


def name_of(cls: type) -> str:
    """`module.Outer.Inner`; a built-in class is named without its module."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def find_class(name: str) -> type | None:
    """The class of this name in a module that is loaded here, else None.

    Nothing is imported for a name that came with a message: a message must not choose what code is run.
    """
    parts = name.split(".")
    for at in range(len(parts) - 1, -1, -1):
        module = sys.modules.get(".".join(parts[:at]) or "builtins")
        if module is None:
            continue
        found: object = module
        for part in parts[at:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and name_of(found) == name:
            return found
    return None
