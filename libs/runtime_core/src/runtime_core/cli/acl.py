"""`weft acl`: the broker's users, each with the rights that its work needs and no others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, cast

from typer import Option

from runtime_core.acl.rules import (
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
from runtime_core.acl.users import USERS
from runtime_core.bus.connection import Reply
from runtime_core.bus.connector import parse_address
from runtime_core.bus.namespace import connect
from runtime_core.cli.connection import Commands, broker_url, read_settings
from runtime_core.config.settings import Settings
from runtime_core.errors import ConfigurationError

NO_PASSWORD = "SHA256-OF-THE-PASSWORD"  # noqa: S105
"""No digest, so that no server takes it."""

app = Commands()


@app.verb("acl")
async def acl(
    user: Annotated[
        list[str] | None, Option(metavar="NAME", help="Print this user only. May be given several times.")
    ] = None,
    publisher: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="Print a publisher with an ingress stream of its own. May be given several times."),
    ] = None,
    server: Annotated[
        str | None, Option("--for", metavar="SERVER", help="The kind of server, as in redis-7.0, redis-8 or valkey-9.")
    ] = None,
    ask: Annotated[bool, Option("--ask", help="Ask the server of WEFT_REDIS_URL which commands it knows.")] = False,
    passwords: Annotated[
        list[Path] | None,
        Option(
            metavar="FILE",
            help="Print digests of the passwords in this file, which gets a new one for each user that it lacks."
            " A second file lets its passwords in as well, while you replace them.",
        ),
    ] = None,
    commands: Annotated[
        bool, Option("--commands", help="Print ACL SETUSER commands instead of lines of an aclfile.")
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
    settings = read_settings()
    if server is not None and server not in SERVERS:
        raise ConfigurationError(f"--for {server}: there are {', '.join(SERVERS)}")
    if ask and server is not None:
        raise ConfigurationError("give --for or --ask, not both")
    chosen = find_users(user or ([] if publisher else USERS), publisher or ())
    if ask:
        target = await _asked(settings)
    else:
        if server is None:
            print("weft acl: without --for or --ask, WEFT_DURABILITY=fsync is not granted", file=sys.stderr)
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
        said = cast(bytes, await transport.call("INFO", "server"))
    finally:
        await transport.close()
    lacks = frozenset(name for name, about in zip(names, found, strict=True) if not about)
    return _target(settings, lacks, valkey=b"valkey_version:" in said)


def _target(settings: Settings, lacks: frozenset[str], *, valkey: bool) -> Target:
    url = settings.operator_redis_url or settings.redis_url
    database = parse_address(url).database if url and not url.startswith("memory:") else 0
    reads_config = valkey and settings.durability == "fsync"
    return Target(settings.namespace, settings.partitions, database, lacks, reads_config=reads_config)
