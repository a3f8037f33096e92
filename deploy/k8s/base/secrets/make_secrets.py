"""Makes the Secret `weft` in the cluster, once: passwords of the broker's users, and of Grafana's admin.

`kubectl apply -k` cannot make a password, and none belongs into a repository. A Secret that is there already is left
as it is, so that the user's own counts, and a second apply changes nothing. The standard library is all it needs.
"""

from __future__ import annotations

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
BROKER = os.environ.get("BROKER", "redis:6379")
PREFIX = os.environ.get("NAMESPACE_OF_KEYS", "weft")
TRIES = 30

SERVICES = (
    "resetchannels -@all +@connection +@read +@write +@scripting -@dangerous +info +time +wait +waitaof +cluster|slots"
    " +cluster|shards"
)


def users_file(passwords: dict[str, str]) -> str:
    """The broker's users, as its `aclfile`: passwords by their SHA-256 only, so that the file may be read."""
    digest = {user: hashlib.sha256(password.encode()).hexdigest() for user, password in passwords.items()}
    return "\n".join(
        (
            # Nobody can be this user, who has every right all the same: the server reads its append-only file as this
            # user, and drops in silence, from the file's transactions and functions, what it may not do.
            "user default off resetpass sanitize-payload ~* &* +@all",
            f"user services on #{digest['services']} ~{PREFIX}:* ~*:answers* {SERVICES}",
            # It may append to the stream of commands, and nothing else.
            f"user publisher on #{digest['publisher']} %W~{PREFIX}:tasks resetchannels -@all +@connection +xadd",
            # What an autoscaler reads: how much waits on a stream.
            f"user scaler on #{digest['scaler']} %R~{PREFIX}:* resetchannels -@all +@connection +info"
            " +xinfo|groups +xinfo|stream +xlen +xpending",
            f"user admin on #{digest['admin']} ~* &* +@all",
            # Its password is no secret: it may ask whether the server is there.
            "user probe on >probe resetchannels -@all +ping",
            "",
        )
    )


def contents() -> dict[str, str]:
    """Every key of the Secret."""
    passwords = {user: secrets.token_hex(24) for user in ("services", "publisher", "scaler", "admin")}
    return {
        "users.acl": users_file(passwords),
        "redis-url": f"redis://services:{passwords['services']}@{BROKER}",
        "redis-url-publisher": f"redis://publisher:{passwords['publisher']}@{BROKER}",
        "scaler-username": "scaler",
        "scaler-password": passwords["scaler"],
        "admin-password": passwords["admin"],
        "grafana-password": secrets.token_hex(16),
        "ray-token": secrets.token_hex(24),
    }


def create() -> str:
    """Asks the cluster's API; what became of it."""
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
                "stringData": contents(),
            }
        ).encode(),
    )
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    # From Python 3.13 on fields of a certificate are asked for that the CAs of many clusters lack.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        with urllib.request.urlopen(request, timeout=10, context=context):  # noqa: S310 - as above
            return "made"
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return "is there already: left as it is"
        raise


def main() -> int:
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
