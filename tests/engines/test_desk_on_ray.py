"""The research desk with its search on a real Ray."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT
from tests.engines.ray_cluster import RayCluster
from tests.servers.matrix import is_full

PASSAGES = "3000" if is_full() else "600"
LIMIT_SECONDS = 240.0
"""Of one run, on a busy machine; it decides nothing."""


def report(data_dir: Path, engine: str, environ: dict[str, str]) -> str:
    """Return the desk's answer for a large collection, searched by this engine."""
    command = [sys.executable, "-m", "examples.research_desk", "--passages", PASSAGES, "--engine", engine]
    kept = {name: value for name, value in environ.items() if not name.startswith("WEFT_") or "RAY" in name}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**kept, "WEFT_DATA_DIR": str(data_dir)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    # On a busy machine the handlers start so late that the desk says it.
    said = [line for line in done.stderr.splitlines() if "no agent-handler has published its agents yet" not in line]
    assert (done.returncode, said) == (0, []), done.stdout
    assert re.search(r"(engine|ray) find_in_shard\S*  (?:step \S+  )?completed", done.stdout)
    match = re.search(r"^# .*?(?=^ *[\d.]+ s  the task is completed)", done.stdout, flags=re.MULTILINE | re.DOTALL)
    assert match is not None, done.stdout
    return match[0]


def test_the_desk_gives_the_same_answer_with_ray(ray_cluster: RayCluster, tmp_path: Path) -> None:
    local = report(tmp_path / "local", "local", dict(os.environ))
    assert local.count("\n[") > 2
    assert report(tmp_path / "ray", "ray", ray_cluster.environ) == local
