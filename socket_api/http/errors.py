"""Errors in the shape of each API, as an answer and in the middle of a stream.

Owns the HTTP status of each error of the daemon, and the texts by which clients know that their context is full: they
shorten their history at these, and at no others (QC6). Such an error is a 400 on both APIs: clients misread a 413.
"""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse

from ...errors import TorporError
from .access import Caller

_LOG = logging.getLogger(__name__)

Dialect = Literal["openai", "anthropic"]

RETRY_AFTER_S: Final = 1
"""When a client should ask again that was refused because others are served."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What each API calls the errors of one HTTP status. code: OpenAI's, for a request that reached no verb."""

    openai: str
    anthropic: str
    code: str = "http_refused"


_KINDS: Final[Mapping[int, _Kind]] = MappingProxyType(
    {
        400: _Kind("invalid_request_error", "invalid_request_error"),
        401: _Kind("invalid_request_error", "authentication_error", "invalid_api_key"),
        403: _Kind("permission_error", "permission_error", "forbidden"),
        404: _Kind("not_found_error", "not_found_error", "not_found"),
        405: _Kind("invalid_request_error", "invalid_request_error", "method_not_allowed"),
        408: _Kind("invalid_request_error", "invalid_request_error", "request_timeout"),
        409: _Kind("conflict_error", "invalid_request_error"),
        413: _Kind("invalid_request_error", "request_too_large", "request_too_large"),
        415: _Kind("invalid_request_error", "invalid_request_error", "unsupported_media_type"),
        429: _Kind("rate_limit_error", "rate_limit_error"),
        500: _Kind("server_error", "api_error"),
        501: _Kind("server_error", "api_error"),
        503: _Kind("server_error", "overloaded_error"),
        507: _Kind("server_error", "api_error"),
    }
)

# Every code that is not here is a failure of the daemon: 500.
_STATUSES: Final[Mapping[int, tuple[str, ...]]] = MappingProxyType(
    {
        400: (
            *("ambiguous_version", "context_overflow", "empty_context", "invalid_draft", "invalid_fold"),
            *("invalid_constraint", "invalid_request", "invalid_sampling", "invalid_tag", "invalid_tokens"),
            *("invalid_transcript", "invalid_uri", "limit_exceeded", "no_such_position", "previous_response_not_found"),
            *("template_unusable", "unknown_event"),
        ),
        404: ("answer_not_found", "model_not_loaded", "session_not_found", "unknown_model"),
        409: (
            *("identity_mismatch", "model_changed", "model_files_changing", "model_in_use", "name_taken"),
            *("session_awake", "session_exists", "transcript_diverged"),
        ),
        429: (
            *("daemon_busy", "engine_busy", "memory_busy", "session_busy", "store_busy", "too_many_requests"),
            "too_many_subscribers",
        ),
        501: ("extra_missing",),
        503: (
            *("cancelled", "lease_held", "lease_lost", "remote_unreachable", "replica_lost", "service_closed"),
            *("shutting_down", "stop_deadline"),
        ),
        507: ("budget_exceeded", "memory_budget_exceeded", "no_space"),
    }
)
_OPENAI_CODES: Final = {"context_overflow": "context_length_exceeded", "unknown_model": "model_not_found"}
"""Codes that its clients know."""

STATUS_OF_CODE: Final[Mapping[str, int]] = MappingProxyType(
    {code: status for status, codes in _STATUSES.items() for code in codes}
)


def status_of(error: TorporError) -> int:
    """The HTTP status of an error."""
    return int(error.status) if error.code == "http_refused" else STATUS_OF_CODE.get(error.code, 500)


_TO_OTHERS: Final[Mapping[int, str]] = MappingProxyType(
    {
        500: "The daemon failed at this. Its log has the reason, and `torpor verify` checks the store.",
        507: "There is no room for this now. Ask again later, ask for less, or delete sessions that you need no more.",
    }
)
"""What a caller of one namespace is told instead of the statuses that tell of the whole daemon: how full its memory and
its store are, and what of theirs is damaged, depends on all namespaces."""

_OF_A_FILE: Final = "A file of the daemon hinders this. Its log has the reason, and `torpor verify` checks the store."
"""What it is told instead of an error that names a file."""


def told_to(caller: Caller, error: TorporError) -> TorporError:
    """An error as its caller may be told it: with its code, and without figures and files of other namespaces."""
    reason = _TO_OTHERS.get(status_of(error), _OF_A_FILE if error.details.get("path") else None)
    if caller.is_owner or reason is None:
        return error
    _LOG.warning("told a client without its reason: %s: %s", error.code, error.message)
    general = copy.copy(error)
    general.args, general.message, general.details = (reason,), reason, {}
    return general


def dialect_of(request: Request) -> Dialect:
    """The API that a request speaks, as its check has found."""
    speaks: Dialect = request.state.speaks
    return speaks


def error_map(error: TorporError, dialect: Dialect) -> dict[str, Any]:
    """An error as an answer's body, or as the data of an event."""
    status = status_of(error)
    kind = _KINDS[status]
    if dialect == "anthropic":
        return {"type": "error", "error": {"type": kind.anthropic, "message": _message(error, dialect)}}
    code = {"http_refused": kind.code, **_OPENAI_CODES}.get(error.code, error.code)
    param = error.details.get("field")
    facts = {"message": _message(error, dialect), "type": kind.openai, "param": param, "code": code}
    return {"error": facts}


def response(error: TorporError, dialect: Dialect) -> JSONResponse:
    """An error as an answer. It closes the connection where a body may be unread."""
    status = status_of(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    if error.code == "http_refused":
        headers["connection"] = "close"
    return JSONResponse(error_map(error, dialect), status, headers)


def new_request_id() -> str:
    """A name for one request, for its answer's headers and the log."""
    return f"req_{uuid.uuid4().hex}"


def _message(error: TorporError, dialect: Dialect) -> str:
    if error.code != "context_overflow" or "context_tokens" not in error.details:
        return error.message
    limit, size = error.context_tokens, error.token_count + error.wanted_tokens
    if dialect == "anthropic":
        return f"prompt is too long: {size} tokens > {limit} maximum"
    return (
        f"This model's maximum context length is {limit} tokens. However, your messages have {size} tokens. Send"
        " fewer, or begin a new session with a summary."
    )
