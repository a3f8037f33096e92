"""What tasks need of services, in a process beside which none run: schedules, and an end of waits for engines."""

from __future__ import annotations

from runtime_core.bus.event_bus import EventBus
from runtime_core.consumer.owner import Owner
from runtime_core.errors import Fenced
from runtime_core.host.host import Host
from runtime_core.ingress.admission import Admission
from runtime_core.ingress.scheduler import Scheduler
from runtime_core.maintenance.engines import LOOK_SECONDS, EngineWatch
from runtime_core.periodic import Periodic


def carry_small_services(host: Host, bus: EventBus) -> None:
    """Start due schedules of a namespace with one partition, and end steps of engines that no gateway serves."""
    # The broker lets only an owner that lives end a step.
    owned = EventBus(bus.transport, bus.keys)
    owner = Owner(owned, "engine-watch", 3 * LOOK_SECONDS)
    engines = EngineWatch(owned, anyone_may_come=False)

    async def look() -> None:
        try:
            await owner.beat()
        except Fenced:  # at the first look, and where the loop was held for longer than the lease
            await owner.enter()
        await engines.look()

    watch = Periodic("watch engines", LOOK_SECONDS, look)

    async def begin() -> None:
        watch.start()

    host.add(start=begin, stop=watch.stop)
    host.add(run=Scheduler(bus, Admission([bus])).run)
