"""The command `weft`: help, usage, and a broker that is missing or silent."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from docs import generate_command
from runtime_core.cli.main import main
from tests.integration.cli.desk import Desk, Weft


def test_the_page_of_the_command_is_current() -> None:
    assert generate_command.PAGE.read_text("utf-8") == generate_command.page(), "run `python -m docs.generate_command`"


def test_every_command_has_an_example_in_its_help() -> None:
    for section in generate_command.page().split("\n## ")[1:]:
        path, _, text = section.partition("\n")
        if "COMMAND [ARGS]" not in text:
            assert "Example" in text, f"{path} has no example"


def test_help_imports_nothing_that_takes_time() -> None:
    code = (
        "import sys; from runtime_core.cli.main import main; status = main(['--help']);"
        "slow = {'sqlalchemy', 'asyncio', 'rich', 'pydantic', 'runtime_core.client.client'} & set(sys.modules);"
        "assert not slow, slow; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("up", "submit", "task", "trajectory", "schedule", "tenant", "dead", "lag", "doctor"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["submit"], "weft submit: Missing argument 'AGENT'; see `weft submit --help`"),
        (
            ["completion", "tcsh"],
            "weft completion: Invalid value for 'SHELL': 'tcsh' is not one of 'bash', 'zsh', 'fish'; "
            "see `weft completion --help`",
        ),
        (["submit", "a", "--max-steps", "0"], "weft submit: "),
        (["submit", "a", "--stream", "--no-wait"], "weft submit: "),
        (["completion"], "weft completion: Missing argument 'SHELL'"),
        (["nothing"], "weft: No such command 'nothing'"),
        (["tsk"], "weft: No such command 'tsk'. Did you mean 'task'? See `weft --help`"),
        (["task", "list", "--status", "odd"], "weft task list: "),
        (["schedule", "set", "s", "echo"], "weft schedule set: Invalid value: give exactly one of --every"),
        (["dead", "redrive"], "weft dead redrive: Invalid value: give either ids or --all"),
        (["dead", "drop", "1-1", "--all"], "weft dead drop: "),
        (["dead", "redrive", "--all", "--data", "{}"], "weft dead redrive: "),
        (
            ["trajectory", "export", "--format", "parquet"],
            "weft trajectory export: Invalid value: Parquet cannot be written to",
        ),
        (["trajectory", "export", "--since", "yesterday"], "weft trajectory export: "),
        (["trajectory", "export", "--format", "sar-parquet"], "weft trajectory export: Invalid value: Parquet cannot"),
        (["trajectory", "export", "--min-reward", "1"], "weft trajectory export: Invalid value: --strategy, --reward"),
    ],
)
def test_wrong_usage_is_one_line_with_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert err.startswith(said)
    assert err.count("\n") == 1
    assert out == ""


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task"]) == 2
    assert "Usage: weft task" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["submit", "echo"], ["task", "list"], ["task", "show", "x"], ["dead", "list"], ["lag"]]
)
def test_without_a_broker_one_line_names_the_remedy(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WEFT_REDIS_URL", raising=False)
    monkeypatch.setenv("WEFT_DATA_DIR", str(tmp_path))
    assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "no broker: start one with `weft up`, or set WEFT_REDIS_URL" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_broker_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_REDIS_URL", "unix:///nowhere/server.sock")
    assert main(["lag"]) == 1
    err = capsys.readouterr().err
    assert "unix:///nowhere/server.sock" in err
    assert err.count("\n") == 1


def test_up_without_an_app_says_how_to_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WEFT_APP", raising=False)
    assert main(["up"]) == 1
    err = capsys.readouterr().err
    assert "weft up --app desk:app" in err
    assert err.count("\n") == 1
    assert not (tmp_path / ".weft").exists()


def test_a_command_does_not_create_a_missing_namespace(weft: Weft, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NAMESPACE", "mistyped")
    ended = weft("task", "list")
    assert ended.status == 1
    assert "'mistyped' does not exist" in ended.err
    with closing(desk.redis()) as server:
        assert list(server.scan_iter("mistyped*")) == []


def test_up_lists_its_services(desk: Desk) -> None:
    text = desk.log.read_text()
    assert text.startswith("Weft is starting\n")
    for service in ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder"):
        assert any(service in line and "✓ ready" in line for line in text.splitlines())
