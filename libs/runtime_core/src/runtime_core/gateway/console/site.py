"""What every page passes through: login by key, CSRF tokens, security headers, templates, static files, errors."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime_core.gateway.console import views
from runtime_core.gateway.keys import (
    UNKNOWN_KEY_SECONDS,
    ApiKeys,
    Caller,
    CodeLogin,
    LoginAttempt,
    ProviderAway,
    TokenRefused,
    caller_of,
)
from runtime_core.gateway.requests import (
    DEFECT,
    FORBIDDEN,
    METHOD,
    NO_HOST,
    NO_ROUTE,
    OVERLOADED,
    UNAUTHORIZED,
    Limits,
    Problem,
    check_headers,
    is_loopback,
    problem_of,
    read_form,
)
from runtime_core.telemetry.metrics import version

logger = logging.getLogger(__name__)

HOME = "/console"
FOLDER = Path(__file__).parent
KEY_COOKIE, FORM_COOKIE, THEME_COOKIE = "weft_key", "weft_form", "weft_theme"
LOGIN_COOKIE = "weft_login"
"""Of a person who is at the identity provider: the attempt, and the page to show after it."""
COOKIE_MAX_CHARACTERS = 4000
"""Browsers refuse larger cookies."""
TOKEN = "token"  # noqa: S105 - the name of a field
FORM_MAX_BYTES = 4 * 1024 * 1024
"""The largest form. A character of an input of 1 MiB may take three bytes in it."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_STATIC = {path.name: path.read_bytes() for path in sorted((FOLDER / "static").iterdir()) if path.suffix in _TYPES}
_STATIC_VERSION = hashlib.sha256(b"".join(_STATIC.values())).hexdigest()[:12]

NOTICES = {
    "started": "The task has started.",
    "cancelled": "The task was cancelled.",
    "had-completed": "The task had already completed.",
    "had-failed": "The task had already failed.",
    "answered": "The answer was sent.",
    "approved": "Approved.",
    "edited": "Approved, as edited.",
    "denied": "Denied.",
    "sent": "The message was sent.",
    "again": "This task runs it again.",
    "forked": "The fork has started.",
    "redriven": "It was redriven, and runs again.",
    "dropped": "The dead letter was dropped.",
    "scheduled": "The schedule was set.",
    "deleted": "The schedule was deleted.",
    "none": "Nothing was selected.",
    "two": "Select two tasks to compare them.",
}
"""What a page says after an action, by the name in its URL."""
NOTICES_OF_MANY = {
    "cancelled-many": ("1 task was cancelled", "{} tasks were cancelled", "1 had ended before", "{} had ended before"),
    "redriven-of-many": (
        "1 dead letter was redriven", "{} dead letters were redriven",
        "1 selected task has none", "{} selected tasks have none",
    ),
    "redriven-many": ("1 dead letter was redriven", "{} dead letters were redriven", "1 is gone", "{} are gone"),
    "dropped-many": ("1 dead letter was dropped", "{} dead letters were dropped", "1 is gone", "{} are gone"),
}  # fmt: skip
"""Messages for bulk actions: singular, plural, and the reason for skips."""

Form = Mapping[str, list[str]]
"""The fields of a form that was sent."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A request for a page, and who makes it."""

    request: Request
    caller: Caller
    token: str
    """What each form of the page must send back."""
    form: Form

    def may(self, role: str) -> bool:
        return role in self.caller.roles

    def field(self, name: str) -> str:
        """Return a field of the form; empty if it is absent."""
        return self.form.get(name, [""])[0]


Handler = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Page:
    """A method on a path of the console, and the role that it needs (empty: none)."""

    method: str
    path: str
    handler: Handler
    role: str
    every_tenant: bool = False
    """Whether it shows data of all tenants, so that a tenant's key may not open it."""


