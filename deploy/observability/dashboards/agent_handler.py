"""The work of agent-handlers: turns of agents, their models, their timers."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Query, graph
from deploy.observability.dashboards.process import deliveries_row, page_of, process_row, streams_row
from runtime_core.telemetry import names

SERVICE = "agent-handler"
INSTANCE = 'instance=~"$instance"'


def page() -> Page:
    page = page_of(SERVICE, "Weft: agent-handler", "Turns of agents: how many, how long, and what delays them.")
    process_row(page, SERVICE)
    deliveries_row(page, SERVICE)
    page.row(
        "Agents",
        graph(
            "Turns",
            'Turns per second, by agent. The page "Agents and tools" has their outcomes.',
            Query(promql.rate(names.AGENT_TURNS, INSTANCE, "agent"), "{{agent}}"),
            unit="ops",
        ),
        graph(
            "Turns, p95",
            "The 95th percentile of an agent's turns. A wait for a model inside a step does not count; a long turn "
            "waits elsewhere in its code.",
            Query(promql.quantile(0.95, names.AGENT_TURN_SECONDS, INSTANCE, "agent"), "{{agent}}"),
            unit="s",
        ),
        graph(
            "Failed hooks",
            "Hooks and callbacks that raised, timed out or returned wrong values, by point. A guard that fails denies.",
            Query(promql.rate(names.HOOK_FAILURES, INSTANCE, "point"), "{{point}}"),
            unit="ops",
        ),
        graph(
            "Timers",
            "Set timers, and those that are due but not promoted yet. Handlers promote them: if the due ones do not "
            "fall to 0, no handler runs.",
            Query(promql.over_partitions(names.TIMERS_WAITING), "set"),
            Query(promql.over_partitions(names.TIMERS_DUE), "due"),
        ),
        graph(
            "Mailboxes",
            "Events that wait for instances of agents, and the deepest mailbox. The limit is WEFT_MAILBOX_MAX.",
            Query(promql.over_partitions(names.MAILBOX_WAITING), "waiting"),
            Query(promql.worst(names.MAILBOX_DEEPEST), "deepest"),
        ),
        graph(
            "Open files",
            "Open files and connections of a process. If it grows without bound, the app does not close them.",
            Query(
                f"{promql.OPEN_FILES.name} * on (instance) group_left () "
                f'{names.BUILD_INFO.name}{{service="{SERVICE}",{INSTANCE}}}',
                "{{instance}}",
            ),
        ),
    )
    streams_row(page, 'group="agent-handler"')
    return page
