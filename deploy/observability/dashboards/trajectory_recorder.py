"""The work of trajectory-recorders: they copy the record into the store."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Query, graph, table_of
from deploy.observability.dashboards.process import of, page_of, process_row, quantiles, streams_row
from runtime_core.telemetry import names

SERVICE = "trajectory-recorder"


def page() -> Page:
    page = page_of(SERVICE, "Weft: trajectory-recorder", "Does the record reach the store, and how far behind is it?")
    process_row(page, SERVICE)
    page.row(
        "Recording",
        graph(
            "Recorded",
            "Entries copied into the store per second. If it is 0 while the stream `record` grows, the store may be "
            "down.",
            Query(promql.rate(names.RECORDED_ENTRIES, by="partition"), "partition {{partition}}"),
            unit="ops",
        ),
        quantiles(
            "Transactions",
            "Duration of a transaction of the store. If the tail grows, the database is slow.",
            names.RECORDER_COMMIT_SECONDS,
            'instance=~"$instance"',
        ),
        table_of(
            "Leader",
            "1 for the process that records a partition, 0 for those that stand by.",
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
    )
    streams_row(page, 'group="trajectory-recorder"')
    return page
