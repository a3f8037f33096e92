"""How a driver reaches its Ray, or starts one: read from the environment once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from runtime_core.config.settings import Settings
from runtime_core.engines.protocol import Away
from runtime_core.engines.results import Results
from runtime_core.errors import ConfigurationError

ADDRESS = "WEFT_RAY_ADDRESS"
DASHBOARD = "WEFT_RAY_DASHBOARD"
JOBS_URL = "WEFT_RAY_JOBS_URL"


@dataclass(frozen=True, slots=True)
class RaySettings:
    """The location of Ray and of results."""

    address: str
    """`host:port` of the head's GCS, or `auto`; empty for the driver's own local Ray."""
    namespace: str
    """Weft's namespace; each has its own keeper."""
    local_cpus: int
    local_store_bytes: int
    dashboard: bool
    """Whether the driver's own local Ray has a dashboard, which batch jobs need."""
    jobs_url: str
    """The URL of the Jobs API; empty for the cluster's dashboard."""
    results: Results

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RaySettings:
        """Read the environment. Raise Away for an invalid variable."""
        # First: the general checks include this one, with a less specific message.
        address = _address(environ.get(ADDRESS, "").strip())
        try:
            settings = Settings.from_environment(environ)
        except ConfigurationError as error:
            raise Away(str(error)) from error
        return cls(
            address=address,
            namespace=settings.namespace,
            local_cpus=settings.ray_local_cpus or os.cpu_count() or 1,
            local_store_bytes=settings.ray_local_store_bytes,
            dashboard=settings.ray_dashboard,
            jobs_url=settings.ray_jobs_url or "",
            results=Results.of_settings(settings),
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
