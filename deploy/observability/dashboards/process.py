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
    """A page with the variable `instance`, which takes the processes of this service."""
    page = Page(service, title, description)
    page.choose("instance", f'{names.BUILD_INFO.name}{{service="{service}"}}', "Instance")
    return page


def of(service: str) -> str:
    """The selector of a service's own metrics."""
    return f'service="{service}",instance=~"$instance"'


def process_row(page: Page, service: str, *more: Placed) -> None:
    """Is it there, connected, and does it get on."""
    mine = of(service)
    # What the client library shows has no label of the service: it is taken from the line of the build.
    here = f"* on (instance) group_left () {promql.series(names.BUILD_INFO, mine)}"
    page.row(
        "Processes",
        number(
            "Running",
            "Processes that Prometheus has scraped. Fewer than you have started: look at the pods.",
            f"count ({promql.series(names.BUILD_INFO, mine)}) or vector(0)",
            limits=Limits(1, 1, low=True),
        ),
        number(
            "Without broker",
            "Processes whose heartbeats the broker does not confirm. Above 0 for longer than a restart of the broker: "
            "look at its address, its password and the network.",
            f"count ({promql.series(names.BROKER_CONNECTED, mine)}) - {promql.total(names.BROKER_CONNECTED, mine)}",
            limits=Limits(1, 1),
        ),
        number(
            "Stalled for",
            "How long work has waited in a process while nothing moved there: the worst one. At 30 s, or 10 leases, "
            "its /healthz fails and it is restarted.",
            promql.worst(names.STALLED, mine),
            unit="s",
            limits=Limits(10, 30),
        ),
        number(
            "Heartbeat age",
            "Time since the broker confirmed the heartbeat of a process: the worst one. Near WEFT_LEASE_SECONDS others "
            "adopt what it holds.",
            promql.worst(names.HEARTBEAT_AGE, mine),
            unit="s",
            limits=Limits(1.5, 2.5),
        ),
        table_of(
            "Releases",
            "What runs where. Two releases for longer than a rolling update: one of them has stopped.",
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
            "Resident memory. It grows without an end: what does the app keep?",
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
    """What handlers do: how many, how long, and what goes wrong."""
    mine = of(service)
    page.row(
        "Deliveries",
        graph(
            "Settled",
            "Deliveries per second, by how they ended. `defect` is an error in Weft or of the server: look at the log.",
            Query(promql.rate(names.EVENTS_HANDLED, mine, "outcome"), "{{outcome}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Handler time",
            "From delivery to outcome, waits for the broker included. The tail grows: a dependency is slow.",
            names.HANDLER_SECONDS,
            mine,
        ),
        quantiles(
            "Commit time",
            "From asking the broker for a commit to its answer. It grows for all services at once: the broker is busy.",
            names.COMMIT_SECONDS,
            mine,
        ),
        graph(
            "In hand",
            "Deliveries that a process has taken and not settled. At 256 per consumer it reads no more: add replicas.",
            Query(promql.total(names.IN_FLIGHT, mine, "instance"), "{{instance}}"),
            limits=Limits(200, 256),
        ),
        graph(
            "Retries and dead letters",
            "Attempts that failed and are made again, and deliveries given up, by reason. Any dead letter wants a "
            "decision: see the page on dead letters.",
            Query(promql.rate(names.RETRIES, mine), "retries"),
            Query(promql.rate(names.DEAD_LETTERS, mine, "reason"), "dead: {{reason}}"),
            unit="ops",
        ),
        graph(
            "Owners that died",
            "Deliveries adopted from owners that died, commits refused since this owner had been declared dead, and "
            "repeats without an effect. They rise without an update: processes die or are paused.",
            Query(promql.rate(names.ADOPTED_DELIVERIES, mine), "adopted"),
            Query(promql.rate(names.FENCED_COMMITS, mine), "fenced"),
            Query(promql.rate(names.DUPLICATES_SUPPRESSED, mine), "repeated"),
            unit="ops",
        ),
    )


def streams_row(page: Page, where: str) -> None:
    """What waits on the streams that `where` selects."""
    page.row(
        "Streams",
        streams(where),
        graph(
            "Waits and is in hand",
            "Events that nobody has read yet, and events that are read and not settled. It grows: add replicas.",
            Query(promql.worst(names.STREAM_LAG, where, BY_STREAM), "waits {{stream}} {{partition}}"),
            Query(promql.worst(names.STREAM_PENDING, where, BY_STREAM), "in hand {{stream}} {{partition}}"),
        ),
    )


def streams(where: str = "", width: int = 16) -> Placed:
    """What waits on streams, who reads them, and for how long the oldest has waited."""

    def column(title: str, metric: MetricName, unit: str = "short", limits: Limits | None = None) -> Column:
        return Column(title, promql.worst(metric, where, BY_STREAM), unit, limits)

    return table_of(
        "What waits where",
        "Per stream and group. Waiting above 0 with no reader: nobody will take it, start the service. Waiting with "
        "readers: too few, or they are full. In hand and old: a dependency is slow, or the work is long.",
        STREAM_LABELS,
        [
            column("Waiting", names.STREAM_LAG, limits=Limits(1000, 50_000)),
            column("Oldest waiting", names.STREAM_OLDEST_WAITING, "s", Limits(10, 120)),
            column("Readers", names.STREAM_READERS, limits=Limits(1, 1, low=True)),
            column("In hand", names.STREAM_PENDING),
            column("Oldest in hand", names.STREAM_OLDEST_PENDING, "s", Limits(300, 900)),
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
