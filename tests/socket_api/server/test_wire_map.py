"""Results become wire maps, and these become frames, in pieces where they are long; the bytes are the same."""

from __future__ import annotations

from dataclasses import Field, asdict, fields
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from torpor.daemon.api.branching import Produced, ProduceResult
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import Event, ProgressEvent, SessionEvent, TokenEvent, WorkEvent
from torpor.daemon.api.logprobs import Likelihood, TokenLogprobs
from torpor.daemon.api.process import StatusRequest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import ListResult, SessionInfo
from torpor.daemon.api.verb import Verb
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.tasks.pieces import SESSIONS_AT_ONCE, Pieces
from torpor.records import Result
from torpor.socket_api.errors import LocalProtocolError
from torpor.socket_api.server.dispatch import event_map
from torpor.socket_api.server.wire_map import wire_map
from torpor.socket_api.wire.framing import encode_frame, encode_in_pieces


def session(number: int, **fields: Any) -> SessionInfo:
    given: dict[str, Any] = {"state": "awake", "model": "m", "token_count": number, "version": None, "bundle_id": None}
    given |= {"resident_bytes": 1, "written_bytes": 2, "dirty": True, "labels": ("x",), "slept_ns": None}
    return SessionInfo(f"torpor://d/s{number}", "d", f"s{number}", **given, sampling=Sampling(), **fields)


def counted(pieces: Pieces[Any]) -> tuple[Any, int]:
    """What comes of them, and how many pauses there were."""
    count = 0
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value, count
        count += 1


@pytest.mark.parametrize("sessions", [0, 1, SESSIONS_AT_ONCE, SESSIONS_AT_ONCE + 1, 1_000])
def test_a_long_list_is_made_and_encoded_in_pieces_and_is_what_it_would_be_at_once(sessions: int) -> None:
    infos = [session(number) for number in range(sessions)]
    made, pauses = counted(wire_map(VERBS["list"], ListResult(tuple(infos))))
    assert made == asdict(ListResult(tuple(infos)))
    assert pauses == (0 if sessions <= SESSIONS_AT_ONCE else -(-sessions // SESSIONS_AT_ONCE))
    message = {"type": "result", "id": 1, "result": made}
    encoded, pauses = counted(encode_in_pieces(message, max_frame_bytes=2**24))
    assert encoded == encode_frame(message, max_frame_bytes=2**24)
    assert sessions // 256 <= pauses <= sessions // 64


class Numbers(Result):
    """A result with nothing else."""

    tokens: tuple[int, ...]


@pytest.mark.one_in(2)
def test_a_million_numbers_take_no_piece_for_each() -> None:
    numbers = {"tokens": tuple(range(1_000_000))}
    made, pauses = counted(wire_map(Verb(StatusRequest, Numbers), Numbers(**numbers)))
    assert made == numbers
    assert 100 < pauses < 1_000
    encoded, pauses = counted(encode_in_pieces({"result": numbers}, max_frame_bytes=2**24))
    assert encoded == encode_frame({"result": numbers}, max_frame_bytes=2**24)
    assert 100 < pauses < 1_000


def test_lent_logits_become_a_frame_without_a_copy_of_their_own_lv3() -> None:
    lent = memoryview(b"lent" * 4096).toreadonly()
    drawn = [Produced(1, 2, 3, "x", ends=False, logits=given) for given in (lent, bytes(lent), None)]
    made, _ = counted(wire_map(VERBS["produce"], ProduceResult(tuple(drawn))))
    assert made["produced"][0]["logits"] is lent
    frames = [encode_frame({"result": each}, max_frame_bytes=2**24) for each in made["produced"]]
    assert frames[0] == frames[1] != frames[2], "a client reads bytes"
    with pytest.raises(ValidationError):
        counted(wire_map(VERBS["produce"], ProduceResult((Produced(1, 2, 3, "x", ends=False, logits=[1.0]),))))  # type: ignore[arg-type]


def test_a_field_that_is_none_of_the_protocol_is_found_in_a_long_list_too() -> None:
    infos = [session(number) for number in range(100)]
    infos[90] = session(90)
    object.__setattr__(infos[90], "token_count", "many")
    with pytest.raises(ValidationError):
        counted(wire_map(VERBS["list"], ListResult(tuple(infos))))


def test_what_is_too_large_or_cannot_be_expressed_is_refused_in_pieces_too() -> None:
    with pytest.raises(LocalProtocolError) as refusal:
        counted(encode_in_pieces({"result": {"items": ["x"] * 5_000}}, max_frame_bytes=100))
    assert refusal.value.details["limit_bytes"] == 100
    with pytest.raises(LocalProtocolError):
        counted(encode_in_pieces({"result": {"items": [2**64] * 5_000}}, max_frame_bytes=2**20))


LOGPROBS = TokenLogprobs(5, "\N{REPLACEMENT CHARACTER}", -0.5, b"\xf0", (Likelihood(6, "Ho", -1.5),))
EVENTS = {
    "progress": ProgressEvent("prefill", 3, 7),
    "handover": ProgressEvent("handover", 3, 7, "north"),
    "token": TokenEvent(5, "Hi"),
    "call": TokenEvent(None, "", "call", ToolCall("look", {"path": "."}, "c1")),
    "logprobs": TokenEvent(5, "Hi", "reasoning", None, LOGPROBS),
    "branch": TokenEvent(5, "Hi", branch=3),
    "session": SessionEvent("torpor://default/a"),
    "recomputed": SessionEvent("torpor://default/a", 389),
}


@pytest.mark.parametrize("event", EVENTS.values(), ids=EVENTS)
def test_a_client_reads_of_an_event_all_that_the_daemon_told(event: WorkEvent) -> None:
    assert TypeAdapter[Event](Event).validate_python(event_map(event)) == event


@pytest.mark.parametrize("kind", [ProgressEvent, TokenEvent, SessionEvent])
def test_each_field_of_an_event_is_among_what_is_read(kind: type[WorkEvent]) -> None:
    told = {field.name for field in fields(kind) for event in EVENTS.values() if differs(event, kind, field)}
    assert told | {"kind"} == {field.name for field in fields(kind)}


def differs(event: WorkEvent, kind: type[WorkEvent], field: Field[Any]) -> bool:
    """Whether an event says something in a field that it would not say by itself."""
    return isinstance(event, kind) and getattr(event, field.name) != field.default
