"""The users of `weft acl` on a shared server, for one namespace. No server may ever refuse them their work."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from runtime_core.bus.acl.rules import Target, rules
from runtime_core.bus.acl.users import USERS
from tests.fleet import plain_redis
from tests.servers.process import HOST, Server

PASSWORD = "of-a-test"
REFUSED_BY_DESIGN = "function|load"
"""What a process tries on a server without functions, to learn whether it may load them or has to wait for another."""


@asynccontextmanager
async def documented_users(server: Server, namespace: str, *names: str) -> AsyncIterator[dict[str, str]]:
    """Yield URLs by user. Fails at the end if the server has refused one of them anything."""
    own = {name: f"{name}-{namespace}" for name in names}
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    async with plain_redis(server.port, text=True) as admin:
        for name, user in own.items():
            await admin.execute_command(
                "ACL", "SETUSER", user, *rules(USERS[name], Target(namespace=namespace), [digest])
            )
        yield {name: f"redis://{user}:{PASSWORD}@{HOST}:{server.port}" for name, user in own.items()}
        log = await admin.acl_log()
        await admin.execute_command("ACL", "DELUSER", *own.values())
    refused = [(each["username"], each["object"]) for each in log if each["username"] in own.values()]
    assert [each for each in refused if each[1] != REFUSED_BY_DESIGN] == [], refused
