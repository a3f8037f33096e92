"""The work of a gateway: steps on one engine, through a driver process. Both gateways have this page."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Limits, Placed, Query, graph, number
from deploy.observability.dashboards.process import deliveries_row, page_of, process_row, quantiles, streams_row
from runtime_core.telemetry import names


def page_of_gateway(engine: str, title: str) -> Page:
    service = f"{engine}-gateway"
    page = page_of(service, f"Weft: {service}", f"Steps on {title}: how many, how long, and whether it is there.")
    process_row(page, service)
    steps_row(page, f'engine="{engine}",instance=~"$instance"')
    deliveries_row(page, service)
    streams_row(page, f'group="{service}"')
    return page


def steps_row(page: Page, where: str) -> None:
    """Steps on the engines that `where` selects."""
    page.row(
        "Steps",
        *_numbers(where),
        graph(
            "Steps",
            "Steps that a gateway held, per second, by outcome. `waits` and `unavailable`: the engine is "
            "unavailable. `lost` steps run again.",
            Query(promql.rate(names.ENGINE_STEPS, where, "engine, end"), "{{engine}} {{end}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Attempt duration",
            "From taking a step to the end of its attempt, including its wait for capacity. If it grows, the engine "
            "is full.",
            names.ENGINE_STEP_SECONDS,
            where,
        ),
        graph(
            "Running",
            "Steps that are running on the engine. At WEFT_ENGINE_IN_FLIGHT for long: the engine is full.",
            Query(promql.total(names.ENGINE_RUNNING, where, "engine, instance"), "{{engine}} {{instance}}"),
            width=12,
        ),
        graph(
            "Driver's memory",
            "Memory of a gateway's driver process. If it grows without bound, a job keeps its data in the driver.",
            Query(promql.worst(names.ENGINE_DRIVER_MEMORY, where, "engine, instance"), "{{engine}} {{instance}}"),
            unit="bytes",
            width=12,
        ),
    )


def _numbers(where: str) -> tuple[Placed, Placed]:
    return (
        number(
            "Connected gateways",
            "Gateways whose driver is connected to the engine. 0 for longer than a restart of the engine: steps wait, "
            "and fail after their engine_wait_seconds.",
            promql.total(names.ENGINE_CONNECTED, where),
            limits=Limits(1, 1, low=True),
            height=8,
        ),
        number(
            "Driver starts",
            "Driver processes started in this time. If it rises, search the gateway's log for `driver`.",
            promql.number(names.ENGINE_DRIVER_STARTS, where),
            limits=Limits(3, 10),
            height=8,
        ),
    )