class Site:
    """Renders pages for callers. None for `keys`: the gateway is open, on loopback only."""

    def __init__(self, limits: Limits, keys: ApiKeys | None, provider: CodeLogin | None = None) -> None:
        """`provider` logs people in without a key."""
        self._limits = limits
        self._keys = keys
        self._provider = provider
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=jinja2.ChainableUndefined,  # records of other releases may lack members
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._templates.filters |= views.FILTERS
        self._templates.globals |= {
            "static": f"{HOME}/static",
            "static_version": _STATIC_VERSION,
            "home": HOME,
            "pages_of": pages_of,
        }
        for name in self._templates.list_templates():
            self._templates.get_template(name)  # compile it now, not while the first person waits

    @property
    def opened(self) -> bool:
        """Whether everyone on this machine may do everything."""
        return self._keys is None

    def routes(self, pages: Sequence[Page]) -> list[Route]:
        by_path: dict[str, dict[str, Page]] = {}
        for one in (
            *pages,
            Page("GET", f"{HOME}/login", self._login_page, ""),
            Page("POST", f"{HOME}/login", self._login, ""),
            Page("POST", f"{HOME}/logout", self._logout, ""),
            Page("GET", f"{HOME}/login/start", self._login_start, ""),
            Page("GET", f"{HOME}/login/back", self._login_back, ""),
        ):
            by_path.setdefault(one.path, {})[one.method] = one
        found = [Route(path, _Entry(self, methods), methods=None) for path, methods in by_path.items()]
        return [*found, Route(f"{HOME}/static/{{name}}", _static), Route("/", _to_home)]

    def render(self, visit: Visit, template: str, /, *, status: int = 200, **values: Any) -> Response:
        """Return a page. (Any: what the template shows.)"""
        query = visit.request.query_params
        text = self._templates.get_template(template).render(
            visit=visit,
            path=visit.request.url.path,
            theme=visit.request.cookies.get(THEME_COOKIE, ""),
            opened=self.opened,
            version=version(),
            notice=notice_of(query),
            **values,
        )
        return HTMLResponse(text, status, HEADERS)

    # -- requests ----------------------------------------------------------------------------------------------

    async def answer(self, request: Request, methods: Mapping[str, Page]) -> Response:
        visit = Visit(request, Caller("", ()), "", {})
        new_cookie = ""
        try:
            check_headers(request)
            page = methods.get(request.method)
            if page is None:
                raise Problem(METHOD, f"send {' or '.join(methods)}", headers={"Allow": ", ".join(methods)})
            caller = await self._caller_of(request)
            secret = request.cookies.get(KEY_COOKIE if caller is not None and self._keys else FORM_COOKIE, "")
            if not secret:
                if request.headers.get("sec-fetch-site") == "cross-site" and request.method == "GET":
                    # A link on another site comes without the cookies, which are strict: load the page once more.
                    return HTMLResponse(self._templates.get_template("again.html").render(), 200, HEADERS)
                secret = new_cookie = secrets.token_urlsafe(32)
            visit = Visit(request, caller or Caller("", ()), _token_of(secret), {})
            if caller is None and page.role:
                return self._ask_to_log_in(request)
            visit = await self._admitted(visit, page)
            response = await page.handler(visit)
        except Exception as error:
            response = self._failed(visit, error)
        if new_cookie:
            set_cookie(request, response, FORM_COOKIE, new_cookie)
        return response

    async def _caller_of(self, request: Request) -> Caller | None:
        address = request.client.host if request.client else ""
        if self._keys is None:
            # As in the API: a web page can point its own host name at 127.0.0.1.
            if not is_loopback(request.headers.get("host", "")):
                raise Problem(NO_HOST, "this gateway has no keys and answers to localhost only", "Host")
            return Caller(address)
        text = request.cookies.get(KEY_COOKIE, "")
        if self._provider is not None and text.count(".") == 2:
            try:
                return await self._provider.tokens.caller(text)
            except TokenRefused:
                return None  # its time is over, most often
            except ProviderAway as error:
                raise Problem(OVERLOADED, str(error), retry_after_seconds=UNKNOWN_KEY_SECONDS) from None
        key = await self._keys.find(text) if text else None
        return None if key is None else caller_of(key)

    async def _admitted(self, visit: Visit, page: Page) -> Visit:
        """Return the visit with its form. Raises Problem if it may not be made."""
        request, caller = visit.request, visit.caller
        address = request.client.host if request.client else ""
        self._limits.count_request(caller.name or address)
        if page.role and page.role not in caller.roles:
            raise Problem(FORBIDDEN, f"your key lacks the role {page.role!r}; it has {', '.join(caller.roles)}")
        if page.every_tenant and caller.tenant:
            raise Problem(FORBIDDEN, f"your key reaches the tasks of tenant {caller.tenant} only")
        if page.method == "GET":
            return visit
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Problem(FORBIDDEN, "the form was sent from another site")
        form = await read_form(request, self._limits, FORM_MAX_BYTES)
        if not hmac.compare_digest(form.get(TOKEN, [""])[0].encode(), visit.token.encode()):
            raise Problem(FORBIDDEN, "the form is too old, or was sent from another site: load the page again")
        return Visit(request, caller, visit.token, form)

    def _failed(self, visit: Visit, error: Exception) -> Response:
        problem = problem_of(error)
        request = visit.request
        if problem is None:
            logger.error("%s %s failed", request.method, request.scope["path"][:200], exc_info=error)
            problem = Problem(DEFECT, "unexpected error; see the log of the gateway")
        if problem.kind is UNAUTHORIZED:
            return self._ask_to_log_in(request)
        response = self.render(
            visit, "error.html", status=problem.kind.status.value, problem=problem, back=_came_from(request)
        )
        response.headers.update(problem.headers or {})
        return response

    # -- login -------------------------------------------------------------------------------------------------

    def _ask_to_log_in(self, request: Request) -> Response:
        back = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.method != "GET":
            back = HOME
        return RedirectResponse(f"{HOME}/login?next={quote(back, safe='')}", 303, HEADERS)

    async def _login_page(self, visit: Visit) -> Response:
        if self._keys is None or visit.caller.roles:
            return RedirectResponse(HOME, 303, HEADERS)
        return self._login_form(visit, visit.request.query_params.get("next", ""))

    def _login_form(self, visit: Visit, back: str, wrong: str = "", status: int = 200) -> Response:
        return self.render(
            visit, "login.html", status=status, next=back, wrong=wrong, provider=self._provider is not None
        )

    async def _login(self, visit: Visit) -> Response:
        text = visit.field("key").strip()
        key = await self._keys.find(text) if self._keys is not None else None
        if key is None:
            return self._login_form(visit, visit.field("next"), "This key is unknown or was revoked.", 401)
        response = RedirectResponse(local_path(visit.field("next")), 303, HEADERS)
        set_cookie(visit.request, response, KEY_COOKIE, text)
        return response

    async def _login_start(self, visit: Visit) -> Response:
        """Send the browser to the identity provider."""
        if self._provider is None:
            raise Problem(NO_ROUTE, "this gateway has no login at an identity provider")
        attempt = LoginAttempt.new()
        try:
            address = await self._provider.address(attempt, _redirect_of(visit.request))
        except ProviderAway as error:
            return self._login_form(visit, visit.request.query_params.get("next", ""), str(error), 503)
        response = RedirectResponse(address, 303, HEADERS)
        back = visit.request.query_params.get("next", "")
        set_cookie(visit.request, response, LOGIN_COOKIE, f"{attempt}.{quote(back[:1000], safe='')}")
        return response

    async def _login_back(self, visit: Visit) -> Response:
        """Take the code with which the browser comes back."""
        query = visit.request.query_params
        if self._provider is None:
            raise Problem(NO_ROUTE, "this gateway has no login at an identity provider")
        *kept, back = visit.request.cookies.get(LOGIN_COOKIE, "").split(".", LoginAttempt.PARTS)
        attempt = LoginAttempt.read(kept)
        back = local_path(unquote(back))
        try:
            if attempt is None or not query.get("code"):
                said = query.get("error_description") or query.get("error") or "no login was begun in this browser"
                raise TokenRefused(f"The identity provider did not log you in: {said[:200]}")
            token = await self._provider.token(
                attempt, query.get("state", ""), query["code"][:2000], _redirect_of(visit.request)
            )
            if len(token) > COOKIE_MAX_CHARACTERS:
                raise TokenRefused("the identity provider's token is too large for a cookie: give it fewer claims")
        except (TokenRefused, ProviderAway) as error:
            response = self._login_form(visit, back, str(error), 401)
        else:
            response = RedirectResponse(back, 303, HEADERS)
            set_cookie(visit.request, response, KEY_COOKIE, token)
        response.delete_cookie(LOGIN_COOKIE, path="/")  # each attempt is used once
        return response

    async def _logout(self, visit: Visit) -> Response:
        response = RedirectResponse(f"{HOME}/login", 303, HEADERS)
        response.delete_cookie(KEY_COOKIE, path="/")
        return response


