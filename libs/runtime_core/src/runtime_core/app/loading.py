"""Loads and checks an app by a reference such as `package.module:app`."""

from __future__ import annotations

import sys
from typing import cast

from runtime_core.app.app import App, DeclaresRunner
from runtime_core.declare.loading import load_object
from runtime_core.errors import ConfigurationError

DEFAULT_RUNNER = "runtime_core.integrations.aworld.runner:TaskRunner"
"""By reference, since runners import apps. Only processes that run tasks load it."""


def load_app(reference: str) -> App:
    """Import the module, find its app and check it.

    Modules are searched first in the current directory. Raises ConfigurationError, on one line, for any failure.
    """
    found = cast("App", load_object("app", reference, kind=App))
    # Every app can run a submitted Task.
    runner = load_object("runner", DEFAULT_RUNNER)
    found.add_runner(cast("type[DeclaresRunner]", runner))
    found.check()
    return found


if __name__ == "__main__":  # `weft up` asks a separate process, since importing an app runs its code
    try:
        load_app(sys.argv[1])
    except ConfigurationError as error:
        sys.exit(str(error))
