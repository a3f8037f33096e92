"""The dashboards match their code, have a form that Grafana reads, and query only metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from deploy.observability.dashboards.pages import FOLDER, files
from runtime_core.host.service import SERVICES
from runtime_core.telemetry import names
from tests.architecture.tree import ROOT
from tests.deploy.kubectl import K8S, build
from tests.deploy.manifests import name_of, pod_templates
from tests.observability.queries import targets
from tests.observability.rules import recorded, rules

PATHS = sorted(FOLDER.glob("*.json"))
FOREIGN = {
    "up", "ALERTS", "ALERTS_FOR_STATE", "process_cpu_seconds_total", "process_resident_memory_bytes",
    "process_open_fds", "process_start_time_seconds",
}  # fmt: skip
"""What Prometheus and its client library name."""
PANELS = {"row", "timeseries", "stat", "table"}
LABEL_PIXELS = 96
"""What a column of a label needs: `agent-handler`."""
CONFIG_MAP_BYTES = 200 * 1024
"""Of what `kubectl apply` keeps in an annotation, which may hold 256 KiB."""

Panel = dict[str, Any]


def page(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(params=[path.stem for path in PATHS])
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return page(request.param)


def test_the_generated_files_are_current() -> None:
    made = files()
    assert sorted(made) == PATHS
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `python -m deploy.observability.dashboards`"
    assert files() == made, "the same code makes the same text"


def test_each_service_has_a_page() -> None:
    assert {path.stem for path in PATHS} == {
        *SERVICES, "overview", "broker", "agents-and-tools", "engines", "dead-letters"
    }  # fmt: skip


def test_a_page_has_the_form_of_one(dashboard: dict[str, Any]) -> None:
    assert re.fullmatch(r"weft-[a-z-]{1,35}", dashboard["uid"])
    assert dashboard["title"].startswith("Weft: ")
    assert dashboard["description"]
    assert dashboard["tags"] == ["weft"]
    assert dashboard["refresh"] == "10s"
    assert dashboard["time"] == {"from": "now-30m", "to": "now"}
    assert dashboard["schemaVersion"] >= 39
    assert "id" not in dashboard, "the id is the database's"
    [link] = dashboard["links"]
    assert (link["type"], link["tags"], link["asDropdown"]) == ("dashboards", ["weft"], True)
    assert "placement" not in link, "Grafana shows above the panels what has none: with an empty one it is nowhere"
    source, *chosen = dashboard["templating"]["list"]
    assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
    for variable in chosen:
        assert variable["type"] == "query"
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert variable["includeAll"] is variable["multi"] is True
        assert variable["allValue"] == ".*"
    text = json.dumps(dashboard["panels"])
    assert [each["name"] for each in chosen if f"${each['name']}" not in text] == []
    known = {each["name"] for each in dashboard["templating"]["list"]} | {"__rate_interval", "__range"}
    assert set(re.findall(r"\$\{?(\w+)", text)) <= known


def test_panels_are_on_the_grid_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels: list[Panel] = dashboard["panels"]
    assert panels[0]["type"] == "row"
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["w"] > 0 < place["h"]
        assert 0 <= place["x"] <= place["x"] + place["w"] <= 24, panel["title"]
        assert taken.isdisjoint(cells), f"{panel['title']} lies on another one"
        taken |= cells
    for panel in panels[1:]:
        place = panel["gridPos"]
        above = {(x, place["y"] - 1) for x in range(place["x"], place["x"] + place["w"])}
        assert taken & above, f"{panel['title']} has nothing above it: Grafana would move it up, away from its line"
    for place in (panel["gridPos"] for panel in panels if panel["type"] == "row"):
        assert (place["x"], place["w"], place["h"]) == (0, 24, 1)


def test_each_panel_has_a_description(dashboard: dict[str, Any]) -> None:
    titles = set()
    row = ""
    for panel in dashboard["panels"]:
        assert panel["type"] in PANELS
        if panel["type"] == "row":
            row = panel["title"]
            continue
        assert (row, panel["type"], panel["title"]) not in titles, "two panels of a row have one title"
        titles.add((row, panel["type"], panel["title"]))
        assert panel["description"].endswith((".", "?")), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] != "table":
            assert defaults["unit"], panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert refs == sorted(set(refs)) != [], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert target["expr"]
            if panel["type"] == "table":
                assert (target["instant"], target["format"]) == (True, "table")
            else:
                assert target["range"] is True
                assert target["legendFormat"]
        for step in thresholds(panel):
            values = [each["value"] for each in step]
            assert values[0] is None
            assert values[1:] == sorted(values[1:]), panel["title"]


def thresholds(panel: Panel) -> Iterator[list[dict[str, Any]]]:
    defaults = panel["fieldConfig"]["defaults"]
    if "thresholds" in defaults:
        yield defaults["thresholds"]["steps"]
    for override in panel["fieldConfig"]["overrides"]:
        for each in override["properties"]:
            if each["id"] == "thresholds":
                yield each["value"]["steps"]


def test_columns_of_a_table_have_the_names_that_it_sorts_and_colours(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] != "table":
            continue
        *merged, organize = panel["transformations"]
        assert [each["id"] for each in merged] == (["merge"] if len(panel["targets"]) > 1 else [])
        shown = organize["options"]["renameByName"]
        refs = [target["refId"] for target in panel["targets"]]
        values = ["Value"] if len(refs) == 1 else [f"Value #{ref}" for ref in refs]
        assert set(values) <= shown.keys()
        assert {sort["displayName"] for sort in panel["options"]["sortBy"]} <= set(shown.values()), panel["title"]
        overrides = panel["fieldConfig"]["overrides"]
        named = {each["matcher"]["options"] for each in overrides if each["matcher"]["id"] == "byName"}
        assert named <= set(shown.values())
        # Lines are put together by their labels, so each query must have those, and no others.
        labels = [name for name in shown if not name.startswith("Value")]
        for target in panel["targets"]:
            by = re.search(r"by \(([^)]*)\)", target["expr"])
            assert by is not None
            assert {name for name in by.group(1).split(", ") if name != "le"} == set(labels), panel["title"]
            whole = "In the selected time range" in panel["description"]
            assert whole == ("[$__range]" in target["expr"]), panel["title"]
            assert "$__rate_interval" not in target["expr"], "a table has one moment: most lines would be empty"


def test_all_columns_of_a_table_are_in_sight_on_a_usual_screen(dashboard: dict[str, Any]) -> None:
    """At 1920 pixels, without the menu at the left, as Grafana distributes them: columns without a width share the
    rest."""
    for panel in dashboard["panels"]:
        if panel["type"] != "table":
            continue
        fixed = [
            each["value"]
            for override in panel["fieldConfig"]["overrides"]
            for each in override["properties"]
            if each["id"] == "custom.width"
        ]
        shown = panel["transformations"][-1]["options"]["renameByName"]
        assert len(fixed) >= len(panel["targets"]), panel["title"]
        labels = len(shown) - len(fixed)
        room = 1590 * panel["gridPos"]["w"] / 24 - 32
        assert labels * LABEL_PIXELS <= room - sum(fixed), panel["title"]
        assert panel["fieldConfig"]["defaults"]["custom"]["minWidth"] <= LABEL_PIXELS, panel["title"]


def test_an_empty_cell_does_not_show_the_text_for_an_empty_table(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] == "table":
            empty = panel["fieldConfig"]["defaults"]["noValue"]
            said = [
                each["value"]
                for override in panel["fieldConfig"]["overrides"]
                for each in override["properties"]
                if each["id"] == "noValue"
            ]
            assert len(said) == 1 + len(panel["targets"]), panel["title"]
            without = [
                each["options"]["match"]
                for override in panel["fieldConfig"]["overrides"]
                for shown in override["properties"]
                if shown["id"] == "mappings"
                for each in shown["value"]
                if each["type"] == "special"
            ]
            assert without == ["null+nan"] * len(panel["targets"]), "a quantile of nothing is NaN"
            assert empty not in said, panel["title"]


def test_a_legend_begins_with_the_largest(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] == "timeseries":
            legend = panel["options"]["legend"]
            assert "max" in legend["calcs"]
            assert (legend["sortBy"], legend["sortDesc"]) == ("Max", True), panel["title"]


def test_a_number_is_current_or_marked_as_missing(dashboard: dict[str, Any]) -> None:
    """A series that has ended would show its last value, as if its processes still ran."""
    for panel in dashboard["panels"]:
        if panel["type"] == "stat":
            assert panel["options"]["reduceOptions"]["calcs"] == ["last"], panel["title"]
            assert [target["expr"].endswith(" or vector(NaN)") for target in panel["targets"]] == [True]
            special = [each for each in panel["fieldConfig"]["defaults"]["mappings"] if each["type"] == "special"]
            assert [each["options"]["match"] for each in special] == ["null+nan"], panel["title"]


def test_legends_name_labels_that_queries_keep() -> None:
    for target in targets():
        wanted = set(re.findall(r"\{\{(\w+)\}\}", target.legend))
        kept = {label for found in re.findall(r"by \(([^)]*)\)", target.expr) for label in found.split(", ")}
        joined = {"instance"} if "* on (instance)" in target.expr else set()
        assert wanted <= kept | joined, f"{target.place}: {target.legend}"


def test_queries_use_only_existing_metrics() -> None:
    known = FOREIGN | recorded().keys()
    for metric in names.ALL:
        suffixes = ("_bucket", "_count", "_sum") if metric.kind is names.MetricType.HISTOGRAM else ("",)
        known |= {f"{metric.name}{suffix}" for suffix in suffixes}
    asked = {rule["expr"]: rule.get("alert", rule.get("record")) for rule in rules()}
    asked |= {target.expr: target.place for target in targets()}
    unknown = {place: metrics for expr, place in asked.items() if (metrics := metrics_of(expr) - known)}
    assert unknown == {}


def test_every_metric_is_shown_somewhere() -> None:
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for target in targets() for name in metrics_of(target.expr)}
    assert {metric.name for metric in names.ALL} - shown == set()


def metrics_of(expr: str) -> set[str]:
    """Return the names of metrics in a query: words that are no functions, labels or strings."""
    text = re.sub(r'"[^"]*"', "", expr)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\boffset \w+", "", text)
    text = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", "", text)
    words = re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?!\s*\()(?![\w:])", text)
    return {word for word in words if word not in ("and", "or", "unless", "bool", "NaN")}


def test_names_of_metrics_are_found_in_queries() -> None:
    assert metrics_of('sum by (a, le) (rate(x_total{b="c"}[5m])) / (y offset 5m > 0) or p:q:r1h == 1') == {
        "x_total", "y", "p:q:r1h"
    }  # fmt: skip


def test_config_maps_are_small_enough_for_kubectl_apply(kubectl_command: tuple[str, ...]) -> None:
    maps = {name_of(each): each for each in build(kubectl_command, K8S) if each["kind"] == "ConfigMap"}
    large = {name: size for name, each in maps.items() if (size := len(json.dumps(each))) > CONFIG_MAP_BYTES}
    assert large == {}


def test_kubernetes_mounts_all_dashboards_and_rules(kubectl_command: tuple[str, ...]) -> None:
    manifests = build(kubectl_command, K8S)
    content = {each["metadata"]["name"]: set(each["data"]) for each in manifests if each["kind"] == "ConfigMap"}
    pods = dict(pod_templates(manifests))
    volumes = {
        (pod, volume["name"]): volume
        for pod in ("Deployment/grafana", "StatefulSet/prometheus")
        for volume in pods[pod]["spec"]["volumes"]
    }
    sources = volumes["Deployment/grafana", "dashboards"]["projected"]["sources"]
    mounted = set().union(*(content[source["configMap"]["name"]] for source in sources))
    assert mounted == {path.name for path in PATHS}
    ruled = content[volumes["StatefulSet/prometheus", "rules"]["configMap"]["name"]]
    assert ruled == {path.name for path in (ROOT / "deploy" / "observability" / "rules").iterdir()}


def test_grafana_reads_the_folder_where_dashboards_are_mounted(kubectl_command: tuple[str, ...]) -> None:
    providers = yaml.safe_load((FOLDER.parent / "dashboards.yaml").read_text(encoding="utf-8"))
    [path] = [each["options"]["path"] for each in providers["providers"]]
    [container] = dict(pod_templates(build(kubectl_command, K8S)))["Deployment/grafana"]["spec"]["containers"]
    assert path in {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "dashboards"}
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8"))
    assert f"../observability/grafana/dashboards:{path}:ro" in compose["services"]["grafana"]["volumes"]
    place = "../observability/rules:/etc/prometheus/rules:ro"
    assert place in compose["services"]["prometheus"]["volumes"]
