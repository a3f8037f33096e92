"""The worker of an agent-handler: its consumers with what they need, for the app that is named or given."""

from __future__ import annotations

from runtime_core.app.app import App
from runtime_core.bus.event_bus import EventBus
from runtime_core.config.settings import Settings
from runtime_core.consumer.consumer import Handler
from runtime_core.engines.results import Results
from runtime_core.host.worker import FINISH_PART, LET_GO_PART, Worker
from runtime_core.runs.compute import ProcessCompute
from runtime_core.runs.outgoing import PROCESS_BYTES, Outflow
from runtime_core.runs.turn import TurnHandler
from runtime_core.telemetry.metrics import Metrics

SERVICE = "agent-handler"


async def agent_worker(
    settings: Settings, metrics: Metrics, app: App | None = None, *, in_flight: int | None = None
) -> Worker:
    """A worker that runs agents; None: the app that WEFT_APP names. Raises ConfigurationError.

    `in_flight` is how many turns it takes at once at most.
    """
    worker = await Worker.open(settings, metrics, service=SERVICE, stream="agent", app=app)
    found = worker.app

    worker.at_stop(found.functions.models.close)
    compute = ProcessCompute(settings.engine_processes) if settings.engine_processes else None
    results = Results.of_settings(settings)
    if compute is not None:
        worker.at_stop(compute.close)

    outflow = Outflow(PROCESS_BYTES)

    def handler(bus: EventBus) -> Handler:
        return TurnHandler(
            bus,
            found,
            metrics,
            partitions=settings.partitions,
            compute=compute,
            results=results,
            outflow=outflow,
        )

    worker.consume(
        handler,
        in_flight=in_flight,
        finish_seconds=FINISH_PART * settings.shutdown_seconds,
        let_go_seconds=LET_GO_PART * settings.shutdown_seconds,
    )
    return worker
