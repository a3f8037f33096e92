"""The names of metrics follow Prometheus' rules, and none of their labels grows without bound."""

from __future__ import annotations

import re

from runtime_core.telemetry import names
from runtime_core.telemetry.names import EMITTERS, SECONDS_BUCKETS, MetricName, MetricType

METRICS = [each for each in vars(names).values() if isinstance(each, MetricName)]
UNBOUNDED = {"task", "task_id", "run", "step", "key", "instance", "session", "message", "entry", "owner"}


def test_each_name_belongs_to_one_metric() -> None:
    assert len(METRICS) > 60
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert [metric.name for metric in METRICS if not re.fullmatch(r"weft_[a-z_]+[a-z]", metric.name)] == []


def test_the_name_of_a_metric_says_its_type_and_unit() -> None:
    for metric in METRICS:
        assert metric.name.endswith("_total") is (metric.kind is MetricType.COUNTER), metric.name
        if metric.kind is MetricType.HISTOGRAM:
            assert metric.name.endswith("_seconds"), metric.name
        if metric.unit in ("seconds", "bytes") and metric.kind is not MetricType.COUNTER:
            assert metric.name.endswith(f"_{metric.unit}"), metric.name


def test_a_metric_is_explained_in_sentences_and_has_emitters() -> None:
    for metric in METRICS:
        assert metric.help.endswith("."), metric.name
        assert "\n" not in metric.help + metric.attention, metric.name
        assert metric.by in EMITTERS, metric.name


def test_no_label_holds_ids() -> None:
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels & UNBOUNDED == set()
    assert all(len(set(metric.labels)) == len(metric.labels) for metric in METRICS)


def test_buckets_grow() -> None:
    assert list(SECONDS_BUCKETS) == sorted(set(SECONDS_BUCKETS))
