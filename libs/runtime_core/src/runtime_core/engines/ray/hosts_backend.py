"""Ray as the driver process of whole tasks uses it: it hosts their handlers, and runs nothing else."""

from __future__ import annotations

from runtime_core.engines.driver.backend import Report
from runtime_core.engines.driver.messages import Outcome, Pickled, Work
from runtime_core.engines.ray.backend import RayBackend


class HostsBackend(RayBackend):
    """Connects as any driver of Ray. Its work is a HostsWanted (`runners/hosted.py`), which is kept until cancelled."""

    async def run(self, work: Work, report: Report) -> Outcome:
        """Keep the hosts; reports `{"hosts": n}` whenever the number of those that read changes."""
        from runtime_core.engines.ray.hosts import Hosts  # here: Ray reads its environment when it is imported

        assert isinstance(work.call, Pickled)
        return await Hosts(work.call.payload, report).run()
