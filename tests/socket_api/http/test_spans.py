"""Answers of a model as spans of OpenTelemetry."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from torpor.daemon.errors import ContextOverflow
from torpor.socket_api.server.spans import Traced, traced
from torpor.tests.socket_api.fake_service import FakeService
from torpor.tests.socket_api.http.http_rig import Begin, HttpThread

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HELLO = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
PATH = "/v1/chat/completions"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def server(begin: Begin, exporter: InMemorySpanExporter) -> HttpThread:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return begin(seen_as=lambda service: Traced(service, provider.get_tracer("test")))


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one_span_in_the_clients_trace(
    server: HttpThread, exporter: InMemorySpanExporter, stream: bool
) -> None:
    asked = server.ask("POST", PATH, {**HELLO, "stream": stream}, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert asked.status == 200
    span = only(exporter)
    assert (span.name, span.kind) == ("chat fake", SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    told = dict(span.attributes or {})
    assert told.pop("gen_ai.server.time_to_first_token") is not None
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "torpor",
        "gen_ai.request.model": "fake",
        "gen_ai.conversation.id": "torpor://default/chat",
        "gen_ai.usage.input_tokens": 0,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "torpor.usage.recomputed_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
    }


def test_a_request_without_a_trace_begins_one_and_only_answers_are_spans(
    server: HttpThread, exporter: InMemorySpanExporter
) -> None:
    assert server.ask("GET", "/v1/models", traceparent=f"00-{TRACE}-{PARENT}-01").status == 200
    assert server.ask("POST", PATH, HELLO, traceparent="nonsense").status == 200
    assert only(exporter).parent is None


def test_a_failure_has_its_code_and_no_words(server: HttpThread, exporter: InMemorySpanExporter) -> None:
    """Threat 60."""

    async def converse(request: object) -> None:
        raise ContextOverflow("secret words", token_count=1, wanted_tokens=2, context_tokens=3)

    server.service.answers = {
        kind: converse if kind.__name__ == "ConverseRequest" else answer  # type: ignore[dict-item]
        for kind, answer in server.service.answers.items()
    }
    assert server.ask("POST", PATH, HELLO).status == 400
    span = only(exporter)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == "context_overflow"
    assert "secret" not in span.to_json()


def test_spans_are_made_only_where_opentelemetry_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    assert isinstance(traced(service), Traced)
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert traced(service) is service
