"""Dead letters by reason, and the failures that precede them."""

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
        "Deliveries that will not be retried. `weft dead list --group-by error` groups them by error.",
    )
    page.choose("partition", names.DEAD_LETTERS_KEPT.name, "Partition")
    page.row(
        "Kept",
        number(
            "Kept",
            "Dead letters that nobody has redriven or dropped. They use the broker's memory.",
            promql.over_partitions(names.DEAD_LETTERS_KEPT, HERE),
            limits=Limits(1, 100),
            width=8,
        ),
        number(
            "New",
            "Dead letters written in the selected time range.",
            promql.number(names.DEAD_LETTERS),
            limits=Limits(1, 100),
            width=8,
        ),
        number(
            "Failed tasks",
            "The share of failed tasks among those that ended in the selected time range.",
            promql.share(promql.increase(names.TASKS_ENDED, 'status="failed"'), promql.increase(names.TASKS_ENDED)),
            unit="percentunit",
            limits=Limits(0.01, 0.05),
            empty="none",
            width=8,
        ),
        graph(
            "Bytes, by stream",
            "Close to `WEFT_DEAD_MAX_BYTES`, the oldest dead letters of the largest stream are trimmed.",
            Query(promql.worst(names.DEAD_LETTER_BYTES, HERE, "partition, stream"), "{{stream}} ({{partition}})"),
            unit="bytes",
        ),
        graph(
            "Trimmed, by stream and cause",
            "Per minute: dead letters that were deleted before anybody redrove or dropped them.",
            Query(promql.increase(names.DEAD_LETTERS_TRIMMED, HERE, "stream, cause", "1m"), "{{stream}}: {{cause}}"),
            stacked=True,
        ),
        graph(
            "Trimmed answers, by publisher",
            "Per minute: answers that were deleted because a publisher left too many, or left them too long.",
            Query(promql.increase(names.ANSWERS_TRIMMED, by="publisher", window="1m"), "{{publisher}}"),
            stacked=True,
        ),
        graph(
            "Kept, by partition",
            "If it rises, something fails now. If it does not fall, nobody handles them.",
            Query(promql.worst(names.DEAD_LETTERS_KEPT, HERE, "partition"), "partition {{partition}}"),
        ),
        graph(
            "New, by reason",
            "Per minute. docs/operations.md explains each reason, and what to do.",
            Query(promql.increase(names.DEAD_LETTERS, by="reason", window="1m"), "{{reason}}"),
            stacked=True,
        ),
        table_of(
            "By service and reason",
            "In the selected time range. `defect` is an error in Weft or of the server: report it.",
            {"service": "Service", "reason": "Reason"},
            [Column("Letters", promql.number(names.DEAD_LETTERS, by="service, reason"))],
            sort="Letters",
            width=8,
        ),
    )
    page.row(
        "Failures that precede dead letters",
        graph(
            "Retries",
            "Failed attempts that are retried, by service: each may become a dead letter.",
            Query(promql.rate(names.RETRIES, by="service"), "{{service}}"),
            unit="ops",
        ),
        graph(
            "Failing tools and agents",
            "Attempts that failed for good, by name.",
            Query(promql.rate(names.TOOL_CALLS, 'outcome="failed"', "tool"), "tool {{tool}}"),
            Query(promql.rate(names.AGENT_TURNS, 'outcome="failed"', "agent"), "agent {{agent}}"),
            unit="ops",
        ),
        graph(
            "Refused commands",
            "Refused commands of the ingress stream: each becomes a dead letter `rejected`.",
            Query(promql.rate(names.TASKS_REFUSED, HERE, "reason"), "{{reason}}"),
            unit="ops",
        ),
    )
    return page
