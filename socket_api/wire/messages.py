"""The messages in frames: their fields, and the way from map to model and back.

Owns the envelope of every message. Parameters and results are opaque maps here (`checking.py`). `connection.py` owns
their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...daemon.api.events import Event
from ...errors import TorporError
from .. import limits
from ..errors import MalformedMessage, UnsupportedProtocol

_M = TypeVar("_M")

RequestId = Annotated[int, Field(ge=0, le=limits.MAX_REQUEST_ID)]


class _FromClient(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, defer_build=True)


class _FromServer(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, defer_build=True)


class Hello(_FromClient):
    """The client's first message."""

    type: Literal["hello"] = "hello"
    protocol: int
    client: Annotated[str, Field(max_length=limits.MAX_CLIENT_NAME_CHARS)] = ""


class Request(_FromClient):
    """Asks for one method; `id` names it among those in flight on this connection."""

    type: Literal["request"] = "request"
    id: RequestId
    method: str
    params: dict[str, Any] = Field(default_factory=dict)


class Cancel(_FromClient):
    """Asks that a request be stopped. It is still answered."""

    type: Literal["cancel"] = "cancel"
    id: RequestId


class HelloLimits(_FromServer):
    """The daemon's limits."""

    max_request_frame_bytes: int
    max_reply_frame_bytes: int
    max_in_flight: int


class HelloReply(_FromServer):
    """The server's first message."""

    type: Literal["hello"] = "hello"
    protocol: int
    server: str
    pid: int
    limits: HelloLimits


class EventMessage(_FromServer):
    """An event before a request's result."""

    type: Literal["event"] = "event"
    id: RequestId
    event: Event


class ResultMessage(_FromServer):
    """The last message about a request that succeeded."""

    type: Literal["result"] = "result"
    id: RequestId
    result: dict[str, Any]


class ErrorBody(_FromServer):
    """A failure: a stable code, a sentence for people, facts for programs."""

    code: str
    message: str
    details: dict[str, Any] = Field(default_factory=dict)


class ErrorMessage(_FromServer):
    """The last message about a request that failed; without an id, about the connection."""

    type: Literal["error"] = "error"
    id: RequestId | None
    error: ErrorBody


ClientMessage = Hello | Request | Cancel
ServerMessage = HelloReply | EventMessage | ResultMessage | ErrorMessage

_LATER = ConfigDict(defer_build=True)
_CLIENT_MESSAGE: TypeAdapter[ClientMessage] = TypeAdapter(
    Annotated[ClientMessage, Field(discriminator="type")], config=_LATER
)
_SERVER_MESSAGE: TypeAdapter[ServerMessage] = TypeAdapter(
    Annotated[ServerMessage, Field(discriminator="type")], config=_LATER
)


def load_client_message(raw: Mapping[str, Any]) -> ClientMessage:
    """Check a map that a client sent.

    Raises:
        UnsupportedProtocol: a hello of another version, with any other fields.
        MalformedMessage: it is no message.
    """
    _require_version(raw)
    return _load(_CLIENT_MESSAGE, raw)


def load_server_message(raw: Mapping[str, Any]) -> ServerMessage:
    """Check a map that the server sent. Raises as `load_client_message` does."""
    _require_version(raw)
    return _load(_SERVER_MESSAGE, raw)


def to_map(message: ClientMessage | ServerMessage) -> dict[str, Any]:
    """Return the message as the map that a frame holds."""
    return message.model_dump()


def error_body(error: TorporError) -> ErrorBody:
    """Give an error its shape on the wire; facts that are not plain data become text."""
    details = {_text(str(key)): _plain(value, depth=0) for key, value in error.details.items()}
    return ErrorBody(code=error.code, message=_text(error.message[: limits.MAX_ERROR_MESSAGE_CHARS]), details=details)


def _load(adapter: TypeAdapter[_M], raw: Mapping[str, Any]) -> _M:
    try:
        return adapter.validate_python(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])[:256]
        raise MalformedMessage(f"Not a message of this protocol: {field}: {first['msg']}.", field=field) from None


def _require_version(raw: Mapping[str, Any]) -> None:
    # Before the fields are checked: a later version's hello may have others, and must still get this refusal.
    if raw.get("type") == "hello" and type(raw.get("protocol")) is int and raw["protocol"] != limits.PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"The peer speaks protocol {raw['protocol']}, this side {limits.PROTOCOL_VERSION}."
            " Run the same release of Torpor on both sides.",
            supported=[limits.PROTOCOL_VERSION],
        )


_PLAIN_DEPTH = 4


def _plain(value: Any, *, depth: int) -> Any:
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value).hex()
    if isinstance(value, Mapping) and depth < _PLAIN_DEPTH:
        return {_text(str(key)): _plain(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)) and depth < _PLAIN_DEPTH:
        return [_plain(item, depth=depth + 1) for item in value]
    return _text(str(value))


def _text(value: str) -> str:
    """Make text sendable: a file name that is not UTF-8 has surrogates, which msgpack refuses."""
    return value.encode("utf-8", "replace").decode("utf-8")
