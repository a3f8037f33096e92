"""A receiver of OTLP over HTTP, in place of a collector: it keeps everything."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """One received span. Ids are hexadecimal digits; `parent` is empty for a root."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    kind: int
    attributes: Mapping[str, object]
    links: tuple[tuple[str, str], ...]
    """Pairs of trace and span."""
    error: bool
    resource: Mapping[str, object] = field(repr=False)


class OtlpReceiver:
    """Listens on a free port: `with OtlpReceiver() as receiver`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Span] = []
        self.encodings: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                encoding = self.headers.get("Content-Encoding", "")
                if encoding == "gzip":
                    body = gzip.decompress(body)
                outer._take(body, encoding)
                answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Nobody reads them."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    @property
    def endpoint(self) -> str:
        """Return the address for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def spans(self, trace: str = "") -> list[Span]:
        """Return all spans so far, or those of one trace."""
        with self._lock:
            return [span for span in self._spans if not trace or span.trace == trace]

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, body: bytes, encoding: str) -> None:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
        made = [
            _span(span, _values(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._lock:
            self._spans += made
            self.encodings.add(encoding)


def _span(span: trace_pb2.Span, resource: Mapping[str, object]) -> Span:
    return Span(
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        name=span.name,
        service=str(resource["service.name"]),
        kind=span.kind,
        attributes=_values(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        error=span.status.code == 2,
        resource=resource,
    )


def _values(pairs: object) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}  # type: ignore[attr-defined]  # protobuf's own sequence


def _value(value: AnyValue) -> object:
    return getattr(value, str(value.WhichOneof("value")))
