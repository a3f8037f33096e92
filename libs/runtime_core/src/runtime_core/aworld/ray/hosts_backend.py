"""Ray as the driver process of whole tasks uses it: it hosts their handlers, and runs nothing else."""

from __future__ import annotations

from runtime_core.clusters.ray.backend import RayBackend
from runtime_core.engines.protocol import Outcome, Pickled, Report, Work


class HostsBackend(RayBackend):
    """Connects as any driver of Ray. Its work is a HostsWanted (`aworld/place.py`), which is kept until cancelled."""

    async def run(self, work: Work, report: Report) -> Outcome:
        """Keep the hosts; reports `{"hosts": n}` whenever the number of those that read changes."""
        from runtime_core.aworld.ray.hosts import Hosts  # here: Ray reads its environment when it is imported

        assert isinstance(work.call, Pickled)
        return await Hosts(work.call.payload, report).run()
