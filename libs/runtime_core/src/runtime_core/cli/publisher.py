"""`weft publisher`: registers publishers with their own ingress streams."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from runtime_core.bus.keys import ingress
from runtime_core.cli.connection import Broker, Commands, broker
from runtime_core.cli.output import Columns, Json, Row, print_json, print_rows
from runtime_core.errors import InvalidInput, ServerError
from runtime_core.ingress.publishers import Publisher, Publishers, split_names

app = Commands("Register untrusted publishers, each with its own ingress stream.")

Name = Annotated[str, Argument(metavar="NAME", help="The publisher's name.")]


@app.verb("set")
async def set_publisher(
    name: Name,
    tenant: Annotated[str, Option(metavar="TENANT", help="The publisher's tenant.")],
    agents: Annotated[
        str | None,
        Option(metavar="A,B", help="The agents that it may submit to. Default: all except internal ones and weft.…"),
    ] = None,
    topics: Annotated[str, Option(metavar="A,B.*", help="The topics that it may publish to. Default: none.")] = "",
    as_json: Json = False,
) -> None:
    """Register or replace a publisher, and print its stream.

    All commands on the stream are bound to the publisher and its tenant. Allow its broker user only to write this
    stream and to read its answers.

    \b
    Examples:
      weft publisher set shop --tenant acme
      weft publisher set web --tenant acme --agents writer,editor --topics "orders.*"
    """
    allowed = None if agents is None else split_names(agents)
    publisher = Publisher(name=name, tenant=tenant, agents=allowed, topics=split_names(topics))
    async with broker() as opened:
        await Publishers(opened.buses[0]).set(publisher)
    row = _row(opened, publisher)
    if as_json:
        print_json(row)
    else:
        print(f"{name} of tenant {tenant} writes to {row['stream']} and reads {row['answers']}…")


@app.verb("list")
async def list_publishers(as_json: Json = False) -> None:
    """List publishers, their tenants, and the number of commands waiting on their streams.

    \b
    Example:
      weft publisher list
    """
    async with broker() as opened:
        rows = [_row(opened, publisher) for publisher in await Publishers(opened.buses[0]).all()]
        for row in rows:
            try:
                row["waiting"] = await opened.transport.call("XLEN", row["stream"])
            except ServerError:  # not a stream
                row["waiting"] = None
    columns: Columns = {
        "PUBLISHER": "publisher",
        "TENANT": "tenant",
        "AGENTS": lambda row: "all" if row["agents"] is None else ",".join(row["agents"]) or "none",
        "TOPICS": lambda row: ",".join(row["topics"]) or "none",
        "WAITING": "waiting",
    }
    print_rows(rows, columns, as_json)


@app.verb("delete")
async def delete(name: Name) -> None:
    """Stop reading a publisher's stream. Its tasks and schedules continue, and the stream is kept.

    \b
    Example:
      weft publisher delete shop
    """
    async with broker() as opened:
        if not await Publishers(opened.buses[0]).delete(name):
            raise InvalidInput("publisher", f"there is no publisher {name!r}; see weft publisher list")


def _row(opened: Broker, publisher: Publisher) -> Row:
    return {
        "publisher": publisher.name,
        "tenant": publisher.tenant,
        "agents": None if publisher.agents is None else list(publisher.agents),
        "topics": list(publisher.topics),
        "stream": ingress(opened.settings.namespace, publisher.name),
        "answers": publisher.answers,
    }
