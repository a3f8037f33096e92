"""Each alert fires when it should and only then, by promtool. Each has a runbook, and each runbook an alert."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.architecture.test_documents import anchors_of, section
from tests.architecture.tree import ROOT
from tests.observability.alert_cases import CASES, Case
from tests.observability.prometheus import promtool
from tests.observability.rules import FILES, alerts, bare, recorded, rules

RUNBOOKS = ROOT / "docs" / "operations.md"


def test_promtool_accepts_the_rules(promtool_command: tuple[str, ...]) -> None:
    said = promtool(promtool_command, "check", "rules", *map(str, FILES))
    assert "FAILED" not in said
    assert "duplicate" not in said


def test_promtool_accepts_the_configuration_with_the_rules(promtool_command: tuple[str, ...], tmp_path: Path) -> None:
    config = (ROOT / "deploy" / "observability" / "prometheus.yml").read_text(encoding="utf-8")
    place = "/etc/prometheus/rules/"
    assert place in config
    path = tmp_path / "prometheus.yml"
    path.write_text(config.replace(place, f"{FILES[0].parent}/"), encoding="utf-8")
    said = promtool(promtool_command, "check", "config", str(path))
    assert said.count("rules found") == len(FILES), said


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_each_alert_fires_when_it_should_and_only_then(
    file: Path, promtool_command: tuple[str, ...], tmp_path: Path
) -> None:
    mine = {rule["alert"] for rule in rules(file) if "alert" in rule}
    paths = []
    for interval, slow in (("1m", False), ("15m", True)):
        tests = [promtool_test(case, interval) for case in CASES if case.slow is slow and case.alert in mine]
        content = {"rule_files": [str(file)], "evaluation_interval": interval, "tests": tests}
        paths.append(tmp_path / f"tests-{interval}.yml")
        # JSON is YAML.
        paths[-1].write_text(json.dumps(content), encoding="utf-8")
    promtool(promtool_command, "test", "rules", *map(str, paths))


def promtool_test(case: Case, interval: str) -> dict[str, Any]:
    """A case as promtool reads it."""
    rule = alerts()[case.alert]
    fires = []
    if case.labels is not None:
        constant = {name: text for name, text in rule["annotations"].items() if name != "description"}
        fires = [
            {
                "exp_labels": {**rule["labels"], **case.labels},
                "exp_annotations": {**constant, "description": case.description},
            }
        ]
    return {
        "name": f"{case.alert}: {case.why}",
        "interval": interval,
        "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": case.alert, "exp_alerts": fires} for at in case.at],
    }


def test_each_alert_is_tried_both_ways() -> None:
    assert {case.alert for case in CASES if case.labels is not None} == alerts().keys()
    assert {case.alert for case in CASES if case.labels is None} == alerts().keys()


def test_each_alert_has_a_severity_and_a_remedy() -> None:
    for name, rule in alerts().items():
        assert rule["labels"].keys() == {"severity"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}, name
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}", name
        assert not rule["annotations"]["summary"].endswith("."), name
        assert rule["annotations"]["description"].endswith("."), name


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    text = RUNBOOKS.read_text(encoding="utf-8")
    books = re.split(r"^### ", section(text, "Alerts"), flags=re.MULTILINE)[1:]
    by_name = {book.partition("\n")[0]: book for book in books}
    assert by_name.keys() == alerts().keys()
    assert {name.lower() for name in by_name} <= anchors_of(text)
    for name, book in by_name.items():
        assert [word for word in ("**Meaning.**", "**Check.**", "**Fix.**") if word not in book] == [], name
        assert alerts()[name]["labels"]["severity"] in book.splitlines()[2], name


def test_recorded_series_are_used() -> None:
    read = " ".join(rule["expr"] for rule in alerts().values())
    assert [name for name in recorded() if name not in read] == []


@pytest.mark.parametrize(
    ("expr", "left"),
    [
        ("a > 0\nand b == 0", "a\nand b"),
        ('a{x!="b", y=~"c"} >= 0.5', 'a{x!="b", y=~"c"}'),
        ("(a / (b > 0)) > 0.8", "(a / (b))"),
        ("absent(a) or count(b == 0) > 0", "(a) or count(b)"),
    ],
)
def test_comparisons_are_removed_from_queries(expr: str, left: str) -> None:
    assert bare(expr) == left


def test_written_yaml_reads_back_unchanged() -> None:
    for path in FILES:
        assert yaml.safe_load(path.read_text(encoding="utf-8")).keys() == {"groups"}, path.name
