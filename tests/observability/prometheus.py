"""Prometheus 3 and promtool: this machine's own, or Debian's packages, unpacked without installing them."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from runtime_core.base.lifeline import tied
from tests.servers.debian import Program, command_of
from tests.servers.process import HOST, free_port
from tests.servers.unavailable import Unavailable

MAJOR = "3"
"""As deploy/ runs it. Prometheus 2 reads ranges, patterns and the bounds of buckets otherwise."""
SUITES = ("forky", "sid")
"""The first release of Debian with it, and, since a package may leave a release that is not out yet, the next one."""
PACKAGES = ("prometheus", "promtool", "libc6")
READY_SECONDS = 60.0
"""How long it may take until it answers, on a machine that is busy with other tests."""
ANSWER_SECONDS = 100.0
"""Patience for one answer."""
ATTEMPTS = 8
"""Ports that are tried, since another process may take one between our look and its bind."""

Sample = dict[str, Any]
"""One series of an answer: `metric` (its labels) and `value` (time and text of the number)."""


def program(name: str, servers: Path) -> tuple[str, ...]:
    """Return the command line of `prometheus` or `promtool`. Raises Unavailable if it cannot be had."""
    own = shutil.which(name)
    if own is not None and version((own,)).partition(".")[0] == MAJOR:
        return (own,)
    for suite in SUITES[:-1]:
        with suppress(Unavailable):
            return command_of(_debian(name, suite), servers)
    return command_of(_debian(name, SUITES[-1]), servers)


def _debian(name: str, suite: str) -> Program:
    return Program(f"prometheus-{MAJOR}-{suite}", suite, f"usr/bin/{name}", name, PACKAGES)


def version(command: tuple[str, ...]) -> str:
    """As in `3.5.3`; empty when the program does not say."""
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=100, check=False)
    # Prometheus 2 says it on standard error.
    found = re.search(r"version (\d[\d.]*)", done.stdout + done.stderr)
    return found[1] if found else ""


def promtool(command: tuple[str, ...], *arguments: str, stdin: str | None = None) -> str:
    """Return promtool's output. Raises AssertionError with it if promtool reports a problem."""
    done = subprocess.run([*command, *arguments], input=stdin, capture_output=True, text=True, timeout=100, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


class QueryError(AssertionError):
    """Prometheus refused a query. The message has the query and its reason."""


@dataclass
class Prometheus:
    """One Prometheus on 127.0.0.1 that ends with this process. Start it from the main thread."""

    command: tuple[str, ...]
    folder: Path
    targets: Sequence[str]
    """What it scrapes each second as the job `weft`: `host:port`."""
    rules: Sequence[Path] = ()

    def __post_init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        job = {"job_name": "weft", "static_configs": [{"targets": list(self.targets)}]}
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(path) for path in self.rules],
            "scrape_configs": [job],
        }
        # JSON is YAML.
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        for _ in range(ATTEMPTS):
            self.port = free_port()
            if self._starts():
                return self
        raise AssertionError(f"Prometheus did not start: {self.log()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def query(self, expr: str) -> list[Sample]:
        """Return the current result of a query. Raises QueryError if it is invalid."""
        answer = self._get("/api/v1/query", query=expr)
        if answer["status"] != "success":
            raise QueryError(f"{expr}: {answer['error']}")
        found = answer["data"]["result"]
        if answer["data"]["resultType"] in ("scalar", "string"):
            return [{"metric": {}, "value": found}]
        samples: list[Sample] = found
        return samples

    def rules_now(self) -> list[dict[str, Any]]:
        """All alerts with their state, how often they were evaluated, and the error of the last time."""
        groups = self._get("/api/v1/rules", type="alert")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def targets_now(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._get("/api/v1/targets", state="active")["data"]["activeTargets"]
        return found

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def _starts(self) -> bool:
        """Whether it answers; if not, another process took its port."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                tied(
                    [
                        *self.command,
                        f"--config.file={self.folder / 'prometheus.yml'}",
                        f"--storage.tsdb.path={self.folder / 'data'}",
                        f"--web.listen-address={HOST}:{self.port}",
                        "--log.level=warn",
                    ],
                    signal.SIGKILL,
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self.port}/-/ready", timeout=5):
                    # Another program may have answered on the port that ours failed to bind.
                    return self._process.poll() is None
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"Prometheus was not ready within {READY_SECONDS:g} s: {self.log()}")

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        url = f"http://{HOST}:{self.port}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            # What is wrong with a query stands in the body.
            found = json.load(error)
        return found
