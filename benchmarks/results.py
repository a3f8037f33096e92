"""The file in which figures are kept: one per run, with the commit and the machine."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.child import ROOT
from benchmarks.machine import machine

FOLDER = ROOT / "benchmarks" / "results"


def write(folder: Path, figures: dict[str, object], commits: Sequence[str]) -> Path:
    """Write `<UTC time>.json`: `at`, `commit`, `machine` and the figures by the name of what was measured.

    `commits` are those at the start and at the end: where they differ both are kept, as the code changed meanwhile.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{time.strftime('%Y-%m-%dT%H-%M-%SZ', time.gmtime())}.json"
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept = {"at": at, "commit": " to ".join(dict.fromkeys(commits)), "machine": machine(), **figures}
    path.write_text(json.dumps(kept, indent=2) + "\n")
    return path
