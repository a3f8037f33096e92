"""Schemathesis tries the gateway by its OpenAPI document: wrong and right requests, none of which may fail it.

It runs in its own environment, which `make test` creates.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.integration.gateway.gateways import gateway_fleet, http, url_of
from tests.servers.matrix import is_full
from tests.servers.process import Server

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
PROGRAM = ROOT / ".venv-schemathesis" / "bin" / "st"
SEED = 19
EXAMPLES = 10 if is_full() else 3
"""For each operation and phase."""
CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"


async def test_no_request_that_the_document_describes_fails_the_gateway(
    valkey: Server, namespace: str, tmp_path: Path
) -> None:
    if not PROGRAM.exists():
        why = "the environment of Schemathesis is missing: make .venv-schemathesis/.setup"
        if os.environ.get("CI"):
            pytest.fail(why)
        print(f"NOT TESTED: {why}")
        pytest.skip(why)
    async with gateway_fleet(valkey, namespace, tmp_path, recorder=True) as fleet, http(fleet) as client:
        body = {"agent": "echo", "input": 1, "task_id": "order-7"}  # the id in the examples
        assert (await client.post("/v1/tasks", json=body)).status_code == 202
        running = await asyncio.create_subprocess_exec(
            PROGRAM, "run", f"{url_of(fleet)}/openapi.json", "--seed", str(SEED), "--max-examples", str(EXAMPLES),
            "--checks", CHECKS, "--phases", "examples,coverage,fuzzing", "--no-color", "--request-timeout", "20",
            cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await running.communicate()
        assert running.returncode == 0, said.decode()[-8000:]
        assert (await client.get("/v1/tasks/order-7")).status_code == 200
