"""The settings that graphs, numbers and tables share: data source, legend, thresholds, size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    DataSourceRef,
    GraphGradientMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Panel,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24
"""Columns of Grafana's grid."""
GOOD, WARN, BAD = "green", "orange", "red"
LEAST_PIXELS = 88
"""The width of a table's value column. Grafana's own 150 put the last columns out of sight."""
LABEL_PIXELS = {"partition": 90, "severity": 75, "alertname": 205}
"""The widths for labels with short and long values; the others share the rest."""
ABSENT = "-"
"""A cell without a value; `empty` is for a table without lines."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A panel and its size, in columns and rows of the grid."""

    panel: Builder[Panel]
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Query:
    """A query and the names of its series, as in `{{status}}`."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Limits:
    """The values from which a panel warns, and from which it is bad. With `low`, from which value down."""

    warn: float
    bad: float
    low: bool = False

    def build(self) -> dashboard.ThresholdsConfig:
        if self.low:
            steps = [(None, BAD), (self.bad, WARN), (self.warn, GOOD)]
        else:
            steps = [(None, GOOD), (self.warn, WARN), (self.bad, BAD)]
        thresholds = [Threshold(value=value, color=color) for value, color in steps]
        return dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(thresholds)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: a value of an instant query, by label."""

    title: str
    expr: str
    unit: str = "short"
    limits: Limits | None = None
    words: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    """Text and colour that replace a value."""

    def pixels(self, sorts: bool) -> int:
        """The width of a column: room for the heading, and for the arrow if it sorts the table. The labels share the
        rest."""
        return max(LEAST_PIXELS, (50 if sorts else 30) + 8 * len(self.title))


def graph(
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int = 8,
    height: int = 8,
    stacked: bool = False,
    limits: Limits | None = None,
) -> Placed:
    """Return a panel of values over time. `description` explains it, and when it needs attention."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .gradient_mode(GraphGradientMode.NONE)
        .show_points(VisibilityMode.NEVER)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.TABLE)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
            # Two or three lines are in sight: the largest, not the first of the alphabet.
            .sort_by("Max")
            .sort_desc(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if limits is not None:
        panel = panel.thresholds(limits.build()).thresholds_style(_lines())
    for ref, query in zip("ABCDEFGH", queries, strict=False):
        panel = panel.with_target(_target(ref, query.expr).legend_format(query.legend).range())
    return Placed(panel, width, height)


def number(
    title: str,
    description: str,
    expr: str,
    *,
    unit: str = "short",
    width: int = 4,
    limits: Limits | None = None,
    words: Mapping[int, tuple[str, str]] | None = None,
    height: int = 4,
    empty: str = "unknown",
    history: bool = True,
) -> Placed:
    """One large value without labels: the current one. `empty` stands for a missing current value, whatever it was
    before;
        `words` are texts and colours that replace values.

    """
    panel = (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .no_value(empty)
        .color_mode(BigValueColorMode.VALUE)
        .graph_mode(BigValueGraphMode.AREA if history else BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["last"]))
        # Without the NaN the series would end with the last value, and that would look like the current value.
        .with_target(_target("A", f"{expr} or vector(NaN)").legend_format(title).range())
    )
    if limits is None:
        panel = panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color("blue"))
    else:
        panel = panel.thresholds(limits.build())
    panel = panel.mappings([*([_map(words)] if words else ()), _without_value(empty)])
    return Placed(panel, width, height)


def table_of(
    title: str,
    description: str,
    labels: Mapping[str, str],
    columns: Sequence[Column],
    *,
    sort: str,
    order: Literal["up", "down"] = "down",
    width: int = 12,
    height: int = 8,
    empty: str = "nothing",
) -> Placed:
    """A line per set of `labels` (label → heading), a column per query. All queries have the same labels."""
    panel = (
        table.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .no_value(empty)
        .min_width(LEAST_PIXELS)
        .override_by_field_type("string", [DynamicConfigValue(id_val="noValue", value=ABSENT)])
        .sort_by([common.TableSortByFieldState().display_name(sort).desc(order == "down")])
    )
    for label, heading in labels.items():
        if label in LABEL_PIXELS:
            panel = panel.override_by_name(heading, [_width(LABEL_PIXELS[label])])
    names = {**labels}
    for ref, column in zip("ABCDEFGH", columns, strict=False):
        panel = panel.with_target(_target(ref, column.expr).format(PromQueryFormat.TABLE).instant())
        names["Value" if len(columns) == 1 else f"Value #{ref}"] = column.title
        panel = panel.override_by_name(column.title, _properties(column, column.title == sort))
    if len(columns) > 1:
        panel = panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    organize = {
        "excludeByName": {"Time": True, "__name__": True},
        "indexByName": {name: index for index, name in enumerate(names)},
        "renameByName": names,
    }
    panel = panel.with_transformation(DataTransformerConfig(id_val="organize", options=organize))
    return Placed(panel, width, height)


def _target(ref: str, expr: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(SOURCE).ref_id(ref).expr(expr)


def _width(pixels: int) -> DynamicConfigValue:
    return DynamicConfigValue(id_val="custom.width", value=pixels)


def _lines() -> common.GraphThresholdsStyleConfig:
    return common.GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)


def _map(words: Mapping[int, tuple[str, str]]) -> ValueMap:
    return ValueMap(
        options={
            str(value): ValueMappingResult(text=text, color=color, index=index)
            for index, (value, (text, color)) in enumerate(words.items())
        }
    )


def _without_value(text: str) -> SpecialValueMap:
    shown = ValueMappingResult(text=text, color="text", index=0)
    return SpecialValueMap(options=DashboardSpecialValueMapOptions(match=SpecialValueMatch.NULL_AND_NAN, result=shown))


def _properties(column: Column, sorts: bool) -> list[DynamicConfigValue]:
    found = [
        DynamicConfigValue(id_val="unit", value=column.unit),
        DynamicConfigValue(id_val="noValue", value=ABSENT),
        _width(column.pixels(sorts)),
    ]
    if column.limits is not None:
        found.append(DynamicConfigValue(id_val="thresholds", value=column.limits.build().build()))
    words = [_map(column.words)] if column.words else []
    found.append(DynamicConfigValue(id_val="mappings", value=[*words, _without_value(ABSENT)]))
    if column.limits is not None or column.words:
        found.append(DynamicConfigValue(id_val="custom.cellOptions", value={"type": "color-text"}))
    return found
