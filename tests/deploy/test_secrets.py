"""The Job that creates the Secret: its requests to the cluster, and the rights of the broker's users."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import ssl
from email.message import Message
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request

import pytest
import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from runtime_core.bus.acl.rules import DEFAULT_OFF, Target, user_line
from runtime_core.bus.acl.users import USERS
from runtime_core.bus.namespace import connect, open_namespace
from runtime_core.host.service import SERVICES
from tests.conftest import OwnServer
from tests.deploy.kubectl import K8S
from tests.servers.matrix import MATRIX, repeat_on
from tests.servers.process import Server
from tests.servers.redis import REDIS_7_0

WRITES = "redis.call('SET', KEYS[1], '1') redis.call('XADD', KEYS[2], '*', 'a', 'b')"
"""Two writes, which stand in the append-only file as a transaction, as those of a function do."""
Client = Any
"""A connection of redis-py, whose `execute_command` has no types."""
URL = re.compile(r"redis://([\w-]+):([0-9a-f]{48})@redis\.weft\.svc:6379")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = K8S / "base" / "secrets" / "make_secrets.py"
    spec = importlib.util.spec_from_file_location("make_secrets", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_passwords_are_new_each_time_and_fit_into_a_url(script: ModuleType) -> None:
    first, second = script.contents(), script.contents()
    urls = [key for key in first if key.startswith("redis-url-")]
    assert {f"redis-url-{service}" for service in SERVICES} < set(urls)
    for key in urls:
        found = URL.fullmatch(first[key])
        assert found is not None
        user, password = found.groups()
        assert key == f"redis-url-{user}"
        assert f"user {user} reset on #{hashlib.sha256(password.encode()).hexdigest()} " in first["users.acl"]
        assert password not in second["users.acl"] + second[key]
    assert not any(first[key] == second[key] for key in first if key != "scaler-username")


@pytest.mark.parametrize("namespace", ["weft", "shop"])
def test_the_users_of_the_cluster_are_those_that_weft_acl_prints(
    script: ModuleType, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "PREFIX", namespace)
    target = Target(namespace, partitions=10)
    printed = [user_line(user, target, [hashlib.sha256(user.name.encode()).hexdigest()]) for user in USERS.values()]
    assert script.users_file({name: name for name in USERS}).splitlines() == [DEFAULT_OFF, *printed]


@pytest.fixture
def users(script: ModuleType, own_valkey: Server) -> dict[str, Client]:
    """A connection for each user of the file, with the user's name as the password."""
    first: Client
    with redis.Redis.from_url(own_valkey.url) as first:
        for line in script.users_file({name: name for name in script.RULES}).splitlines():
            _, name, rest = line.split(maxsplit=2)
            rules = re.findall(r"\([^)]*\)|\S+", rest)
            if name != "default":
                assert first.execute_command("ACL", "SETUSER", name, *rules) == b"OK"
        names = [name.decode() for name in first.execute_command("ACL", "USERS")]
    return {
        name: redis.Redis.from_url(own_valkey.url, username=name, password=name) for name in names if name != "default"
    }


def test_each_user_may_do_its_work_and_no_more(users: dict[str, Client]) -> None:
    publisher, scaler, probe = users["publisher"], users["scaler"], users["probe"]
    assert publisher.xadd("weft:tasks", {"type": "weft.task.submit", "data": "{}"})
    assert scaler.xlen("weft:tasks") == 1
    assert probe.execute_command("PING")
    refused = [
        (publisher, ("XRANGE", "weft:tasks", "-", "+")),
        (publisher, ("XADD", "weft:{0}:agent", "*", "a", "b")),
        (publisher, ("DEL", "weft:tasks")),
        (publisher, ("FCALL", "any", "0")),
        (scaler, ("XADD", "weft:tasks", "*", "a", "b")),
        (scaler, ("GET", "weft:settings")),
        (probe, ("XLEN", "weft:tasks")),
        (users["state-manager"], ("HSET", "other", "f", "1")),
        (users["state-manager"], ("CONFIG", "GET", "dir")),
        (users["operator"], ("FLUSHALL",)),
        (publisher, ("CLIENT", "PAUSE", "4000", "ALL")),
        (scaler, ("CLIENT", "KILL", "USER", "state-manager")),
    ]
    for user, command in refused:
        with pytest.raises(redis.exceptions.NoPermissionError):
            user.execute_command(*command)
    assert users["admin"].execute_command("DBSIZE") == 1
    for user in users.values():
        user.close()


