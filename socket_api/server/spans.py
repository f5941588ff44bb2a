"""A span of OpenTelemetry for each answer of a model, by the conventions for generative AI.

A daemon that was started with OpenTelemetry (`opentelemetry-instrument torpor serve`) has its package loaded already;
then spans are made, and else nothing is imported. Owns the names of the conventions: they are still in development.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from ...daemon.api.process import ShutdownResult
from ...daemon.api.reading import GenerateResult
from ...daemon.api.records import Request
from ...daemon.api.verb import R, Verb
from ...daemon.events.figures import Figures
from ...errors import TorporError
from .dispatch import Backend, Events, ResumableEvents

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
CONVERSATION: Final = "gen_ai.conversation.id"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
RECOMPUTED_TOKENS: Final = "torpor.usage.recomputed_tokens"
"""Ours: the conventions have no name for it."""
FIRST_TOKEN_S: Final = "gen_ai.server.time_to_first_token"  # noqa: S105 - no password
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
ERROR: Final = "error.type"

_OPERATIONS: Final = {"chat": "chat", "converse": "chat", "generate": "text_completion"}
"""By the verbs that let a model write."""

TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""The headers of a request that name its trace, as W3C has them."""

trace_headers: ContextVar[Mapping[str, str]] = ContextVar("trace_headers", default=MappingProxyType({}))
"""Those of the request under way."""


def traced(backend: Backend) -> Backend:
    """The backend, with spans if this process has OpenTelemetry loaded."""
    if "opentelemetry.trace" not in sys.modules:
        return backend
    from opentelemetry.trace import get_tracer

    return Traced(backend, get_tracer("torpor"))


class Traced:
    """A backend whose answers of a model are spans."""

    def __init__(self, backend: Backend, tracer: Tracer) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._backend = backend
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()

    @property
    def figures(self) -> Figures:
        return self._backend.figures

    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        """As the backend."""
        operation = _OPERATIONS.get(verb.name)
        if operation is None:
            return await self._backend.ask(verb, request)
        from opentelemetry.trace import SpanKind, StatusCode

        model, session = getattr(request, "model", None), getattr(request, "session", None)
        asked = {OPERATION: operation, PROVIDER: "torpor", REQUEST_MODEL: model, CONVERSATION: session}
        with self._tracer.start_as_current_span(
            f"{operation} {model}" if model else operation,
            context=self._propagator.extract(trace_headers.get()),
            kind=SpanKind.SERVER,
            attributes=_given(asked),
            record_exception=False,  # its text may have words of the dialogue in it (threat 60)
            set_status_on_exception=False,
        ) as span:
            try:
                result = await self._backend.ask(verb, request)
            except BaseException as error:
                span.set_attribute(ERROR, error.code if isinstance(error, TorporError) else type(error).__name__)
                span.set_status(StatusCode.ERROR)
                raise
            if isinstance(result, GenerateResult):
                span.set_attributes(_given(_told(result)))
            return result

    def subscribe(
        self, *, names: Sequence[str] | None = None, session: str | None = None, namespace: str | None = None
    ) -> Events:
        """As the backend."""
        return self._backend.subscribe(names=names, session=session, namespace=namespace)

    def resume(
        self, names: Sequence[str] | None, session: str | None, namespace: str | None, *, after: str | None
    ) -> ResumableEvents:
        """As the backend."""
        return self._backend.resume(names, session, namespace, after=after)

    async def prepare_close(self) -> ShutdownResult:
        """As the backend."""
        return await self._backend.prepare_close()


def _told(result: GenerateResult) -> dict[str, Any]:
    written = len(result.tokens)
    read = result.token_count - written
    return {
        CONVERSATION: result.session,
        INPUT_TOKENS: read,
        OUTPUT_TOKENS: written,
        CACHED_TOKENS: max(0, read - result.prefilled_tokens - result.recomputed_tokens),
        RECOMPUTED_TOKENS: result.recomputed_tokens,
        FIRST_TOKEN_S: result.time_to_first_token_s,
        FINISH_REASONS: (result.finish_reason,),
    }


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
