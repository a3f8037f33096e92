"""The queries of all dashboards, with values in place of Grafana's variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.observability.dashboards.pages import FOLDER


@dataclass(frozen=True, slots=True)
class Target:
    """One query of one panel."""

    place: str
    """Dashboard, panel and query, as in `broker / Memory / A`."""
    expr: str
    legend: str


def targets() -> Iterator[Target]:
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", ()):
                place = f"{path.stem} / {panel['title']} / {target['refId']}"
                yield Target(place, target["expr"], target.get("legendFormat", ""))


def plain(expr: str, window: str) -> str:
    """Return it as Prometheus reads it: everything selected, over this window."""
    expr = re.sub(r"\$__(rate_interval|range)", window, expr)
    return re.sub(r'"\$\w+"', '".*"', expr)
