"""Where a broker is: a URL, read once."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, unquote, urlsplit

from runtime_core.errors import ConfigurationError

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix", "redis+sentinel")


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

    Options: `?ca_file=…` and `?verify=none` for TLS. Raises ConfigurationError naming WEFT_REDIS_URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ConfigurationError(
            f"WEFT_REDIS_URL: {parts.scheme or url!r} is not a scheme that Weft knows; use {', '.join(SCHEMES)}"
        )
    options = parse_qs(parts.query)
    username, password = unquote(parts.username or ""), unquote(parts.password or "")
    tls = parts.scheme in ("rediss", "valkeys") or options.get("tls", [""])[0] == "1"
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
        hosts = parts.netloc.rpartition("@")[2].split(",")
        sentinels = tuple(
            (host or "127.0.0.1", int(port or 26379)) for host, _, port in (h.partition(":") for h in hosts)
        )
        if not segments:
            raise ConfigurationError(
                "WEFT_REDIS_URL: name the Sentinel master, as in redis+sentinel://host:26379/mymaster/0"
            )
        database = _database(segments[1]) if len(segments) > 1 else 0
        return replace(base, sentinels=sentinels, master=segments[0], database=database)
    try:
        port = parts.port or 6379
    except ValueError:
        raise ConfigurationError(
            f"WEFT_REDIS_URL: the port of {parts.netloc.rpartition('@')[2]!r} is not a number"
        ) from None
    database = _database(segments[0] if segments else options.get("db", ["0"])[0])
    return replace(base, host=parts.hostname or "127.0.0.1", port=port, database=database)


def _database(text: str) -> int:
    if not text.isdigit():
        raise ConfigurationError(f"WEFT_REDIS_URL: the database {text!r} is not a number")
    return int(text)
