"""`weft up` with an app, and the command against it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from runtime_core.bus.embedded import find_endpoint
from runtime_core.cli.main import main
from tests.integration.cli.desk import APP, Desk, Ended, Weft, command, environment, until


@pytest.fixture(scope="package")
def desk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    assert isinstance(request.node, pytest.Package), "it would run until the last of all tests"
    folder = tmp_path_factory.mktemp("desk")
    (folder / "desk.py").write_text(APP)
    log = folder / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command("up", "--app", "desk:app"), cwd=folder, env=environment(folder), stdout=output, stderr=output
        )
    try:
        until(lambda: process.poll() is not None or log.read_text().count("✓ ready") == 4, 60)
        assert process.poll() is None, log.read_text()
        url = find_endpoint(folder / "data")
        assert url is not None
        yield Desk(folder, url, log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def weft(desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs a command in this process, in the folder of the desk."""
    monkeypatch.chdir(desk.folder)
    for name in list(os.environ):
        if name.startswith("WEFT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WEFT_DATA_DIR", str(desk.folder / "data"))

    def run(*arguments: str) -> Ended:
        capsys.readouterr()
        status = main(arguments)
        out, err = capsys.readouterr()
        return Ended(status, out, err)

    return run
