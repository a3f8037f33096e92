"""`weft tenant`: weights and limits of tenants."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from typer import Argument, Option

from runtime_core.cli.connection import Commands, broker
from runtime_core.cli.output import Json, Row, print_rows
from runtime_core.errors import InvalidInput
from runtime_core.ingress.publishers import (
    ALL_OTHERS,
    Tenant,
    open_tasks,
    remove_tenant,
    set_tenant,
    tenants,
    waiting_tasks,
)

app = Commands("Set the weights and limits of tenants.")

Name = Annotated[str, Argument(metavar="NAME", help="The tenant; * is every other named tenant.")]


@app.verb("set")
async def set_settings(
    name: Name,
    weight: Annotated[
        int, Option(metavar="N", min=1, max=1000, help="Its share of turns relative to other tenants.")
    ] = 1,
    max_open: Annotated[int, Option(metavar="N", min=0, help="The most open tasks; 0: no limit.")] = 0,
    rate: Annotated[float, Option(metavar="N", min=0.0, help="The most tasks per second; 0: no limit.")] = 0.0,
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


@app.verb("list")
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


@app.verb("remove")
async def remove(name: Name) -> None:
    """Remove a tenant's settings. Its tasks continue.

    \b
    Example:
      weft tenant remove acme
    """
    async with broker() as opened:
        if not await remove_tenant(opened.buses, name):
            raise InvalidInput("tenant", f"{name!r} has no settings; see `weft tenant list`")
    print(f"removed the settings of tenant {name}")
