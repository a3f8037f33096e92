"""Agents, tools, models and MCP servers: how long, how often they fail, tokens and cost."""

from __future__ import annotations

from deploy.observability.dashboards import promql
from deploy.observability.dashboards.page import Page
from deploy.observability.dashboards.panels import Column, Limits, Query, graph, number, table_of
from deploy.observability.dashboards.process import quantiles
from runtime_core.telemetry import names

AGENT, TOOL, MODEL = 'agent=~"$agent"', 'tool=~"$tool"', 'model=~"$model"'
BAD_SHARE = Limits(0.01, 0.1)


def page() -> Page:
    page = Page(
        "agents-and-tools",
        "Weft: agents and tools",
        "Latency and errors of agents, tools, models and MCP servers; tokens and cost.",
    )
    page.choose("agent", names.AGENT_TURNS.name, "Agent")
    page.choose("tool", names.TOOL_CALLS.name, "Tool")
    page.choose("model", names.MODEL_CALLS.name, "Model")
    turns, calls, asked = names.AGENT_TURNS, names.TOOL_CALLS, names.MODEL_CALLS
    page.row(
        "Agents",
        graph(
            "Turns",
            "Turns per second, by outcome. `suspended` turns wait for steps, which is the usual outcome.",
            Query(promql.rate(turns, AGENT, "outcome"), "{{outcome}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Turn duration",
            "If the tail grows, code waits in the turn instead of in a step.",
            names.AGENT_TURN_SECONDS,
            AGENT,
        ),
        table_of(
            "By agent",
            "In the selected time range. Went wrong: turns that failed or were retried.",
            {"agent": "Agent"},
            [
                Column("Turns", promql.number(turns, AGENT, "agent")),
                Column(
                    "Went wrong",
                    promql.share(
                        promql.increase(turns, f'{AGENT},outcome=~"failed|retried"', "agent"),
                        promql.increase(turns, AGENT, "agent"),
                    ),
                    "percentunit",
                    BAD_SHARE,
                ),
                Column("p95", promql.quantile(0.95, names.AGENT_TURN_SECONDS, AGENT, "agent", promql.RANGE), "s"),
            ],
            sort="Turns",
            width=8,
        ),
    )
    page.row(
        "Names",
        number(
            "Without a handler",
            "Runs and calls of agents and tools that no running handler has. `weft doctor` names them: start a handler "
            "that has them, or roll back.",
            f"({promql.total(names.NAMES_UNSERVED)}) or vector(0)",
            limits=Limits(1, 1),
            width=24,
        ),
    )
    page.row(
        "Limits",
        graph(
            "Slots held",
            "Open runs and calls that hold slots, by the agent or tool that declares the limit.",
            Query(promql.total(names.LIMIT_SLOTS, by="name"), "{{name}}"),
            stacked=True,
        ),
        graph(
            "Waiting for a slot",
            "Runs and calls that wait for a slot. If it grows without bound, more is submitted than the limit lets "
            "through.",
            Query(promql.total(names.LIMIT_WAITING, by="name"), "{{name}}"),
            stacked=True,
        ),
    )
    page.row(
        "Tools",
        graph(
            "Calls",
            "Attempts of calls per second, by outcome.",
            Query(promql.rate(calls, TOOL, "outcome"), "{{outcome}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Call duration",
            "One attempt. Close to a tool's timeout_seconds, attempts begin to fail.",
            names.TOOL_CALL_SECONDS,
            TOOL,
        ),
        table_of(
            "By tool",
            "In the selected time range. Went wrong: attempts that failed or were retried.",
            {"tool": "Tool"},
            [
                Column("Calls", promql.number(calls, TOOL, "tool")),
                Column(
                    "Went wrong",
                    promql.share(
                        promql.increase(calls, f'{TOOL},outcome=~"failed|retried"', "tool"),
                        promql.increase(calls, TOOL, "tool"),
                    ),
                    "percentunit",
                    BAD_SHARE,
                ),
                Column("p95", promql.quantile(0.95, names.TOOL_CALL_SECONDS, TOOL, "tool", promql.RANGE), "s"),
            ],
            sort="Calls",
            width=8,
        ),
    )
    page.row(
        "Models",
        number(
            "Tokens",
            "Input and output in the selected time range.",
            promql.number(names.MODEL_TOKENS, f'{MODEL},type=~"input|output"'),
            width=6,
            empty="none",
        ),
        number(
            "Cost",
            "In the selected time range, by the prices that agents declare.",
            promql.increase(names.MODEL_COST, MODEL),
            width=6,
            empty="none",
        ),
        number(
            "Cost per hour",
            "At the rate of the last minutes. If it rises faster than the number of tasks, an agent repeats itself.",
            f"3600 * {promql.rate(names.MODEL_COST, MODEL)}",
            width=6,
            empty="none",
        ),
        number(
            "Unanswered",
            'The share of calls that ended in an error. The panel "Calls" shows which one.',
            promql.share(promql.rate(asked, f'{MODEL},outcome!="answered"'), promql.rate(asked, MODEL)),
            unit="percentunit",
            limits=BAD_SHARE,
            width=6,
            empty="none",
        ),
        graph(
            "Calls",
            "Calls of models per second: answered, or the type of the error. RateLimited: request a higher limit, or "
            "send less.",
            Query(promql.rate(asked, MODEL, "model, outcome"), "{{model}} {{outcome}}"),
            unit="ops",
            stacked=True,
        ),
        quantiles(
            "Call duration",
            "If the tail grows, the provider is slow, or answers are long.",
            names.MODEL_CALL_SECONDS,
            MODEL,
        ),
        quantiles(
            "First chunk",
            "From the call to the first chunk of a streamed answer: the time that people wait.",
            names.MODEL_FIRST_CHUNK_SECONDS,
            MODEL,
        ),
        graph(
            "Tokens",
            "Tokens per second. `cached` is a part of input, `reasoning` of output.",
            Query(promql.rate(names.MODEL_TOKENS, MODEL, "model, type"), "{{model}} {{type}}"),
            width=6,
        ),
        graph(
            "Cost per hour",
            "By model, at the current rate.",
            Query(f"3600 * {promql.rate(names.MODEL_COST, MODEL, 'model')}", "{{model}}"),
            width=6,
        ),
        table_of(
            "By model",
            "In the selected time range.",
            {"model": "Model"},
            [
                Column("Calls", promql.number(asked, MODEL, "model")),
                Column("Tokens in", promql.number(names.MODEL_TOKENS, f'{MODEL},type="input"', "model")),
                Column("Tokens out", promql.number(names.MODEL_TOKENS, f'{MODEL},type="output"', "model")),
                Column("Cost", promql.increase(names.MODEL_COST, MODEL, "model")),
                Column("p95", promql.quantile(0.95, names.MODEL_CALL_SECONDS, MODEL, "model", promql.RANGE), "s"),
            ],
            sort="Cost",
            width=12,
        ),
    )
    page.row(
        "MCP servers",
        graph(
            "Calls",
            "Calls of MCP servers' tools per second. `error` is the tool's own; `lost` and `timeout` are the server's.",
            Query(promql.rate(names.MCP_CALLS, by="server, outcome"), "{{server}} {{outcome}}"),
            unit="ops",
        ),
        graph(
            "Connections",
            "Tool-handlers that are connected to a server. 0 for longer than a restart: calls of its tools wait.",
            Query(promql.total(names.MCP_SERVER_UP, by="server"), "{{server}}"),
        ),
        graph(
            "Lost connections",
            "Lost or failed connections per minute. If it rises, search the log for the server's name.",
            Query(promql.increase(names.MCP_RESTARTS, by="server", window="1m"), "{{server}}"),
        ),
    )
    return page
