"""Variables that look like settings of Weft and are none: a misspelt one is refused, not ignored."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping

from runtime_core.errors import ConfigurationError

PREFIX = "WEFT_"
OTHERS = ("WEFT_APP_", "WEFT_TEST_", "WEFT_CHAOS_")
"""What Weft never reads: `WEFT_APP_…` is for the user's app, the rest for the tests of this repository."""
RESERVED = ("WEFT_HTTP_PORT",)
"""Of an HTTP gateway, which is no part of this release: an environment that all services share may name it."""
OF_A_SERVICE = re.compile(r"WEFT(_[A-Z0-9_]+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes puts into a container for a Service that is called `weft` or `weft-…`."""


def refuse_unknown(environ: Mapping[str, str], fields: Collection[str]) -> None:
    """Raises ConfigurationError for a variable that begins with `WEFT_`, is set to something and belongs to nobody.

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
