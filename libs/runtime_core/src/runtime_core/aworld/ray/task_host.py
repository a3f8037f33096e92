"""What runs in a worker of Ray that hosts whole tasks: an actor with the handlers of the tasks' app."""

from __future__ import annotations

import logging
import os

import msgspec
from ray import cloudpickle

from runtime_core.aworld.hosted import HostsWanted
from runtime_core.aworld.sent import unpack
from runtime_core.config.settings import Settings
from runtime_core.errors import WeftError
from runtime_core.host import task_host
from runtime_core.host.host import Host

_WANTED = msgspec.msgpack.Decoder(HostsWanted)

logger = logging.getLogger(__name__)


def dumps(value: object) -> bytes:
    """Make bytes of objects for `start`: also of those that no module has, with their code."""
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


class TaskHost:
    """One host. It takes tasks from the broker as a handler service does, so that others adopt them when it dies."""

    def __init__(self) -> None:
        self._host: Host | None = None

    async def start(self, wanted: bytes, in_flight: int) -> str:
        """Read from the broker; why that cannot be, in one line, else empty. `wanted` is a HostsWanted."""
        told = _WANTED.decode(wanted)
        try:
            app = unpack(told.app, cloudpickle.loads)
            self._host = await task_host.build(app, Settings.from_environment(told.environ), in_flight)
            await self._host.start()
        except WeftError as error:
            return str(error) or type(error).__name__
        logger.info("hosts tasks in process %d", os.getpid())
        return ""

    async def run(self) -> None:
        """Work until `stop`; raises what ends a handler."""
        assert self._host is not None
        await self._host.run()

    async def stop(self) -> None:
        """Finish what is in hand, or hand it back."""
        if self._host is not None:
            await self._host.stop()
