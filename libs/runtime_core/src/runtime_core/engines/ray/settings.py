"""How a driver reaches its Ray, or starts one: read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from runtime_core.engines.driver.backend import Away
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError

ADDRESS = "WEFT_RAY_ADDRESS"
LOCAL_CPUS = "WEFT_RAY_LOCAL_CPUS"
LOCAL_STORE_BYTES = "WEFT_RAY_LOCAL_STORE_BYTES"
DASHBOARD = "WEFT_RAY_DASHBOARD"
JOBS_URL = "WEFT_RAY_JOBS_URL"

LEAST_STORE_BYTES = 80 * 1024**2
"""Ray refuses less."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """Where Ray is, and where results go."""

    address: str
    """`host:port` of the head's GCS, or `auto`; empty: a Ray of the driver's own on this machine."""
    namespace: str
    """Weft's: a keeper serves one of them."""
    local_cpus: int
    local_store_bytes: int
    dashboard: bool
    """Whether a Ray of the driver's own has a dashboard, which batch jobs need."""
    jobs_url: str
    """Of the Jobs API; empty: the cluster's dashboard."""
    results: Results

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RaySettings:
        """Raises Away for a variable that cannot be used."""
        # First: what other settings are checked for includes this one, in other words.
        address = _address(environ.get(ADDRESS, "").strip())
        try:
            results = Results.from_environment(environ)
        except ConfigurationError as error:
            raise Away(str(error)) from error
        return cls(
            address=address,
            namespace=environ.get("WEFT_NAMESPACE", "").strip() or "weft",
            local_cpus=_whole(environ, LOCAL_CPUS, os.cpu_count() or 1, 1),
            local_store_bytes=_whole(environ, LOCAL_STORE_BYTES, 512 * 1024**2, LEAST_STORE_BYTES),
            dashboard=environ.get(DASHBOARD, "").strip() == "1",
            jobs_url=environ.get(JOBS_URL, "").strip(),
            results=results,
        )


def _address(text: str) -> str:
    if not text or text == "auto":
        return text
    if "://" in text:
        why = "Ray Client is not supported, since work that it has submitted ends with it" if "ray:" in text else ""
        raise Away(f"{ADDRESS}={text!r}: {why or 'not an address'}: give host:port of the head (its GCS), or 'auto'")
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise Away(f"{ADDRESS}={text!r}: not host:port; give that of the head's GCS, as in 'ray-head:6379', or 'auto'")
    return text


def _whole(environ: Mapping[str, str], variable: str, default: int, low: int) -> int:
    text = environ.get(variable, "").strip()
    if not text:
        return default
    if not text.isdecimal() or len(text) > 15 or int(text) < low:
        raise Away(f"{variable}={text!r}: must be a whole number from {low}")
    return int(text)
