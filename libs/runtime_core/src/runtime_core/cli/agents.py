"""`weft agents`: the agent types of runtimes, who runs them, and what waits for them."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from runtime_core.bus.topics import Topics
from runtime_core.cli.connection import Commands, broker
from runtime_core.cli.output import Columns, Json, Row, print_rows
from runtime_core.errors import InvalidInput
from runtime_core.maintenance.waits import agents_of_runtimes, drop_agent, subscriptions_of

app = Commands("List agent types of runtimes, and forget those that no process runs.")


@app.verb("list")
async def list_agents(as_json: Json = False) -> None:
    """List the agent types of runtimes.

    PROCESSES counts those that run the type now, MESSAGES the unfinished ones.

    \b
    Example:
      weft agents list
    """
    async with broker() as opened:
        subscriptions = await Topics(opened.buses).subscriptions()
        rows: list[Row] = [
            {
                "agent": each.name,
                "processes": each.processes,
                "messages": each.messages,
                "subscriptions": subscriptions_of(each.name, subscriptions),
            }
            for each in await agents_of_runtimes(opened.buses)
        ]
    columns: Columns = {
        "AGENT": "agent",
        "PROCESSES": "processes",
        "MESSAGES": "messages",
        "SUBSCRIPTIONS": lambda row: " ".join(row["subscriptions"]) or None,
    }
    print_rows(rows, columns, as_json, empty="no runtime has registered agents")


@app.verb("drop", seconds=None)  # it cancels many tasks
async def drop(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="Types from `weft agents list`.")] = None,
    gone: Annotated[bool, Option("--gone", help="All types that no process runs.")] = False,
) -> None:
    """Forget agent types that no process runs.

    Removes their subscriptions and mailboxes, and cancels the tasks whose messages wait for them. The
    states of their agents stay. A type that is registered again starts with an empty mailbox.

    \b
    Examples:
      weft agents drop writer
      weft agents drop --gone
    """
    if bool(names) == gone:
        raise InvalidInput("NAME", "name agent types, or pass --gone")
    async with broker() as opened:
        chosen = names or [each.name for each in await agents_of_runtimes(opened.buses) if not each.processes]
        for name in chosen:
            print(f"dropped {name}: cancelled {await drop_agent(opened.buses, name)} tasks")
    if not chosen:
        print("every agent type has a process")
