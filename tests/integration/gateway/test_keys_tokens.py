"""Tokens of an identity provider: who is let in, with which tenant and roles. The provider is a real HTTP server."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from runtime_core.gateway import keys
from runtime_core.gateway.keys import Provider, ProviderAway, TokenRefused, Tokens
from tests.fleet import until
from tests.integration.gateway.gateways import gateway_fleet, http, problem
from tests.servers.process import Server

pytestmark = pytest.mark.timeout(300)
AUDIENCE = "weft"
CLIENT = "weft-console"
PRIVATE: dict[str, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey] = {
    "a": rsa.generate_private_key(65537, 2048),
    "b": ec.generate_private_key(ec.SECP256R1()),
}
ALGORITHM = {"a": "RS256", "b": "ES256"}


class Issuer:
    """An identity provider on loopback that serves its discovery document and its keys."""

    def __init__(self) -> None:
        self.listed = ["a"]
        self.calls_itself: str | None = None
        self.keys_url: str | None = None
        self.reads = 0
        self.secret = ""
        self.codes: dict[str, dict[str, str]] = {}
        """Codes that were given out, with the request of each."""
        self.id_claims: dict[str, Any] = {}
        self.access_token: str | None = None
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/realm"

    def start(self) -> None:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                document = issuer.documents().get(self.path)
                self.send_response(404 if document is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                answer = issuer.redeem({name: values[0] for name, values in form.items()}, self.headers)
                self.send_response(400 if answer is None else 200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def documents(self) -> dict[str, object]:
        self.reads += 1
        named = self.calls_itself or self.url
        public = [_public(id) for id in self.listed]
        return {
            "/realm/.well-known/openid-configuration": {
                "issuer": named,
                "jwks_uri": self.keys_url or f"{self.url}/keys",
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
            },
            "/realm/keys": {"keys": [*public, {"kty": "new"}, {"kty": "oct", "kid": "a", "k": "c2VjcmV0"}]},
        }

    def approve(self, address: str) -> dict[str, str]:
        """Log a person in who was sent to this address, and return the query with which the browser goes back."""
        asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
        assert address.startswith(f"{self.url}/authorize?")
        assert (asked["response_type"], asked["client_id"], asked["scope"]) == ("code", CLIENT, "openid")
        assert asked["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = asked
        return {"code": code, "state": asked["state"]}

    def redeem(self, form: dict[str, str], headers: Message) -> dict[str, str] | None:
        """Return the tokens for a code, once; None if the request is not the one for which it was given."""
        asked = self.codes.pop(form["code"], None)
        digest = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
        pair = base64.b64encode(f"{CLIENT}:{self.secret}".encode()).decode()
        if (
            asked is None
            or (asked["code_challenge"], asked["redirect_uri"]) != (digest, form["redirect_uri"])
            or (self.secret and headers["Authorization"] != f"Basic {pair}")
        ):
            return None
        own = self.token(**{"aud": CLIENT, "nonce": asked["nonce"], "roles": None, **self.id_claims})
        return {"id_token": own, "access_token": self.token() if self.access_token is None else self.access_token}

    def token(self, key: str = "a", *, header: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a token with these claims; None removes one."""
        now = int(time.time())
        every = {
            "iss": self.url, "aud": AUDIENCE, "sub": "ada", "exp": now + 300, "iat": now, "tenant": "acme",
            "roles": ["read", "submit"], **claims,
        }  # fmt: skip
        given = {name: value for name, value in every.items() if value is not None}
        return jwt.encode(given, PRIVATE[key], ALGORITHM[key], headers={"kid": key, **(header or {})})


def _public(id: str) -> dict[str, Any]:
    key = PRIVATE[id].public_key()
    if isinstance(key, rsa.RSAPublicKey):
        found = jwt.algorithms.RSAAlgorithm.to_jwk(key, as_dict=True)
    else:
        found = jwt.algorithms.ECAlgorithm.to_jwk(key, as_dict=True)
    return {**found, "kid": id, "use": "sig"}


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    found = Issuer()
    try:
        yield found
    finally:
        found.stop()


def tokens_of(issuer: Issuer, **settings: str) -> Tokens:
    return Tokens(Provider(issuer.url, AUDIENCE, **settings))


def unsigned(token: str) -> str:
    header = base64.urlsafe_b64encode(b'{"alg":"none","kid":"a"}').rstrip(b"=").decode()
    return f"{header}.{token.split('.')[1]}."


