"""`weft up`: its services, its banner, and processes that it starts and ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime_core.errors import ConfigurationError
from runtime_core.host.stack import SERVICES, _up, banner, child_specs, services_for
from runtime_core.settings import Settings


async def until(condition: Callable[[], bool], otherwise: Callable[[], object] = lambda: "") -> None:
    end_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_at, otherwise()
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_child_gets_its_own_settings_and_ports() -> None:
    settings = Settings.from_environment(
        {"WEFT_REDIS_URL": "redis://h:1", "WEFT_METRICS_PORT": "9100", "WEFT_APP": "desk:app"}
    )
    specs = child_specs(settings, 2, ("agent_handler", "state_manager"))
    assert [spec.name for spec in specs] == ["agent-handler-1", "agent-handler-2", "state-manager"]
    assert [spec.env["WEFT_METRICS_PORT"] for spec in specs] == ["9100", "9101", "9102"]
    entry = [sys.executable, "-P", "-m", "runtime_core.host"]
    names = ["agent-handler", "agent-handler", "state-manager"]
    assert [spec.argv for spec in specs] == [[*entry, name] for name in names]
    for spec in specs:
        assert Settings.from_environment(spec.env).redis_url == "redis://h:1"
        assert Settings.from_environment(spec.env).instance == spec.name
    off = child_specs(Settings.from_environment({}), 1, ("tool_handler",))[0]
    assert "WEFT_METRICS_PORT" not in off.env


@pytest.mark.parametrize(
    ("environ", "flags", "gateways"),
    [
        ({}, {}, []),
        ({}, {"ray": True}, ["ray_gateway"]),
        ({"WEFT_RAY_ADDRESS": "head:6379", "WEFT_SPARK_REMOTE": "sc://s"}, {}, ["ray_gateway", "spark_gateway"]),
        ({"WEFT_SPARK_REMOTE": "sc://s"}, {"spark": True}, ["spark_gateway"]),
        ({"WEFT_HTTP_PORT": "0"}, {}, ["gateway"]),
    ],
)
def test_gateways_run_on_request_or_if_their_cluster_is_named(
    environ: dict[str, str], flags: dict[str, bool], gateways: list[str]
) -> None:
    settings = Settings.from_environment({"WEFT_APP": "desk:app", **environ})
    services = services_for(settings, **flags)
    assert services == (*SERVICES, *gateways)
    specs = child_specs(settings, 2, services)
    assert [spec.name for spec in specs[6:]] == [name.replace("_", "-") for name in gateways], "one of each"
    for spec in specs:
        assert Settings.from_environment(spec.env).ray_address == environ.get("WEFT_RAY_ADDRESS")


def test_the_banner_names_the_engines_without_tokens() -> None:
    environ = {"WEFT_RAY_ADDRESS": "head:6379", "WEFT_SPARK_REMOTE": "sc://s:1/;token=secret"}
    assert "  engines  ray (head:6379), spark (sc://s:1/)" in told_by(environ)
    assert "  engines  spark (a local one)" in told_by({}, spark=True)
    assert not [line for line in told_by({}) if "engines" in line]


def test_the_banner_names_the_address_of_the_http_gateway() -> None:
    assert "  http     http://127.0.0.1:8080/openapi.json" in told_by({"WEFT_HTTP_PORT": "8080"})
    assert "  console  http://127.0.0.1:8080/console" in told_by({"WEFT_HTTP_PORT": "8080"})
    assert "  http     at a free port, which the log shows; the console is at /console" in told_by(
        {"WEFT_HTTP_PORT": "0"}
    )
    assert not [line for line in told_by({}) if "http " in line or "console" in line]


def told_by(environ: dict[str, str], **flags: bool) -> list[str]:
    settings = Settings.from_environment({"WEFT_REDIS_URL": "redis://h:1", **environ})
    return banner(settings, services_for(settings, **flags), embedded=False).splitlines()


SERVICE = """
from runtime_core.consumer.progress import Health
from runtime_core.host.service import serve
import asyncio, os, sys

class Role:
    def __init__(self, settings):
        self.settings, self.stopped = settings, asyncio.Event()
    async def start(self):
        print("broker", self.settings.redis_url, flush=True)
    async def run(self):
        await self.stopped.wait()
    async def stop(self):
        self.stopped.set()
    def ready(self):
        return True
    def progress(self):
        return Health(True)

async def build(settings, metrics):
    return Role(settings)

