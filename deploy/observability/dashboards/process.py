"""The rows that every page of a service has: its processes, its deliveries, and its streams."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Limits, Placed, Query, graph, number, table_of
from runtime_core.telemetry import names
from runtime_core.telemetry.names import MetricName

STREAM_LABELS = {"partition": "Partition", "stream": "Stream", "group": "Group"}
BY_STREAM = "partition, stream, group"


def page_of(service: str, title: str, description: str) -> Page:
    """A page with the variable `instance`, which selects among the processes of this service."""
    page = Page(service, title, description)
    page.choose("instance", f'{names.BUILD_INFO.name}{{service="{service}"}}', "Instance")
    return page


def of(service: str) -> str:
    """The selector of a service's own metrics."""
    return f'service="{service}",instance=~"$instance"'


def process_row(page: Page, service: str, *more: Placed) -> None:
    """Whether the processes run, are connected, and make progress."""
    mine = of(service)
    # What the client library shows has no label of the service: it is taken from the line of the build.
    here = f"* on (instance) group_left () {promql.series(names.BUILD_INFO, mine)}"
    page.row(
        "Processes",
        number(
            "Running",
            "Processes that Prometheus has scraped. If fewer than you have started, check the pods.",
            f"count ({promql.series(names.BUILD_INFO, mine)}) or vector(0)",
            limits=Limits(1, 1, low=True),
        ),
        number(
            "Without broker",
            "Processes whose heartbeats the broker does not confirm. Above 0 for longer than a restart of the "
            "broker: check its address, its password and the network.",
            f"count ({promql.series(names.BROKER_CONNECTED, mine)}) - {promql.total(names.BROKER_CONNECTED, mine)}",
            limits=Limits(1, 1),
        ),
        number(
            "Stalled for",
            "How long work has waited in a process without progress: the worst process. At 30 s, or 10 leases, its "
            "/healthz fails and it is restarted.",
            promql.worst(names.STALLED, mine),
            unit="s",
            limits=Limits(10, 30),
        ),
        number(
            "Heartbeat age",
            "Time since the broker confirmed the heartbeat of a process: the worst process. Close to "
            "WEFT_LEASE_SECONDS, others reclaim its deliveries.",
            promql.worst(names.HEARTBEAT_AGE, mine),
            unit="s",
            limits=Limits(1.5, 2.5),
        ),
        table_of(
            "Releases",
            "The running releases. Two releases for longer than a rolling update: one rollout is stuck.",
            {"version": "Version", "python": "Python"},
            [Column("Processes", f"count by (version, python) ({promql.series(names.BUILD_INFO, mine)})")],
            sort="Processes",
            width=8,
            height=4,
        ),
        graph(
            "CPU",
            "Processors in use. Near 1 a process is full, since Python uses one: add replicas.",
            Query(f"rate({promql.series(promql.CPU_SECONDS)}[{promql.WINDOW}]) {here}", "{{instance}}"),
            limits=Limits(0.8, 0.95),
        ),
        graph(
            "Memory",
            "Resident memory. If it grows without bound, the app leaks memory.",
            Query(f"{promql.series(promql.MEMORY_BYTES)} {here}", "{{instance}}"),
            unit="bytes",
        ),
        graph(
            "Event loop",
            "How late the event loop woke. Above 0.1 s for long: blocking code in an async function, or too few CPUs.",
            Query(promql.worst(names.LOOP_LAG, mine, "instance"), "{{instance}}"),
            unit="s",
            limits=Limits(0.1, 0.5),
        ),
        *more,
    )


def deliveries_row(page: Page, service: str) -> None:
    """The work of handlers: deliveries, their durations and failures."""
    mine = of(service)
    page.row(
        "Deliveries",
        graph(
            "Settled",
            "Deliveries per second, by outcome. `defect` is an error in Weft or of the server: check the log.",
            Query(promql.rate(names.EVENTS_HANDLED, mine, "outcome"), "{{outcome}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Handler time",
            "From delivery to outcome, including waits for the broker. If the tail grows, a dependency is slow.",
            names.HANDLER_SECONDS,
            mine,
        ),
        quantiles(
            "Commit time",
            "From sending a commit to the broker to its answer. If it grows for all services, the broker is busy.",
            names.COMMIT_SECONDS,
            mine,
        ),
        graph(
            "In flight",
            "Deliveries that a process has taken and not settled. At 256 per consumer it stops reading: add replicas.",
            Query(promql.total(names.IN_FLIGHT, mine, "instance"), "{{instance}}"),
            limits=Limits(200, 256),
        ),
        graph(
            "Retries and dead letters",
            "Failed attempts that are retried, and deliveries given up, by reason. Handle every dead letter: see the "
            "page on dead letters.",
            Query(promql.rate(names.RETRIES, mine), "retries"),
            Query(promql.rate(names.DEAD_LETTERS, mine, "reason"), "dead: {{reason}}"),
            unit="ops",
        ),
        graph(
            "Dead owners",
            "Deliveries reclaimed from dead owners, commits refused because this owner was declared dead, and repeats "
            "without effect. If they rise without an update, processes die or are paused.",
            Query(promql.rate(names.ADOPTED_DELIVERIES, mine), "reclaimed"),
            Query(promql.rate(names.FENCED_COMMITS, mine), "fenced"),
            Query(promql.rate(names.DUPLICATES_SUPPRESSED, mine), "repeated"),
            unit="ops",
        ),
    )


def streams_row(page: Page, where: str) -> None:
    """Work on the streams that `where` selects."""
    page.row(
        "Streams",
        streams(where),
        graph(
            "Waiting and in flight",
            "Unread events, and events that were read but are not settled. If it grows, add replicas.",
            Query(promql.worst(names.STREAM_LAG, where, BY_STREAM), "waiting {{stream}} {{partition}}"),
            Query(promql.worst(names.STREAM_PENDING, where, BY_STREAM), "in flight {{stream}} {{partition}}"),
        ),
    )


def streams(where: str = "", width: int = 16) -> Placed:
    """The work on streams, its readers, and the age of the oldest entry."""

    def column(title: str, metric: MetricName, unit: str = "short", limits: Limits | None = None) -> Column:
        return Column(title, promql.worst(metric, where, BY_STREAM), unit, limits)

    return table_of(
        "Waiting work",
        "Per stream and group. Waiting above 0 without a reader: start the service. Waiting with readers: there are "
        "too few, or they are full. In flight and old: a dependency is slow, or the work is long.",
        STREAM_LABELS,
        [
            column("Waiting", names.STREAM_LAG, limits=Limits(1000, 50_000)),
            column("Oldest waiting", names.STREAM_OLDEST_WAITING, "s", Limits(10, 120)),
            column("Readers", names.STREAM_READERS, limits=Limits(1, 1, low=True)),
            column("In flight", names.STREAM_PENDING),
            column("Oldest in flight", names.STREAM_OLDEST_PENDING, "s", Limits(300, 900)),
        ],
        sort="Oldest waiting",
        width=width,
    )


def quantiles(title: str, description: str, metric: MetricName, where: str = "") -> Placed:
    """The median and the tail of a histogram."""
    return graph(
        title,
        description,
        *(Query(promql.quantile(share, metric, where), f"p{100 * share:g}") for share in promql.QUANTILES),
        unit="s",
    )
