"""Where a broker is: a URL, read once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, unquote, urlsplit

from runtime_core.errors import ConfigurationError

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+sentinel")
MEMORY = "memory://"
"""A server of this process alone; `bus/private_server.py`."""
OPTIONS = ("ca_file", "db", "tls", "verify")
_QUOTING = "in a password, write / as %2F, ? as %3F, # as %23 and @ as %40"


@dataclass(frozen=True, slots=True)
class Address:
    """One broker: host and port, or a socket's path, with what is needed to be let in."""

    host: str = "127.0.0.1"
    port: int = 6379
    path: str = ""
    username: str = ""
    password: str = ""
    database: int = 0
    tls: bool = False
    ca_file: str = ""
    verify: bool = True
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""

    def at(self, host: str, port: int) -> Address:
        """The same credentials at another host (after a failover or a MOVED)."""
        return replace(self, host=host, port=port)

    def ssl_context(self) -> ssl.SSLContext | None:
        """None where TLS is off. OSError where `ca_file` cannot be used."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    def __str__(self) -> str:
        """Without the password: this goes into messages."""
        if self.path:
            return f"unix://{self.path}"
        if self.master:
            return f"sentinel master {self.master!r}"
        return f"{'rediss' if self.tls else 'redis'}://{self.host}:{self.port}/{self.database}"


def parse_address(url: str) -> Address:
    """Read `redis://`, `rediss://` (TLS), `unix://` or `redis+sentinel://a:26379,b:26379/master/0`.

    Options: `?ca_file=…` and `?verify=none` for TLS. Raises ConfigurationError naming WEFT_REDIS_URL; it
    shows nothing of the URL that may be a part of a password.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ConfigurationError(f"WEFT_REDIS_URL: {error}; write an IPv6 address as [::1]") from None
    if parts.scheme not in SCHEMES:
        raise ConfigurationError(
            f"WEFT_REDIS_URL: {parts.scheme!r} is not a scheme that Weft knows; use {', '.join(SCHEMES)}"
        )
    if parts.fragment or (parts.path.count("@") and parts.scheme != "unix"):
        raise ConfigurationError(f"WEFT_REDIS_URL: it cannot be read: {_QUOTING}")
    options = parse_qs(parts.query, keep_blank_values=True)
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigurationError(
            f"WEFT_REDIS_URL: {unknown[0][:40]!r} is not an option; there are {', '.join(OPTIONS)}"
            if unknown[0].isidentifier()
            else f"WEFT_REDIS_URL: it cannot be read: {_QUOTING}"
        )
    for name, allowed in (("verify", "none"), ("tls", "1")):
        if options.get(name, [allowed])[0] != allowed:
            raise ConfigurationError(f"WEFT_REDIS_URL: {name} must be {allowed!r}, or left out")
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    tls = parts.scheme in ("rediss", "valkeys") or options.get("tls", [""])[0] == "1"
    if not tls and not options.keys().isdisjoint(("ca_file", "verify")):
        raise ConfigurationError(
            "WEFT_REDIS_URL: ca_file and verify are for TLS: write rediss://, or ?tls=1 for others"
        )
    base = Address(
        username=username,
        password=password,
        tls=tls,
        ca_file=options.get("ca_file", [""])[0],
        verify=options.get("verify", [""])[0] != "none",
    )
    if parts.scheme == "unix":
        return replace(base, path=unquote(parts.path), database=_database(options.get("db", ["0"])[0]))
    segments = [segment for segment in parts.path.split("/") if segment]
    if parts.scheme == "redis+sentinel":
        sentinels = tuple(_sentinel(each) for each in parts.netloc.rpartition("@")[2].split(","))
        if not segments:
            raise ConfigurationError(
                "WEFT_REDIS_URL: name the Sentinel master, as in redis+sentinel://host:26379/mymaster/0"
            )
        database = _database(segments[1]) if len(segments) > 1 else 0
        return replace(base, sentinels=sentinels, master=segments[0], database=database)
    try:
        port = 6379 if parts.port is None else parts.port
    except ValueError:
        port = 0
    if not port:
        raise ConfigurationError(f"WEFT_REDIS_URL: the port is no number up to 65535; {_QUOTING}")
    database = _database(segments[0] if segments else options.get("db", ["0"])[0])
    return replace(base, host=_host(parts.hostname), port=port, database=database)


def _sentinel(text: str) -> tuple[str, int]:
    host, _, port = text.partition(":")
    if port and not (_is_number(port) and 0 < int(port) <= 65535):
        raise ConfigurationError(f"WEFT_REDIS_URL: a Sentinel's port is no number up to 65535; {_QUOTING}")
    return _host(host), int(port or 26379)


def _host(name: str | None) -> str:
    try:
        (name or "").encode("idna")
    except UnicodeError:
        raise ConfigurationError(
            "WEFT_REDIS_URL: the host's name cannot be one: a part of it is empty, or longer than 63 letters"
        ) from None
    return name or "127.0.0.1"


def _database(text: str) -> int:
    if not _is_number(text):
        raise ConfigurationError("WEFT_REDIS_URL: the database behind the last / is not a number, as in …:6379/0")
    return int(text)


def _is_number(text: str) -> bool:
    # Digits of other scripts are digits too, and no numbers.
    return text.isascii() and text.isdecimal() and len(text) < 10
