"""API keys and tokens of the HTTP gateway: who sends a request, what it may do, and which tenant's tasks it reaches.

The broker holds a digest of each key, never the key itself. Tokens are those of an identity provider (OpenID Connect).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
import logging
import re
import secrets
import time
import urllib.error
import urllib.request
from base64 import b64encode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import quote, urlencode

import msgspec

from runtime_core.base.text import choices
from runtime_core.bus.event_bus import EventBus
from runtime_core.declare.manifest import TOOL_AGENTS
from runtime_core.errors import InvalidInput, Rejected, WeftError
from runtime_core.settings import SAFE_URL
from runtime_core.state_manager.publishers import BUILT_IN, Publisher, checked_name
from runtime_core.wire.codec import quoted
from runtime_core.wire.commands import Submission
from runtime_core.wire.ids import MAX_NAME_CHARACTERS, has_control

if TYPE_CHECKING:
    import jwt

logger = logging.getLogger(__name__)

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

    @property
    def holder(self) -> str:
        """Who holds its open streams: the tenant, whose keys share one bound, or the caller."""
        return f"tenant {self.tenant}" if self.tenant else self.name

    def bind(self, new: Submission, blobs: str) -> Submission:
        """Bind every name in a submit to the tenant. `blobs` is the URL of the namespace's blobs, if it has any.

        Raises Rejected for an agent that it may not submit to, and InvalidInput as `Publisher.scope`.
        """
        self.check_agent(new.agent)
        return new if self.scope is None else self.scope.scope(new, blobs)

    def check_agent(self, agent: str) -> None:
        """Raise Rejected for an agent that it may not submit to."""
        if agent.startswith(TOOL_AGENTS) and OPERATE not in self.roles:
            raise Rejected("data.agent", f"{agent} calls any tool, so it takes the role {OPERATE}")
        if self.scope is not None:
            self.scope.check_agent(agent)
        elif self.agents is not None and agent not in self.agents:
            listed = ", ".join(self.agents)
            raise Rejected("data.agent", f"this key may not submit to {agent}; it may submit to {listed}")

    def sees_agent(self, agent: str) -> bool:
        """Return whether it may submit to an agent and know its name: a tenant knows those that its key lists."""
        if self.agents is not None:
            return agent in self.agents
        return not self.tenant and not agent.startswith(BUILT_IN)

    def bound_task(self, task_id: str) -> str:
        """Return the id of a task as the tenant names it. Raises InvalidInput if it becomes too long."""
        return task_id if self.scope is None else self.scope.task(task_id)

    def check_references(self, field: str, data: bytes, blobs: str) -> None:
        """Raise InvalidInput (`field`) for a reference to another tenant's blob in JSON."""
        if self.scope is not None:
            self.scope.check_references(field, data, blobs)


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
            what = f"there is no {', '.join(map(quoted, unknown))}" if unknown else "is missing"
            raise InvalidInput("role", f"{what}; {choices(ROLES)}")
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
    """Return a stored key; None if a newer release wrote it in a different format."""
    try:
        return msgspec.json.decode(data, type=ApiKey)
    except msgspec.MsgspecError:
        return None


ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys only: with HS256, the public key would be the password."""
TOKEN_MAX_CHARACTERS = 8192
EVERY_TENANT = "*"
"""The value of the tenant claim of a caller that reaches all tasks."""
LEEWAY_SECONDS = 30.0
"""How far the clocks of the provider and of the gateway may differ."""
KEYS_SECONDS = 600.0
"""How long the provider's keys are used before they are read again."""
KEYS_STALE_SECONDS = 86_400.0
"""How long they are used while the provider is away."""
UNKNOWN_KEY_SECONDS = 5.0
"""The shortest time between two reads, however many tokens name unknown keys, or while the provider is away."""
PROVIDER_SECONDS = 5.0
DOCUMENT_MAX_BYTES = 1024 * 1024
DISCOVERY = "/.well-known/openid-configuration"


class TokenRefused(WeftError):
    """A token that is not valid here. The message says why, without the token."""


class ProviderAway(WeftError):
    """The identity provider cannot be reached, so no token can be checked."""


@dataclass(frozen=True, slots=True)
class Provider:
    """An identity provider, and what its tokens say about a caller."""

    issuer: str
    audience: str | tuple[str, ...]
    """The `aud` of its tokens; one of several is enough."""
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"


