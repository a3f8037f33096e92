"""Commands for operators of a namespace: rights of the broker's users, publishers, tenants, API keys, agent types."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, cast

from typer import Argument, BadParameter, Option

from runtime_core.base.text import counted
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
from runtime_core.bus.keys import ingress
from runtime_core.bus.namespace import connect, server_info
from runtime_core.bus.topics import Topics, TopicSubscription
from runtime_core.cli.connection import Broker, Commands, broker, broker_url, read_settings
from runtime_core.cli.output import Columns, Json, Row, moment, print_result, print_rows
from runtime_core.errors import ConfigurationError, InvalidInput, ServerError
from runtime_core.gateway.keys import ROLES, ApiKey, ApiKeys
from runtime_core.settings import Settings
from runtime_core.state_manager.backlog import agents_of_runtimes, drop_agent
from runtime_core.state_manager.publishers import (
    ALL_OTHERS,
    Publisher,
    Publishers,
    Tenant,
    open_tasks,
    remove_tenant,
    set_tenant,
    split_names,
    tenants,
    waiting_tasks,
)

# ---- weft acl -------------------------------------------------------------------------------------------------

NO_PASSWORD = "SHA256-OF-THE-PASSWORD"  # noqa: S105
"""Not a digest, so every server rejects it."""

acl_commands = Commands()


@acl_commands.verb("acl")
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
        raise ConfigurationError("give one of them: --for names the server, --ask asks it")
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


# ---- weft publisher -------------------------------------------------------------------------------------------

publisher_commands = Commands("Register untrusted publishers, each with its own ingress stream.")

PublisherName = Annotated[str, Argument(metavar="NAME", help="The publisher's name.")]


@publisher_commands.verb("set")
async def set_publisher(
    name: PublisherName,
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
    row = _publisher_row(opened, publisher)
    print_result(row, f"{name} of tenant {tenant} writes to {row['stream']} and reads {row['answers']}…", as_json)


@publisher_commands.verb("list")
async def list_publishers(as_json: Json = False) -> None:
    """List publishers, their tenants, and the number of commands waiting on their streams.

    \b
    Example:
      weft publisher list
    """
    async with broker() as opened:
        rows = [_publisher_row(opened, publisher) for publisher in await Publishers(opened.buses[0]).all()]
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


@publisher_commands.verb("delete")
async def delete_publisher(name: PublisherName) -> None:
    """Stop reading a publisher's stream. Its tasks and schedules continue, and the stream is kept.

    \b
    Example:
      weft publisher delete shop
    """
    async with broker() as opened:
        if not await Publishers(opened.buses[0]).delete(name):
            raise InvalidInput("publisher", f"there is no publisher {name!r}; see `weft publisher list`")
    print(f"deleted publisher {name}")


def _publisher_row(opened: Broker, publisher: Publisher) -> Row:
    return {
        "publisher": publisher.name,
        "tenant": publisher.tenant,
        "agents": None if publisher.agents is None else list(publisher.agents),
        "topics": list(publisher.topics),
        "stream": ingress(opened.settings.namespace, publisher.name),
        "answers": publisher.answers,
    }


# ---- weft tenant ----------------------------------------------------------------------------------------------

tenant_commands = Commands("Set the weights and limits of tenants.")

TenantName = Annotated[str, Argument(metavar="NAME", help="The tenant; * is every other named tenant.")]


@tenant_commands.verb("set")
async def set_tenant_settings(
    name: TenantName,
    weight: Annotated[
        int, Option(metavar="N", min=1, max=1000, help="Its share of turns relative to other tenants.")
    ] = 1,
    max_open: Annotated[int, Option(metavar="N", min=0, help="Allow at most N open tasks; 0: no limit.")] = 0,
    rate: Annotated[float, Option(metavar="N", min=0.0, help="Allow at most N tasks per second; 0: no limit.")] = 0.0,
) -> None:
    """Set a tenant's weight and limits, replacing earlier ones.

    Submits over a limit are rejected as `overloaded`. Partitions share the limits equally.

    \b
    Examples:
      weft tenant set acme --weight 2 --max-open 10000 --rate 100
      weft tenant set "*" --max-open 1000
    """
    async with broker() as opened:
        await set_tenant(opened.buses, Tenant(name, weight, max_open, rate))
    print(f"set tenant {name}")


@tenant_commands.verb("list")
async def list_tenants(as_json: Json = False) -> None:
    """List tenants with settings or waiting tasks.

    \b
    Example:
      weft tenant list
    """
    async with broker() as opened:
        waiting: Counter[str] = Counter()
        for bus in opened.buses:
            for counts in (await waiting_tasks(bus)).values():
                waiting += counts
        known = {tenant.name: tenant for tenant in await tenants(opened.buses[0])}
        others = known.get(ALL_OTHERS, Tenant(ALL_OTHERS))
        rows: list[Row] = []
        for name in sorted({*known, *waiting}):
            tenant = known.get(name) or (others if name else Tenant(name))
            rows.append(
                {
                    "tenant": name,
                    "weight": tenant.weight,
                    "max_open": tenant.max_open or None,
                    "rate": tenant.rate or None,
                    "open": await open_tasks(opened.buses, name) if name not in ("", ALL_OTHERS) else None,
                    "waiting": waiting[name],
                }
            )
    columns = {"WEIGHT": "weight", "MAX OPEN": "max_open", "RATE": "rate", "OPEN": "open", "WAITING": "waiting"}
    print_rows(rows, {"TENANT": lambda row: row["tenant"] or "(no name)", **columns}, as_json)


@tenant_commands.verb("remove")
async def remove_settings(name: TenantName) -> None:
    """Remove a tenant's settings. Its tasks continue.

    \b
    Example:
      weft tenant remove acme
    """
    async with broker() as opened:
        if not await remove_tenant(opened.buses, name):
            raise InvalidInput("tenant", f"{name!r} has no settings; see `weft tenant list`")
    print(f"removed the settings of tenant {name}")


# ---- weft key -------------------------------------------------------------------------------------------------

key_commands = Commands("Create and revoke API keys of the HTTP gateway.")


@key_commands.verb("create")
async def create_key(
    name: Annotated[str, Argument(metavar="NAME", help="Who uses the key, for the list.")],
    role: Annotated[
        list[str], Option(metavar="ROLE", help=f"What it may do: {', '.join(ROLES)}. Repeatable. Default: all.")
    ] = [],  # noqa: B006 - Typer reads the default and changes nothing
    tenant: Annotated[
        str, Option(metavar="TENANT", help="The only tenant whose tasks it reaches. Default: all tasks.")
    ] = "",
    agents: Annotated[
        str | None,
        Option(metavar="A,B", help="The agents that it may submit to. Default: all except internal ones."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an API key, and print it. It is not stored, so it cannot be shown again.

    Programs send it as `Authorization: Bearer <key>` to gateways with WEFT_HTTP_AUTH=keys.

    \b
    Examples:
      weft key create "web shop" --tenant acme --role submit --role read
      weft key create dashboard --role read
    """
    allowed = None if agents is None else split_names(agents)
    async with broker() as opened:
        key, text = await ApiKeys(opened.buses[0]).create(name, role or ROLES, tenant, allowed)
    print_result({**_key_row(key), "key": text}, text, as_json)


