"""Loads an app by a reference such as `package.module:app`, and checks it, or its code against a recorded task."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from runtime_core.base.lazy import collect_seldom

if __name__ == "__main__":
    collect_seldom()  # before the imports below

from runtime_core.app.app import App, DeclaresRunner
from runtime_core.declare.declaration import NAME, RetryPolicy, place_of
from runtime_core.declare.loading import load_object
from runtime_core.declare.manifest import TOOL_AGENTS
from runtime_core.errors import ConfigurationError
from runtime_core.runs.context import AgentContext
from runtime_core.runs.definition import FunctionAgent

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
    name = TOOL_AGENTS + found.name
    # A process may load its app twice.
    if name not in found.agents and NAME.fullmatch(name) and (found.tools or found.functions.mcp_servers):
        once = RetryPolicy(attempts=1)  # of the run: the tool has its own
        found.functions.agents.add(FunctionAgent(name, call_tool, place_of(call_tool, 2), retry=once))
    found.check()
    return found


@dataclass
class RequestedCall:
    tool: str
    arguments: dict[str, Any]  # Any: JSON


async def call_tool(ctx: AgentContext, call: RequestedCall) -> object:
    """Call a tool for a person. The app's hooks that always run, and the tool's limits, apply as in any agent."""
    return await ctx.tool(call.tool, **call.arguments)


REPLAY_MAX_BYTES = 1024**3
"""Memory of a process that replays a task."""


def replay(reference: str) -> None:
    """Check the app's code against the recorded task on standard input, and write the result to standard output.

    Both are JSON: a `TaskTrajectory`, and a `Check` or `{"error": …}` if the app cannot be loaded. The gateway runs
    this in a separate process.
    """
    import resource  # Windows has none

    from runtime_core.client.replay import Check, check_task
    from runtime_core.trajectory.reading import TaskTrajectory

    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as result:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the app's own output is not part of the result
        resource.setrlimit(resource.RLIMIT_DATA, (REPLAY_MAX_BYTES, REPLAY_MAX_BYTES))
        recorded = msgspec.json.decode(sys.stdin.buffer.read(), type=TaskTrajectory)
        found = Check()
        try:
            asyncio.run(check_task(recorded, load_app(reference), found))
            result.write(msgspec.json.encode(found))
        except ConfigurationError as error:
            result.write(msgspec.json.encode({"error": str(error)}))


if __name__ == "__main__":  # other services ask a separate process, since importing an app runs its code
    try:
        if sys.argv[2:] == ["--replay"]:
            replay(sys.argv[1])
        else:
            load_app(sys.argv[1])
    except ConfigurationError as error:
        sys.exit(str(error))
