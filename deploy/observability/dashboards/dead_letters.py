"""What was given up, why, and what goes wrong before that."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Limits, Query, graph, number, table_of
from runtime_core.telemetry import names

HERE = 'partition=~"$partition"'


def page() -> Page:
    page = Page(
        "dead-letters",
        "Weft: dead letters",
        "Deliveries that will not be tried again. `weft dead list --group-by error` says what went wrong.",
    )
    page.choose("partition", names.DEAD_LETTERS_KEPT.name, "Partition")
    page.row(
        "Kept",
        number(
            "Kept",
            "Letters on which nobody has decided: redrive or drop them. They cost memory of the broker.",
            promql.over_partitions(names.DEAD_LETTERS_KEPT, HERE),
            limits=Limits(1, 100),
            width=8,
        ),
        number(
            "New",
            "Letters that were written in the time that the page shows.",
            promql.number(names.DEAD_LETTERS),
            limits=Limits(1, 100),
            width=8,
        ),
        number(
            "Failed tasks",
            "The share of failed tasks among those that ended in the time that the page shows.",
            promql.share(promql.increase(names.TASKS_ENDED, 'status="failed"'), promql.increase(names.TASKS_ENDED)),
            unit="percentunit",
            limits=Limits(0.01, 0.05),
            empty="none",
            width=8,
        ),
        graph(
            "Bytes, by stream",
            "Near `WEFT_DEAD_MAX_BYTES` the oldest letters of the largest stream are trimmed.",
            Query(promql.worst(names.DEAD_LETTER_BYTES, HERE, "partition, stream"), "{{stream}} ({{partition}})"),
            unit="bytes",
        ),
        graph(
            "Trimmed, by stream and cause",
            "In each minute: letters that were deleted before anybody decided about them.",
            Query(promql.increase(names.DEAD_LETTERS_TRIMMED, HERE, "stream, cause", "1m"), "{{stream}}: {{cause}}"),
            stacked=True,
        ),
        graph(
            "Kept, by partition",
            "It rises: something goes wrong now. It does not fall: nobody decides.",
            Query(promql.worst(names.DEAD_LETTERS_KEPT, HERE, "partition"), "partition {{partition}}"),
        ),
        graph(
            "New, by reason",
            "In each minute. docs/operations.md has what each reason means, and what to do.",
            Query(promql.increase(names.DEAD_LETTERS, by="reason", window="1m"), "{{reason}}"),
            stacked=True,
        ),
        table_of(
            "By service and reason",
            "Over all that the page shows. `defect` is an error in Weft or of the server: report it.",
            {"service": "Service", "reason": "Reason"},
            [Column("Letters", promql.number(names.DEAD_LETTERS, by="service, reason"))],
            sort="Letters",
            width=8,
        ),
    )
    page.row(
        "What goes wrong before",
        graph(
            "Retries",
            "Attempts that failed and are made again, by service: each may end as a letter.",
            Query(promql.rate(names.RETRIES, by="service"), "{{service}}"),
            unit="ops",
        ),
        graph(
            "Tools and agents that fail",
            "Attempts that failed for good, by name.",
            Query(promql.rate(names.TOOL_CALLS, 'outcome="failed"', "tool"), "tool {{tool}}"),
            Query(promql.rate(names.AGENT_TURNS, 'outcome="failed"', "agent"), "agent {{agent}}"),
            unit="ops",
        ),
        graph(
            "Refused commands",
            "Commands of the ingress stream that were refused: each is a letter `rejected`.",
            Query(promql.rate(names.TASKS_REFUSED, HERE, "reason"), "{{reason}}"),
            unit="ops",
        ),
    )
    return page
