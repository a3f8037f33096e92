"""RayEngine: any functions on a Ray cluster, for programs that have no gateway."""

from __future__ import annotations

from runtime_core.clusters.driver.engine import DriverEngine
from runtime_core.clusters.ray.settings import ADDRESS


class RayEngine(DriverEngine):
    """Runs calls as tasks of the cluster at `RunConfig.address`, or WEFT_RAY_ADDRESS, or on a Ray of its own here.

    Functions and arguments go through cloudpickle; workers import what stands in modules, so they need those. Each
    call takes a processor of the cluster. With no `worker_num` as many run at once as the cluster has processors.
    """

    engine = "ray"
    package = "ray"
    cloudpickle = "ray.cloudpickle"
    address = ADDRESS
