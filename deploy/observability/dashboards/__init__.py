"""Grafana's dashboards, made by code: `python -m deploy.observability.dashboards` writes them as JSON.

1. `promql`   queries, by the names of `runtime_core.telemetry.names`
2. `panels`   a graph, a number, a table: what all of them have in common
3. `page`     panels in rows, variables, links between dashboards
4. `process`  the rows that every page of a service has
5. one module per dashboard, listed in `pages`
"""
