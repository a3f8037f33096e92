"""`weft acl`: prints ACL rules for the broker's users, each with least privilege."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

from typer import Option

from runtime_core.bus.acl.rules import (
    DEFAULT_OFF,
    LATER,
    SERVERS,
    Target,
    as_command,
    digests,
    find_users,
    lacking,
    user_line,
)
from runtime_core.bus.acl.users import USERS
from runtime_core.bus.connection import Reply
from runtime_core.bus.connector import parse_address
from runtime_core.bus.namespace import connect, server_info
from runtime_core.cli.connection import Commands, broker_url, read_settings
from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError

NO_PASSWORD = "SHA256-OF-THE-PASSWORD"  # noqa: S105
"""Not a digest, so every server rejects it."""

app = Commands()


@app.verb("acl")
async def acl(
    user: Annotated[list[str] | None, Option(metavar="NAME", help="Print only this user. Repeatable.")] = None,
    publisher: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Print the user of a registered publisher. Repeatable."),
    ] = None,
    server: Annotated[
        str | None, Option("--for", metavar="SERVER", help="The server's kind, such as redis-7.0, redis-8 or valkey-9.")
    ] = None,
    ask: Annotated[
        bool, Option("--ask", help="Query the server at WEFT_REDIS_URL for the commands that it knows.")
    ] = False,
    passwords: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="Print digests of the passwords in this file; a password is generated for each missing user."
            " With a second file, its passwords are also valid, so that you can replace them.",
        ),
    ] = None,
    commands: Annotated[
        bool, Option("--commands", help="Print ACL SETUSER commands instead of lines for an ACL file.")
    ] = False,
) -> None:
    """Print ACL rules for the broker's users.

    Each user gets only the rights that it needs. Without --for and --ask, the rules contain
    only what Redis 7.0 knows, so every server loads them. They depend on WEFT_NAMESPACE and
    WEFT_PARTITIONS.

    \b
    Examples:
      weft acl --for redis-8 --passwords passwords.env > users.acl
      weft acl --publisher shop --passwords shop.env --commands | redis-cli
    """
    settings = read_settings()
    if server is not None and server not in SERVERS:
        raise ConfigurationError(f"--for {server}: unknown; use one of {', '.join(SERVERS)}")
    if ask and server is not None:
        raise ConfigurationError("--for and --ask exclude each other")
    chosen = find_users(user or ([] if publisher else USERS), publisher or ())
    if ask:
        target = await _asked(settings)
    else:
        if server is None:
            print("weft acl: without --for or --ask, the rules do not allow WEFT_DURABILITY=fsync", file=sys.stderr)
        oldest = min(SERVERS, key=lambda name: SERVERS[name])
        target = _target(settings, lacking(server or oldest), valkey=(server or "").startswith("valkey"))
    known = digests(passwords or (), [one.name for one in chosen if not one.public_password])
    for one in chosen:
        line = user_line(one, target, known.get(one.name, [NO_PASSWORD]))
        print(as_command(line) if commands else line)
    if not (user or publisher or commands):
        print(DEFAULT_OFF)


async def _asked(settings: Settings) -> Target:
    transport = await connect(broker_url(settings))
    try:
        names = sorted(LATER)
        found = cast(list[Reply], await transport.call("COMMAND", "INFO", *names))
        info = await server_info(transport, "server")
    finally:
        await transport.close()
    lacks = frozenset(name for name, about in zip(names, found, strict=True) if not about)
    return _target(settings, lacks, valkey="valkey_version" in info)


def _target(settings: Settings, lacks: frozenset[str], *, valkey: bool) -> Target:
    url = settings.operator_redis_url or settings.redis_url
    database = parse_address(url).database if url and not url.startswith("memory:") else 0
    reads_config = valkey and settings.durability == "fsync"
    return Target(settings.namespace, settings.partitions, database, lacks, reads_config=reads_config)
