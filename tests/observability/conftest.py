"""Prometheus and promtool for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import missing
from tests.deploy.kubectl import kubectl
from tests.observability.prometheus import program
from tests.servers.unavailable import Unavailable


@pytest.fixture(scope="session")
def prometheus_command(server_cache: Path) -> tuple[str, ...]:
    return _found("prometheus", server_cache)


@pytest.fixture(scope="session")
def promtool_command(server_cache: Path) -> tuple[str, ...]:
    return _found("promtool", server_cache)


@pytest.fixture(scope="session")
def kubectl_command(server_cache: Path) -> tuple[str, ...]:
    try:
        return kubectl(server_cache)
    except Unavailable as reason:
        missing("kubectl 1.32", reason)


def _found(name: str, servers: Path) -> tuple[str, ...]:
    try:
        return program(name, servers)
    except Unavailable as reason:
        missing(name, reason)
