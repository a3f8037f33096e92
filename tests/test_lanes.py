"""Lanes of make targets run beside each other, and one that fails fails them all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import lanes

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

MAKEFILE = """\
.PHONY: asks answers passes fails args
asks:
	@mkfifo ask; echo asked >ask; echo asks
answers:
	@until [ -p ask ]; do :; done; cat ask
passes:
	@echo passes
fails:
	@echo fails; exit 1
killed:
	@kill -TERM $$PPID; sleep 60
args:
	@echo "ARGS are [$(ARGS)]"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "Makefile").write_text(MAKEFILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def test_lanes_run_at_the_same_time(capfd: pytest.CaptureFixture[str]) -> None:
    # Each waits for the other, so one after the other would never end.
    assert lanes.main(["asks", "passes", "--", "answers"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == ["asks", "passes"]
    assert "asked" in lines
    assert [line.split()[0] for line in lines[-3:]] == ["asks", "passes", "answers"]
    assert all(line.endswith("passed") for line in lines[-3:])


@pytest.mark.parametrize("arguments", [["passes", "--", "fails", "args"], ["fails", "args", "--", "passes"]])
def test_a_target_that_fails_fails_them_all_after_the_rest_of_its_lane(
    arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert lanes.main(arguments) == 1
    out = capfd.readouterr().out
    assert out.count("FAILED") == 1
    assert "ARGS are" in out, "the target after the failed one did not run"


def test_a_signal_ends_a_lane(capfd: pytest.CaptureFixture[str]) -> None:
    assert lanes.main(["killed", "args"]) == 1
    assert "ARGS are" not in capfd.readouterr().out


def test_arguments_reach_the_first_lane_only(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MAKEFLAGS", "-- ARGS=-x")
        assert lanes.main(["args", "--", "args"]) == 0
    assert capfd.readouterr().out.splitlines()[0] == "ARGS are [-x]"
    assert (folder / lanes.LOGS / "args.log").read_text() == "ARGS are []\n"
