"""Where a step stands in its task: a text that sorts as its run path and step path do.

Paths are numbers between dots and slashes, so plain text order would put `r/10` before `r/2`. A place
spells each number with its length in front (`2` is `12`, `10` is `210`), and its separators sort in the
order end of run, slash, dot. Two different paths never share a place, so the store uses it as part of the
key and reads a task in order straight from the index.
"""

from __future__ import annotations

import re
from functools import lru_cache

from runtime_core.errors import InvalidInput

PLACE_MAX = 1_500
"""Bytes. PostgreSQL refuses index rows over 2,704 bytes; namespace and task share them."""

_RUN_ENDS = " "
_SLASH = "!"
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*\Z")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,8})\Z")


@lru_cache(maxsize=16_384)
def place(run: str, step: str) -> str:
    """Return the sort key of (run, step). InvalidInput where it is longer than an index can hold."""
    text = _path(run) + _RUN_ENDS + (_path(step) if step else "")
    if len(text) > PLACE_MAX:
        raise InvalidInput("run", f"the path of run and step is longer than {PLACE_MAX} bytes; nest less")
    return text


def before(run: str, step: str, at: str) -> bool:
    """Return whether a step, or a run that it started, comes before step `at` of the task's first run.

    The first run's own row does not: a fork has its own.
    """
    inside, _, rest = run.partition("/")
    of_first_run = rest.partition("/")[0] if rest else step
    return inside == "r" and bool(of_first_run) and place("r", of_first_run) < place("r", at)


def _path(path: str) -> str:
    return _SLASH.join(".".join(map(_part, piece.split("."))) for piece in path.split("/"))


def _part(part: str) -> str:
    if _NUMBER.match(part):
        return f"{len(part)}{part}"
    if _WORD.match(part):
        return f"~{part}"
    # Anything else could hold a separator; hexadecimal keeps the order and cannot be taken for a word.
    return f"~~{part.encode('utf-8', 'surrogatepass').hex()}"
