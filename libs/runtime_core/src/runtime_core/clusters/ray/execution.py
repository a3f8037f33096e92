"""One call, whatever its kind: a task, a call of an actor, or a map of either. In the driver, and in the keeper."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import ray

from runtime_core.clusters.ray.actors import Actors
from runtime_core.clusters.ray.mapping import run_map
from runtime_core.clusters.ray.tasks import Tasks
from runtime_core.clusters.ray.worker import Answer, Items, Job
from runtime_core.engines.protocol import Mapped, Outcome, Report, Resources, Work
from runtime_core.engines.results import Results

NODES_SECONDS = 5.0
"""How long what is known of the nodes is taken for true."""
MOST_IN_FLIGHT = 1000
"""Tasks of one map."""

logger = logging.getLogger(__name__)


class Execution:
    """Runs work on the cluster that this process has joined."""

    def __init__(self) -> None:
        self.actors = Actors()
        self._tasks = Tasks()
        self._nodes: list[dict[str, float]] = []
        self._nodes_at = -NODES_SECONDS

    async def run(self, work: Work, results: Results, report: Report) -> Outcome:
        """Run one call to its end. Cancelled, it stops it where it runs."""
        nodes = await self._known_nodes()
        if missing := lacking(work.resources, nodes):
            logger.warning("%s waits: %s", work.name, missing)
            report(msgspec.json.encode({"waiting": "resources", "reason": missing}))

        async def run_one(part: Work, limit: float) -> Answer:
            runner = self.actors if part.actors else self._tasks
            return await runner.run(Job(part, results).packed(), part, limit)

        if isinstance(work.call, Mapped):
            cpus = sum(node.get("CPU", 0) for node in nodes)
            in_flight = work.call.in_flight or max(1, int(4 * cpus))
            return await run_map(work, work.call, min(in_flight, MOST_IN_FLIGHT), run_one, report)
        answer = await run_one(work, work.timeout_seconds)
        assert not isinstance(answer, Items)  # only maps have items
        return answer

    async def _known_nodes(self) -> list[dict[str, float]]:
        now = asyncio.get_running_loop().time()
        if now - self._nodes_at >= NODES_SECONDS:
            self._nodes_at = now
            self._nodes = await asyncio.to_thread(_nodes)
        return self._nodes


def lacking(resources: Resources, nodes: list[dict[str, float]]) -> str:
    """What no node of the cluster has, in one line; empty where one has it all."""
    needs = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": float(resources.memory_bytes), **resources.custom}
    needs = {name: amount for name, amount in needs.items() if amount > 0}
    if not nodes or any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
        return ""
    short = [
        f"{name} {amount:g} (the most that a node has is {largest:g})"
        for name, amount in needs.items()
        if (largest := max(node.get(name, 0) for node in nodes)) < amount
    ]
    return f"no node of the cluster has {', '.join(short) or 'all of ' + ', '.join(needs) + ' together'}"


def _nodes() -> list[dict[str, float]]:
    alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]  # Any: Ray's
    return [node["Resources"] for node in alive]
