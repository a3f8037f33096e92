"""Names of what the code calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime_core.agents.ports import Registered

if TYPE_CHECKING:
    from runtime_core.agents.run import Run


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tool or agent by its name and pool, of this app or of another, as manifests give them: it may be called."""

    name: str
    pool: str = ""


def name_and_pool(run: Run, kind: str, known: Registered | None, named: object) -> tuple[str, str]:
    """The name and pool of a call. A name that this app does not know is sent as it is, to the default pool.

    Raises WeftError, and ends the run, for a function that is not registered.
    """
    if known is not None:
        return known.name, known.pool
    if isinstance(named, Elsewhere):
        return named.name, named.pool
    if isinstance(named, str) and named:
        return named, ""
    label = getattr(named, "__qualname__", None) or repr(named)
    raise run.flow.misuse(
        f"{label} is no {kind} of this app: register it with the app before it starts, or give a name (text)"
    )
