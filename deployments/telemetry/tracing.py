"""OpenTelemetry spans of the requests for tokens, sent over OTLP; off unless an endpoint is given.

    POST /v1/chat/completions   at the ingress, until the last byte; part of the caller's trace if
    │                           the request has a ``traceparent`` (W3C)
    └── generate                one for each choice
        ├── queue               until the engine admits it, as measured by the engine
        ├── prefill             until its first token
        └── decode              until its last token

Names of attributes are those of OpenTelemetry's conventions for generative AI, as in vLLM's spans.
Spans hold no text and no key. This module needs the packages of the extra ``tracing``.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rayfin import __version__
from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.deployments.telemetry.load import GENERATING

NANOSECONDS = 1_000_000_000


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to an OTLP collector over HTTP, such as http://127.0.0.1:4318/v1/traces."""
    exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
    return exporter


class Tracing:
    """The spans of one ingress."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        resource = Resource.create({"service.name": "rayfin", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._model = model
        self.tracer: Tracer = self._provider.get_tracer("rayfin", __version__)

    @classmethod
    def to(cls, endpoint: str, model: str) -> "Tracing":
        """See ``otlp_exporter``."""
        return cls(BatchSpanProcessor(otlp_exporter(endpoint)), model)

    def layer(self, app: ASGIApp) -> ASGIApp:
        """Wraps the application."""
        return TraceRequests(app, self)

    def close(self) -> None:
        """Sends the remaining spans; waits until they are sent."""
        self._provider.shutdown()

    @contextmanager
    def observe(self, request: EngineRequest) -> Iterator[Callable[[TokenDelta], None]]:
        """Records a span for one stream and its phases; gives the function to call per delta."""
        started, first, tokens, queued = time.time_ns(), 0, 0, 0.0
        span = self.tracer.start_span("generate", start_time=started)

        def observe(delta: TokenDelta) -> None:
            nonlocal first, tokens, queued
            tokens += len(delta.tokens)
            if delta.tokens and not first:
                first = time.time_ns()
            if delta.finish_reason is not None:
                queued = delta.queued
                span.set_attribute("gen_ai.response.finish_reasons", [delta.finish_reason])

        try:
            yield observe
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            ended = time.time_ns()
            span.set_attributes(
                {
                    "gen_ai.request.id": request.request_id,
                    "gen_ai.response.model": self._model,
                    "gen_ai.usage.input_tokens": len(request.prompt),
                    "gen_ai.usage.output_tokens": tokens,
                    "gen_ai.latency.time_in_queue": queued,
                }
            )
            self._record_phases(span, started, int(queued * NANOSECONDS), first, ended)
            span.end(ended)

    def _record_phases(
        self, parent: trace.Span, started: int, queued: int, first: int, ended: int
    ) -> None:
        """Records a span for each phase that took place; times in nanoseconds."""
        admitted = min(started + queued, first or ended)
        phases = [("queue", started, admitted)]
        if first:
            phases += [("prefill", admitted, first), ("decode", first, ended)]
        context = trace.set_span_in_context(parent)
        for name, begin, end in phases:
            self.tracer.start_span(name, context, start_time=begin).end(end)


class TraceRequests:
    """ASGI: records a span for each request for tokens, in its caller's trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = get_route_path(scope) if scope["type"] == "http" else ""
        if path not in GENERATING:
            return await self._app(scope, receive, send)
        context = self._propagator.extract(dict(Headers(scope=scope)))
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "url.path": path,
            "rayfin.request_id": scope.get("state", {}).get("request_id", ""),
        }
        with self._tracing.tracer.start_as_current_span(
            f"{scope['method']} {path}",
            context,
            SpanKind.SERVER,
            attributes,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:

            async def send_and_record(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    span.set_attribute("http.response.status_code", status)
                    if status >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            try:
                await self._app(scope, receive, send_and_record)
            except Exception as error:  # its text may contain a prompt's
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise
