"""The HTTP gateway: who may do what, and no tenant reaches another one's tasks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, lua, python

KEYS = "integration/gateway:keys"

MUTANTS: tuple[Mutant, ...] = (
    lua(
        "ends",
        "keeps_tenant",
        "  if head.tenant ~= '' then header = header .. '\\n' .. head.tenant end\n",
        "",
        "a list of a tenant's tasks has the ended ones",
        "contracts:fairness",
        KEYS,
    ),
    python(
        "gateway/server.py",
        "role",
        "        if role not in key.roles:\n",
        "        if False:\n",
        "a key does only what its roles allow",
        KEYS,
    ),
    python(
        "gateway/keys.py",
        "digest",
        "return key if hmac.compare_digest(key.digest, _digest(text)) else None",
        "return key",
        "the id of a key is not enough",
        KEYS,
    ),
    python(
        "gateway/keys.py",
        "fresh",
        "if key is None or now - read_at > FRESH_SECONDS:",
        "if key is None:",
        "a revoked key is refused",
        KEYS,
    ),
    python(
        "gateway/keys.py",
        "bound_task",
        "return task_id if self.scope is None else self.scope.task(task_id)",
        "return task_id",
        "a tenant's key reaches no task of another tenant",
        KEYS,
    ),
    python(
        "gateway/keys.py",
        "agents",
        "            self.scope.check_agent(agent)\n",
        "            pass\n",
        "a tenant's key submits to its agents only",
        KEYS,
    ),
    python(
        "gateway/access.py",
        "prefix",
        'replace(wanted, tenant=caller.tenant, prefix=f"{caller.tenant}.")',
        "replace(wanted, tenant=caller.tenant)",
        "a tenant's key lists no task that it cannot name",
        KEYS,
    ),
    python(
        "gateway/access.py",
        "source",
        'source = f"{SOURCE}/{caller.tenant}" if caller.tenant else SOURCE',
        "source = SOURCE",
        "tenants have separate idempotency keys",
        KEYS,
    ),
    python(
        "gateway/access.py",
        "unknown_agent",
        'if caller.scope is not None and error.field == "data.agent":',
        "if False:",
        "an unknown agent's error names no agents of others to a tenant",
        KEYS,
    ),
)
