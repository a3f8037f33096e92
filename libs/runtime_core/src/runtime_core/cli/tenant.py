"""`weft tenant`: weights and limits of tenants."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runtime_core.cli.output import Json, print_json, print_table

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant; * stands for all others that have a name.")]


def group() -> typer.Typer:
    app = typer.Typer(
        help="Share handlers fairly among tenants, and limit what one may start.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    app.command("set")(set_settings)
    app.command("list")(list_tenants)
    app.command("remove")(remove)
    return app


def set_settings(
    name: Name,
    weight: Annotated[
        int, typer.Option("--weight", metavar="N", min=1, max=1000, help="Its share of turns, against others' weights.")
    ] = 1,
    max_open: Annotated[
        int, typer.Option("--max-open", metavar="N", min=0, help="The most tasks it may have open; 0: no limit.")
    ] = 0,
    rate: Annotated[
        float, typer.Option("--rate", metavar="N", min=0.0, help="The most tasks it may start a second; 0: no limit.")
    ] = 0.0,
) -> None:
    """Set a tenant's weight and limits, in place of what was set before.

    Submits over a limit are answered `overloaded`. With several partitions each has an equal part of the limits.

    \b
    Examples:
      weft tenant set acme --weight 2 --max-open 10000 --rate 100
      weft tenant set "*" --max-open 1000
    """
    from runtime_core.cli.connection import run

    run(_set(name, weight, max_open, rate))


def list_tenants(as_json: Json = False) -> None:
    """List tenants that have settings or tasks that wait for their turns.

    \b
    Example:
      weft tenant list
    """
    from runtime_core.cli.connection import run

    run(_list(as_json))


def remove(name: Name) -> None:
    """Remove a tenant's settings. Its tasks go on.

    \b
    Example:
      weft tenant remove acme
    """
    from runtime_core.cli.connection import run

    run(_remove(name))


async def _set(name: str, weight: int, max_open: int, rate: float) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.ingress.tenants import Tenant, set_tenant

    async with broker() as opened:
        await set_tenant(opened.buses, Tenant(name, weight, max_open, rate))
    print(f"set tenant {name}")


async def _remove(name: str) -> None:
    from runtime_core.cli.connection import broker
    from runtime_core.errors import InvalidInput
    from runtime_core.ingress.tenants import remove_tenant

    async with broker() as opened:
        if not await remove_tenant(opened.buses, name):
            raise InvalidInput("tenant", f"nothing is set for {name!r}; see `weft tenant list`")
    print(f"removed the settings of tenant {name}")


async def _list(as_json: bool) -> None:
    from collections import Counter

    from runtime_core.cli.connection import broker
    from runtime_core.ingress.tenants import ALL_OTHERS, Tenant, open_tasks, tenants, waiting_tasks

    async with broker() as opened:
        waiting: Counter[str] = Counter()
        for bus in opened.buses:
            for counts in (await waiting_tasks(bus)).values():
                waiting += counts
        known = {tenant.name: tenant for tenant in await tenants(opened.buses[0])}
        others = known.get(ALL_OTHERS, Tenant(ALL_OTHERS))
        rows: list[dict[str, Any]] = []  # Any: JSON
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
    if as_json:
        print_json(rows)
        return
    print_table(
        ("TENANT", "WEIGHT", "MAX OPEN", "RATE", "OPEN", "WAITING"),
        [
            (
                row["tenant"] or "(no name)",
                str(row["weight"]),
                "-" if row["max_open"] is None else str(row["max_open"]),
                "-" if row["rate"] is None else f"{row['rate']:g}",
                "-" if row["open"] is None else str(row["open"]),
                str(row["waiting"]),
            )
            for row in rows
        ],
    )