@pytest.mark.parametrize("kind", repeat_on(*(kind for kind in MATRIX if kind != REDIS_7_0.name)))  # no WAITAOF
def test_a_restart_keeps_every_transaction_and_the_default_user_off(
    script: ModuleType, kind: str, own_server: OwnServer, tmp_path: Path
) -> None:
    """Servers read their append-only file as the user `default`, and skip what that user may not do."""
    path = tmp_path / "users.acl"
    path.write_text(script.users_file({name: name for name in script.RULES}))
    server = own_server(kind, append="always", options=("--aclfile", str(path)))
    # After a restart it asks for a login before it says that it still reads its file.
    patient = Retry(ConstantBackoff(0.05), 1200)
    connection: Client
    with redis.Redis.from_url(
        server.url,
        username="admin",
        password="admin",
        retry=patient,
        retry_on_error=[redis.exceptions.BusyLoadingError],
    ) as connection:
        connection.eval(WRITES, 2, "weft:first", "weft:second")
        server.restart()
        assert (connection.get("weft:first"), connection.xlen("weft:second")) == (b"1", 1)
    with redis.Redis.from_url(server.url) as connection:
        for command in (("GET", "weft:first"), ("AUTH", "default", ""), ("AUTH", "any")):
            with pytest.raises(redis.exceptions.RedisError, match=r"(?i)auth|wrongpass|invalid"):
                connection.execute_command(*command)


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_creates_its_namespace_as_its_own_user(
    users: dict[str, Client], own_valkey: Server, service: str
) -> None:
    host = own_valkey.url.partition("://")[2]
    transport = await connect(f"redis://{service}:{service}@{host}")
    try:
        keys = await open_namespace(transport, "weft", 1)
        assert len(keys) == 1
    finally:
        await transport.close()
    for user in users.values():
        user.close()


OLD_USERS = """user default off resetpass sanitize-payload ~* &* +@all
user services on #{services} ~weft:* resetchannels -@all +@read +@write
user publisher on #{publisher} %W~weft:tasks resetchannels -@all +@connection +xadd
user mine on #{mine} ~mine:* +@all
"""


def test_an_older_secret_gets_users_and_rights_and_keeps_its_passwords(script: ModuleType) -> None:
    digests = {user: hashlib.sha256(user.encode()).hexdigest() for user in ("services", "publisher", "mine")}
    old = {
        "users.acl": OLD_USERS.format(**digests),
        "redis-url": "redis://services:services@redis:6379",
        "redis-url-publisher": "redis://publisher:publisher@redis:6379",
        "ray-token": "token",
    }
    packed = {key: base64.b64encode(value.encode()).decode() for key, value in old.items()}
    secret = script.added({"metadata": {"name": "weft"}, "data": packed})
    new = {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}
    lines = {line.split()[1]: line for line in new["users.acl"].splitlines()}
    assert {key: new[key] for key in old if key != "users.acl"} == {key: old[key] for key in old if key != "users.acl"}
    # Old pods still sign in as the user that all shared, and somebody's own user stays as it is.
    assert [lines[user] for user in ("services", "mine")] == OLD_USERS.format(**digests).splitlines()[1::2]
    assert f"#{digests['publisher']} " in lines["publisher"]
    assert "@connection" not in lines["publisher"]
    password = URL.fullmatch(new["redis-url-agent-handler"])
    assert password is not None
    assert hashlib.sha256(password[2].encode()).hexdigest() in lines["agent-handler"]
    assert set(lines) == {*script.RULES, "services", "mine"}
    assert script.added(secret)["data"] == secret["data"], "a second time changes nothing"


def test_an_existing_secret_stays_unchanged(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The cluster's API answers 409 for what exists. Anything else is retried, and fails in the end."""
    answers = [URLError("no route"), HTTPError("https://api", 409, "exists", Message(), None)]

    def urlopen(request: Request, context: ssl.SSLContext, **_: object) -> object:
        assert request.get_method() == "POST"
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert not context.verify_flags & ssl.VERIFY_X509_STRICT, "CAs of many clusters lack what Python 3.13 asks for"
        assert request.full_url == "https://10.0.0.1:443/api/v1/namespaces/weft/secrets"
        assert json.loads(cast(bytes, request.data))["metadata"]["name"] == "weft"
        raise answers.pop(0)

    strict = ssl.create_default_context()
    strict.verify_flags |= ssl.VERIFY_X509_STRICT
    for name, content in (("namespace", "weft"), ("token", "t"), ("ca.crt", "")):
        (tmp_path / name).write_text(content)
    monkeypatch.setattr(script, "ACCOUNT", tmp_path)
    monkeypatch.setattr(script.ssl, "create_default_context", lambda **_: strict)
    monkeypatch.setattr(script.time, "sleep", lambda _: None)
    monkeypatch.setattr(script.urllib.request, "urlopen", urlopen)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert script.main() == 0
    assert answers == []
    answers += [HTTPError("https://api", 403, "forbidden", Message(), None)] * script.TRIES
    assert script.main() == 1
