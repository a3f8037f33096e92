"""Starts a service by its name: `python -m runtime_core.host agent-handler`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import cast

from runtime_core.host.service import Build, serve

_BUILDERS = {
    "agent-handler": "agent_handler:build",
    "ray-gateway": "gateway:build_ray",
    "spark-gateway": "gateway:build_spark",
    "state-manager": "manager:build",
    "tool-handler": "tool_handler:build",
    "trajectory-recorder": "recorder:build",
}
"""Service → the module of this package that wires it, and the function there."""

SERVICES = tuple(_BUILDERS)


def build_of(service: str) -> Build:
    """Return the function that wires a service. Only the modules of that service are imported."""
    module, _, function = _BUILDERS[service.replace("_", "-")].partition(":")
    return cast("Build", getattr(importlib.import_module(f"runtime_core.host.{module}"), function))


def main(arguments: Sequence[str]) -> int:
    """Run one service as the whole of this process.

    Args:
        arguments: The service's name. Without one, the variable `SERVICE` names it.

    Returns:
        2, after one line on standard error, if there is no such service. Otherwise the process ends here.
    """
    given = arguments[0] if arguments else os.environ.get("SERVICE", "")
    name = given.strip().replace("_", "-")
    if len(arguments) > 1 or name not in SERVICES:
        shown = " ".join(arguments) or f"SERVICE={given!r}"
        problem = f"{shown}: there is no such service" if arguments or name else "SERVICE is not set"
        print(f"weft: {problem}; choose one of {', '.join(SERVICES)}", file=sys.stderr)
        return 2
    serve(name, build_of(name))
