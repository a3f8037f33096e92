"""Login of people at an identity provider: the code flow with PKCE, and what a browser has after it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runtime_core.gateway.keys import CodeLogin, LoginAttempt, Provider, ProviderAway, TokenRefused
from tests.integration.gateway.consoles import Page, console_fleet, page, send
from tests.integration.gateway.gateways import http
from tests.integration.gateway.test_keys_tokens import AUDIENCE, CLIENT, Issuer, issuer
from tests.servers.process import Server

__all__ = ["issuer"]
pytestmark = pytest.mark.timeout(300)
BACK = "http://127.0.0.1/console/login/back"


def login_at(issuer: Issuer, secret: str = "") -> CodeLogin:
    return CodeLogin(Provider(issuer.url, AUDIENCE), CLIENT, secret)


async def approved(issuer: Issuer, login: CodeLogin, attempt: LoginAttempt) -> tuple[str, str]:
    """Return the state and the code of a person who has logged in at the provider."""
    found = issuer.approve(await login.address(attempt, BACK))
    return found["state"], found["code"]


async def test_a_code_becomes_a_token_once(issuer: Issuer) -> None:
    login, attempt = login_at(issuer), LoginAttempt.new()
    state, code = await approved(issuer, login, attempt)
    token = await login.token(attempt, state, code, BACK)
    caller = await login.tokens.caller(token)
    assert (caller.tenant, caller.roles) == ("acme", ("submit", "read"))
    with pytest.raises(TokenRefused, match="refused the login"):
        await login.token(attempt, state, code, BACK)


async def test_a_login_of_another_browser_is_refused(issuer: Issuer) -> None:
    login, own, other = login_at(issuer), LoginAttempt.new(), LoginAttempt.new()
    state, code = await approved(issuer, login, own)
    with pytest.raises(TokenRefused, match="another browser"):
        await login.token(other, state, code, BACK)
    # With this state but the verifier of another attempt, the provider refuses it.
    mixed = LoginAttempt(own.state, own.nonce, other.verifier)
    with pytest.raises(TokenRefused, match="refused the login"):
        await login.token(mixed, state, code, BACK)
    state, code = await approved(issuer, login, own)
    with pytest.raises(TokenRefused, match="answered another login"):
        await login.token(LoginAttempt(own.state, other.nonce, own.verifier), state, code, BACK)


async def test_tokens_of_a_login_must_be_signed_and_for_the_console(issuer: Issuer) -> None:
    login = login_at(issuer)
    for claims in ({"aud": "other"}, {"exp": 1}, {"iss": "http://127.0.0.1/other"}, {"nonce": None}, {"key": "b"}):
        issuer.id_claims = claims
        attempt = LoginAttempt.new()
        state, code = await approved(issuer, login, attempt)
        with pytest.raises(TokenRefused):
            await login.token(attempt, state, code, BACK)


async def test_the_id_token_serves_where_the_access_token_has_another_format(issuer: Issuer) -> None:
    issuer.access_token = "opaque"
    login, attempt = login_at(issuer), LoginAttempt.new()
    state, code = await approved(issuer, login, attempt)
    with pytest.raises(TokenRefused, match="neither token"):
        await login.token(attempt, state, code, BACK)
    issuer.id_claims = {"roles": ["read"]}
    state, code = await approved(issuer, login, attempt)
    caller = await login.tokens.caller(await login.token(attempt, state, code, BACK))
    assert (caller.tenant, caller.roles) == ("acme", ("read",))


async def test_a_client_with_a_secret_sends_it(issuer: Issuer) -> None:
    issuer.secret = "s/1"
    for secret, fits in (("s/1", False), ("", False)):
        login, attempt = login_at(issuer, secret), LoginAttempt.new()
        state, code = await approved(issuer, login, attempt)
        if not fits:
            with pytest.raises(TokenRefused):
                await login.token(attempt, state, code, BACK)
    # It is encoded as a form before it is sent (RFC 6749, 2.3.1).
    issuer.secret = "s%2F1"
    login, attempt = login_at(issuer, "s/1"), LoginAttempt.new()
    state, code = await approved(issuer, login, attempt)
    assert await login.token(attempt, state, code, BACK)


async def test_an_unavailable_provider_logs_no_one_in(issuer: Issuer) -> None:
    issuer.stop()
    with pytest.raises(ProviderAway, match="does not answer"):
        await login_at(issuer).address(LoginAttempt.new(), BACK)


async def test_a_person_logs_in_at_the_provider(valkey: Server, namespace: str, tmp_path: Path, issuer: Issuer) -> None:
    environ = {
        "WEFT_HTTP_AUTH": "keys", "WEFT_HTTP_OIDC_ISSUER": issuer.url, "WEFT_HTTP_OIDC_AUDIENCE": AUDIENCE,
        "WEFT_HTTP_OIDC_CLIENT_ID": CLIENT,
    }  # fmt: skip
    async with console_fleet(valkey, namespace, tmp_path, **environ) as fleet, http(fleet) as client:
        form = await page(client, "/login?next=%2Fconsole%2Fpeople")
        start = form.all("a", **{"class": "button primary"})[0]["href"]
        assert start == "/console/login/start?next=/console/people"
        sent = await client.get(start)
        cookie = sent.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        back = issuer.approve(sent.headers["location"])
        # Without the cookie of this browser, the code logs nobody in.
        async with http(fleet) as other:
            stolen = await other.get("/console/login/back", params=back)
            assert stolen.status_code == 401
            assert "weft_key" not in stolen.headers.get("set-cookie", "")
        done = await client.get("/console/login/back", params=back)
        assert (done.status_code, done.headers["location"]) == (303, "/console/people")
        given = [value for name, value in done.headers.multi_items() if name == "set-cookie"]
        [session] = [value for value in given if value.startswith("weft_key=ey")]
        assert "HttpOnly" in session
        assert "SameSite=strict" in session
        assert "tenant acme" in (await page(client, "/people")).text
        assert (await client.get("/console/system")).status_code == 403
        # Its forms have tokens of their own, and its roles hold: it may start tasks, and cancel none.
        seen = await page(client, "/tasks")
        assert (await client.post("/console/tasks", data={"agent": "listener", "token": "x"})).status_code == 403
        started = await send(client, "/tasks", seen, {"agent": "listener", "text.": "x"})
        task = started.headers["location"].removeprefix("/console").partition("?")[0]
        assert task.startswith("/tasks/acme.")
        assert (await send(client, f"{task}/cancel", seen, {})).status_code == 403
        # Each attempt is used once; a refusal of the provider is shown as text.
        again = await client.get("/console/login/back", params=back)
        assert again.status_code == 401
        refused = await client.get("/console/login/back?error=access_denied&error_description=<b>no</b>")
        assert "<b>no" not in refused.text
        assert "<b>no</b>" in Page(refused.text).text
        client.cookies.clear()
        client.cookies.set("weft_key", issuer.token(exp=int(time.time()) - 60))
        over = await client.get("/console/tasks")
        assert (over.status_code, over.headers["location"].partition("?")[0]) == (303, "/console/login")
        for target in ("https://evil.example/", "//evil.example", "/v1/tasks"):
            sent = await client.get("/console/login/start", params={"next": target})
            landed = await client.get("/console/login/back", params=issuer.approve(sent.headers["location"]))
            assert landed.headers["location"] == "/console"
        issuer.access_token = issuer.token(filler="x" * 4200)
        sent = await client.get("/console/login/start")
        large = await client.get("/console/login/back", params=issuer.approve(sent.headers["location"]))
        assert "too large for a cookie" in large.text
