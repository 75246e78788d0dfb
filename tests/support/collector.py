"""A collector of OpenTelemetry on loopback: keeps the spans that it is sent, or fails as told."""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class SeenSpan:
    """A span as it was sent. Ids are hexadecimal, times in seconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    began: float
    ended: float
    failed: bool


@dataclass
class Collector:
    """Args: status: of its answers; delay_s: before each."""

    status: int = 200
    delay_s: float = 0.0
    spans: list[SeenSpan] = field(default_factory=list[SeenSpan])
    n_requests: int = 0
    url: str = ""

    def traces(self) -> Mapping[str, list[SeenSpan]]:
        found = defaultdict[str, list[SeenSpan]](list)
        for span in list(self.spans):
            found[span.trace].append(span)
        return found

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [_seen(service, span) for span in scope.spans]


def _seen(service: str, span: Any) -> SeenSpan:
    return SeenSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        tuple(link.trace_id.hex() for link in span.links),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextlib.contextmanager
def collecting(status: int = 200, delay_s: float = 0.0) -> Iterator[Collector]:
    """A collector, until the end of the block."""
    collector = Collector(status, delay_s)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.n_requests += 1
            time.sleep(collector.delay_s)
            if collector.status == 200:
                collector.take(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(collector.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