serve(sys.argv[1], build)
"""


UP = """
import asyncio, functools, os
from runtime_core.host import stack as up
from runtime_core.settings import Settings
up.ENTRY = "small_services"
up.connect = functools.partial(up.connect, wait_seconds=0.5)
raise SystemExit(asyncio.run(up.up(Settings.from_environment(os.environ), 1, ("agent_handler", "state_manager"))))
"""


@pytest.fixture
def up_command(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `up` with two small services; a folder `runtime_core` in the working directory must not matter."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "small_services.py").write_text(SERVICE)
    (tmp_path / "desk.py").write_text("from weft import App\n\napp = App('desk')\n")
    (tmp_path / "runtime_core").mkdir()
    (tmp_path / "runtime_core" / "__init__.py").write_text("raise RuntimeError('the wrong runtime_core')")

    def start(**variables: str) -> subprocess.Popen[str]:
        given = {"WEFT_APP": "desk:app", "WEFT_DATA_DIR": "data", "PYTHONPATH": str(tmp_path / "path")}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", UP],
            cwd=tmp_path,
            env={**os.environ, **given, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def read_until_ready(up: subprocess.Popen[str], services: int = 2) -> list[str]:
    assert up.stdout is not None
    lines: list[str] = []
    for line in up.stdout:
        lines.append(line.rstrip("\n"))
        if sum("✓ ready" in said for said in lines) == services:
            return lines
    raise AssertionError(lines)


def pids_of(lines: list[str]) -> list[int]:
    return [int(number) for line in lines for number in re.findall(r"ready .*\(process (\d+)\)", line)]


def test_up_runs_all_and_ends_all(up_command: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    with up_command() as up:
        lines = read_until_ready(up)
        url = (tmp_path / "data" / "endpoint").read_text().strip()
        assert f"  broker   {url}  (embedded)" in lines
        assert f"  data     {tmp_path}/data" in lines
        assert any(f"redis-cli -p {url.rpartition(':')[2]} XADD weft:tasks" in line for line in lines)
        assert sum(line.endswith(f"| broker {url}") for line in lines) == 2

        with up_command() as second:
            said, _ = second.communicate(timeout=60)
            assert second.returncode == 1
            assert re.fullmatch(rf"weft up: .* is in use by process {up.pid}; .*\n", said)

        up.send_signal(signal.SIGINT)
        rest, _ = up.communicate(timeout=60)
        assert up.returncode == 0, rest
        assert rest.count("✓ stopped") == 2
        assert not any(is_alive(pid) for pid in pids_of(lines))
        assert not (tmp_path / "data" / "endpoint").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ties a child to its parent")
async def test_a_killed_up_leaves_nothing_behind(
    up_command: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    with up_command() as up:
        lines = read_until_ready(up)
        pids = [*pids_of(lines), int((tmp_path / "data" / "valkey" / "server.lock").read_text())]
        assert len(pids) == 3
        assert all(is_alive(pid) for pid in pids)
        up.kill()
        await until(lambda: not any(is_alive(pid) for pid in pids))
    with up_command() as up:
        read_until_ready(up)
        up.terminate()
        up.communicate(timeout=60)
        assert up.returncode == 0


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WEFT_APP": ""}, "weft up: WEFT_APP is not set: .*WEFT_APP=package.module:app\n"),
        ({"WEFT_DATA_DIR": "path/small_services.py"}, "weft up: WEFT_DATA_DIR=.*: not a directory; .*\n"),
        ({"WEFT_REDIS_URL": "memory://"}, "weft up: WEFT_REDIS_URL=memory:// .*\n"),
        (
            {"WEFT_REDIS_URL": "redis://127.0.0.1:1", "WEFT_METRICS_PORT": "0", "WEFT_LOG_FORMAT": "json"},
            "weft up: WEFT_REDIS_URL: no answer from redis://127.0.0.1:1/0: .*; is the server running there\\?\n",
        ),
    ],
)
def test_up_refuses_unusable_settings_in_one_line(
    up_command: Callable[..., subprocess.Popen[str]], variables: dict[str, str], said: str
) -> None:
    with up_command(**variables) as up:
        output, _ = up.communicate(timeout=60)
        assert up.returncode == 1
        assert re.fullmatch(said, output)


@pytest.mark.parametrize(
    ("service", "library", "said"),
    [
        ("gateway", "uvicorn", "the gateway needs uvicorn, .* 'weft\\[gateway\\]', or leave out --http-port"),
        (
            "ray_gateway",
            "ray",
            "the ray-gateway needs ray, .* 'weft\\[ray\\]', or leave out --ray and WEFT_RAY_ADDRESS",
        ),
        ("spark_gateway", "pyspark", "the spark-gateway needs pyspark, .* 'weft\\[spark\\]', or leave out --spark"),
    ],
)
async def test_a_gateway_without_its_libraries_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, service: str, library: str, said: str
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    settings = Settings.from_environment({"WEFT_APP": "desk:app", "WEFT_DATA_DIR": str(tmp_path / "data")})
    with pytest.raises(ConfigurationError, match=said):
        await _up(settings, 1, (*SERVICES, service), reload=False)
    assert not (tmp_path / "data").exists()
