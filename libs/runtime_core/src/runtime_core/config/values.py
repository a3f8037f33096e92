"""Reads one variable of the environment at a time and checks its text by kind. Misspelt names are refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import overload

from runtime_core.errors import ConfigurationError
from runtime_core.telemetry.redaction import patterns_of

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
PASSWORD = re.compile(r"(?<=://)([^:/@]*):.*@")
PASSWORD_OPTION = re.compile(r"(?<=password=)[^&]*")
UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


class SettingValues:
    """Reads variables of one environment. Every method returns None or the default where the variable is not set.

    Raises ConfigurationError: one line with the variable, its value and what is allowed.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def text(self, variable: str) -> str | None:
        """The value without surrounding white space. Refuses one in quotes: they would belong to it."""
        text = self._environ.get(variable, "").strip()
        if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" and text[0] not in text[1:-1]:
            # As `docker run --env-file` passes them on. A value that is shown may be a secret.
            raise ConfigurationError(f"{variable}: its value is in quotes, which belong to it: write it without them")
        return text or None

    def path(self, variable: str, default: str) -> Path:
        """Absolute, and `~` replaced."""
        text = self.text(variable) or default
        try:
            return Path(os.path.abspath(Path(text).expanduser()))
        except RuntimeError:
            raise wrong(variable, text, "a folder: there is no home folder for the ~ in it") from None

    def name(self, variable: str) -> str | None:
        value = self.text(variable)
        if value is not None and not NAME.fullmatch(value):
            raise wrong(variable, value, "1 to 64 letters, digits, `_` or `-`")
        return value

    def names(self, variable: str) -> tuple[str, ...]:
        text = self.text(variable)
        if text is None:
            return ()
        values = tuple(value.strip() for value in text.split(","))
        if not all(NAME.fullmatch(value) for value in values) or len(set(values)) < len(values):
            raise wrong(variable, text, "different names with commas between them (letters, digits, `_` or `-`)")
        return values

    def patterns(self, variable: str) -> str | None:
        """Regular expressions separated by white space."""
        text = self.text(variable)
        patterns_of(text or "")
        return text

    @overload
    def whole(self, variable: str, low: int, high: int, default: int) -> int: ...
    @overload
    def whole(self, variable: str, low: int, high: int, default: None) -> int | None: ...
    def whole(self, variable: str, low: int, high: int, default: int | None) -> int | None:
        text = self.text(variable)
        if text is None:
            return default
        # isdecimal alone would take digits of other scripts, and int alone `1_000` and ` 1`.
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise wrong(variable, text, f"a whole number from {low} to {high}")
        return value

    def port(self, variable: str) -> int | None:
        return self.whole(variable, 0, 65535, None)

    def flag(self, variable: str) -> bool:
        return self.whole(variable, 0, 1, 0) == 1

    def heap(self, variable: str, least_bytes: int, default: str) -> str:
        """Memory in the JVM's notation: `512m`, `2g`."""
        text = self.text(variable)
        if text is None:
            return default
        unit = UNITS.get(text[-1].lower(), 0)
        if not (text.isascii() and text[:-1].isdecimal() and len(text) < 20) or int(text[:-1]) * unit < least_bytes:
            raise wrong(variable, text, f"{default} or more, as in {default} or 2g")
        return text

    def seconds(self, variable: str, low: float, high: float, default: float) -> float:
        text = self.text(variable)
        if text is None:
            return default
        try:
            # float alone would take digits of other scripts, and `1_000`.
            value = float(text) if text.isascii() and "_" not in text else -1.0
        except ValueError:
            value = -1.0
        if not low <= value <= high:  # NaN is refused here too
            raise wrong(variable, text, f"seconds from {low:g} to {high:g}")
        return value

    def choice(self, variable: str, allowed: tuple[str, ...], default: str) -> str:
        text = self.text(variable)
        if text is None:
            return default
        if text.lower() not in allowed:
            raise wrong(variable, text, " or ".join(allowed))
        return text.lower()

    def matching(self, variable: str, pattern: re.Pattern[str], allowed: str) -> str | None:
        """A URL, or another value with a fixed shape; no password in it is shown."""
        text = self.text(variable)
        if text is not None and not pattern.fullmatch(text):
            raise wrong(variable, without_password(text).partition(";")[0], allowed)  # a token may follow
        return text


def without_password(url: str) -> str:
    """The URL as it may be shown: each password is replaced by `***`."""
    return PASSWORD_OPTION.sub("***", PASSWORD.sub(r"\1:***@", url))


def wrong(variable: str, value: str, allowed: str) -> ConfigurationError:
    """The error for a value that is not allowed."""
    shown = value if len(value) <= 80 else value[:80] + "…"
    return ConfigurationError(f"{variable}={shown!r}: must be {allowed}")


PREFIX = "WEFT_"
OTHERS = ("WEFT_APP_", "WEFT_TEST_", "WEFT_CHAOS_")
"""Variables that Weft never reads: `WEFT_APP_…` is for the user's app, the rest for the tests of this repository."""
RESERVED = ("WEFT_HTTP_PORT",)
"""Reserved for an HTTP gateway, which is not part of this release: a shared environment may set it."""
OF_A_SERVICE = re.compile(r"WEFT(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""Variables that Kubernetes puts into a container for a Service called `weft` or `weft-…`."""


def refuse_unknown(environ: Mapping[str, str], fields: Collection[str]) -> None:
    """Raises ConfigurationError for a non-empty variable that begins with `WEFT_` and is not known.

    `fields` are the names of the settings, as `lease_seconds` for `WEFT_LEASE_SECONDS`.
    """
    known = {*(f"{PREFIX}{field.upper()}" for field in fields), *RESERVED}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known or variable.startswith(OTHERS):
            continue
        if not environ[variable].strip():
            continue
        raise ConfigurationError(f"{variable}: {_remedy(variable, known)}")


def _remedy(variable: str, known: Collection[str]) -> str:
    if OF_A_SERVICE.fullmatch(variable):
        return "Kubernetes has set it for a Service of that name: set enableServiceLinks: false in the pod"
    near = difflib.get_close_matches(variable, sorted(known), n=1, cutoff=0.8)
    if near:
        return f"there is no such setting; did you mean {near[0]}?"
    return "there is no such setting: remove it; what your app reads itself may begin with WEFT_APP_"
