"""API keys of the HTTP gateway: who sends a request, what it may do, and which tenant's tasks it reaches.

The broker holds a digest of each key, never the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from runtime_core.bus.event_bus import EventBus
from runtime_core.codec import quoted
from runtime_core.errors import InvalidInput, Rejected
from runtime_core.ids import MAX_NAME_CHARACTERS, has_control
from runtime_core.ingress.publishers import Publisher, checked_name
from runtime_core.wire.commands import Submission

SUBMIT, READ, ANSWER, OPERATE = "submit", "read", "answer", "operate"
ROLES = (SUBMIT, READ, ANSWER, OPERATE)
"""What a key may do: start tasks; show, list and follow them; answer their questions; cancel them."""
KEY = re.compile(r"weft_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
FRESH_SECONDS = 1.0
"""How long a key stays valid after it was revoked."""
CACHED_MAX = 10_000


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A key as the broker stores it."""

    id: str
    name: str
    roles: tuple[str, ...]
    digest: str
    """SHA-256 of the whole key. A key has 256 random bits, so a slow hash would add nothing."""
    created_ms: int
    tenant: str = ""
    """The only tenant whose tasks the key reaches; empty: all tasks, of every tenant and of none."""
    agents: tuple[str, ...] | None = None
    """Agents that it may submit to; None: all but internal agents, and with a tenant but the runtime's own."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    name: str
    """The key's id; without keys the caller's address. Rates are counted for each name."""
    roles: Sequence[str] = ROLES
    scope: Publisher | None = None
    """Binds names to the key's tenant; None: no tenant."""
    agents: tuple[str, ...] | None = None
    """Agents that it may submit to, if it has no tenant; None: all but internal agents."""

    @property
    def tenant(self) -> str:
        return "" if self.scope is None else self.scope.tenant

    def bind(self, new: Submission, blobs: str) -> Submission:
        """Bind every name in a submit to the tenant. `blobs` is the URL of the namespace's blobs, if it has any.

        Raises Rejected for an agent that it may not submit to, and InvalidInput as `Publisher.scope`.
        """
        self.check_agent(new.agent)
        return new if self.scope is None else self.scope.scope(new, blobs)

    def check_agent(self, agent: str) -> None:
        """Raise Rejected for an agent that it may not submit to."""
        if self.scope is not None:
            self.scope.check_agent(agent)
        elif self.agents is not None and agent not in self.agents:
            listed = ", ".join(self.agents)
            raise Rejected("data.agent", f"this key may not submit to {agent}; it may submit to {listed}")

    def bound_task(self, task_id: str) -> str:
        """Return the id of a task as the tenant names it. Raises InvalidInput if it becomes too long."""
        return task_id if self.scope is None else self.scope.task(task_id)

    def check_references(self, field: str, data: bytes, blobs: str) -> None:
        """Raise InvalidInput (`field`) for a reference to another tenant's blob in JSON."""
        if self.scope is not None:
            self.scope.check_references(field, data, blobs)

    def reaches(self, task_id: str) -> bool:
        """Return whether a task is one that it can name."""
        return self.scope is None or task_id.startswith(f"{self.scope.tenant}.")


class ApiKeys:
    """The keys of a namespace; `bus` is its first partition."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus
        self._cached: OrderedDict[str, tuple[float, ApiKey]] = OrderedDict()

    async def create(
        self, name: str, roles: Sequence[str], tenant: str = "", agents: tuple[str, ...] | None = None
    ) -> tuple[ApiKey, str]:
        """Store a new key. Return it with its text, which nobody can read again. Raises InvalidInput."""
        if not 1 <= len(name) <= MAX_NAME_CHARACTERS or has_control(name):
            raise InvalidInput("name", f"{quoted(name)} is not one line of 1 to {MAX_NAME_CHARACTERS} characters")
        unknown = [role for role in roles if role not in ROLES]
        if unknown or not roles:
            raise InvalidInput("role", f"{', '.join(map(quoted, unknown)) or 'none'}: use {', '.join(ROLES)}")
        if tenant:
            checked_name("tenant", tenant)
        id = secrets.token_hex(6)
        text = f"weft_{id}_{secrets.token_urlsafe(32)}"
        key = ApiKey(
            id=id,
            name=name,
            roles=tuple(role for role in ROLES if role in roles),
            digest=_digest(text),
            created_ms=time.time_ns() // 1_000_000,
            tenant=tenant,
            agents=agents,
        )
        await self._bus.transport.call("HSET", self._bus.keys.api_keys, id, msgspec.json.encode(key))
        return key, text

    async def revoke(self, id: str) -> bool:
        """Delete a key. Gateways refuse it within `FRESH_SECONDS`. Return False if it does not exist."""
        return await self._bus.transport.call("HDEL", self._bus.keys.api_keys, id) == 1

    async def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first."""
        stored = cast(list[bytes], await self._bus.transport.call("HVALS", self._bus.keys.api_keys))
        return sorted(filter(None, map(_read, stored)), key=lambda key: (key.created_ms, key.id))

    async def find(self, text: str) -> ApiKey | None:
        """Return the key with this text, or None."""
        found = KEY.fullmatch(text)
        if found is None:
            return None
        id, now = found[1], time.monotonic()
        read_at, key = self._cached.get(id, (0.0, None))
        if key is None or now - read_at > FRESH_SECONDS:
            stored = await self._bus.transport.call("HGET", self._bus.keys.api_keys, id)
            key = None if stored is None else _read(cast(bytes, stored))
            self._cached.pop(id, None)
            if key is None:
                return None
            self._cached[id] = (now, key)
            if len(self._cached) > CACHED_MAX:
                self._cached.popitem(last=False)
        return key if hmac.compare_digest(key.digest, _digest(text)) else None


def caller_of(key: ApiKey) -> Caller:
    """Return who sends a request with this key."""
    scope = None
    if key.tenant:
        scope = Publisher(name=f"key-{key.id}", tenant=key.tenant, agents=key.agents)
    return Caller(key.id, key.roles, scope, key.agents)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(data: bytes) -> ApiKey | None:
    """Return a stored key; None if a newer release wrote it in another format."""
    try:
        return msgspec.json.decode(data, type=ApiKey)
    except msgspec.MsgspecError:
        return None
