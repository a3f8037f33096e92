"""Add, rotate and remove users of the broker in a cluster, by kubectl: the Secret `weft` and the running broker.

    python3 deploy/k8s/broker_users.py add shop                 # a publisher with its own stream (docs/publishers.md)
    python3 deploy/k8s/broker_users.py rotate agent-handler     # a new password; restarts the service that uses it
    python3 deploy/k8s/broker_users.py rotate client            # the old one works too, until: rotate client --finish
    python3 deploy/k8s/broker_users.py remove shop

The broker takes each change at once, and the Secret keeps it for the broker's next start. The standard library is all
it needs.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Callable
from typing import Any

SERVICES = ("agent-handler", "tool-handler", "state-manager", "trajectory-recorder", "ray-gateway", "spark-gateway")
RESTARTED = {**{service: (service,) for service in SERVICES}, "operator": ("state-manager", "trajectory-recorder")}
"""User → the services whose pods have its password. Other users belong to programs outside these manifests."""
PASSWORD_KEYS = {"scaler": "scaler-password", "metrics": "metrics-password", "admin": "admin-password"}
FIXED = ("default", "probe")
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
URL = re.compile(r"redis://([^:@/]+):([^@/]+)@(.+)")
PLACEHOLDER = "#SHA256-OF-THE-PASSWORD"
# The password comes by standard input, so that no list of processes shows it.
REDIS_CLI = "read -r REDISCLI_AUTH; export REDISCLI_AUTH; exec redis-cli -e --user admin --no-auth-warning"


class Failed(Exception):
    """A step failed; the message is for the user."""


class Cluster:
    """The namespace of Weft, by kubectl."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def kubectl(self, *arguments: str, given: str | None = None) -> str:
        """Run kubectl and return its output. Raises Failed with its last line."""
        command = ["kubectl", "-n", self._namespace, *arguments]
        try:
            done = subprocess.run(command, input=given, capture_output=True, text=True)  # noqa: S603 - kubectl
        except OSError as error:
            raise Failed(f"kubectl: {error.strerror}") from None
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
            raise Failed(f"kubectl {' '.join(arguments[:3])}: {lines[-1]}")
        return done.stdout

    def values(self) -> dict[str, str]:
        """Return the Secret's values."""
        return decoded(self._secret())

    def _secret(self) -> dict[str, Any]:  # Any: JSON
        secret: dict[str, Any] = json.loads(self.kubectl("get", "secret", "weft", "-o", "json"))
        return secret

    def change(self, edit: Callable[[dict[str, str]], None]) -> dict[str, str]:
        """Edit the Secret's values in place and return them. Raises Failed if somebody else changed it meanwhile."""
        secret = self._secret()
        values = decoded(secret)
        if "users.acl" not in values:
            raise Failed("the Secret weft has no users.acl: its broker is not the one of these manifests")
        edit(values)
        secret["data"] = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.kubectl("replace", "-f", "-", given=json.dumps(secret))
        return values

    def tell_brokers(self, admin_password: str, command: str) -> None:
        """Run a command on every server of the broker, as its admin."""
        pods = self.kubectl("get", "pods", "-l", "app.kubernetes.io/name=redis", "-o", "name").split()
        if not pods:
            raise Failed("no broker is running: no pod has the label app.kubernetes.io/name=redis")
        for pod in pods:
            given = f"{admin_password}\n{command}\n"
            said = self.kubectl("exec", "-i", pod, "-c", "redis", "--", "sh", "-c", REDIS_CLI, given=given).strip()
            if said not in ("OK", "1", "0"):
                raise Failed(f"{pod} refused the change: {said}")

    def restart(self, service: str) -> None:
        """Restart a service's pods and wait until the new ones are ready."""
        kind = "statefulset" if service == "trajectory-recorder" else "deployment"
        if self.kubectl("get", kind, service, "--ignore-not-found", "-o", "name").strip():
            print(f"restarting {service}", flush=True)
            self.kubectl("rollout", "restart", f"{kind}/{service}")
            self.kubectl("rollout", "status", f"{kind}/{service}", "--timeout=15m")


def add(cluster: Cluster, user: str) -> None:
    """Add a publisher with its own stream, and print the key of its URL."""
    # From the release that runs, which knows the rights.
    printed = cluster.kubectl(
        "exec", "deploy/state-manager", "-c", "service", "--", "weft", "acl", "--publisher", user, "--for", "redis-8"
    )
    rules = next((line for line in printed.splitlines() if line.startswith(f"user {user} ")), "")
    if PLACEHOLDER not in rules:
        raise Failed(f"weft acl printed no rules for the user {user!r}")
    password = secrets.token_hex(24)
    rules = rules.replace(PLACEHOLDER, f"#{digest(password)}")

    def edit(values: dict[str, str]) -> None:
        if line_of(values, user):
            raise Failed(f"there is a user {user!r}: rotate its password, or choose another name")
        values["users.acl"] = values["users.acl"].rstrip("\n") + f"\n{rules}\n"
        values[f"redis-url-{user}"] = f"redis://{user}:{password}@{broker_of(values)}"

    values = cluster.change(edit)
    cluster.tell_brokers(values["admin-password"], as_command(rules))
    print(
        f"added {user}: its URL is the key redis-url-{user} of the Secret weft; register it: weft publisher set {user}"
    )


