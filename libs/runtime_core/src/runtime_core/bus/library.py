"""The functions of the bus, assembled from one file each.

Library and function names carry a digest of the source: two versions of Weft, or two programs, on one server never
replace each other's functions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# May they run at maxmemory? What settles work must (it frees memory); what starts work must not.
FUNCTIONS = {
    "adopt": True,
    "announce_engine": True,
    "answered": True,
    "ask": True,
    "beat": True,
    "begin_call": True,
    "begin_turn": True,
    "cancel": True,
    "claim": False,
    "commit_call": True,
    "commit_turn": True,
    "create_node": False,
    "dead_letter": True,
    "drop_letter": True,
    "due_requests": True,
    "emit": True,
    "erase": True,
    "expire_call": True,  # stands on commit_call
    "gateways": True,
    "idle": True,
    "lead": True,
    "leave": True,
    "load": True,
    "keep_letter": True,  # it takes the place of an entry that is larger, within the bound
    "mark_started": True,
    "node": True,
    "progress": True,
    "promote": True,
    "publish": False,
    "read_ingress": True,
    "put_state": False,
    "record": True,
    "recount_letters": True,
    "redrive": False,
    "refill": True,  # what waits was accepted
    "refuse": True,
    "repair": True,
    "repeat_request": True,
    "retry": True,
    "schedule": True,
    "settle_call": True,
    "signal": True,  # an answer lets a task end that is open already
    "submit": False,
    "fork": False,  # stands on submit
    "stream": True,
    "survey": True,
    "subscribe": False,
    "touch": True,
    "trim": True,
    "trim_letters": True,
    "unclaim": True,
    "unsubscribe": True,
    "watch": True,
    "withdraw": True,
}


SHARED = ("prelude", "letters", "checks", "nodes", "claims", "queues")
"""Files whose helpers all functions may use."""


@dataclass(frozen=True, slots=True)
class Library:
    """One library: its source and, by short name, the names its functions have on the server."""

    name: str
    source: bytes
    functions: dict[str, bytes]


@cache
def library() -> Library:
    """Read and assemble the source once per process."""
    folder = files("runtime_core.bus") / "functions"
    body = [(folder / f"{name}.lua").read_text("utf-8") for name in SHARED]
    body += [_scoped(name, (folder / f"{name}.lua").read_text("utf-8")) for name in FUNCTIONS]
    digest = hashlib.sha256("\n".join(body).encode()).hexdigest()[:8]
    functions = {name: f"weft_{digest}_{name}" for name in FUNCTIONS}
    for name, allow_oom in FUNCTIONS.items():
        flags = ", flags = {'allow-oom'}" if allow_oom else ""
        body.append(f"redis.register_function{{function_name = '{functions[name]}', callback = {name}{flags}}}")
    source = f"#!lua name=weft_{digest}\n" + "\n".join(body) + "\n"
    return Library(f"weft_{digest}", source.encode(), {name: full.encode() for name, full in functions.items()})


def _scoped(name: str, source: str) -> str:
    """Keep a file's helpers to itself: Lua allows 200 local names at the top of a script."""
    return f"local {name}\ndo\n{source.replace(f'local function {name}(', f'function {name}(', 1)}\nend"
