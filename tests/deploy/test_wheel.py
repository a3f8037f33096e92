"""What a wheel installs, and that an installed `weft up` works beside a user's own package `services`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

import pytest

from runtime_core.bus.library import FUNCTIONS
from tests.architecture.tree import ROOT

LIMIT_SECONDS = 60
APP = """
from services import billing
from weft import AgentContext, App

app = App("shop")


@app.agent("biller")
async def biller(ctx: AgentContext, item: str) -> str:
    return billing.bill(item)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_SECONDS)
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and the dependencies, without this repository. Returns its folder `bin`."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, timeout=LIMIT_SECONDS)
    libraries = sysconfig.get_path("purelib")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # A path added by a .pth file brings no .pth files of its own: the editable install stays out.
    (site / "libraries.pth").write_text(libraries + "\n")
    return python.parent


def test_it_installs_two_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"runtime_core", "weft"}
    assert {"runtime_core/py.typed", "weft/py.typed"} <= set(names)
    assert {f"runtime_core/bus/functions/{name}.lua" for name in FUNCTIONS} <= set(names)


def test_it_says_its_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folder = wheel.name.rpartition("-py3")[0] + ".dist-info"
        metadata = Parser().parsestr(archive.read(f"{folder}/METADATA").decode())
        license = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert license == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_weft_up_works_with_a_users_package_named_services(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    (tmp_path / "services" / "billing.py").write_text("def bill(item: str) -> str:\n    return f'{item}: 7'\n")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "PYTHONPATH"))}
    environ |= {"WEFT_METRICS_PORT": "0", "WEFT_DATA_DIR": str(tmp_path / "data")}
    with running([str(installed / "weft"), "up", "--app", "app:app"], tmp_path, environ):
        submit = [str(installed / "weft"), "submit", "biller", '"soap"']
        done = subprocess.run(
            submit, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    assert (done.stdout, done.returncode) == ("soap: 7\n", 0), done.stderr


@contextmanager
def running(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[None]:
    """Run the command until the block ends. The block begins when the broker and the four services are ready."""
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder, env={**environ, "PYTHONUNBUFFERED": "1"}, stdout=output, stderr=output
        )
    try:
        give_up_at = time.monotonic() + LIMIT_SECONDS
        while log.read_text(errors="replace").count("✓ ready") < 4:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < give_up_at, log.read_text()
            time.sleep(0.05)
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=LIMIT_SECONDS) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
