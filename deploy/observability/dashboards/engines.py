"""All engines side by side."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.gateway import steps_row
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Query, graph, table_of
from deploy.observability.dashboards.process import BY_STREAM, STREAM_LABELS
from runtime_core.telemetry import names

HERE = 'engine=~"$engine"'
GROUPS = 'group=~".*-gateway"'


def page() -> Page:
    page = Page(
        "engines", "Weft: engines", "Steps on Ray and Spark: are the engines connected, and do steps make progress?"
    )
    page.choose("engine", names.ENGINE_CONNECTED.name, "Engine")
    steps_row(page, HERE)
    wrong, ended = ('end=~"failed|lost|unavailable"', 'end=~"completed|failed|lost|unavailable"')
    page.row(
        "What goes wrong?",
        graph(
            "Share of failed steps",
            "Failed, lost and unavailable steps among the ended ones. Failed: the functions' own errors.",
            Query(
                f"{promql.rate(names.ENGINE_STEPS, f'{HERE},{wrong}', 'engine, end')} / on (engine) group_left () "
                f"({promql.rate(names.ENGINE_STEPS, f'{HERE},{ended}', 'engine')} > 0)",
                "{{engine}} {{end}}",
            ),
            unit="percentunit",
            width=6,
        ),
        graph(
            "Connected",
            "Connected gateways, by engine.",
            Query(promql.total(names.ENGINE_CONNECTED, HERE, "engine"), "{{engine}}"),
            width=6,
        ),
        table_of(
            "Work that waits for engines",
            "Steps that no gateway has read. Waiting without a reader: start the gateway.",
            STREAM_LABELS,
            [
                Column("Waiting", promql.worst(names.STREAM_LAG, GROUPS, BY_STREAM)),
                Column("Oldest waiting", promql.worst(names.STREAM_OLDEST_WAITING, GROUPS, BY_STREAM), "s"),
                Column("Readers", promql.worst(names.STREAM_READERS, GROUPS, BY_STREAM)),
                Column("In flight", promql.worst(names.STREAM_PENDING, GROUPS, BY_STREAM)),
            ],
            sort="Oldest waiting",
            width=12,
        ),
    )
    return page
