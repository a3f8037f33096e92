"""The connection of a driver process to its Ray: made in a thread that stays, watched by plain connections.

Ray itself notices late that its head is gone, by then ends the process, or leaves calls waiting for ever. So the two
servers that a driver depends on, the head's GCS and the raylet of its node, are looked at from here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from contextlib import suppress

from runtime_core.clusters.ray.local_ray import ENVIRONMENT, LocalRay
from runtime_core.clusters.ray.settings import ADDRESS, RaySettings
from runtime_core.engines.protocol import Away

RAY_NAMESPACE = "weft"
"""Of Ray's own kind: names of actors are unique in it."""
REACH_SECONDS = 3.0
"""How long a plain connection may take."""
CONNECT_SECONDS = 180.0
"""How long Ray may take to join a cluster, or to start one."""
WATCH_SECONDS = 1.0
FAILURES = 2
"""Connections that fail in a row, until a server is taken for gone."""
SILENT_SECONDS = 30.0
"""How long the GCS may take to answer what is asked of it all the time."""
logger = logging.getLogger(__name__)


class Cluster:
    """One connection; a process makes one in its life."""

    def __init__(self, settings: RaySettings) -> None:
        self.jobs_url = settings.jobs_url
        """Of the Jobs API; empty where the cluster has no dashboard."""
        self._settings = settings
        self._opening: Future[dict[str, str]] | None = None
        self._close = threading.Event()
        self._closed = threading.Event()
        self._lost = False
        self._servers: dict[str, tuple[str, int]] = {}

    async def open(self) -> dict[str, str]:
        """Connect; what Ray says of itself. Raises Away and ImportError; may be called again then."""
        address = self._settings.address
        if address and address != "auto":
            await self._reach(address)
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = Future()
            # A thread of its own, which stays: Ray ties the processes it starts to the thread that starts them.
            threading.Thread(target=self._hold, args=(self._opening,), name="ray connection", daemon=True).start()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                # Shielded: who gives up waiting does not stop it, and comes back to it.
                return await asyncio.shield(asyncio.wrap_future(self._opening))
        except TimeoutError:
            raise Away(f"Ray at {address or 'this machine'} does not answer within {CONNECT_SECONDS:g} s") from None

    async def lost(self) -> str:
        """Wait until one of its servers is gone; which, in one line."""
        watching = [asyncio.create_task(self._gone(name, host, port)) for name, (host, port) in self._servers.items()]
        watching.append(asyncio.create_task(self._silent()))
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            self._lost = True
            return done.pop().result()
        finally:
            for task in watching:
                task.cancel()

    async def gone(self) -> str:
        """Which of its servers is gone at this moment, in one line; empty where all are there."""
        for name, (host, port) in self._servers.items():
            try:
                await _connects(host, port)
            except (OSError, TimeoutError) as error:
                return f"{name} is gone: {str(error) or 'no answer'}"
        return ""

    async def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._opening is None:
            return
        self._close.set()
        await asyncio.to_thread(self._closed.wait)

    async def _reach(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        try:
            await _connects(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            why = str(error) or f"no answer within {REACH_SECONDS:g} s"
            raise Away(f"no Ray at {ADDRESS}={address}: {why}; is its head up, and is this its GCS port?") from None

    # -- the thread ------------------------------------------------------------------------------------------------

    def _hold(self, opened: Future[dict[str, str]]) -> None:
        local: LocalRay | None = None
        try:
            os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
            if not self._settings.address:
                os.environ.update(ENVIRONMENT)
                import ray  # noqa: F401  # before anything is started: it may not be installed

                local = LocalRay(
                    self._settings.local_cpus, self._settings.local_store_bytes, dashboard=self._settings.dashboard
                )
                local.start()
                self.jobs_url = self.jobs_url or local.jobs_url
            info = self._init(local)
        except BaseException as error:
            _shut_down(local)
            # Ray raises whatever it meets, in many lines.
            known = isinstance(error, ImportError | Away)
            opened.set_exception(error if known else Away(f"Ray cannot be joined: {_first_line(error)}"))
            return
        opened.set_result(info)
        self._close.wait()
        # Ray takes its time to leave a head that is gone; this process ends without that.
        _shut_down(local, leave=not self._lost)
        self._closed.set()

    def _init(self, local: LocalRay | None) -> dict[str, str]:
        import ray  # not before the environment says how

        context = ray.init(
            self._settings.address if local is None else local.address,
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level="error",
        )
        own = ray.get_runtime_context().get_node_id()
        node = next(node for node in ray.nodes() if node["NodeID"] == own)
        host, _, port = context.address_info["gcs_address"].rpartition(":")
        self._servers = {
            f"the GCS of its head ({host}:{port})": (host, int(port)),
            "the raylet of the driver's node": (node["NodeManagerAddress"], int(node["NodeManagerPort"])),
        }
        dashboard = context.address_info.get("webui_url")
        if dashboard and not self.jobs_url:
            self.jobs_url = f"http://{dashboard}"
        return {
            "version": f"Ray {ray.__version__}",
            "address": f"{host}:{port}" if local is None else f"{host}:{port} (its own)",
            "cpus": f"{ray.cluster_resources().get('CPU', 0):g}",
        }

    # -- watching --------------------------------------------------------------------------------------------------

    async def _gone(self, name: str, host: str, port: int) -> str:
        failed = 0
        while True:
            try:
                await _connects(host, port)
                failed = 0
            except (OSError, TimeoutError) as error:
                failed += 1
                if failed == FAILURES:
                    return f"{name} is gone: {str(error) or 'no answer'}"
            await asyncio.sleep(WATCH_SECONDS)

    async def _silent(self) -> str:
        """A GCS that takes connections and answers nothing."""
        import ray

        while True:
            asking = asyncio.create_task(asyncio.to_thread(ray.nodes))
            done, _ = await asyncio.wait((asking,), timeout=SILENT_SECONDS)
            if not done:
                return f"the GCS of its head has not answered for {SILENT_SECONDS:g} s"
            if (error := asking.exception()) is not None:
                return f"the GCS of its head fails: {_first_line(error)}"
            if not any(node["Alive"] for node in asking.result()):
                return "none of its nodes lives"
            await asyncio.sleep(5 * WATCH_SECONDS)


async def _connects(host: str, port: int) -> None:
    async with asyncio.timeout(REACH_SECONDS):
        _, writer = await asyncio.open_connection(host, port)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def _shut_down(local: LocalRay | None, *, leave: bool = True) -> None:
    try:
        if leave:
            import ray

            ray.shutdown()
    except Exception as error:
        logger.warning("Ray was not left as it should: %s", _first_line(error))
    if local is not None:
        local.stop()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
