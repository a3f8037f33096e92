"""The declaration of an MCP server: how to reach it, which of its tools the app uses, and how to call them."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias, TypedDict, get_args
from urllib.parse import urlsplit

from runtime_core.declare.declaration import (
    NAME,
    Limit,
    Place,
    RetryPolicy,
    checked_limits,
    checked_pool,
    checked_retry,
    checked_timeout,
)
from runtime_core.errors import ConfigurationError

Mode = Literal["auto", "legacy"]
WhenDown = Literal["wait", "fail"]
Named: TypeAlias = Mapping[str, str] | Callable[[], Mapping[str, str]]
"""A mapping of names to strings, or a function that returns one at each connect."""
Limits: TypeAlias = Limit | Sequence[Limit]

_SERVER = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


class MCPSettings(TypedDict, total=False):
    """The options of an MCP server. `App.add_mcp` describes them."""

    command: Sequence[str] | None
    env: Named
    cwd: str | None
    url: str | None
    headers: Named
    tools: Sequence[str]
    prefix: str | None
    pool: str
    timeout_seconds: float
    retry: RetryPolicy | None
    repeatable: bool | Mapping[str, bool]
    limit: Limits | Mapping[str, Limits] | None
    when_down: WhenDown
    mode: Mode
    connect_seconds: float


class MCPServer:
    """An MCP server of an app. `App.add_mcp` describes its options. Its repr shows no header and no variable."""

    ALL = "*"

    def __init__(
        self,
        name: str,
        place: Place,
        *,
        command: Sequence[str] | None = None,
        env: Named | None = None,
        cwd: str | None = None,
        url: str | None = None,
        headers: Named | None = None,
        tools: Sequence[str] = ("*",),
        prefix: str | None = None,
        pool: str = "",
        timeout_seconds: float = 60.0,
        retry: RetryPolicy | None = None,
        repeatable: bool | Mapping[str, bool] | None = None,
        limit: Limits | Mapping[str, Limits] | None = None,
        when_down: WhenDown = "wait",
        mode: Mode = "auto",
        connect_seconds: float = 60.0,
    ) -> None:
        """Raises ConfigurationError for mistakes that show without the server."""
        if not isinstance(name, str) or not _SERVER.fullmatch(name):
            raise ConfigurationError(
                f"MCP server name {name!r} ({place}) cannot be used: start with a letter or _, followed by letters, "
                "digits, _ or -, at most 64 in total"
            )
        self.name = name
        self.place = place
        self.what = f"MCP server {name!r}"
        self.command = self._checked_command(command, url)
        self.url = self._checked_url(url)
        self.env = self._checked_named("env", env, self.command is not None, "command")
        self.headers = self._checked_named("headers", headers, self.url is not None, "url")
        self.cwd = cwd
        if cwd is not None and (not isinstance(cwd, str) or self.command is None):
            raise ConfigurationError(f"{self.what} ({place}) has cwd={cwd!r}: give a path, together with a command")
        self.patterns = self._checked_patterns(tools)
        self.prefix = name if prefix is None else prefix
        if not isinstance(self.prefix, str) or not NAME.fullmatch(self.prefix):
            raise ConfigurationError(f"{self.what} ({place}) has prefix={prefix!r}: use a valid tool name")
        self.pool = checked_pool(self.what, pool, place)
        self.timeout_seconds = checked_timeout(self.what, timeout_seconds, place)
        self.retry = checked_retry(self.what, retry, place)
        self.repeatable = self._checked_repeatable(repeatable)
        self.limits = self._checked_limits(limit)
        """Limits by the server's tool name; `ALL`: one for all tools together."""
        if when_down not in get_args(WhenDown):
            raise ConfigurationError(f"{self.what} ({place}) has when_down={when_down!r}: give 'wait' or 'fail'")
        self.when_down = when_down
        if mode not in get_args(Mode):
            raise ConfigurationError(f"{self.what} ({place}) has mode={mode!r}: give 'auto' or 'legacy'")
        self.mode = mode
        try:
            self.connect_seconds = checked_timeout(self.what, connect_seconds, place)
        except ConfigurationError:
            raise ConfigurationError(
                f"{self.what} ({place}) has connect_seconds={connect_seconds!r}: give a number above 0"
            ) from None

    def __repr__(self) -> str:
        return f"MCPServer({self.name!r})"

    def owns(self, tool: str) -> bool:
        """Return whether a tool of this name would belong to this server."""
        return tool.startswith(f"{self.prefix}.")

    def takes(self, tool: str) -> bool:
        """Return whether the app uses this tool, given by the server's name for it."""
        return any(fnmatch.fnmatchcase(tool, pattern) for pattern in self.patterns)

    def may_repeat(self, tool: str) -> bool | None:
        """Return whether the app lets this tool be repeated; None: it does not say."""
        if self.repeatable is None or isinstance(self.repeatable, bool):
            return self.repeatable
        return self.repeatable.get(tool)

    def limits_of(self, tool: str) -> tuple[str, Sequence[Limit]]:
        """Return the limits of a tool, given by the server's name for it, and the name of all that they count."""
        counted = self.ALL if self.limits.get(self.ALL) else tool
        return f"{self.prefix}.{counted}", self.limits.get(counted, ())

    # -- checks ------------------------------------------------------------------------------------------------

    def _checked_command(self, command: object, url: object) -> tuple[str, ...] | None:
        if (command is None) == (url is None):
            raise ConfigurationError(
                f"{self.what} ({self.place}) needs a command or a url, but not both: write "
                "command=['program', 'argument'] or url='https://…/mcp'"
            )
        if command is None:
            return None
        texts = tuple(command) if isinstance(command, Sequence) and not isinstance(command, str) else ()
        if not texts or not all(isinstance(text, str) and text and "\0" not in text for text in texts):
            raise ConfigurationError(
                f"{self.what} ({self.place}) has command={command!r}: give a list of strings, the program first"
            )
        return texts

    def _checked_url(self, url: object) -> str | None:
        if url is None:
            return None
        try:
            parts = urlsplit(url) if isinstance(url, str) else None
        except ValueError:
            parts = None
        if not isinstance(url, str) or parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{self.what} ({self.place}) has an invalid url: write http://… or https://…")
        return url

    def _checked_named(self, field: str, named: object, fits: bool, beside: str) -> Callable[[], dict[str, str]]:
        """Return a function that returns the mapping, and checks the result of a function."""
        if named is not None and not fits:
            raise ConfigurationError(
                f"{self.what} ({self.place}) has {field} but no {beside}: {field} is for a {beside}"
            )
        source = {} if named is None else named
        if not callable(source):
            fixed = self._texts(field, source)
            return lambda: fixed
        return lambda: self._texts(field, source())

    def _texts(self, field: str, named: object) -> dict[str, str]:
        if not isinstance(named, Mapping) or not all(
            isinstance(key, str) and isinstance(value, str) for key, value in named.items()
        ):
            raise ConfigurationError(f"{self.what} ({self.place}): {field} must map names to strings")
        return dict(named)

    def _checked_patterns(self, patterns: object) -> tuple[str, ...]:
        texts = tuple(patterns) if isinstance(patterns, Sequence) and not isinstance(patterns, str) else ()
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigurationError(
                f"{self.what} ({self.place}) has tools={patterns!r}: give a list of names or patterns, as in ['read_*']"
            )
        return texts

    def _checked_repeatable(self, repeatable: object) -> bool | dict[str, bool] | None:
        if repeatable is None or isinstance(repeatable, bool):
            return repeatable
        if isinstance(repeatable, Mapping) and all(
            isinstance(key, str) and isinstance(value, bool) for key, value in repeatable.items()
        ):
            return dict(repeatable)
        raise ConfigurationError(
            f"{self.what} ({self.place}) has repeatable={repeatable!r}: give True, False, or one of them by tool"
        )

    def _checked_limits(self, limit: object) -> dict[str, Sequence[Limit]]:
        if not isinstance(limit, Mapping):
            return {self.ALL: checked_limits(self.what, limit, self.place)}
        for tool in limit:
            if not isinstance(tool, str) or not NAME.fullmatch(f"{self.prefix}.{tool}"):
                raise ConfigurationError(
                    f"{self.what} ({self.place}) has a limit for {tool!r}: give the server's name of one tool, or a "
                    "Limit alone for all of them together"
                )
        return {tool: checked_limits(f"{self.what}, tool {tool!r},", each, self.place) for tool, each in limit.items()}


def need_sdk(servers: Sequence[MCPServer]) -> None:
    """Raise ConfigurationError if servers are declared and the MCP SDK is not installed."""
    if servers and importlib.util.find_spec("mcp") is None:
        raise ConfigurationError(
            f"{servers[0].what} ({servers[0].place}) needs the MCP SDK, which is not installed: pip install 'weft[mcp]'"
        )
