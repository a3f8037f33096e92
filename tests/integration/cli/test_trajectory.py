"""`weft trajectory`."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.integration.cli.desk import Desk, Ended, Weft, command, environment, shown_with, until


def test_a_trajectory_is_shown_as_a_tree(weft: Weft) -> None:
    weft("submit", "caller", "right", "--task-id", "tree-1")
    shown_with(weft, "tree-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    lines = weft("trajectory", "show", "tree-1").out.splitlines()
    assert lines[0] == "task tree-1  caller  completed"
    assert lines[1].startswith("└─ ◆ agent caller  completed  ")
    assert lines[2].startswith("   └─ ▸ tool broken  step 1  completed  ")
    tree = weft("trajectory", "show", "tree-1", "--json").json
    assert (tree["task"], tree["complete"], tree["steps"]) == ("tree-1", True, 2)
    missing = weft("trajectory", "show", "unheard-of")
    assert missing.status == 1
    assert missing.err.startswith("weft trajectory show: no steps of task 'unheard-of' are recorded yet")


def test_trajectories_are_exported(weft: Weft, desk: Desk) -> None:
    weft("submit", "echo", "x", "--task-id", "export-1")
    shown_with(weft, "export-1", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    lines = weft("trajectory", "export", "--task", "export-1").out.splitlines()
    assert [json.loads(line)["task"] for line in lines] == ["export-1"]
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert weft("trajectory", "export", "--since", tomorrow).out == ""
    assert weft("trajectory", "export", "--agent", "echo", "--status", "failed").out == ""
    ended = weft("trajectory", "export", "--task", "export-1", "--output", "steps.jsonl")
    assert ended.out == "1 step in steps.jsonl\n"
    assert (desk.folder / "steps.jsonl").read_text().splitlines() == lines
    refused = weft("trajectory", "export", "--output", "no/such/folder.jsonl")
    assert refused == Ended(1, "", "weft trajectory export: no/such/folder.jsonl: No such file or directory\n")


def test_items_for_training_are_scored_and_exported(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    for task, text in (("sar-1", "short"), ("sar-2", "somewhat longer")):
        weft("submit", "echo", text, "--task-id", task, "--session", "sar")
        shown_with(weft, task, lambda view: view["trajectory"] and view["trajectory"]["complete"])
    exported = ["trajectory", "export", "--format", "sar", "--session", "sar"]
    items = [json.loads(line) for line in weft(*exported).out.splitlines()]
    assert [(item["meta"]["task_id"], item["reward"]["score"]) for item in items] == [("sar-1", None), ("sar-2", None)]
    assert "set WEFT_APP" in weft(*exported, "--reward").err
    monkeypatch.setenv("WEFT_APP", "desk:app")
    items = [json.loads(line) for line in weft(*exported, "--min-reward", "10").out.splitlines()]
    assert [(item["meta"]["task_id"], item["reward"]["score"]) for item in items] == [("sar-2", 15.0)]
    assert weft(*exported, "--strategy", "desk:Nothing").out == ""
    (item,) = [json.loads(line) for line in weft(*exported, "--strategy", "memory", "--task", "sar-1").out.splitlines()]
    assert item["state"]["messages"] == [{"role": "user", "content": "short"}]
    refused = weft(*exported, "--strategy", "desk:app")
    assert (refused.status, refused.out) == (1, "")
    assert "is not a TrajectoryStrategy" in refused.err


def test_trajectories_are_exported_to_parquet(weft: Weft, desk: Desk) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    weft("submit", "echo", "x", "--task-id", "export-2")
    shown_with(weft, "export-2", lambda view: view["trajectory"] and view["trajectory"]["complete"])
    weft("trajectory", "export", "--format", "parquet", "--task", "export-2", "--output", "steps.parquet")
    assert parquet.read_table(desk.folder / "steps.parquet").column("task").to_pylist() == ["export-2"]


def test_a_missing_trajectory_store_is_named_and_not_created(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TRAJECTORY_URL", f"sqlite:///{tmp_path}/none.db")
    ended = weft("trajectory", "export")
    assert ended.status == 1
    assert "there is no trajectory store at sqlite:///" in ended.err
    assert weft("task", "list").status == 0
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "/dev/full"), "/dev/full: No space left on device"),
        (("--format", "parquet", "-o", "missing/steps"), "missing/steps: No such file or directory"),
        (("--format", "sar", "-o", "missing/items"), "missing/items: No such file or directory"),
    ],
)
def test_an_export_that_cannot_be_written_is_reported_in_one_line(
    weft: Weft, arguments: tuple[str, ...], said: str
) -> None:
    assert weft("submit", "echo", "1", "--task-id", "full-1").status == 0
    until(lambda: weft("trajectory", "show", "full-1").status == 0)
    ended = weft("trajectory", "export", *arguments)
    assert (ended.status, ended.out, ended.err) == (1, "", f"weft trajectory export: {said}\n")


@pytest.mark.parametrize("arguments", [("trajectory", "export"), ("task", "list")], ids=["export", "list"])
def test_a_full_disk_is_reported_in_one_line(weft: Weft, desk: Desk, arguments: tuple[str, ...]) -> None:
    assert weft("submit", "echo", "1", "--task-id", f"full-{arguments[0]}").status == 0
    until(lambda: weft("trajectory", "show", f"full-{arguments[0]}").status == 0)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command(*arguments), cwd=desk.folder, env=environment(desk.folder), stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        1,
        "weft: a file was not written: No space left on device; free space, or use another disk\n",
    )