def rotate(cluster: Cluster, user: str, finish: bool) -> None:
    """Give a user a new password, restart what uses it, and then end the old one."""
    password = secrets.token_hex(24)

    def renew(values: dict[str, str]) -> None:
        values["users.acl"] = replaced(values, user, [digest(password), *digests_of(values, user)])
        if user in PASSWORD_KEYS:
            values[PASSWORD_KEYS[user]] = password
        elif found := URL.fullmatch(values.get(f"redis-url-{user}", "")):
            values[f"redis-url-{user}"] = f"redis://{found[1]}:{password}@{found[3]}"
        else:
            raise Failed(f"the Secret weft has no key redis-url-{user} that names a user and a password")

    def keep_newest(values: dict[str, str]) -> None:
        ended.extend(digests_of(values, user)[1:])
        values["users.acl"] = replaced(values, user, digests_of(values, user)[:1])

    ended: list[str] = []
    if not finish:
        # The admin's password before the change: the broker learns a new one by this command.
        admin_password = cluster.values()["admin-password"]
        cluster.change(renew)
        cluster.tell_brokers(admin_password, f"ACL SETUSER {user} #{digest(password)}")
        if user not in RESTARTED:
            print(
                f"{user} has a new password in the Secret weft, and the old one works too; when every program has the "
                f"new one: broker_users.py rotate {user} --finish"
            )
            return
        for service in RESTARTED[user]:
            cluster.restart(service)
    values = cluster.change(keep_newest)
    if ended:
        cluster.tell_brokers(values["admin-password"], " ".join(["ACL SETUSER", user, *(f"!{each}" for each in ended)]))
    print(f"{user} has only its new password")


def remove(cluster: Cluster, user: str) -> None:
    """Remove a user that `add` has added."""
    if user in RESTARTED or user in PASSWORD_KEYS or user in (*FIXED, "client", "runtime", "publisher"):
        raise Failed(f"{user} belongs to these manifests and cannot be removed")

    def edit(values: dict[str, str]) -> None:
        if not line_of(values, user):
            raise Failed(f"there is no user {user!r}")
        lines = [line for line in values["users.acl"].splitlines() if not line.startswith(f"user {user} ")]
        values["users.acl"] = "\n".join([*lines, ""])
        values.pop(f"redis-url-{user}", None)

    values = cluster.change(edit)
    cluster.tell_brokers(values["admin-password"], f"ACL DELUSER {user}")
    print(f"removed {user}")


def decoded(secret: dict[str, Any]) -> dict[str, str]:
    """Return a Secret's values as text."""
    return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}


def digest(password: str) -> str:
    """Return what the broker stores of a password."""
    return hashlib.sha256(password.encode()).hexdigest()


def line_of(values: dict[str, str], user: str) -> str:
    """Return the user's line of the file; empty if there is none."""
    return next((line for line in values["users.acl"].splitlines() if line.startswith(f"user {user} ")), "")


def digests_of(values: dict[str, str], user: str) -> list[str]:
    """Return the digests of the user's passwords, the newest first. Raises Failed for an unknown user."""
    if user in FIXED or not (line := line_of(values, user)):
        raise Failed(f"there is no user {user!r} with a password")
    return [word[1:] for word in line.split() if word.startswith("#")]


def replaced(values: dict[str, str], user: str, digests: list[str]) -> str:
    """Return the file with these digests as the user's only ones."""
    line = line_of(values, user)
    words = [word for word in line.split() if not word.startswith("#")]
    at = line.split().index(f"#{digests_of(values, user)[0]}")
    changed = " ".join([*words[:at], *(f"#{each}" for each in digests), *words[at:]])
    return values["users.acl"].replace(line, changed, 1)


def broker_of(values: dict[str, str]) -> str:
    """Return host and port of the broker, as the other users' URLs have them."""
    found = URL.fullmatch(values.get("redis-url-publisher", ""))
    if found is None:
        raise Failed("the Secret weft has no redis-url-publisher, from which the broker's address is taken")
    return found[3]


def as_command(line: str) -> str:
    """Return a line of the file as a command; selectors in parentheses stay one argument."""
    words = re.findall(r"\([^)]*\)|\S+", line.removeprefix("user "))
    return "ACL SETUSER " + " ".join(f'"{word}"' if " " in word else word for word in words)


def main() -> int:
    """Run one command. One line says why it failed."""
    parser = argparse.ArgumentParser(prog="broker_users.py", description="Users of the broker in a cluster.")
    parser.add_argument("action", choices=("add", "rotate", "remove"))
    parser.add_argument("user")
    parser.add_argument("--finish", action="store_true", help="with rotate: end the old password")
    parser.add_argument("--namespace", "-n", default="weft")
    given = parser.parse_args()
    cluster = Cluster(given.namespace)
    try:
        if not NAME.fullmatch(given.user):
            raise Failed(f"{given.user!r} cannot be a user: use small letters, digits and -, a letter first")
        if given.action == "rotate":
            rotate(cluster, given.user, given.finish)
        else:
            (add if given.action == "add" else remove)(cluster, given.user)
    except Failed as reason:
        print(f"broker_users.py: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