def signed_with_public_key(issuer: Issuer) -> str:
    """Return a token whose HMAC key is the provider's public key."""
    public = (
        PRIVATE["a"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"a"}').rstrip(b"=")
    signed = header + b"." + issuer.token().split(".")[1].encode()
    digest = base64.urlsafe_b64encode(hmac.new(public, signed, hashlib.sha256).digest()).rstrip(b"=")
    return (signed + b"." + digest).decode()


async def test_a_token_binds_tenant_and_roles(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    caller = await tokens.caller(issuer.token())
    assert (caller.tenant, caller.roles) == ("acme", ("submit", "read"))
    assert (await tokens.caller(issuer.token(roles="operate read x"))).roles == ("read", "operate")
    assert (await tokens.caller(issuer.token(roles=None))).roles == ()
    everyone = await tokens.caller(issuer.token(tenant="*", aud=["other", AUDIENCE]))
    assert (everyone.tenant, everyone.scope) == ("", None)
    assert everyone.name == caller.name, "the same person"
    nested = tokens_of(issuer, tenant_claim="https://x/tenant", roles_claim="realm.roles")
    claims: dict[str, Any] = {"https://x/tenant": "evil", "realm": {"roles": ["answer"]}}
    found = await nested.caller(issuer.token(**claims))
    assert (found.tenant, found.roles) == ("evil", ("answer",))


async def test_a_token_that_is_not_for_this_gateway_is_refused(issuer: Issuer) -> None:
    tokens = tokens_of(issuer)
    now = int(time.time())
    other = issuer.token(header={"kid": "a"}).rsplit(".", 1)[0] + "." + issuer.token(sub="eve").rsplit(".", 1)[1]
    wrong = [
        issuer.token(exp=now - 60), issuer.token(exp=None), issuer.token(nbf=now + 600), issuer.token(aud="other"),
        issuer.token(aud=None), issuer.token(iss="http://127.0.0.1/other"), issuer.token(iss=None),
        issuer.token(sub=None), issuer.token(tenant=None), issuer.token(tenant="A B"),
        issuer.token(tenant=["acme"]), issuer.token("b"), issuer.token("b", header={"kid": "a"}), other,
        unsigned(issuer.token()), signed_with_public_key(issuer), "a.b.c", "..", "é.é.é", "x" * 9000 + "..",
        issuer.token(filler="x" * 9000),
    ]  # fmt: skip
    for token in wrong:
        with pytest.raises(TokenRefused):
            await tokens.caller(token)
    assert (await tokens.caller(issuer.token())).tenant == "acme"


async def test_keys_are_cached_rotated_and_survive_a_pause_of_the_provider(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(issuer)
    for _ in range(3):
        await tokens.caller(issuer.token())
    assert issuer.reads == 2, "the discovery document and the keys"
    issuer.listed = ["b"]
    with pytest.raises(TokenRefused, match="does not list"):
        await tokens.caller(issuer.token("b"))  # so soon after the first read
    assert issuer.reads == 2, "an unknown key does not make the gateway read at each request"
    monkeypatch.setattr(keys, "UNKNOWN_KEY_SECONDS", 0.0)
    assert (await tokens.caller(issuer.token("b"))).tenant == "acme"
    with pytest.raises(TokenRefused):
        await tokens.caller(issuer.token("a"))  # it was withdrawn
    issuer.stop()
    monkeypatch.setattr(keys, "KEYS_SECONDS", 0.0)
    assert (await tokens.caller(issuer.token("b"))).tenant == "acme"
    monkeypatch.setattr(keys, "KEYS_STALE_SECONDS", 0.0)
    with pytest.raises(ProviderAway):
        await tokens.caller(issuer.token("b"))


async def test_a_provider_with_a_different_issuer_is_refused(issuer: Issuer) -> None:
    issuer.calls_itself = "https://id.example"
    with pytest.raises(ProviderAway):
        await tokens_of(issuer).caller(issuer.token())


async def test_keys_come_from_a_safe_address_only(issuer: Issuer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps({"keys": [_public("a")]}))
    for address in (file.as_uri(), "http://id.example/keys", "x", None):
        issuer.keys_url = address or "None"
        with pytest.raises(ProviderAway):
            await tokens_of(issuer).caller(issuer.token())


async def test_the_gateway_takes_tokens(valkey: Server, namespace: str, tmp_path: Path, issuer: Issuer) -> None:
    environ = {
        "WEFT_HTTP_AUTH": "keys", "WEFT_HTTP_OIDC_ISSUER": issuer.url, "WEFT_HTTP_OIDC_AUDIENCE": AUDIENCE,
    }  # fmt: skip
    async with gateway_fleet(valkey, namespace, tmp_path, environ=environ) as fleet, http(fleet) as client:

        def bearer(token: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {token}"}

        issuer.stop()
        away = await client.get("/v1/tasks", headers=bearer(issuer.token()))
        assert problem(away) == (503, "overloaded", "Authorization")
        assert int(away.headers["retry-after"]) >= 1
        issuer.start()

        body = {"agent": "echo", "input": 1, "task_id": "order"}

        async def lets_in() -> bool:
            return (await client.post("/v1/tasks", json=body, headers=bearer(issuer.token()))).status_code == 202

        await until(lets_in, 30.0, "the provider's keys")
        shown = await client.get("/v1/tasks/order", headers=bearer(issuer.token()))
        assert shown.json()["task_id"] == "acme.order"
        other = await client.get("/v1/tasks/acme.order", headers=bearer(issuer.token(tenant="evil")))
        assert problem(other) == (404, "no-task", "task_id")
        refused = await client.post("/v1/tasks/order/cancel", json={}, headers=bearer(issuer.token()))
        assert problem(refused)[:2] == (403, "forbidden")
        for token in (unsigned(issuer.token()), issuer.token(aud="other"), issuer.token(exp=1), "a.b.c", "a"):
            answer = await client.get("/v1/tasks", headers=bearer(token))
            assert problem(answer) == (401, "unauthorized", "Authorization")
