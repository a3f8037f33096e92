"""A mutant: one guard of the product code, and the change that removes it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_core.bus.library import SHARED

FUNCTIONS = "libs/runtime_core/src/runtime_core/bus/functions"
CORE = "libs/runtime_core/src/runtime_core"


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace `anchor`, which occurs exactly once in `file`, to remove a guard.

    `tests` names the narrowest tests that should fail, as in `contracts:commit_fence`; see `commands.py`.
    """

    id: str
    file: str
    anchor: str
    replacement: str
    promise: str
    """What breaks without the guard."""
    tests: tuple[str, ...] = ()
    survives: str = ""
    """Why no test can see that the guard is gone; empty if one must."""

    def apply(self, text: str) -> str:
        """Return the file's text without the guard.

        Raises:
            ValueError: the anchor does not occur exactly once.
        """
        found = text.count(self.anchor)
        if found != 1:
            raise ValueError(f"the anchor of {self.id} occurs {found} times in {self.file}, not once: {self.anchor!r}")
        return text.replace(self.anchor, self.replacement)


def lua(name: str, guard: str, anchor: str, replacement: str, promise: str, *tests: str, survives: str = "") -> Mutant:
    """A mutant of a Lua file of the bus, a function's or a shared one; its id is `<file>.<guard>`."""
    folder = f"{FUNCTIONS}/shared" if name in SHARED else FUNCTIONS
    return Mutant(f"{name}.{guard}", f"{folder}/{name}.lua", anchor, replacement, promise, tests, survives)


def python(
    path: str, guard: str, anchor: str, replacement: str, promise: str, *tests: str, survives: str = ""
) -> Mutant:
    """A mutant of a Python file; its id is `<module>.<guard>`."""
    module = path.rpartition("/")[2].removesuffix(".py")
    return Mutant(f"{module}.{guard}", f"{CORE}/{path}", anchor, replacement, promise, tests, survives)
