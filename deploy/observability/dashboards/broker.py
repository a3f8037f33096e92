"""The state of the broker: memory, file, speed, and stored data."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Limits, Query, graph, number
from deploy.observability.dashboards.process import quantiles, streams
from runtime_core.telemetry import names

HERE = 'partition=~"$partition"'
EACH = "partition {{partition}}"


def page() -> Page:
    page = Page(
        "broker",
        "Weft: broker",
        "Memory, append-only file, speed and streams. Partitions on the same server show the same values.",
    )
    page.choose("partition", names.BROKER_MEMORY.name, "Partition")
    memory = promql.worst(names.BROKER_MEMORY, HERE, "partition")
    limit = promql.worst(names.BROKER_MEMORY_LIMIT, HERE, "partition")
    page.row(
        "The server",
        number(
            "Memory in use",
            "The share of maxmemory. At 80 % submits are refused as `overloaded`. No value: the server has no limit.",
            f"max ({promql.share(memory, limit)})",
            unit="percentunit",
            limits=Limits(0.7, 0.8),
            empty="no limit",
        ),
        number(
            "Append-only file",
            "Whether the file is on and its last write succeeded. Without it a restart of the broker loses all work.",
            promql.least(names.BROKER_APPEND_ONLY_OK, HERE),
            words={1: ("well", "green"), 0: ("off or failing", "red")},
            limits=Limits(1, 1, low=True),
            history=False,
        ),
        number(
            "Uptime",
            "Time since the server started: the youngest, if there are several servers.",
            promql.least(names.BROKER_UPTIME, HERE),
            unit="s",
            history=False,
        ),
        number(
            "Round trip",
            "Duration of the leader's last round trip to the server. Above 0.1 s: a busy server, or a slow network.",
            promql.worst(names.BROKER_PING, HERE),
            unit="s",
            limits=Limits(0.02, 0.1),
        ),
        number(
            "Connections",
            "Connections to the server: the most, if there are several servers.",
            promql.worst(names.BROKER_CLIENTS, HERE),
        ),
        number(
            "Evicted keys",
            "Keys that the server has evicted since its start. Above 0 work was lost: set `noeviction`.",
            promql.worst(names.BROKER_EVICTED_KEYS, HERE),
            limits=Limits(1, 1),
            history=False,
        ),
        graph(
            "Memory",
            "Memory of the server, and its limit. If it grows while few tasks are open: dead letters, or a long "
            "retention.",
            Query(memory, f"in use, {EACH}"),
            Query(f"{limit} > 0", f"limit, {EACH}"),
            unit="bytes",
        ),
        graph(
            "Round trip",
            "Duration of the leader's last round trip, by partition.",
            Query(promql.worst(names.BROKER_PING, HERE, "partition"), EACH),
            unit="s",
            limits=Limits(0.02, 0.1),
        ),
        graph(
            "Connections",
            "If it grows without bound, a client does not close its connections.",
            Query(promql.worst(names.BROKER_CLIENTS, HERE, "partition"), EACH),
        ),
    )
    page.row(
        "Commits",
        graph(
            "Commits",
            "Commits per second, by service: each is one atomic step on the broker.",
            Query(promql.rate(promql.counted(names.COMMIT_SECONDS), by="service"), "{{service}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles("Commit time", "From sending a commit to its answer, for all services.", names.COMMIT_SECONDS),
        graph(
            "Processes without broker",
            "Processes whose heartbeats are not confirmed, by service.",
            Query(
                f"count by (service) ({promql.series(names.BROKER_CONNECTED)}) - "
                f"{promql.total(names.BROKER_CONNECTED, by='service')}",
                "{{service}}",
            ),
            limits=Limits(1, 1),
        ),
    )
    page.row(
        "Stored data",
        streams(HERE),
        graph(
            "Tasks, timers, dead letters",
            "Open tasks, set timers, and stored dead letters.",
            Query(promql.over_partitions(names.TASKS_OPEN, HERE), "open tasks"),
            Query(promql.over_partitions(names.TIMERS_WAITING, HERE), "timers"),
            Query(promql.over_partitions(names.DEAD_LETTERS_KEPT, HERE), "dead letters"),
        ),
    )
    return page
