"""A service of another release, whose functions on the broker have other names: `python -m tests.chaos.next_release
SERVICE NUMBER`.

The same functions under another library and other names, as any change of their source would give them.
"""

from __future__ import annotations

import runpy
import sys

from runtime_core.bus import library as module
from runtime_core.bus.library import Library


def renamed(old: Library, number: int) -> Library:
    """Return this release's library under the names that release `number` would give it."""
    digest = old.name.rpartition("_")[2].encode()
    other = b"%08x" % number
    functions = {name: full.replace(digest, other) for name, full in old.functions.items()}
    return Library(old.name.replace(digest.decode(), other.decode()), old.source.replace(digest, other), functions)


def main() -> None:
    service, number = sys.argv[1], int(sys.argv[2])
    released = module.library
    own = renamed(released(), number)
    # A fork has modules that have imported it by name.
    for loaded in list(sys.modules.values()):
        if getattr(loaded, "library", None) is released:
            loaded.library = lambda: own  # type: ignore[attr-defined]
    sys.argv = [service]
    runpy.run_module(f"services.{service.replace('-', '_')}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
