"""What a wheel installs, and that an installed `weft up` works beside a user's own package `services`."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
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
from tests.e2e.test_readme import the
from tests.servers.matrix import only_in_matrix

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
    console = ROOT / "libs/runtime_core/src/runtime_core/gateway/console"
    files = [path for folder in ("templates", "static") for path in (console / folder).iterdir()]
    assert {f"runtime_core/gateway/console/{path.parent.name}/{path.name}" for path in files} <= set(names)


def test_the_wheel_names_its_license(wheel: Path) -> None:
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


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The wheel and the source distribution, built as `make dist` does."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=LIMIT_SECONDS)
    return sorted(folder.iterdir())


def test_the_distributions_can_be_published(distributions: list[Path]) -> None:
    assert [each.suffix for each in distributions] == [".whl", ".gz"]
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *map(str, distributions)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_source_distribution_holds_only_what_builds_the_wheel(distributions: list[Path]) -> None:
    with tarfile.open(distributions[1]) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    known = {"libs", "CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert tops <= known


@only_in_matrix("all dependencies are installed into a new environment")
@pytest.mark.slow
def test_the_first_app_of_the_readme_runs_in_an_empty_environment(distributions: list[Path], tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", symlinks=True, with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    uv = [sys.executable, "-m", "uv", "--quiet", "pip"]
    locked = ["--constraint", str(ROOT / "requirements" / "run.txt")]
    done = subprocess.run(
        [*uv, "install", "--python", str(python), *locked, str(distributions[0])],
        capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"NOT TESTED: the dependencies cannot be installed here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    desk = tmp_path / "desk"
    desk.mkdir()
    (desk / "app.py").write_text(the("python", "app = App("), encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("WEFT_", "PYTHON"))}
    environ |= {"PATH": f"{python.parent}:{os.environ['PATH']}", "WEFT_METRICS_PORT": "0"}
    with running(shlex.split(the("sh", "weft up")), desk, environ):
        submit = ["bash", "-ec", the("sh", "weft submit")]
        asked = subprocess.run(
            submit, cwd=desk, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
        )
    assert (asked.stdout, asked.returncode) == (the("text", "Redis Streams: found"), 0), asked.stderr


@contextmanager
def running(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[None]:
    """Run the command until the block ends. The block begins when the broker and the four services are ready."""
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [shutil.which(command[0], path=environ["PATH"]) or command[0], *command[1:]],
            cwd=folder,
            env={**environ, "PYTHONUNBUFFERED": "1"},
            stdout=output,
            stderr=output,
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
