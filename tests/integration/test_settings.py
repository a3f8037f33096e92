"""A wrong setting ends a service at its start, in one line that names the variable and the fix."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from redis import Redis

from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.errors import ConfigurationError
from runtime_core.settings import Settings
from tests.conftest import OwnServer
from tests.fleet import ROOT, SERVICES, PlainRedis
from tests.servers.matrix import first_of
from tests.servers.process import HOST

pytestmark = pytest.mark.timeout(300)

SECRET = "hunter2xyz"
"""The password of most URLs here: no line may show it."""
HANDLERS = ("agent-handler", "tool-handler")
ONE = ("state-manager",)
RECORDER = ("trajectory-recorder",)
APPS = {
    "raises": "raise RuntimeError('one\\ntwo')\n",
    "broken": "def f(:\n",
    "leaves": "import sys\nsys.exit(3)\n",
    "without": "x = 1\n",
    "needs_more": "import no_such_module_at_all\n",
}
"""Modules of an app that cannot be loaded, each in its own way."""


@dataclass(frozen=True)
class Case:
    variable: str
    """Which one is wrong; the line names it."""
    value: str
    remedy: str
    """Words of the remedy."""
    services: Sequence[str] = SERVICES
    """Who refuses it."""
    more: tuple[tuple[str, str], ...] = ()
    """Variables besides."""


BAD_VALUES = [
    Case("WEFT_NAMESPACE", "a b", "letters, digits"),
    Case("WEFT_PARTITIONS", "0", "whole number from 1"),
    Case("WEFT_TRAJECTORY_URL", f"mysql://u:{SECRET}@db/weft", "must be sqlite:///path or postgresql://"),
    Case("WEFT_METRICS_PORT", "70000", "whole number from 0 to 65535"),
    Case("WEFT_LEASE_SECONDS", "nan", "seconds from 0.1"),
    Case("WEFT_LOOP_BLOCK_SECONDS", "0", "seconds from 0.1"),
    Case("WEFT_RETENTION_SECONDS", "-1", "seconds from 0"),
    Case("WEFT_DEDUPE_MAX", "0", "whole number from 1"),
    Case("WEFT_MAILBOX_MAX", "many", "whole number from 1"),
    Case("WEFT_STREAM_MAX", "1.5", "whole number from 1"),
    Case("WEFT_OUTPUT_MAX_BYTES", "1024", "whole number from 1048576"),
    Case("WEFT_OUTPUT_RUN_BYTES", "10", "whole number from 1024"),
    Case("WEFT_OUTPUT_PROCESS_BYTES", "all", "whole number from 1024"),
    Case("WEFT_READY_MAX", "0", "whole number from 1"),
    Case("WEFT_RECORD_MAX", "-5", "whole number from 1"),
    Case("WEFT_ANSWERS_MAX_BYTES", "1000000", "whole number from 4194304"),
    Case("WEFT_ANSWERS_RETENTION_SECONDS", "5", "seconds from 60"),
    Case("WEFT_TENANT_SCHEDULES_MAX", "0", "whole number from 1"),
    Case("WEFT_TENANT_SCHEDULES_MAX_BYTES", "1", "whole number from 1024"),
    Case("WEFT_DEAD_MAX_BYTES", "1000000", "whole number from 4194304"),
    Case("WEFT_DEAD_RETENTION_SECONDS", "5", "seconds from 60"),
    Case("WEFT_POOLS", "a,,b", "different names"),
    Case("WEFT_DURABILITY", "best", "fast or fsync or quorum"),
    Case("WEFT_INSTANCE", "a b", "letters, digits"),
    Case("WEFT_LOG_LEVEL", "loud", "debug or info"),
    Case("WEFT_LOG_FORMAT", "xml", "text or json"),
    Case("WEFT_ENGINE_PROCESSES", "-1", "whole number from 0"),
    Case("WEFT_ENGINE_IN_FLIGHT", "x", "whole number from 0"),
    Case("WEFT_RAY_ADDRESS", "ray://head:10001", "auto, or host:port"),
    Case("WEFT_RAY_LOCAL_CPUS", "abc", "whole number from 1"),
    Case("WEFT_RAY_LOCAL_STORE_BYTES", "-1", "whole number from 83886080"),
    Case("WEFT_RAY_DASHBOARD", "yes", "whole number from 0 to 1"),
    Case("WEFT_RAY_JOBS_URL", "head", "http://ray-head:8265"),
    Case("WEFT_SPARK_REMOTE", "spark://head", "sc://host:port"),
    Case("WEFT_SPARK_LOCAL_MASTER", "yarn", "local[4]"),
    Case("WEFT_SPARK_LOCAL_MEMORY", "much", "512m or 2g"),
    Case("WEFT_MAILBOX_MAX", "'9'", "remove them"),
    Case("WEFT_BLOB_URL", "ftp://host/folder", "file:///folder"),
    Case("WEFT_BLOB_RETENTION_SECONDS", "1", "seconds from 60"),
    Case("WEFT_RESULT_INLINE_BYTES", "0", "whole number from 1"),
    Case("WEFT_RESULT_MAX_BYTES", "0", "whole number from 1"),
    Case("WEFT_SHUTDOWN_SECONDS", "soon", "seconds from 0"),
    Case("WEFT_REQUEST_TIMEOUT_SECONDS", "0", "seconds from 0.001"),
    Case("WEFT_REDACT", "([", "not a regular expression"),
    Case("WEFT_REDACT", "(?<=user )name", "no lookaround"),
    Case("WEFT_HTTP_PORT", "65536", "from 0 to 65535"),
    Case("WEFT_HTTP_AUTH", "password", "open or keys"),
    Case("WEFT_HTTP_ORIGINS", "desk.example", "origins separated by commas"),
    Case("WEFT_HTTP_OIDC_ISSUER", "http://id.example", "https://host/path"),
    Case("WEFT_HTTP_TRACE_URL", "https://traces.example/", "{trace_id}"),
    Case("WEFT_HTTP_LOG_URL", "javascript:{task_id}", "{task_id}"),
    Case("WEFT_HTTP_RATE", "-1", "requests per second from 0"),
    Case("WEFT_HTTP_STREAMS_MAX", "0", "whole number from 1"),
    Case("WEFT_HTTP_CALLER_STREAMS_PERCENT", "101", "whole number from 1 to 100"),
    Case("WEFT_LEASE", "3", "there is no such setting"),
    Case("WEFT_REDIS_URL", f"http://u:{SECRET}@host", "must be redis://host:port"),
    Case("WEFT_REDIS_URL", "memory://", "name a Redis or Valkey server"),
    Case("WEFT_OPERATOR_REDIS_URL", f"http://u:{SECRET}@host", "must be redis://<user>"),
    # Of the URL itself.
    Case("WEFT_REDIS_URL", f"redis+socket://u:{SECRET}@host", "use redis, rediss", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@host:port", "number up to 65535", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@host:99999", "number up to 65535", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@host:0", "number up to 65535", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@a..b", "not a valid host name", ONE),
    Case("WEFT_REDIS_URL", f"redis+sentinel://u:{SECRET}@{'a' * 64}:1/main", "not a valid host name", ONE),
    Case("WEFT_REDIS_URL", "rediss://host?ssl_cert_reqs=no", "Invalid SSL Certificate Requirements Flag", ONE),
    Case("WEFT_REDIS_URL", "redis://host?ssl_ca_certs=/etc/ca.pem", "write rediss://", ONE),
    Case("WEFT_REDIS_URL", f"redis://host?sentinel_password={SECRET}", "are for Sentinels", ONE),
    Case("WEFT_REDIS_URL", "redis://host?credential_provider=nowhere", "write it as package.module:name", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}/1@host", "write / as %2F", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:a/{SECRET}@host", "write / as %2F", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:a?{SECRET}@host", "write / as %2F", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:a#{SECRET}@host", "write / as %2F", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@[::1", "IPv6", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@host/weft", "not a number", ONE),
    Case("WEFT_REDIS_URL", "redis://host/²", "not a number", ONE),
    Case("WEFT_REDIS_URL", "rediss://host?verfiy=none", "not an option; there are credential_provider", ONE),
    Case("WEFT_REDIS_URL", f"redis+sentinel://u:{SECRET}@a:x/main/0", "a Sentinel's port", ONE),
    Case("WEFT_REDIS_URL", f"redis+sentinel://u:{SECRET}@a:26379", "name the Sentinel master", ONE),
    Case("WEFT_REDIS_URL", "rediss://host?ssl_ca_certs=/no/such/file", "name a file with the certificates", ONE),
    Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@no-such-host.invalid", "is the host name right", ONE),
    Case("WEFT_REDIS_URL", f"redis+sentinel://u:{SECRET}@127.0.0.1:1/main", "is the server running there", ONE),
]
"""What is wrong whatever the broker is."""

ANY_VALUE = {
    "http_oidc_audience",
    "http_oidc_client_id",
    "http_oidc_client_secret",
    "http_oidc_roles_claim",
    "http_oidc_tenant_claim",
    "data_dir",
    "http_host",
    "metrics_host",
    "app",
    "redis_url",
}
"""Settings of which the value alone tells nothing; what they name may be missing, and is tested below."""


def test_each_setting_has_a_wrong_value_here() -> None:
    tried = {case.variable.removeprefix("WEFT_").lower() for case in BAD_VALUES}
    assert {field.name for field in dataclasses.fields(Settings)} - ANY_VALUE <= tried


@pytest.fixture
def place(own_server: OwnServer, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Addresses that a case may use, among them a broker with users, and a listener that never answers."""
    server = own_server(append=None)
    (tmp_path / "apps").mkdir()
    for name, text in APPS.items():
        (tmp_path / "apps" / f"refused_{name}.py").write_text(text)
    (tmp_path / "file").write_text("text")
    admin: PlainRedis
    with ExitStack() as stack, Redis.from_url(server.url) as admin:
        silent = stack.enter_context(socket.create_server((HOST, 0)))
        closed = stack.enter_context(socket.socket())
        closed.bind((HOST, 0))
        for user in (
            ("services", "on", f">{SECRET}", "~weft:*", "resetchannels", "+@all"),
            ("publisher", "on", f">{SECRET}", "%W~weft:tasks", "resetchannels", "-@all", "+@connection", "+xadd"),
            ("default", "off"),
        ):
            admin.execute_command("ACL", "SETUSER", *user)
        admin.execute_command("HSET", "weft:settings", "partitions", 1, "format", 1)
        yield {
            "broker": f"{HOST}:{server.port}",
            "good": f"redis://services:{SECRET}@{HOST}:{server.port}",
            "silent": f"{HOST}:{silent.getsockname()[1]}",
            "silent port": str(silent.getsockname()[1]),
            "closed": f"{HOST}:{closed.getsockname()[1]}",
            "folder": str(tmp_path),
        }