class Tokens:
    """Checks tokens of one identity provider by its public keys."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._keys: dict[str, jwt.PyJWK] = {}
        self._read_at = self._tried_at = -KEYS_STALE_SECONDS
        self._reading = asyncio.Lock()

    async def caller(self, token: str) -> Caller:
        """Return who sends a token. Raises TokenRefused or ProviderAway."""
        return self._caller(await self.claims(token))

    async def claims(self, token: str) -> dict[str, Any]:  # Any: JSON
        """Return what a token says, if the provider has signed it for this audience. Raises as `caller`."""
        import jwt  # here: `weft key` works without the extra

        provider = self._provider
        try:
            if len(token) > TOKEN_MAX_CHARACTERS:
                raise TokenRefused(f"the token is longer than {TOKEN_MAX_CHARACTERS} characters")
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in ALGORITHMS:
                raise TokenRefused(f"the token is not signed with one of {', '.join(ALGORITHMS)}")
            key = await self._key(str(header.get("kid") or ""))
            claims = jwt.decode(
                token, key=key, algorithms=[header["alg"]], audience=provider.audience, issuer=provider.issuer,
                leeway=LEEWAY_SECONDS, options={"require": ["aud", "exp", "iss", "sub"]},
            )  # fmt: skip
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise TokenRefused(f"the token is not valid: {str(error)[:200]}") from None
        return claims

    def _caller(self, claims: Mapping[str, Any]) -> Caller:  # Any: JSON
        name = hashlib.sha256(f"{claims['iss']}\n{claims['sub']}".encode()).hexdigest()[:16]
        given = _claim(claims, self._provider.roles_claim)
        words = given.split() if isinstance(given, str) else given if isinstance(given, list) else []
        roles = tuple(role for role in ROLES if role in words)
        tenant = _claim(claims, self._provider.tenant_claim)
        if tenant == EVERY_TENANT:
            return Caller(f"oidc-{name}", roles)
        try:
            checked = checked_name("tenant", tenant if isinstance(tenant, str) else "")
        except InvalidInput:
            raise TokenRefused(f"the claim {self._provider.tenant_claim!r} of the token names no tenant") from None
        return Caller(f"oidc-{name}", roles, Publisher(name=f"oidc-{name}", tenant=checked))

    async def _key(self, id: str) -> jwt.PyJWK:
        """Return the provider's key with this id; without an id, its only key."""
        now = time.monotonic()
        if (
            self._find(id) is None or now - self._read_at > KEYS_SECONDS
        ) and now - self._tried_at > UNKNOWN_KEY_SECONDS:
            async with self._reading:
                if time.monotonic() - self._tried_at > UNKNOWN_KEY_SECONDS:
                    await self._read_keys()
        if time.monotonic() - self._read_at > KEYS_STALE_SECONDS:
            raise ProviderAway(f"the identity provider {self._provider.issuer} does not answer")
        key = self._find(id)
        if key is None:
            raise TokenRefused("the token is signed with a key that the identity provider does not list")
        return key

    def _find(self, id: str) -> jwt.PyJWK | None:
        if not id and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        return self._keys.get(id)

    async def _read_keys(self) -> None:
        """Read the provider's keys. If it does not answer, the known ones stay."""
        try:
            document = await asyncio.to_thread(_discovered, self._provider.issuer)
            found = await asyncio.to_thread(_read_json, str(document.get("jwks_uri")))
            self._keys = _signing_keys(found)
            self._read_at = time.monotonic()
        except (OSError, ValueError, http.client.HTTPException) as error:
            logger.warning("cannot read the keys of the identity provider %s: %s", self._provider.issuer, error)
        self._tried_at = time.monotonic()


def _claim(claims: Mapping[str, Any], name: str) -> object:  # Any: JSON
    """Return a claim. If no claim has this name, its dots lead into objects, as in `realm_access.roles`."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _signing_keys(document: Mapping[str, Any]) -> dict[str, jwt.PyJWK]:  # Any: JSON
    """Return the keys of a JWK set that this release can use, by id."""
    import jwt  # here: see above

    found: dict[str, jwt.PyJWK] = {}
    keys = document.get("keys")
    for each in keys if isinstance(keys, list) else []:
        if not isinstance(each, dict) or each.get("use", "sig") != "sig" or each.get("kty") == "oct":
            continue
        try:
            found[str(each.get("kid") or "")] = jwt.PyJWK(each)
        except (jwt.PyJWTError, ValueError, TypeError):
            continue  # of a kind that this release does not know
    return found


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *given: Any, **named: Any) -> None:  # Any: of the base class
        """Follow no redirect: it could lead to another host, or away from TLS."""


def _discovered(issuer: str) -> dict[str, Any]:  # Any: JSON
    """Return the provider's description of itself. Raises as `_read_json`."""
    document = _read_json(issuer.rstrip("/") + DISCOVERY)
    if document.get("issuer") != issuer:
        raise ValueError(f"it calls itself {str(document.get('issuer'))[:200]!r}")
    return document


