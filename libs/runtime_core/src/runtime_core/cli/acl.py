"""`weft acl`: the broker's users, each with the rights that its work needs and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from runtime_core.acl.rules import Target
    from runtime_core.config.settings import Settings

NO_PASSWORD = "SHA256-OF-THE-PASSWORD"  # noqa: S105
"""No digest, so that no server takes it."""


def register(app: typer.Typer) -> None:
    app.command("acl")(acl)


def acl(
    users: Annotated[
        list[str] | None,
        typer.Option("--user", metavar="NAME", help="Print this user only. May be given several times."),
    ] = None,
    publishers: Annotated[
        list[str] | None,
        typer.Option(
            "--publisher",
            metavar="NAME",
            help="Print a publisher with an ingress stream of its own. May be given several times.",
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option("--for", metavar="SERVER", help="The kind of server, as in redis-7.0, redis-8 or valkey-9."),
    ] = None,
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask the server that WEFT_REDIS_URL names which commands it knows.")
    ] = False,
    passwords: Annotated[
        list[Path] | None,
        typer.Option(
            "--passwords",
            metavar="FILE",
            help="Print digests of the passwords in this file, which gets a new one for each user that it lacks."
            " A second file lets its passwords in as well, while you replace them.",
        ),
    ] = None,
    commands: Annotated[
        bool, typer.Option("--commands", help="Print ACL SETUSER commands instead of lines of an aclfile.")
    ] = False,
) -> None:
    """Print the broker's users, each with least rights.

    Without --for and --ask the lines leave out what Redis 7.0 does not know, so that every
    server loads them. WEFT_NAMESPACE and WEFT_PARTITIONS count.

    \b
    Examples:
      weft acl --for redis-8 --passwords passwords.env > users.acl
      weft acl --publisher shop --passwords shop.env --commands | redis-cli
    """
    from runtime_core.acl import rules as lines
    from runtime_core.acl.rules import digests
    from runtime_core.acl.users import USERS
    from runtime_core.cli.connection import read_settings, run
    from runtime_core.errors import ConfigurationError

    settings = read_settings()
    if server is not None and server not in lines.SERVERS:
        raise ConfigurationError(f"--for {server}: there are {', '.join(lines.SERVERS)}")
    if ask and server is not None:
        raise ConfigurationError("give --for or --ask, not both")
    chosen = lines.find_users(users or ([] if publishers else USERS), publishers or ())
    target = run(_asked(settings)) if ask else _target(settings, server)
    if server is None and not ask:
        print("weft acl: without --for or --ask, WEFT_DURABILITY=fsync is not granted", file=sys.stderr)
    known = digests(passwords or (), [user.name for user in chosen if not user.public_password])
    for user in chosen:
        line = lines.user_line(user, target, known.get(user.name, [NO_PASSWORD]))
        print(lines.as_command(line) if commands else line)
    if not (users or publishers or commands):
        print(lines.DEFAULT_OFF)


def _target(settings: Settings, server: str | None) -> Target:
    from runtime_core.acl.rules import SERVERS, lacking

    oldest = min(SERVERS, key=lambda name: SERVERS[name])
    return _made(settings, lacking(server or oldest), valkey=(server or "").startswith("valkey"))


async def _asked(settings: Settings) -> Target:
    from typing import cast

    from runtime_core.acl.rules import LATER
    from runtime_core.bus.connection import Reply
    from runtime_core.bus.namespace import connect
    from runtime_core.cli.connection import broker_url

    transport = await connect(broker_url(settings))
    try:
        names = sorted(LATER)
        found = cast(list[Reply], await transport.call("COMMAND", "INFO", *names))
        said = cast(bytes, await transport.call("INFO", "server"))
    finally:
        await transport.close()
    lacks = frozenset(name for name, about in zip(names, found, strict=True) if not about)
    return _made(settings, lacks, valkey=b"valkey_version:" in said)


def _made(settings: Settings, lacks: frozenset[str], *, valkey: bool) -> Target:
    from runtime_core.acl.rules import Target
    from runtime_core.bus.address import parse_address

    url = settings.operator_redis_url or settings.redis_url
    return Target(
        settings.namespace,
        settings.partitions,
        parse_address(url).database if url and not url.startswith("memory:") else 0,
        lacks,
        reads_config=valkey and settings.durability == "fsync",
    )
