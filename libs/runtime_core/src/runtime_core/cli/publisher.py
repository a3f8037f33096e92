"""`weft publisher`: publishers with ingress streams of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime_core.cli.output import Json, print_json, print_table

if TYPE_CHECKING:
    from runtime_core.ingress.publishers import Publisher

Name = Annotated[str, typer.Argument(metavar="NAME", help="The publisher's name.")]


def group() -> typer.Typer:
    app = typer.Typer(
        help="Register publishers that are not trusted, each with an ingress stream of its own.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("set")(set_publisher)
    app.command("list")(list_publishers)
    app.command("delete")(delete)
    return app


def set_publisher(
    name: Name,
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="The tenant that it publishes for.")],
    agents: Annotated[
        str | None,
        typer.Option(
            "--agents",
            metavar="A,B",
            help="The agents that it may submit to. Default: all but internal ones and weft.…",
        ),
    ] = None,
    topics: Annotated[
        str, typer.Option("--topics", metavar="A,B.*", help="The topics that it may publish on. Default: none.")
    ] = "",
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
    from runtime_core.cli.connection import run
    from runtime_core.ingress.publishers import Publisher, names_of

    allowed = None if agents is None else names_of(agents)
    run(_set(Publisher(name=name, tenant=tenant, agents=allowed, topics=names_of(topics)), as_json))


def list_publishers(as_json: Json = False) -> None:
    """List publishers, their tenants, and how many commands wait on their streams.

    \b
    Example:
      weft publisher list
    """
    from runtime_core.cli.connection import run

    run(_list(as_json))


def delete(name: Name) -> None:
    """Stop reading a publisher's stream. Its tasks and schedules go on, and its stream stays as it is.

    \b
    Example:
      weft publisher delete shop
    """
    from runtime_core.cli.connection import run

    run(_delete(name))


async def _set(publisher: Publisher, as_json: bool) -> None:
    from runtime_core.bus.keys import ingress
    from runtime_core.cli.connection import broker
    from runtime_core.ingress.publishers import Publishers

    async with broker() as found:
        await Publishers(found.buses[0]).set(publisher)
        stream = ingress(found.settings.namespace, publisher.name)
    if as_json:
        print_json(_shown(publisher, stream))
    else:
        print(f"{publisher.name} of tenant {publisher.tenant} writes {stream} and reads {publisher.answers}…")


async def _list(as_json: bool) -> None:
    from runtime_core.bus.keys import ingress
    from runtime_core.cli.connection import broker
    from runtime_core.errors import ServerError
    from runtime_core.ingress.publishers import Publishers

    rows: list[tuple[Publisher, str, int | None]] = []
    async with broker() as found:
        for publisher in await Publishers(found.buses[0]).all():
            stream = ingress(found.settings.namespace, publisher.name)
            try:
                length = await found.transport.call("XLEN", stream)
            except ServerError:  # a key of another type
                length = None
            rows.append((publisher, stream, length if isinstance(length, int) else None))
    if as_json:
        print_json([{**_shown(publisher, stream), "waiting": waiting} for publisher, stream, waiting in rows])
        return
    print_table(
        ("PUBLISHER", "TENANT", "AGENTS", "TOPICS", "WAITING"),
        [
            (
                publisher.name,
                publisher.tenant,
                "all" if publisher.agents is None else ",".join(publisher.agents) or "none",
                ",".join(publisher.topics) or "none",
                "?" if waiting is None else str(waiting),
            )
            for publisher, _, waiting in rows
        ],
    )


async def _delete(name: str) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput
    from runtime_core.ingress.publishers import Publishers

    async with broker() as found:
        if not await Publishers(found.buses[0]).delete(name):
            raise InvalidInput("publisher", f"no publisher is named {name!r}; see weft publisher list")


def _shown(publisher: Publisher, stream: str) -> dict[str, Any]:  # Any: JSON
    """A publisher for programs."""
    return {
        "publisher": publisher.name,
        "tenant": publisher.tenant,
        "agents": None if publisher.agents is None else list(publisher.agents),
        "topics": list(publisher.topics),
        "stream": stream,
        "answers": publisher.answers,
    }