def _read_json(url: str, form: Mapping[str, str] | None = None, **headers: str) -> dict[str, Any]:  # Any: JSON
    """Return a JSON object from a URL, which gets the form if there is one.

    Raises OSError, ValueError or HTTPException.
    """
    if not SAFE_URL.fullmatch(url):
        raise ValueError(f"{url[:200]!r} is not https://…")
    opener = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler())
    sent = None if form is None else urlencode(form).encode()
    request = urllib.request.Request(url, sent, {"Accept": "application/json", **headers})  # noqa: S310 - checked above
    with opener.open(request, timeout=PROVIDER_SECONDS) as response:
        data = response.read(DOCUMENT_MAX_BYTES + 1)
    if len(data) > DOCUMENT_MAX_BYTES:
        raise ValueError(f"{url[:200]} has more than {DOCUMENT_MAX_BYTES} bytes")
    document = json.loads(data)
    if not isinstance(document, dict):
        raise ValueError(f"{url[:200]} is not a JSON object")
    return document


# -- login of people -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoginAttempt:
    """What a browser keeps, in a cookie, while its person is at the provider."""

    PARTS: ClassVar[int] = 3
    state: str
    nonce: str
    verifier: str

    @classmethod
    def new(cls) -> LoginAttempt:
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))

    @classmethod
    def read(cls, parts: Sequence[str]) -> LoginAttempt | None:
        return cls(*parts) if len(parts) == cls.PARTS and all(parts) else None

    def __str__(self) -> str:
        return f"{self.state}.{self.nonce}.{self.verifier}"


class CodeLogin:
    """Logs people in at an identity provider: the authorization code flow of OpenID Connect, with PKCE."""

    def __init__(self, provider: Provider, client_id: str, client_secret: str = "") -> None:
        """`client_id` is the provider's name for the console, `client_secret` its password there, if it has one."""
        self._provider = provider
        self._client_id = client_id
        self._client_secret = client_secret
        self._id_tokens = Tokens(replace(provider, audience=client_id))
        api = (provider.audience,) if isinstance(provider.audience, str) else provider.audience
        self.tokens = Tokens(replace(provider, audience=(*api, client_id)))
        """Checks the token of a logged-in person."""
        self._description: dict[str, Any] = {}  # Any: JSON
        self._described_at = float("-inf")

    async def address(self, attempt: LoginAttempt, redirect: str) -> str:
        """Return where the browser goes to log in. Raises ProviderAway."""
        endpoint = str((await self._described()).get("authorization_endpoint"))
        if not SAFE_URL.fullmatch(endpoint.partition("?")[0]):
            raise ProviderAway(f"the identity provider {self._provider.issuer} has no authorization endpoint")
        digest = hashlib.sha256(attempt.verifier.encode()).digest()
        query = {
            "response_type": "code", "client_id": self._client_id, "redirect_uri": redirect, "scope": "openid",
            "state": attempt.state, "nonce": attempt.nonce, "code_challenge_method": "S256",
            "code_challenge": urlsafe_b64encode(digest).rstrip(b"=").decode(),
        }  # fmt: skip
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def token(self, attempt: LoginAttempt, state: str, code: str, redirect: str) -> str:
        """Return the token of the person who came back with this code: it is the login, as long as it is valid.

        Raises TokenRefused or ProviderAway.
        """
        if not hmac.compare_digest(attempt.state.encode(), state.encode()):
            raise TokenRefused("the login was begun in another browser, or too long ago: log in again")
        form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect,
                "client_id": self._client_id, "code_verifier": attempt.verifier}  # fmt: skip
        headers = {}
        if self._client_secret:
            pair = f"{quote(self._client_id, safe='')}:{quote(self._client_secret, safe='')}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        endpoint = str((await self._described()).get("token_endpoint"))
        try:
            answer = await asyncio.to_thread(_read_json, endpoint, form, **headers)
        except urllib.error.HTTPError as error:
            raise TokenRefused(f"the identity provider refused the login ({error.code}): log in again") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ProviderAway(f"the identity provider gave no token: {str(error)[:200]}") from None
        own = str(answer.get("id_token") or "")
        claims = await self._id_tokens.claims(own)
        if not hmac.compare_digest(str(claims.get("nonce")).encode(), attempt.nonce.encode()):
            raise TokenRefused("the identity provider answered another login: log in again")
        # With most providers the access token has the roles, but it may have a proprietary format.
        for token in (str(answer.get("access_token") or ""), own):
            try:
                if token.count(".") == 2 and (await self.tokens.caller(token)).roles:
                    return token
            except TokenRefused:
                continue
        raise TokenRefused("neither token of the identity provider has a tenant and a role that Weft knows")

    async def _described(self) -> dict[str, Any]:  # Any: JSON
        """Return what the provider says about itself, so that many logins are few requests."""
        if time.monotonic() - self._described_at < KEYS_SECONDS:
            return self._description
        try:
            self._description = await asyncio.to_thread(_discovered, self._provider.issuer)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ProviderAway(
                f"the identity provider {self._provider.issuer} does not answer: {str(error)[:200]}"
            ) from None
        self._described_at = time.monotonic()
        return self._description
