"""The kustomizations, built once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import missing
from tests.deploy.kubectl import kubectl
from tests.servers.unavailable import Unavailable


@pytest.fixture(scope="session")
def kubectl_command(server_cache: Path) -> tuple[str, ...]:
    try:
        return kubectl(server_cache)
    except Unavailable as reason:
        missing("kubectl 1.32", reason)