NAVIGATION = (
    ("", "Overview", "home", "o"),
    ("/tasks", "Tasks", "tasks", "t"),
    ("/people", "People", "people", "p"),
    ("/dead", "Dead letters", "dead", "d"),
    ("/schedules", "Schedules", "clock", "s"),
    ("/agents", "Agents and tools", "agents", "a"),
    ("/usage", "Usage and cost", "usage", "c"),
    ("/system", "System", "system", "y"),
)
"""Path, name, icon and key of each page in the navigation."""


EVERY_TENANT = ("/agents", "/system")
"""Pages that show data of all tenants."""


def pages_of(visit: Visit) -> list[tuple[str, str, str, str]]:
    """Return the pages that the visitor may open."""
    return [each for each in NAVIGATION if each[0] not in EVERY_TENANT or not visit.caller.tenant]


class _Entry:
    """A path of the console, as an ASGI application."""

    def __init__(self, site: Site, methods: Mapping[str, Page]) -> None:
        self._site = site
        self._methods = methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._site.answer(Request(scope, receive, send), self._methods)
        await response(scope, receive, send)


def _token_of(secret: str) -> str:
    """Return the CSRF token that belongs to a cookie."""
    return hmac.new(secret.encode(), b"weft console form", hashlib.sha256).hexdigest()