def cases_of(place: Mapping[str, str]) -> list[Case]:
    broker, good, folder = place["broker"], (("WEFT_REDIS_URL", place["good"]),), place["folder"]
    apps = {name: f"refused_{name}:app" for name in APPS}
    return [
        Case("WEFT_REDIS_URL", "", "name a broker"),
        Case("WEFT_REDIS_URL", f"redis://{broker}", "NOAUTH"),
        Case("WEFT_REDIS_URL", f"redis://services@{broker}", "correct user and password", ONE),
        Case("WEFT_REDIS_URL", f"redis://services:{SECRET}1@{broker}", "correct user and password"),
        Case("WEFT_REDIS_URL", f"redis://nobody:{SECRET}@{broker}", "correct user and password", ONE),
        Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@{place['closed']}", "is the server running there"),
        Case("WEFT_REDIS_URL", f"redis://u:{SECRET}@{place['silent']}", "is the server running there", ONE),
        Case("WEFT_REDIS_URL", f"rediss://services:{SECRET}@{broker}", "Without TLS use redis://", ONE),
        Case("WEFT_REDIS_URL", f"{place['good']}/99", "correct the database", ONE),
        Case("WEFT_REDIS_URL", f"redis://publisher:{SECRET}@{broker}", "use another user"),
        Case("WEFT_NAMESPACE", "other", "may not work in the namespace 'other'", SERVICES, good),
        Case("WEFT_PARTITIONS", "3", "set WEFT_PARTITIONS=1", SERVICES, good),
        Case("WEFT_DURABILITY", "fsync", "does not support it", ONE, good),
        Case("WEFT_METRICS_HOST", "no-such-host.invalid", "0.0.0.0", ONE, (("WEFT_METRICS_PORT", "0"), *good)),
        Case("WEFT_METRICS_HOST", "a..b", "0.0.0.0", ONE, good),
        Case("WEFT_METRICS_PORT", place["silent port"], "choose another port", ONE, good),
        Case("WEFT_APP", "", "name your app", HANDLERS, good),
        Case("WEFT_APP", "no_such_module:app", "set PYTHONPATH", HANDLERS, good),
        Case("WEFT_APP", apps["raises"], r"refused_raises.py:1: RuntimeError: one", HANDLERS, good),
        Case("WEFT_APP", apps["broken"], r"refused_broken.py:1", HANDLERS, good),
        Case("WEFT_APP", apps["leaves"], r"refused_leaves.py:2: SystemExit", HANDLERS, good),
        Case("WEFT_APP", apps["needs_more"], "no_such_module_at_all", HANDLERS, good),
        Case("WEFT_APP", apps["without"], "add app = App", HANDLERS, good),
        Case("WEFT_APP", "refused_without:x", "is of type int, not App", HANDLERS, good),
        Case("WEFT_APP", "tests/apps/fleet_app.py", "did you mean tests.apps.fleet_app:app", HANDLERS, good),
        Case(
            "WEFT_TRAJECTORY_URL",
            f"postgresql://u:{SECRET}@{place['closed']}/weft",
            "that the server runs",
            RECORDER,
            good,
        ),
        Case("WEFT_TRAJECTORY_URL", "sqlite:///:memory:", "names no file", RECORDER, good),
        Case("WEFT_TRAJECTORY_URL", f"sqlite:///{folder}/file", "is not a trajectory file", RECORDER, good),
        Case("WEFT_TRAJECTORY_URL", f"sqlite:///{folder}/file/t.db", "the permissions of its folder", RECORDER, good),
        Case("WEFT_DATA_DIR", f"{folder}/file", "name a folder", RECORDER, good),
    ]


