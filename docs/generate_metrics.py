"""Writes docs/metrics.md from the code: `python -m docs.generate_metrics`.

A test compares the file with what this makes, so that the page cannot fall behind.
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
    names.AGENTS: "An agent is the name of its type, as an app declares it.",
    names.TOOLS: "A tool is its name, as an app declares it or its MCP server lists it.",
    names.GATEWAYS: "",
    names.RECORDER: "",
    names.LEADERS: "",
    names.STATE_MANAGER: "Each event is counted by one replica: sum over the replicas.",
    names.LEADER: (
        "One state-manager leads a partition and looks at it every few seconds. It alone shows these: they go from\n"
        "its page when it loses the lead or its broker, so a sum over the replicas is right. Ages go by the broker's\n"
        "clock. `stream` is `agent`, `tool`, `ray`, `spark` (`:<pool>` behind it for a named pool), `record`, or\n"
        "`tasks`, the ingress stream, which is shown under partition 0. The lag is counted from the streams\n"
        "themselves: it is right where the server does not know one, as after deletions, and all waits where there\n"
        "is no group. What the broker's `INFO` says is left out where the user may not ask for it."
    ),
}


def page() -> str:
    """The whole page."""
    parts = [
        "# Metrics\n\n"
        "Every metric of every service, as the code names them. `python -m docs.generate_metrics` writes this page:\n"
        "do not edit it. [`operations.md`](operations.md#metrics) says which to look at first.\n\n"
        "Each service answers `GET /metrics` on `WEFT_METRICS_PORT` in Prometheus' text format, with the usual\n"
        "`process_…` besides these. No label is the id of a task or a run, or the key of an instance. Histograms have\n"
        "the series `_bucket`, `_sum` and `_count`. Without a unit it is a number of things.\n"
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
    yield "| metric | kind | labels | unit | meaning | look when |"
    yield "|---|---|---|---|---|---|"
    for metric in names.ALL:
        if metric.by == by:
            yield _row(metric)
    yield ""


def _row(metric: MetricName) -> str:
    labels = ", ".join(metric.labels)
    cells = (f"`{metric.name}`", metric.kind, labels, metric.unit, metric.help, metric.look)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    main()