def set_cookie(request: Request, response: Response, name: str, value: str) -> None:
    """Set a cookie that ends with the browser. Scripts cannot read it, and requests of other sites do not carry it."""
    # The header of a proxy can only make the cookie stricter.
    secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    response.set_cookie(name, value, path="/", httponly=True, samesite="strict", secure=secure)


def _redirect_of(request: Request) -> str:
    """Return where the identity provider sends the browser back to; the provider knows this address."""
    https = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
    return f"{'https' if https else 'http'}://{request.headers.get('host', '')}{HOME}/login/back"


def local_path(text: str) -> str:
    """Return a path of the console, never of another site."""
    parts = urlsplit(text) if text.isprintable() and "\\" not in text else None
    if parts is None or parts.scheme or parts.netloc or not parts.path.startswith(HOME):
        return HOME
    return parts.path + (f"?{parts.query}" if parts.query else "")


def see(path: str, notice: str = "", **counts: int) -> Response:
    """Return a redirect to a page of the console, with the name of a notice that it shows, and its counts."""
    target = local_path(path)
    if notice:
        target += ("&" if "?" in target else "?") + urlencode({"notice": notice, **counts})
    return RedirectResponse(target, 303, HEADERS)


def notice_of(query: Mapping[str, str]) -> str:
    """Return the words of the notice that a page's URL names."""
    name = query.get("notice", "")
    if name not in NOTICES_OF_MANY:
        return NOTICES.get(name, "")
    one, many, one_left, many_left = NOTICES_OF_MANY[name]
    done, left = (int(text) if (text := query.get(each, "")[:4]).isdecimal() else 0 for each in ("done", "left"))
    rest = f"; {one_left if left == 1 else many_left.format(left)}" if left else ""
    return f"{one if done == 1 else many.format(done or 'No')}{rest}."


def _came_from(request: Request) -> str:
    """Return the page of the console that sent the request; empty if there is none."""
    page = urlsplit(request.headers.get("referer", ""))
    if page.netloc != request.url.netloc or not page.path.startswith(HOME):
        return ""
    return page.path + (f"?{page.query}" if page.query else "")


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    data = _STATIC.get(name)
    if data is None:
        return Problem(NO_ROUTE, "there is no such file").response()
    # The version in the URL changes with the files.
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
    return Response(data, 200, headers, _TYPES[Path(name).suffix])


async def _to_home(request: Request) -> Response:
    return RedirectResponse(HOME, 303, HEADERS)
