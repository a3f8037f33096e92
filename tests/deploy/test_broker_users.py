"""Users of the broker are added, rotated and removed: a real broker and real rules, and a stand-in for the cluster."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import OwnServer
from tests.deploy.kubectl import K8S
from tests.deploy.test_secrets import script
from tests.servers.process import Server

__all__ = ["script"]

# The Secret is a file, pods are this machine, and redis-cli is a client that fails as `redis-cli -e` does.
KUBECTL = """\
#!{python}
import pathlib, shlex, subprocess, sys

state = pathlib.Path({state!r})
arguments = sys.argv[3:]
with (state / "log").open("a") as log:
    print(*arguments[:3], file=log)
match arguments[:2]:
    case ["get", "secret"]:
        print((state / "secret.json").read_text())
    case ["replace", "-f"]:
        (state / "secret.json").write_text(sys.stdin.read())
    case ["get", "pods"]:
        print("pod/redis-0")
    case ["get", *_]:
        print(arguments[2])
    case ["rollout", verb]:
        sys.exit((state / "rollout-fails").exists() and verb == "status")
    case ["exec", "-i"]:
        import redis

        password, command = sys.stdin.read().splitlines()
        client = redis.Redis.from_url({url!r}, username="admin", password=password)
        client.response_callbacks.clear()
        reply = client.execute_command(*shlex.split(command))
        print(reply.decode() if isinstance(reply, bytes) else reply)
    case ["exec", "deploy/state-manager"]:
        sys.exit(subprocess.run([{weft!r}, *arguments[arguments.index("weft") + 1 :]]).returncode)
"""


class Desk:
    """The script with its cluster."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self.server = server

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(K8S / "broker_users.py"), *arguments],
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    @property
    def secret(self) -> dict[str, str]:
        data = json.loads((self.folder / "secret.json").read_text())["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    def may_sign_in(self, user: str, password: str) -> bool:
        with redis.Redis.from_url(self.server.url, username=user, password=password) as client:
            try:
                return bool(client.execute_command("PING"))
            except redis.exceptions.AuthenticationError:
                return False

    def password(self, user: str) -> str:
        return re.fullmatch(r"redis://[^:]+:([^@]+)@redis\.weft\.svc:6379", self.secret[f"redis-url-{user}"])[1]  # type: ignore[index]  # a miss fails the test

    def users_in_file(self) -> dict[str, list[str]]:
        lines = [line.split() for line in self.secret["users.acl"].splitlines()]
        return {words[1]: [word[1:] for word in words if word.startswith("#")] for words in lines}


@pytest.fixture
def desk(script: Any, own_server: OwnServer, tmp_path: Path) -> Desk:
    values = script.contents()
    (tmp_path / "users.acl").write_text(values["users.acl"])
    server = own_server("valkey-9", options=("--aclfile", str(tmp_path / "users.acl")))
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    (tmp_path / "secret.json").write_text(json.dumps({"kind": "Secret", "data": data}))
    weft = str(Path(sys.executable).parent / "weft")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, state=str(tmp_path), url=server.url, weft=weft))
    kubectl.chmod(0o755)
    return Desk(tmp_path, server)


def digest(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()


def test_a_publisher_is_added_and_removed(desk: Desk) -> None:
    before = desk.secret
    done = desk.run("add", "shop")
    assert done.returncode == 0, done.stderr
    password = desk.password("shop")
    with redis.Redis.from_url(desk.server.url, username="shop", password=password) as shop:
        assert shop.xadd("weft:tasks:shop", {"type": "t"})
        with pytest.raises(redis.exceptions.NoPermissionError):
            shop.xadd("weft:tasks", {"type": "t"})
    assert desk.users_in_file()["shop"] == [digest(password)]
    again = desk.run("add", "shop")
    assert (again.returncode, again.stdout) == (1, "")
    assert "there is a user 'shop'" in again.stderr
    assert desk.run("remove", "shop").returncode == 0
    assert not desk.may_sign_in("shop", password)
    assert desk.secret == before


def test_a_service_has_a_valid_password_at_every_moment(desk: Desk) -> None:
    old = desk.password("agent-handler")
    (desk.folder / "rollout-fails").touch()
    failed = desk.run("rotate", "agent-handler")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    new = desk.password("agent-handler")
    # Pods with the old password are still there, and the broker may restart meanwhile.
    assert desk.may_sign_in("agent-handler", old)
    assert desk.may_sign_in("agent-handler", new)
    assert desk.users_in_file()["agent-handler"] == [digest(new), digest(old)]
    (desk.folder / "rollout-fails").unlink()
    done = desk.run("rotate", "agent-handler")
    assert done.returncode == 0, done.stderr
    newest = desk.password("agent-handler")
    assert [desk.may_sign_in("agent-handler", each) for each in (old, new, newest)] == [False, False, True]
    assert desk.users_in_file()["agent-handler"] == [digest(newest)]
    assert "rollout restart deployment/agent-handler" in desk.log


@pytest.mark.parametrize(
    ("user", "password_of"),
    [
        ("client", lambda desk: desk.password("client")),
        ("admin", lambda desk: desk.secret["admin-password"]),
        ("scaler", lambda desk: desk.secret["scaler-password"]),
    ],
    ids=["client", "admin", "scaler"],
)
def test_programs_outside_keep_the_old_password_until_the_end(
    desk: Desk, user: str, password_of: Callable[[Desk], str]
) -> None:
    old = password_of(desk)
    done = desk.run("rotate", user)
    assert done.returncode == 0, done.stderr
    assert f"rotate {user} --finish" in done.stdout
    new = password_of(desk)
    assert new != old
    assert desk.may_sign_in(user, old)
    assert desk.may_sign_in(user, new)
    done = desk.run("rotate", user, "--finish")
    assert done.returncode == 0, done.stderr
    assert password_of(desk) == new
    assert not desk.may_sign_in(user, old)
    assert desk.may_sign_in(user, new)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rotate", "nobody"), "no user 'nobody'"),
        (("rotate", "default"), "no user 'default'"),
        (("remove", "agent-handler"), "cannot be removed"),
        (("add", "Shop"), "cannot be a user"),
    ],
)
def test_a_wrong_name_is_one_line_and_changes_nothing(desk: Desk, arguments: tuple[str, ...], said: str) -> None:
    before = desk.secret
    done = desk.run(*arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert said in done.stderr
    assert desk.secret == before