async def test_a_replica_is_refused_unless_it_becomes_the_master(own_server: OwnServer, namespace: str) -> None:
    master = own_server()
    replica = own_server(options=("--replicaof", f"{HOST} {master.port}"))
    transport = await connect(replica.url)
    try:
        with pytest.raises(ConfigurationError, match=r"^WEFT_REDIS_URL: the server is a replica.* name its master"):
            await open_namespace(transport, namespace, 1)
        opening = asyncio.create_task(open_namespace(transport, namespace, 1))
        await transport.call("REPLICAOF", "NO", "ONE")
        assert len(await opening) == 1
    finally:
        await transport.close()


# As JSON, all services write their lines with the same code.
@pytest.mark.parametrize(("log_format", "services"), [("text", SERVICES), ("json", first_of(*SERVICES))])
def test_an_impossible_configuration_is_reported_in_one_line(
    place: dict[str, str], log_format: str, services: Sequence[str]
) -> None:
    cases = [*BAD_VALUES, *cases_of(place)]
    folder = place["folder"]
    started = []
    for service in services:
        own = [case for case in cases if service in case.services]
        environs = [
            {
                "WEFT_REDIS_URL": place["good"], "WEFT_APP": "tests.apps.fleet_app:app",
                "WEFT_DATA_DIR": f"{folder}/data", "WEFT_LOG_FORMAT": log_format, "WEFT_METRICS_PORT": "0",
                **dict(case.more), case.variable: case.value,
            }
            for case in own
        ]  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.refused_services", service],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}/apps"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(environs))
        process.stdin.close()
        process.stdin = None
        started.append((service, own, process))
    try:
        for service, own, process in started:
            ends = json.loads(process.communicate(timeout=240)[0])
            assert len(ends) == len(own)
            for case, (status, output) in zip(own, ends, strict=True):
                lines = output.splitlines()
                told = f"{service} with {case.variable}={case.value!r} said {output!r}"
                assert status == 1, told
                assert len(lines) == 1, told
                if log_format == "json" and case.variable != "WEFT_LOG_FORMAT":
                    said = json.loads(lines[0])
                    assert (said["service"], said["level"]) == (service, "error")
                    lines = [said["message"]]
                else:
                    assert lines[0].startswith(f"weft {service}: "), told
                assert case.variable in lines[0], told
                assert case.remedy in lines[0], told
                assert SECRET not in output, told
    finally:
        for _, _, process in started:
            process.kill()
            process.wait()
