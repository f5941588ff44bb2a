"""Answers to a few requests, asked without the client's checks: for a command that only lists, and is short.

The client checks with pydantic what it sends and gets, which takes longer to import than such a command takes. Here
the peer is proven to be this user's own process, frames are held to their limits, and a record is made of a map whose
values are of the kinds that its fields have. Whatever else there is (a refusal, another protocol, a daemon that is
full) gives None: the caller asks again with the client, which says what it is. So ask only what changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ...records import Record, Result
from ..errors import ApiError
from ..limits import MAX_REQUEST_FRAME_BYTES, PROTOCOL_VERSION, REPLY_LIMITS
from ..wire.framing import FrameDecoder, encode_frame
from ..wire.peer import peer_uid, require_own_peer

R = TypeVar("R", bound=Result)
_SILENCE_S: Final = 5.0
"""A daemon that says nothing for so long is asked by the client, which waits longer."""

_BYTES_AT_ONCE: Final = 1 << 18


def ask_plainly(path: Path, *asked: tuple[str, Mapping[str, Any], type[Result]]) -> list[Any] | None:
    """The records of the answers to requests: each its verb's name on the wire, its parameters, and the record of its
    result. None if the client has to ask."""
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connected:
            connected.settimeout(_SILENCE_S)
            connected.connect(str(path))
            require_own_peer(connected, str(path), peer_uid)
            _send(connected, {"type": "hello", "protocol": PROTOCOL_VERSION, "client": "torpor"})
            messages = _messages(connected)
            if (hello := next(messages)).get("type") != "hello" or hello.get("protocol") != PROTOCOL_VERSION:
                return None
            answers = []
            for number, (verb, params, kind) in enumerate(asked, 1):
                _send(connected, {"type": "request", "id": number, "method": verb, "params": dict(params)})
                answer = next(message for message in messages if message.get("type") != "event")
                if (answer.get("type"), answer.get("id")) != ("result", number):
                    return None
                answers.append(record_of(kind, answer["result"]))
            return answers
    except (OSError, ApiError, StopIteration, TypeError, KeyError):
        return None


def _send(connected: socket.socket, message: dict[str, Any]) -> None:
    connected.sendall(encode_frame(message, max_frame_bytes=MAX_REQUEST_FRAME_BYTES))


def _messages(connected: socket.socket) -> Iterator[Mapping[str, Any]]:
    """The daemon's messages, until it closes the connection."""
    decoder = FrameDecoder(REPLY_LIMITS)
    while data := connected.recv(_BYTES_AT_ONCE):
        decoder.feed(data)
        while (message := decoder.next_frame()) is not None:
            yield message


def record_of(kind: type[R], raw: object) -> R:
    """A record of a map, with the records in it. Fields that it does not have are skipped, as by the client. Raises
    TypeError: a field is missing, or has a value of another kind."""
    return _value(kind, raw)  # type: ignore[no-any-return]  # by the kind


@cache
def _fields_of(kind: Any) -> Mapping[str, Any]:
    return {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}


def _value(kind: Any, raw: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Record) and isinstance(raw, Mapping):
        hints = _fields_of(cast("Any", kind))
        return kind(**{name: _value(hint, raw[name]) for name, hint in hints.items() if name in raw})
    if origin in (tuple, Sequence) and isinstance(raw, Sequence) and not isinstance(raw, str | bytes):
        if origin is Sequence or parts[-1:] == (...,):
            return tuple(_value(parts[0], each) for each in raw)
        return tuple(_value(part, each) for part, each in zip(parts, raw, strict=True))
    if origin in (dict, Mapping) and isinstance(raw, Mapping):
        return {_value(parts[0], name): _value(parts[1], each) for name, each in raw.items()}
    if origin in (Union, UnionType):
        return _of_one(parts, raw)
    if (origin is Literal and raw in parts) or kind is Any or (kind in (None, NoneType) and raw is None):
        return raw
    if isinstance(kind, type) and type(raw) is kind:
        return raw
    if kind is float and type(raw) is int:
        return float(raw)
    raise TypeError(f"it is no {kind}")


def _of_one(kinds: Sequence[Any], raw: Any) -> Any:
    for kind in kinds:
        try:
            return _value(kind, raw)
        except (TypeError, ValueError):
            continue
    raise TypeError(f"it is none of {kinds}")
