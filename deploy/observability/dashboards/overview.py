"""Is work flowing; what is stuck, and why."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Limits, Query, graph, number, table_of
from deploy.observability.dashboards.process import quantiles, streams
from runtime_core.telemetry import names

HERE = 'partition=~"$partition"'
FIRING = f'{promql.ALERTS.name}{{alertstate="firing"}}'
FIRED = f"count by (alertname, severity, service, stream) ({FIRING})"
"""One for each line of the table: an alert may fire for several reasons."""


def page() -> Page:
    page = Page(
        "overview",
        "Weft: overview",
        "Is work flowing, and if not, what is stuck and why. Look here first.",
    )
    page.choose("partition", names.TASKS_OPEN.name, "Partition")
    ended = promql.rate(names.TASKS_ENDED)
    failed = promql.rate(names.TASKS_ENDED, 'status="failed"')
    page.row(
        "Is work flowing?",
        number(
            "Open tasks",
            "Tasks that were accepted and have not ended; those that wait for a person or a timer are among them.",
            promql.over_partitions(names.TASKS_OPEN, HERE),
            width=3,
        ),
        number(
            "Started",
            "Tasks that are started per second. More than end, for long: too few handlers.",
            promql.rate(names.TASKS_ADMITTED, HERE),
            unit="ops",
            width=3,
        ),
        number("Ended", "Tasks that end per second.", ended, unit="ops", width=3, empty="none"),
        number(
            "Failed",
            "The share of failed tasks among those that end.",
            promql.share(failed, ended),
            unit="percentunit",
            empty="none",
            limits=Limits(0.01, 0.05),
            width=3,
        ),
        number(
            "Oldest waiting",
            "Age of the oldest event that nobody has read yet. It grows by a second a second: nothing is read.",
            promql.worst(names.STREAM_OLDEST_WAITING, HERE),
            unit="s",
            limits=Limits(10, 120),
            width=3,
        ),
        number(
            "Stalled",
            "Processes where work has waited for 30 s and nothing has moved. They are restarted by /healthz.",
            f"sum ({promql.series(names.STALLED)} >= bool 30)",
            limits=Limits(1, 1),
            width=3,
        ),
        number(
            "Dead letters",
            "Deliveries that were given up, and on which nobody has decided yet.",
            promql.over_partitions(names.DEAD_LETTERS_KEPT, HERE),
            limits=Limits(1, 100),
            width=3,
        ),
        number(
            "Alerts",
            "Alerts that fire now; the list is below, the runbooks in docs/operations.md.",
            f"count ({FIRED}) or vector(0)",
            limits=Limits(1, 3),
            width=3,
        ),
    )
    page.row(
        "What is stuck, and why?",
        streams(HERE, width=15),
        table_of(
            "Alerts that fire",
            "What Prometheus has found, and how long ago. Each name is a heading in docs/operations.md that says what "
            "to do.",
            {"alertname": "Alert", "severity": "Level", "service": "Service", "stream": "Stream"},
            [
                Column(
                    "For",
                    f"max by (alertname, severity, service, stream) "
                    f"((time() - {promql.ALERTS_SINCE.name}) and ignoring (alertstate) {FIRING})",
                    "s",
                )
            ],
            sort="Level",
            order="up",
            width=9,
            empty="none",
        ),
        table_of(
            "Processes",
            "Stalled: how long work has waited there while nothing moved. Heartbeat: near the lease others adopt its "
            "work. Broker: whether it has its broker.",
            {"service": "Service", "instance": "Instance"},
            [
                Column("Stalled", promql.worst(names.STALLED, by="service, instance"), "s", Limits(10, 30)),
                Column("Heartbeat", promql.worst(names.HEARTBEAT_AGE, by="service, instance"), "s", Limits(1.5, 2.5)),
                Column(
                    "Broker",
                    promql.worst(names.BROKER_CONNECTED, by="service, instance"),
                    words={1: ("connected", "green"), 0: ("away", "red")},
                ),
            ],
            sort="Stalled",
            width=9,
        ),
        table_of(
            "Leaders",
            "One process per role and partition leads. None for longer than a lease: start the service. More than one "
            "for long: a process is paused and does not know it yet; what it writes is refused.",
            {"service": "Service", "partition": "Partition"},
            [Column("Leaders", promql.total(names.LEAD, HERE, "service, partition"), limits=Limits(1, 1, low=True))],
            sort="Leaders",
            order="up",
            width=7,
        ),
        graph(
            "Timers",
            "How late the oldest due timer is, per partition. Above a few seconds: no handler runs, or all are full.",
            Query(promql.worst(names.TIMERS_LATE, HERE, "partition"), "partition {{partition}}"),
            unit="s",
            limits=Limits(10, 30),
        ),
    )
    page.row(
        "How does it flow?",
        graph(
            "Tasks",
            "Tasks that are started, and that end, by status. The lines of starts and ends lie on each other where all "
            "is well.",
            Query(promql.rate(names.TASKS_ADMITTED, HERE), "started"),
            Query(promql.rate(names.TASKS_ENDED, by="status"), "{{status}}"),
            unit="ops",
        ),
        quantiles(
            "Duration of tasks",
            "From a task's start to its end, waits for people and timers included.",
            names.TASK_SECONDS,
        ),
        graph(
            "Open tasks",
            "Tasks that have not ended, by partition. It grows without an end: more comes in than goes out.",
            Query(promql.worst(names.TASKS_OPEN, HERE, "partition"), "partition {{partition}}"),
        ),
        graph(
            "Tasks that wait for turns",
            "New tasks in the queues of their tenants, while handlers have no free hands. Of one tenant: its burst. Of "
            "all: add handlers.",
            Query(promql.worst(names.TASKS_QUEUED, HERE, "partition, tenant"), "{{tenant}} {{partition}}"),
        ),
        graph(
            "Mailboxes",
            "Events that wait for instances of agents, and the deepest mailbox. An instance handles one event at a "
            "time: use more keys.",
            Query(promql.worst(names.MAILBOX_WAITING, HERE, "partition"), "waiting {{partition}}"),
            Query(promql.worst(names.MAILBOX_DEEPEST, HERE, "partition"), "deepest {{partition}}"),
        ),
        graph(
            "Work in hand",
            "Events that are read and not settled, by stream.",
            Query(promql.worst(names.STREAM_PENDING, HERE, "partition, stream"), "{{stream}} {{partition}}"),
        ),
        graph(
            "Measured",
            "How old these measures are. Above a minute: no state-manager leads, and what is shown here is not known.",
            Query(f"time() - {promql.worst(names.MEASURED_AT, HERE, 'partition')}", "partition {{partition}}"),
            unit="s",
            limits=Limits(30, 60),
        ),
    )
    page.row(
        "What goes wrong?",
        graph(
            "Dead letters",
            "Deliveries that were given up in each minute, by reason.",
            Query(promql.increase(names.DEAD_LETTERS, by="reason", window="1m"), "{{reason}}"),
            stacked=True,
            width=6,
        ),
        graph(
            "Retries",
            "Attempts that failed and are made again, by service. It rises with the trouble of a dependency.",
            Query(promql.rate(names.RETRIES, by="service"), "{{service}}"),
            unit="ops",
            width=6,
        ),
        graph(
            "Refused",
            "Commands from the ingress stream that were refused, by reason. `overloaded`: the limits hold, see what "
            "waits.",
            Query(promql.rate(names.TASKS_REFUSED, by="reason"), "{{reason}}"),
            unit="ops",
            width=6,
        ),
        graph(
            "Spans that were dropped",
            "Spans of traces that the collector did not take, in each minute. Tasks do not suffer; traces have holes.",
            Query(promql.increase(names.SPANS_DROPPED, by="service", window="1m"), "{{service}}"),
            width=6,
        ),
    )
    return page
