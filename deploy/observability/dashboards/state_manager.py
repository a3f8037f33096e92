"""The work of state-managers: one leads a partition, admits commands, maintains and measures it."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Query, graph, table_of
from deploy.observability.dashboards.process import of, page_of, process_row, streams_row
from runtime_core.telemetry import names

SERVICE = "state-manager"


def page() -> Page:
    page = page_of(SERVICE, "Weft: state-manager", "Leaders, admission and housekeeping.")
    process_row(page, SERVICE)
    page.row(
        "Admission",
        table_of(
            "Leader",
            "1 for the process that leads a partition, 0 for those that stand by.",
            {"instance": "Instance", "partition": "Partition"},
            [
                Column(
                    "Leads",
                    promql.worst(names.IS_LEADER, of(SERVICE), "instance, partition"),
                    words={1: ("leads", "green"), 0: ("stands by", "blue")},
                )
            ],
            sort="Leads",
            width=8,
        ),
        graph(
            "From the ingress stream",
            "Commands of `weft:tasks` read per second. The Python client does not use this stream.",
            Query(promql.rate(names.EVENTS_HANDLED, of(SERVICE), "outcome"), "{{outcome}}"),
            unit="ops",
        ),
        graph(
            "Refused",
            "Refused commands, by reason; each is answered and kept as a dead letter.",
            Query(promql.rate(names.TASKS_REFUSED, by="reason"), "{{reason}}"),
            unit="ops",
        ),
        graph(
            "Started",
            "Tasks started per second, from all submitters.",
            Query(promql.rate(names.TASKS_ADMITTED, by="partition"), "partition {{partition}}"),
            unit="ops",
        ),
        graph(
            "Rejected and undeliverable",
            "Dead letters of the state-manager: refused commands, and answers that could not be written to `replyto`.",
            Query(promql.rate(names.DEAD_LETTERS, of(SERVICE), "reason"), "{{reason}}"),
            unit="ops",
        ),
        graph(
            "Age of the measurements",
            "Time since the leader last measured the partition. Above a minute: nobody leads, or there is no broker.",
            Query(f"time() - {promql.worst(names.MEASURED_AT, by='partition')}", "partition {{partition}}"),
            unit="s",
        ),
    )
    streams_row(page, 'group="state-manager"')
    return page
