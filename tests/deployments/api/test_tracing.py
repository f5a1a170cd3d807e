"""Spans of a request: whose trace, which phases, and that none of its words are in them."""

import asyncio
import gzip
import subprocess
import sys
import threading
import types
from collections.abc import AsyncGenerator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rayfin.actors.errors import InvalidConfig, RequestFailed
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.serve.ingress import IngressDeployment
from rayfin.deployments.serve.model_service import start_tracing
from rayfin.deployments.telemetry.tracing import Tracing

pytestmark = [pytest.mark.anyio, pytest.mark.slow(reason="starts processes")]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(service: Any, engine: Any) -> InMemorySpanExporter:
    """What is exported; the engine says that its requests had to wait."""
    exporter = InMemorySpanExporter()
    service.tracing = Tracing(SimpleSpanProcessor(exporter), "tiny")
    plain = engine._deltas

    def queued(request: Any) -> Any:
        deltas = plain(request)
        deltas[-1].queued = 1e-6
        return deltas

    engine._deltas = queued
    trace_streams(engine, service.tracing)
    return exporter


def trace_streams(engine: Any, tracing: Tracing) -> None:
    """Lets ``tracing`` observe the engine's streams, as an ``EnginePool`` does."""
    stream = engine.stream

    async def traced(request: Any) -> AsyncGenerator[Any, None]:
        with tracing.observe(request) as observe:
            async with aclosing(stream(request)) as deltas:
                async for delta in deltas:
                    observe(delta)
                    yield delta

    engine.stream = traced


async def ask(service: Any, body: dict[str, Any], **headers: str) -> int:
    transport = httpx.ASGITransport(build_api(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await http.get("/health")
        answer = await http.post("/v1/completions", json=body, headers=headers)
    return answer.status_code


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_phases(service: Any, spans: InMemorySpanExporter, stream: bool) -> None:
    body = {"prompt": "canary", "max_tokens": 6, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "label"}
    assert await ask(service, body, **headers) == 200
    found = by_name(spans)
    assert set(found) == {"POST /v1/completions", "generate", "queue", "prefill", "decode"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    top, generate = found["POST /v1/completions"], found["generate"]
    assert f"{top.parent.span_id:016x}" == PARENT
    assert generate.parent.span_id == top.context.span_id
    queue, prefill, decode = (found[name] for name in ("queue", "prefill", "decode"))
    assert all(own.parent.span_id == generate.context.span_id for own in (queue, prefill, decode))
    assert queue.start_time == generate.start_time and decode.end_time == generate.end_time
    assert queue.end_time == prefill.start_time == queue.start_time + 1000
    assert prefill.end_time == decode.start_time <= decode.end_time
    assert generate.attributes["gen_ai.usage.output_tokens"] == 6
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert top.attributes["http.response.status_code"] == 200
    assert top.attributes["rayfin.request_id"] == "label"
    assert "canary" not in "".join(span.to_json() for span in found.values())


async def test_failures(service: Any, engine: Any, spans: InMemorySpanExporter) -> None:
    engine.refusal = RequestFailed("the canary died")
    assert await ask(service, {"prompt": "canary"}) == 500
    found = by_name(spans)
    assert set(found) == {"POST /v1/completions", "generate", "queue"}
    assert not found["generate"].status.is_ok and not found["POST /v1/completions"].status.is_ok
    assert found["generate"].status.description == "RequestFailed"
    assert "canary" not in "".join(span.to_json() for span in found.values())


async def test_requests_at_once_have_traces_of_their_own(
    service: Any, spans: InMemorySpanExporter
) -> None:
    body = {"prompt": "x", "max_tokens": 2, "n": 2}
    await asyncio.gather(*(ask(service, body) for _ in range(3)))
    all_spans = spans.get_finished_spans()
    traces: dict[int, list[str]] = {}
    for span in all_spans:
        traces.setdefault(span.context.trace_id, []).append(span.name)
    assert len(traces) == 3
    assert {names.count("generate") for names in traces.values()} == {2}


async def test_a_collector_gets_them(service: Any, engine: Any) -> None:
    """Over OTLP, as bytes on a socket."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        service.tracing = Tracing.to(endpoint, "tiny")
        trace_streams(engine, service.tracing)
        assert await ask(service, {"prompt": "x", "max_tokens": 2}) == 200
        await asyncio.to_thread(service.tracing.close)
        server.shutdown()
    sent = [
        ExportTraceServiceRequest.FromString(body) for path, body in got if path == "/v1/traces"
    ]
    spans = [
        span.name
        for own in sent
        for resource in own.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(spans) == ["POST /v1/completions", "decode", "generate", "prefill", "queue"]


async def test_off_without_an_endpoint(service: Any) -> None:
    assert service.tracing is None
    assert await ask(service, {"prompt": "x", "max_tokens": 2}) == 200


async def test_what_is_left_is_sent_at_the_end(service: Any) -> None:
    """Serve awaits the deployment's ``__del__``; a batch of spans may not have gone by then."""
    exporter = InMemorySpanExporter()
    service.tracing = Tracing(BatchSpanProcessor(exporter, schedule_delay_millis=10**7), "tiny")
    assert await ask(service, {"prompt": "x", "max_tokens": 2}) == 200
    assert not exporter.get_finished_spans()
    ingress = types.SimpleNamespace(_served=ServedModels([service]))
    await IngressDeployment.func_or_class.__bases__[0].__del__(ingress)
    assert set(by_name(exporter)) == {"POST /v1/completions"}
    assert service.client.closed


def test_without_its_packages_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rayfin.deployments.telemetry.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(InvalidConfig, match=r"pip install -e '\.\[tracing\]'") as error:
        start_tracing("http://127.0.0.1:4318/v1/traces", "tiny")
    assert error.value.param == "otlp_traces_endpoint"


def test_a_server_without_traces_needs_none_of_its_packages() -> None:
    modules = ("deployments.serve.ingress", "deployments.api.app", "deployments.app")
    script = "import sys\nsys.modules['opentelemetry.exporter.otlp'] = None\n"
    script += "".join(f"import rayfin.{name}\n" for name in modules)
    script += "assert 'rayfin.deployments.telemetry.tracing' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
