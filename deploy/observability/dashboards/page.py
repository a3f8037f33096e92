"""A dashboard: panels in rows from left to right, variables at its top, and links to all others."""

from __future__ import annotations

from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    GridPos,
    Panel,
    RowPanel,
    VariableModel,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from deploy.observability.dashboards.panels import SOURCE, WIDTH, Placed

TAG = "weft"
ALL = VariableOption(selected=True, text="All", value="$__all")


@dataclass(slots=True)
class Page:
    """A dashboard under construction. `name` is that of its file, and after `weft-` its uid, which never changes."""

    name: str
    title: str
    description: str
    variables: list[VariableModel] = field(default_factory=list)
    rows: list[tuple[str, list[Placed]]] = field(default_factory=list)

    def choose(self, label: str, query: str, title: str) -> None:
        """Add a variable of this name that selects one of a series' label values, or all of them."""
        self.variables.append(
            dashboard.QueryVariable(label)
            .label(title)
            .datasource(SOURCE)
            .query({"query": f"label_values({query}, {label})", "refId": label})
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.NATURAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(ALL)
            .build()
        )

    def row(self, title: str, *panels: Placed) -> None:
        """Add panels under a heading; those that do not fit in a line begin the next."""
        self.rows.append((title, list(panels)))

    def build(self) -> Dashboard:
        page = (
            dashboard.Dashboard(self.title)
            .uid(f"weft-{self.name}")
            .description(self.description)
            .tags([TAG])
            .refresh("10s")
            .time("now-30m", "now")
            .timezone("browser")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .editable()
            .link(
                dashboard.DashboardLink("Weft")
                .type(DashboardLinkType.DASHBOARDS)
                .tags([TAG])
                .as_dropdown(True)
                .keep_time(True)
            )
            .with_variable(
                dashboard.DatasourceVariable("datasource")
                .label("Data source")
                .type("prometheus")
                .current(VariableOption(selected=True, text="Prometheus", value="prometheus"))
            )
            .build()
        )
        assert page.templating is not None
        assert page.templating.list_val is not None
        for link in page.links or []:
            # Above the panels, where it is seen: Grafana shows there what has no place, and only that; the SDK names
            # a menu.
            link.placement = None  # type: ignore[assignment]  # the SDK has no word for it
        page.templating.list_val += self.variables
        page.panels = self._placed()
        return page

    def json(self) -> str:
        """The checked-in JSON: always the same text."""
        return JSONEncoder(sort_keys=True, indent=1, ensure_ascii=False).encode(self.build()) + "\n"

    def _placed(self) -> list[Panel | RowPanel]:
        """Panels with ids and positions. Those of a line have the same height, and fill it."""
        placed: list[Panel | RowPanel] = []
        y = 0
        for title, panels in self.rows:
            row = dashboard.Row(title).id(len(placed) + 1).grid_pos(GridPos(h=1, w=WIDTH, x=0, y=y)).build()
            placed.append(row)
            x, y, height = 0, y + 1, 0
            for each in panels:
                if x + each.width > WIDTH:
                    x, y, height = 0, y + height, 0
                panel = each.panel.build()
                panel.id_val = len(placed) + 1
                panel.grid_pos = GridPos(h=each.height, w=each.width, x=x, y=y)
                placed.append(panel)
                x, height = x + each.width, max(height, each.height)
            y += height
        return placed