@key_commands.verb("list")
async def list_keys(as_json: Json = False) -> None:
    """List API keys, without the keys themselves.

    \b
    Example:
      weft key list
    """
    async with broker() as opened:
        rows = [_key_row(key) for key in await ApiKeys(opened.buses[0]).all()]
    columns: Columns = {
        "ID": "id",
        "NAME": "name",
        "ROLES": lambda row: ",".join(row["roles"]),
        "TENANT": lambda row: row["tenant"] or "all",
        "AGENTS": lambda row: "all" if row["agents"] is None else ",".join(row["agents"]) or "none",
        "CREATED": lambda row: moment(row["created"]),
    }
    print_rows(rows, columns, as_json)


@key_commands.verb("revoke")
async def revoke_key(id: Annotated[str, Argument(metavar="ID", help="From `weft key list`.")]) -> None:
    """Revoke an API key. Gateways refuse it within a second; streams that are open end with their task.

    \b
    Example:
      weft key revoke 3f2a9c01d7e4
    """
    async with broker() as opened:
        if not await ApiKeys(opened.buses[0]).revoke(id):
            raise InvalidInput("ID", f"there is no key {id!r}; see `weft key list`")
    print(f"revoked {id}")


def _key_row(key: ApiKey) -> Row:
    return {
        "id": key.id,
        "name": key.name,
        "roles": list(key.roles),
        "tenant": key.tenant or None,
        "agents": None if key.agents is None else list(key.agents),
        "created": key.created_ms,
    }


# ---- weft agents ----------------------------------------------------------------------------------------------

agents_commands = Commands("List agent types of runtimes, and forget those that no process runs.")


@agents_commands.verb("list")
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
                "subscriptions": _subscriptions_of(each.name, subscriptions),
            }
            for each in await agents_of_runtimes(opened.buses)
        ]
    columns: Columns = {
        "AGENT": "agent",
        "PROCESSES": "processes",
        "MESSAGES": "messages",
        "SUBSCRIPTIONS": lambda row: " ".join(row["subscriptions"]) or None,
    }
    print_rows(
        rows,
        columns,
        as_json,
        empty="no runtime has registered agents; agents that an app declares are not listed here",
    )


@agents_commands.verb("drop", seconds=None)  # it cancels many tasks
async def drop_agents(
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
        raise BadParameter("give either agent types or --gone")
    async with broker() as opened:
        chosen = names or [each.name for each in await agents_of_runtimes(opened.buses) if not each.processes]
        for name in chosen:
            print(f"dropped {name}: cancelled {counted(await drop_agent(opened.buses, name), 'task')}")
    if not chosen:
        print("every agent type has a process")


def _subscriptions_of(name: str, all_of_them: Sequence[TopicSubscription]) -> list[str]:
    """Return the topics of an agent; a prefix ends with `*`."""
    return [f"{each.topic}{'*' if each.prefix else ''}" for each in all_of_them if each.agent == name]
