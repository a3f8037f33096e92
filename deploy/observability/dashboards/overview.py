"""The flow of work, and what is stuck."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Limits, Query, graph, number, table_of
from deploy.observability.dashboards.process import quantiles, streams
from runtime_core.telemetry import names

HERE = 'partition=~"$partition"'
FIRING = f'{promql.ALERTS.name}{{alertstate="firing"}}'
FIRED = f"count by (alertname, severity, service, stream) ({FIRING})"
"""One series per line of the table: an alert may fire for several reasons."""


def page() -> Page:
    page = Page(
        "overview",
        "Weft: overview",
        "Does work flow, and if not, what is stuck and why? Start here.",
    )
    page.choose("partition", names.TASKS_OPEN.name, "Partition")
    ended = promql.rate(names.TASKS_ENDED)
    failed = promql.rate(names.TASKS_ENDED, 'status="failed"')
    page.row(
        "Does work flow?",
        number(
            "Open tasks",
            "Accepted tasks that have not ended, including those that wait for a person or a timer.",
            promql.over_partitions(names.TASKS_OPEN, HERE),
            width=3,
        ),
        number(
            "Started",
            "Tasks started per second. If this exceeds the tasks ended for long, there are too few handlers.",
            promql.rate(names.TASKS_ADMITTED, HERE),
            unit="ops",
            width=3,
        ),
        number("Ended", "Tasks ended per second.", ended, unit="ops", width=3, empty="none"),
        number(
            "Failed",
            "The share of failed tasks among the ended ones.",
            promql.share(failed, ended),
            unit="percentunit",
            empty="none",
            limits=Limits(0.01, 0.05),
            width=3,
        ),
        number(
            "Oldest waiting",
            "Age of the oldest unread event. If it grows by a second per second, nothing is read.",
            promql.worst(names.STREAM_OLDEST_WAITING, HERE),
            unit="s",
            limits=Limits(10, 120),
            width=3,
        ),
        number(
            "Stalled",
            "Processes where work has waited for 30 s without progress. /healthz makes the supervisor restart them.",
            f"sum ({promql.series(names.STALLED)} >= bool 30)",
            limits=Limits(1, 1),
            width=3,
        ),
        number(
            "Dead letters",
            "Deliveries that were given up, and that nobody has redriven or dropped yet.",
            promql.over_partitions(names.DEAD_LETTERS_KEPT, HERE),
            limits=Limits(1, 100),
            width=3,
        ),
        number(
            "Alerts",
            "Firing alerts; the list is below, the runbooks are in docs/operations.md.",
            f"count ({FIRED}) or vector(0)",
            limits=Limits(1, 3),
            width=3,
        ),
    )
    page.row(
        "What is stuck, and why?",
        streams(HERE, width=15),
        table_of(
            "Firing alerts",
            "Alerts that Prometheus has raised, and how long ago. Each name is a heading in docs/operations.md that "
            "says what to do.",
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
            "Stalled: how long work has waited there without progress. Alone: how long a delivery that killed its "
            "process has run there with nothing beside it. Heartbeat: close to the lease, others reclaim its work. "
            "Broker: whether it is connected to its broker.",
            {"service": "Service", "instance": "Instance"},
            [
                Column("Stalled", promql.worst(names.STALLED, by="service, instance"), "s", Limits(10, 30)),
                Column("Alone", promql.worst(names.QUARANTINE, by="service, instance"), "s", Limits(30, 120)),
                Column("Heartbeat", promql.worst(names.HEARTBEAT_AGE, by="service, instance"), "s", Limits(1.5, 2.5)),
                Column(
                    "Broker",
                    promql.worst(names.BROKER_CONNECTED, by="service, instance"),
                    words={1: ("connected", "green"), 0: ("away", "red")},
                ),
            ],
            sort="Stalled",
            width=10,
        ),
        table_of(
            "Leaders",
            "One process per role and partition leads. None for longer than a lease: start the service. More than "
            "one for long: a process is paused and does not know it yet; its writes are refused.",
            {"service": "Service", "partition": "Partition"},
            [
                Column(
                    "Leaders", promql.total(names.IS_LEADER, HERE, "service, partition"), limits=Limits(1, 1, low=True)
                )
            ],
            sort="Leaders",
            order="up",
            width=6,
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
        "How does work flow?",
        graph(
            "Tasks",
            "Tasks started, and tasks ended by status. If all is well, the lines of starts and ends coincide.",
            Query(promql.rate(names.TASKS_ADMITTED, HERE), "started"),
            Query(promql.rate(names.TASKS_ENDED, by="status"), "{{status}}"),
            unit="ops",
        ),
        quantiles(
            "Task duration",
            "From a task's start to its end, including waits for people and timers.",
            names.TASK_SECONDS,
        ),
        graph(
            "Open tasks",
            "Tasks that have not ended, by partition. If it grows without bound, more tasks arrive than end.",
            Query(promql.worst(names.TASKS_OPEN, HERE, "partition"), "partition {{partition}}"),
        ),
        graph(
            "Tasks that wait for turns",
            "New tasks in the queues of their tenants, while handlers have no free slots. If one tenant waits, it "
            "has sent a burst. If all wait, add handlers.",
            Query(promql.worst(names.TASKS_QUEUED, HERE, "partition, tenant"), "{{tenant}} {{partition}}"),
        ),
        graph(
            "Bytes of schedules, by tenant",
            "Counted once a minute. At `WEFT_TENANT_SCHEDULES_MAX_BYTES` the schedules of a tenant's publishers are "
            "rejected.",
            Query(promql.worst(names.SCHEDULE_BYTES, HERE, "tenant"), "{{tenant}}"),
            unit="bytes",
        ),
        graph(
            "Mailboxes",
            "Events that wait for instances of agents, and the deepest mailbox. An instance handles one event at a "
            "time: use more keys.",
            Query(promql.worst(names.MAILBOX_WAITING, HERE, "partition"), "waiting {{partition}}"),
            Query(promql.worst(names.MAILBOX_DEEPEST, HERE, "partition"), "deepest {{partition}}"),
        ),
        graph(
            "Work in flight",
            "Events that were read but are not settled, by stream.",
            Query(promql.worst(names.STREAM_PENDING, HERE, "partition, stream"), "{{stream}} {{partition}}"),
        ),
        graph(
            "Measured",
            "The age of these measurements. Above a minute: no state-manager leads, and this page is out of date.",
            Query(f"time() - {promql.worst(names.MEASURED_AT, HERE, 'partition')}", "partition {{partition}}"),
            unit="s",
            limits=Limits(30, 60),
        ),
    )
    page.row(
        "What goes wrong?",
        graph(
            "Dead letters",
            "Deliveries given up per minute, by reason.",
            Query(promql.increase(names.DEAD_LETTERS, by="reason", window="1m"), "{{reason}}"),
            stacked=True,
            width=6,
        ),
        graph(
            "Retries",
            "Failed attempts that are retried, by service. It rises if a dependency has problems.",
            Query(promql.rate(names.RETRIES, by="service"), "{{service}}"),
            unit="ops",
            width=6,
        ),
        graph(
            "Refused",
            "Refused commands of the ingress stream, by reason. `overloaded`: a limit is reached, see which work "
            "waits.",
            Query(promql.rate(names.TASKS_REFUSED, by="reason"), "{{reason}}"),
            unit="ops",
            width=6,
        ),
        graph(
            "Dropped spans",
            "Spans that the trace collector did not accept, per minute. Tasks are not affected; traces have gaps.",
            Query(promql.increase(names.SPANS_DROPPED, by="service", window="1m"), "{{service}}"),
            width=6,
        ),
    )
    return page
