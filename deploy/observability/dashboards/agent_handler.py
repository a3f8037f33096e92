"""What agent-handlers do: turns of agents, their models, their timers."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Query, graph
from deploy.observability.dashboards.process import deliveries_row, page_of, process_row, streams_row
from runtime_core.telemetry import names

SERVICE = "agent-handler"
INSTANCE = 'instance=~"$instance"'


def page() -> Page:
    page = page_of(SERVICE, "Weft: agent-handler", "Turns of agents: how many, how long, and what holds them up.")
    process_row(page, SERVICE)
    deliveries_row(page, SERVICE)
    page.row(
        "Agents",
        graph(
            "Turns",
            "Turns per second, by agent. `Agents and tools` has their outcomes.",
            Query(promql.rate(names.AGENT_TURNS, INSTANCE, "agent"), "{{agent}}"),
            unit="ops",
        ),
        graph(
            "Turns, p95",
            "What 95 % of the turns of an agent stay below. A turn that waits for a model inside of a step is not "
            "long; one that is has code that waits elsewhere.",
            Query(promql.quantile(0.95, names.AGENT_TURN_SECONDS, INSTANCE, "agent"), "{{agent}}"),
            unit="s",
        ),
        graph(
            "Hooks that failed",
            "Hooks and callbacks that raised, took too long or answered wrongly, by point. A guard's failure denies.",
            Query(promql.rate(names.HOOK_FAILURES, INSTANCE, "point"), "{{point}}"),
            unit="ops",
        ),
        graph(
            "Timers",
            "Timers that are set, and those that are due and not promoted yet. Handlers promote them: due ones that "
            "do not fall to 0 say that none runs.",
            Query(promql.over_partitions(names.TIMERS_WAITING), "set"),
            Query(promql.over_partitions(names.TIMERS_DUE), "due"),
        ),
        graph(
            "Mailboxes",
            "Events that wait for instances of agents, and the deepest mailbox. WEFT_MAILBOX_MAX is its limit.",
            Query(promql.over_partitions(names.MAILBOX_WAITING), "waiting"),
            Query(promql.worst(names.MAILBOX_DEEPEST), "deepest"),
        ),
        graph(
            "Open files",
            "Files and connections that a process has open. It grows without an end: the app does not close them.",
            Query(
                f"{promql.OPEN_FILES.name} * on (instance) group_left () "
                f'{names.BUILD_INFO.name}{{service="{SERVICE}",{INSTANCE}}}',
                "{{instance}}",
            ),
        ),
    )
    streams_row(page, 'group="agent-handler"')
    return page
