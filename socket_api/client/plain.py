"""Answers to a few requests, asked without the client's checks: for a command that only lists, and is short.

The client checks with pydantic what it sends and gets, which takes longer to import than such a command takes. Here
the peer is proven to be this user's own process, frames are held to their limits, and a record is made of a map whose
values are of the kinds that its fields have. Whatever else there is (a refusal, another protocol, a daemon that is
full) gives None: the caller asks again with the client, which says what it is. So ask only what changes nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import closing
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from types import UnionType
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
    made: R = _reader(cast("Any", kind))(raw)
    return made


_Reader = Callable[[Any], Any]
"""Gives a value of one kind. Raises TypeError: it is of another."""


@cache
def _reader(kind: Any) -> _Reader:
    """Made once for each kind: an answer may list thousands of values of it."""
    origin, parts = get_origin(kind), get_args(kind)
    if _is_record(kind):
        return partial(_record, kind)
    if origin in (tuple, Sequence):
        is_list = origin is Sequence or parts[-1:] == (...,)
        return partial(_items, _reader(parts[0])) if is_list else partial(_row, tuple(map(_reader, parts)))
    if origin in (dict, Mapping):
        return partial(_map, _reader(parts[0]), _reader(parts[1]))
    if origin in (Union, UnionType):
        plain = frozenset(each for each in parts if isinstance(each, type) and not _is_record(each))
        return partial(_of_one, plain, tuple(map(_reader, parts)))
    return partial(_word, parts) if origin is Literal else partial(_plain, kind)


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Record)


@cache
def _readers_of_fields(kind: Any) -> Mapping[str, _Reader]:
    hints = get_type_hints(kind)
    return {each.name: _reader(hints[each.name]) for each in fields(kind)}


def _record(kind: Any, raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        raise TypeError(f"it is no {kind}")
    return kind(**{name: read(raw[name]) for name, read in _readers_of_fields(kind).items() if name in raw})


def _items(read: _Reader, raw: Any) -> Any:
    return tuple(map(read, _sequence(raw)))


def _row(readers: Sequence[_Reader], raw: Any) -> Any:
    if len(_sequence(raw)) != len(readers):
        raise TypeError(f"it has not {len(readers)} items")
    return tuple(read(each) for read, each in zip(readers, raw, strict=True))


def _sequence(raw: Any) -> Sequence[Any]:
    if not isinstance(raw, list | tuple):
        raise TypeError("it is no list")
    return raw


def _map(name: _Reader, value: _Reader, raw: Any) -> Any:
    if not isinstance(raw, Mapping):
        raise TypeError("it is no map")
    return {name(each): value(raw[each]) for each in raw}


def _of_one(plain: Set[type], readers: Sequence[_Reader], raw: Any) -> Any:
    """plain: those of its kinds whose values stay as they are."""
    if type(raw) in plain:
        return raw
    for read in readers:
        try:
            return read(raw)
        except TypeError:
            continue
    raise TypeError("it is of none of its kinds")


def _word(words: Sequence[Any], raw: Any) -> Any:
    if raw not in words:
        raise TypeError(f"it is none of {words}")
    return raw


def _plain(kind: Any, raw: Any) -> Any:
    if type(raw) is kind or kind is Any:
        return raw
    if kind is float and type(raw) is int:
        return float(raw)
    raise TypeError(f"it is no {kind}")
