"""`weft new`, and `weft up` with an app that cannot be imported or that changes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from runtime_core.cli.main import COMPLETION, main
from tests.integration.cli.desk import ROOT, command, environment, until

APP = """
from weft import AgentContext, App

app = App("desk")


@app.agent("echo")
async def echo(ctx: AgentContext, text: str) -> str:
    return "first " + text
"""


def test_the_test_of_a_new_project_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", str(tmp_path / "desk")]) == 0
    assert "weft up --app app:app" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider"],
        cwd=tmp_path / "desk", env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout
    # From the repository's folder: its cache has the types of all libraries, which would take half a minute.
    types = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        *(str(tmp_path / "desk" / name) for name in ("app.py", "test_app.py")),
    ]
    environ = {**os.environ, "MYPYPATH": str(tmp_path / "desk")}
    checked = subprocess.run(types, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert checked.returncode == 0, checked.stdout


def test_a_new_project_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app.py").write_text("mine")
    assert main(["new", str(tmp_path)]) == 1
    assert "already has app.py" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["app.py"]
    assert main(["new", str(tmp_path / "3x")]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_an_import_error_is_reported_once_before_the_broker_starts(tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text("import misspelled\n")
    done = subprocess.run(
        command("up", "--app", "desk:app"),
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("weft up: app 'desk:app' cannot be imported: ")
    assert "desk.py:1" in done.stderr
    assert not (tmp_path / "data" / "endpoint").exists()


@pytest.mark.parametrize("option", ["--metrics-port", "--http-port"])
def test_a_port_in_use_is_reported_once(tmp_path: Path, option: str) -> None:
    (tmp_path / "desk.py").write_text(APP)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("up", "--app", "desk:app", option, str(port)),
            cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"weft up: port {port} is in use: choose another")
    assert option in done.stderr
    assert done.stderr.count("\n") == 1
    assert "ready" not in done.stdout


def test_up_offers_tasks_over_http(tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text(APP)
    log = tmp_path / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("up", "--app", "desk:app", "--http-port", "0"),
            cwd=tmp_path, env=environment(tmp_path), stdout=output, stderr=output,
        )  # fmt: skip
    try:
        until(lambda: process.poll() is not None or log.read_text().count("✓ ready") == 5, 60)
        (url,) = re.findall(r"HTTP on (http://\S+:\d+)", log.read_text())
        with httpx2.Client(base_url=url, timeout=30, trust_env=False) as client:
            task = client.post("/v1/tasks", json={"agent": "echo", "input": "x"}).json()["task_id"]
            until(lambda: client.get(f"/v1/tasks/{task}").json()["status"] == "completed", 30)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_reload_restarts_the_handlers_with_the_new_code(tmp_path: Path) -> None:
    (tmp_path / "desk.py").write_text(APP)
    log = tmp_path / "up.log"
    own = environment(tmp_path)

    def asked() -> str:
        submit = command("submit", "echo", '"x"', "--timeout", "30")
        return subprocess.run(submit, cwd=tmp_path, env=own, capture_output=True, text=True, check=False).stdout

    with log.open("wb") as output:
        process = subprocess.Popen(
            command("up", "--app", "desk:app", "--reload"), cwd=tmp_path, env=own, stdout=output, stderr=output
        )
    try:
        until(lambda: process.poll() is not None or log.read_text().count("✓ ready") == 4, 60)
        assert asked() == "first x\n", log.read_text()
        (tmp_path / "desk.py").write_text(APP + "syntax error")
        until(lambda: "the old code keeps running" in log.read_text())
        assert asked() == "first x\n"
        (tmp_path / "desk.py").write_text(APP.replace("first", "second"))
        until(lambda: log.read_text().count("✓ ready") == 6, 60)
        assert asked() == "second x\n"
        assert "restarting in" not in log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_the_version_is_that_of_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "weft 0.1.0\n"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("weft ta", ["task"]), ("weft task ca", ["cancel"]), ("weft up --rel", ["--reload"])],
)
def test_a_shell_completes_commands_and_options(typed: str, offered: list[str]) -> None:
    asked = {COMPLETION: "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(command(), env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert done.stdout.split() == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_calls_weft(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert f"{COMPLETION}=complete_{shell}" in capsys.readouterr().out
