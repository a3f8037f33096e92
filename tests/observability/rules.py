"""The checked-in rules, and their queries without the comparisons that make them alerts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.architecture.tree import ROOT

FOLDER = ROOT / "deploy" / "observability" / "rules"
FILES = sorted(FOLDER.glob("*.yaml"))

Rule = dict[str, Any]
"""An alert or a recorded series, as Prometheus reads it."""


def rules(*files: Path) -> Iterator[Rule]:
    """Return the rules of these files, or of all."""
    for path in files or FILES:
        yield from _rules_in(path)


@cache
def _rules_in(path: Path) -> list[Rule]:
    """Read a file once: tests look at the rules again and again while they wait for an alert."""
    groups = yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, Rule]:
    found = [rule for rule in rules() if "alert" in rule]
    by_name = {rule["alert"]: rule for rule in found}
    assert len(by_name) == len(found), "two alerts have one name"
    return by_name


def recorded() -> dict[str, Rule]:
    return {rule["record"]: rule for rule in rules() if "record" in rule}


def bare(expr: str) -> str:
    """Return an alert's query without comparisons: the value that it watches."""
    looked_at = re.sub(r"\babsent\(", "(", expr)
    return re.sub(r"\s*(>=|<=|==|!=|(?<![=!~])>|<)\s*-?[\d.e]+(?![\w\"}])", "", looked_at)
