"""A ray-gateway or spark-gateway over a folder: `python -m tests.engine_backends.gateway ray`.

With `ENGINE_SPANS` it traces, into that file.
"""

from __future__ import annotations

import os
import sys
from functools import partial

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from runtime_core.calls.engine_gateway import RAY, SPARK
from runtime_core.host import app_services
from runtime_core.host.service import serve

SPANS = "ENGINE_SPANS"


def trace_into(path: str) -> None:
    """Writes one span per line, as JSON."""
    provider = TracerProvider()
    file = open(path, "a", buffering=1)  # noqa: SIM115  # as long as the process
    exporter = ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


if __name__ == "__main__":
    if SPANS in os.environ:
        trace_into(os.environ[SPANS])
    served = {"ray": RAY, "spark": SPARK}[sys.argv[1]]
    serve(
        f"{served.name}-gateway",
        partial(app_services.build_gateway, served, backend="tests.engine_backends.folder:Folder"),
    )
