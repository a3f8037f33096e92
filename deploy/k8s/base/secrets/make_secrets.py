"""Makes the Secret `weft` in the cluster, once: passwords of the broker's users, and of Grafana's admin.

`kubectl apply -k` cannot make a password, and none belongs into a repository. A Secret that is there already is left
as it is, so that the user's own counts, and a second apply changes nothing. The standard library is all it needs.

    kubectl get secret weft -o json | python3 make_secrets.py add | kubectl apply -f -

adds users and keys that an older Secret lacks, and gives the others today's rights; every password stays.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
NAME = "weft"
PREFIX = os.environ.get("NAMESPACE_OF_KEYS", "weft")
TRIES = 30

RULES: dict[str, str] = json.loads(Path(__file__).with_name("users.json").read_text(encoding="utf-8"))
"""The rights of each user, which `python -m docs.generate_acl` writes."""
WITHOUT_SECRET = ("default", "probe")
"""The user `default` has all rights, since the server reads its append-only file as it, but nobody can log in."""
WITH_URL = (
    "agent-handler", "tool-handler", "state-manager", "trajectory-recorder", "ray-gateway", "spark-gateway",
    "operator", "client", "gateway", "runtime", "publisher",
)  # fmt: skip
WITH_PASSWORD = {"scaler": "scaler-password", "metrics": "metrics-password", "admin": "admin-password"}


def users_file(passwords: dict[str, str]) -> str:
    """The broker's users, as its `aclfile`: passwords by their SHA-256 only, so that the file may be read."""
    return "\n".join([*(line(user, passwords.get(user, "")) for user in RULES), ""])


def line(user: str, password: str) -> str:
    """One user of the file."""
    rules = RULES[user].replace("~weft:", f"~{PREFIX}:")
    if user in WITHOUT_SECRET:
        return f"user {user} {rules}"
    return f"user {user} {rules.replace('reset on', f'reset on #{hashlib.sha256(password.encode()).hexdigest()}', 1)}"


def contents(namespace: str = NAME) -> dict[str, str]:
    """Every key of the Secret. The broker's name has the namespace, so that pods of other namespaces find it too."""
    broker = f"redis.{namespace}.svc:6379"
    passwords = {user: secrets.token_hex(24) for user in RULES if user not in WITHOUT_SECRET}
    return {
        "users.acl": users_file(passwords),
        **{f"redis-url-{user}": f"redis://{user}:{passwords[user]}@{broker}" for user in WITH_URL},
        "scaler-username": "scaler",
        **{key: passwords[user] for user, key in WITH_PASSWORD.items()},
        "grafana-password": secrets.token_hex(16),
        "ray-token": secrets.token_hex(24),
    }


def added(secret: dict[str, object]) -> dict[str, object]:
    """A Secret of the cluster with the keys and users that it lacks. Its passwords and other users stay."""
    data = secret["data"]
    assert isinstance(data, dict)
    kept = {key: base64.b64decode(value).decode() for key, value in data.items()}
    metadata = secret.get("metadata")
    fresh = contents(metadata.get("namespace", NAME) if isinstance(metadata, dict) else NAME)
    old = {each.split()[1]: each for each in kept["users.acl"].splitlines() if each.startswith("user ")}
    new = {each.split()[1]: each for each in fresh["users.acl"].splitlines()}
    for user, rules in new.items():
        digests = [word for word in old.get(user, "").split() if word.startswith("#")]
        if digests:
            words = rules.split()
            new[user] = " ".join([word if not word.startswith("#") else " ".join(digests) for word in words])
    for user in old.keys() & set(WITH_URL):
        # Somebody's own key may name it otherwise; its password is not known here.
        fresh.pop(f"redis-url-{user}")
    lines = [*new.values(), *(each for user, each in old.items() if user not in new), ""]
    merged = {**fresh, **kept, "users.acl": "\n".join(lines)}
    return {**secret, "data": {key: base64.b64encode(value.encode()).decode() for key, value in merged.items()}}


def create() -> str:
    """Send a request to the cluster's API and return its result."""
    namespace = (ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    request = urllib.request.Request(
        f"https://{host}:{port}/api/v1/namespaces/{namespace}/secrets",
        method="POST",
        headers={
            "Authorization": f"Bearer {(ACCOUNT / 'token').read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/json",
        },
        data=json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": NAME, "labels": {"app.kubernetes.io/part-of": "weft"}},
                "type": "Opaque",
                "stringData": contents(namespace),
            }
        ).encode(),
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    # Python 3.13 and later require fields that certificates of many clusters' CAs lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        with urllib.request.urlopen(request, timeout=10, context=context):  # noqa: S310 - as above
            return "made"
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return "is there already: left as it is"
        raise


def main() -> int:
    if sys.argv[1:] == ["add"]:
        json.dump(added(json.load(sys.stdin)), sys.stdout)
        return 0
    for tried in range(1, TRIES + 1):
        try:
            print(f"the Secret {NAME!r} {create()}")
            return 0
        except OSError as error:  # the network of a new pod may be a moment late
            print(f"the Secret {NAME!r} could not be made ({tried} of {TRIES}): {error}", file=sys.stderr)
            time.sleep(2)
    return 1


if __name__ == "__main__":
    sys.exit(main())
