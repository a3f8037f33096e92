"""Write docs/metrics.md from the code: `python -m docs.generate_metrics`.

A test compares the file with the output of this module, so the page cannot become stale.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runtime_core.telemetry import names
from runtime_core.telemetry.names import MetricName

PAGE = Path(__file__).with_name("metrics.md")

_ABOUT = {
    names.EVERY: "",
    names.HANDLERS: "",
    names.AGENTS: "The label `agent` is the name of its type, as an app declares it.",
    names.TOOLS: "The label `tool` is the tool's name, as an app declares it or its MCP server lists it.",
    names.GATEWAYS: "",
    names.RECORDER: "",
    names.LEADERS: "",
    names.STATE_MANAGER: "One replica counts each event: sum over the replicas.",
    names.LEADER: (
        "One state-manager leads a partition and measures it every few seconds. Only this process exports these\n"
        "metrics, and stops when it loses the lead or its broker, so a sum over the replicas is right. Ages follow\n"
        "the broker's clock. `stream` is `agent`, `tool`, `ray`, `spark` (with the suffix `:<pool>` for a named\n"
        "pool), `record`, or `tasks`, the ingress stream, which belongs to partition 0. The lag is counted from the\n"
        "streams themselves, so it is right even if the server does not know it, as after deletions. Without a\n"
        "group, all entries count. Metrics from the broker's `INFO` are missing if the user may not call it."
    ),
}


def page() -> str:
    """The whole page."""
    parts = [
        "# Metrics\n\n"
        "This page lists every metric of every service. `python -m docs.generate_metrics` writes it from the code:\n"
        "do not edit it. [`operations.md`](operations.md#metrics) names the ones to start with.\n\n"
        "Each service answers `GET /metrics` on `WEFT_METRICS_PORT` in Prometheus' text format, besides the usual\n"
        "`process_…` metrics. No label is the id of a task or a run, or the key of an instance. Histograms have the\n"
        "series `_bucket`, `_sum` and `_count`. A metric without a unit is a count.\n"
    ]
    parts += ["\n".join(_section(by)) for by in names.EMITTERS]
    return "\n".join(parts)


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def _section(by: str) -> Iterator[str]:
    yield f"## {by[:1].upper()}{by[1:]}\n"
    if _ABOUT[by]:
        yield f"{_ABOUT[by]}\n"
    yield "| metric | kind | labels | unit | meaning | check when |"
    yield "|---|---|---|---|---|---|"
    for metric in names.ALL:
        if metric.by == by:
            yield _row(metric)
    yield ""


def _row(metric: MetricName) -> str:
    labels = ", ".join(metric.labels)
    cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.help, metric.attention)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
