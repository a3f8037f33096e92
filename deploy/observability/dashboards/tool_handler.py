"""The work of tool-handlers: calls of tools, and the MCP servers behind them."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Query, graph
from deploy.observability.dashboards.process import deliveries_row, page_of, process_row, streams_row
from runtime_core.telemetry import names

SERVICE = "tool-handler"
INSTANCE = 'instance=~"$instance"'


def page() -> Page:
    page = page_of(SERVICE, "Weft: tool-handler", "Calls of tools: how many, how long, and what delays them.")
    process_row(page, SERVICE)
    deliveries_row(page, SERVICE)
    page.row(
        "Tools",
        graph(
            "Calls",
            'Attempts per second, by tool. The page "Agents and tools" has their outcomes.',
            Query(promql.rate(names.TOOL_CALLS, INSTANCE, "tool"), "{{tool}}"),
            unit="ops",
        ),
        graph(
            "Calls, p95",
            "The 95th percentile of a tool's attempts. Close to the tool's timeout_seconds they begin to fail.",
            Query(promql.quantile(0.95, names.TOOL_CALL_SECONDS, INSTANCE, "tool"), "{{tool}}"),
            unit="s",
        ),
        graph(
            "MCP servers",
            "How many tool-handlers are connected to an MCP server. If fewer than there are tool-handlers for long, "
            "search the log for the server's name.",
            Query(promql.total(names.MCP_SERVER_UP, INSTANCE, "server"), "{{server}}"),
        ),
    )
    streams_row(page, 'group="tool-handler"')
    return page
