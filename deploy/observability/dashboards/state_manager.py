"""What state-managers do: one leads a partition, admits, keeps order and measures."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Query, graph, table_of
from deploy.observability.dashboards.process import of, page_of, process_row, streams_row
from runtime_core.telemetry import names

SERVICE = "state-manager"


def page() -> Page:
    page = page_of(SERVICE, "Weft: state-manager", "Who leads, what is admitted, and how the housekeeping goes.")
    process_row(page, SERVICE)
    page.row(
        "Admission",
        table_of(
            "Who leads",
            "1 on the process that leads a partition, 0 on those that stand by.",
            {"instance": "Instance", "partition": "Partition"},
            [
                Column(
                    "Leads",
                    promql.worst(names.LEAD, of(SERVICE), "instance, partition"),
                    words={1: ("leads", "green"), 0: ("stands by", "blue")},
                )
            ],
            sort="Leads",
            width=8,
        ),
        graph(
            "From the ingress stream",
            "Commands of `weft:tasks` that were taken per second. The Python client does not go that way.",
            Query(promql.rate(names.EVENTS_HANDLED, of(SERVICE), "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        graph(
            "Refused",
            "Commands that were refused, by reason; each is answered and kept as a dead letter.",
            Query(promql.rate(names.TASKS_REFUSED, by="reason"), "{{reason}}"),
            unit="ops",
        ),
        graph(
            "Started",
            "Tasks that were started per second, whoever has submitted them.",
            Query(promql.rate(names.TASKS_ADMITTED, by="partition"), "partition {{partition}}"),
            unit="ops",
        ),
        graph(
            "Rejected and undeliverable",
            "Dead letters of its own: commands that were refused, and answers that could not be written to `replyto`.",
            Query(promql.rate(names.DEAD_LETTERS, of(SERVICE), "reason"), "{{reason}}"),
            unit="ops",
        ),
        graph(
            "Age of the measures",
            "How long ago the leader of a partition has measured it. Above a minute: nobody leads, or no broker.",
            Query(f"time() - {promql.worst(names.MEASURED_AT, by='partition')}", "partition {{partition}}"),
            unit="s",
        ),
    )
    streams_row(page, 'group="state-manager"')
    return page
