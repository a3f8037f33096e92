"""`weft publisher`: publishers with ingress streams of their own."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Option

from runtime_core.bus.keys import ingress
from runtime_core.cli.connection import Broker, Commands, broker
from runtime_core.cli.output import Columns, Json, Row, print_json, print_rows
from runtime_core.errors import InvalidInput, ServerError
from runtime_core.ingress.publishers import Publisher, Publishers, names_of

app = Commands("Register publishers that are not trusted, each with an ingress stream of its own.")

Name = Annotated[str, Argument(metavar="NAME", help="The publisher's name.")]


@app.verb("set")
async def set_publisher(
    name: Name,
    tenant: Annotated[str, Option(metavar="TENANT", help="The tenant that it publishes for.")],
    agents: Annotated[
        str | None,
        Option(metavar="A,B", help="The agents that it may submit to. Default: all but internal ones and weft.…"),
    ] = None,
    topics: Annotated[str, Option(metavar="A,B.*", help="The topics that it may publish on. Default: none.")] = "",
    as_json: Json = False,
) -> None:
    """Register a publisher, or replace the one with this name, and print its stream.

    Everything that comes on the stream is bound to the publisher and its tenant. Give its broker user the right to
    write that stream, and to read its answers, and nothing else.

    \b
    Examples:
      weft publisher set shop --tenant acme
      weft publisher set web --tenant acme --agents writer,editor --topics "orders.*"
    """
    allowed = None if agents is None else names_of(agents)
    publisher = Publisher(name=name, tenant=tenant, agents=allowed, topics=names_of(topics))
    async with broker() as opened:
        await Publishers(opened.buses[0]).set(publisher)
    row = _row(opened, publisher)
    if as_json:
        print_json(row)
    else:
        print(f"{name} of tenant {tenant} writes {row['stream']} and reads {row['answers']}…")


@app.verb("list")
async def list_publishers(as_json: Json = False) -> None:
    """List publishers, their tenants, and how many commands wait on their streams.

    \b
    Example:
      weft publisher list
    """
    async with broker() as opened:
        rows = [_row(opened, publisher) for publisher in await Publishers(opened.buses[0]).all()]
        for row in rows:
            try:
                row["waiting"] = await opened.transport.call("XLEN", row["stream"])
            except ServerError:  # a key of another type
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
    """Stop reading a publisher's stream. Its tasks and schedules go on, and its stream stays as it is.

    \b
    Example:
      weft publisher delete shop
    """
    async with broker() as opened:
        if not await Publishers(opened.buses[0]).delete(name):
            raise InvalidInput("publisher", f"no publisher is named {name!r}; see weft publisher list")


def _row(opened: Broker, publisher: Publisher) -> Row:
    return {
        "publisher": publisher.name,
        "tenant": publisher.tenant,
        "agents": None if publisher.agents is None else list(publisher.agents),
        "topics": list(publisher.topics),
        "stream": ingress(opened.settings.namespace, publisher.name),
        "answers": publisher.answers,
    }
