"""All dashboards, and their checked-in files."""

from __future__ import annotations

from pathlib import Path

from deploy.observability.dashboards import (
    agent_handler,
    agents_and_tools,
    broker,
    dead_letters,
    engines,
    overview,
    state_manager,
    tool_handler,
    trajectory_recorder,
)
from deploy.observability.dashboards.gateway import page_of_gateway
from deploy.observability.dashboards.page import Page

FOLDER = Path(__file__).resolve().parents[1] / "grafana" / "dashboards"


def pages() -> list[Page]:
    return [
        overview.page(),
        agent_handler.page(),
        tool_handler.page(),
        state_manager.page(),
        trajectory_recorder.page(),
        page_of_gateway("ray", "Ray"),
        page_of_gateway("spark", "Spark"),
        broker.page(),
        agents_and_tools.page(),
        engines.page(),
        dead_letters.page(),
    ]


def files() -> dict[Path, str]:
    """The expected content of each file, by its path."""
    return {FOLDER / f"{page.name}.json": page.json() for page in pages()}
