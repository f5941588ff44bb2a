"""The two state machines, talking to each other with no sockets: every message both ways, and every breach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.errors import TorporError
from torpor.socket_api.errors import (
    FrameTooLarge,
    LocalProtocolError,
    MalformedMessage,
    ProtocolError,
    UnsupportedProtocol,
)
from torpor.socket_api.wire.connection import AcceptedRequest, ClientConnection, RefusedRequest, ServerConnection
from torpor.socket_api.wire.framing import encode_frame, whole
from torpor.socket_api.wire.messages import Cancel, ErrorMessage, EventMessage, Hello, HelloReply, ResultMessage


class Pair:
    """A client and a server connection, joined by nothing but bytes."""

    def __init__(self, *, max_in_flight: int = 4, greet: bool = True) -> None:
        self.client = ClientConnection(client_name="test")
        self.server = ServerConnection(max_in_flight=max_in_flight)
        if greet:
            assert isinstance(self.to_server(self.client.send_hello()), Hello)
            assert isinstance(self.to_client(self.server.send_hello(server="torpor 0", pid=7)), HelloReply)

    def to_server(self, data: bytes) -> Any:
        self.server.feed(data)
        return self.server.next_message()

    def to_client(self, data: bytes) -> Any:
        self.client.feed(data)
        return self.client.next_message()

    def raw(self, **message: object) -> Any:
        return self.to_server(encode_frame(message, max_frame_bytes=2**24))

    def answer(self, request_id: int, result: dict[str, object]) -> bytes:
        return whole(self.server.send_result(request_id, result))

    def ask(self, method: str = "status", **params: object) -> AcceptedRequest:
        accepted = self.to_server(self.client.send_request(method, params)[1])
        assert isinstance(accepted, AcceptedRequest)
        return accepted


def test_every_kind_of_message_crosses_both_ways() -> None:
    pair = Pair()
    assert pair.client.hello is not None
    assert (pair.client.hello.pid, pair.client.hello.limits.max_in_flight) == (7, 4)
    asked = pair.ask("generate", session="s", max_tokens=2)
    assert asked.verb.name == "generate"
    token = pair.to_client(pair.server.send_event(asked.id, {"kind": "token", "token": 5, "text": "é"}))
    assert isinstance(token, EventMessage)
    assert token.event.text == "é"
    progress = {"kind": "progress", "stage": "prefill", "done": 1, "total": 2}
    assert pair.to_client(pair.server.send_event(asked.id, progress)).event.stage == "prefill"
    assert pair.to_server(pair.client.send_cancel(asked.id)) == Cancel(id=asked.id)
    result = pair.to_client(pair.answer(asked.id, {"text": "x"}))
    assert isinstance(result, ResultMessage)
    failed = pair.ask()
    error = pair.to_client(pair.server.send_error(failed.id, TorporError("no", bundle=b"\x01", path=Path("/x"))))
    assert isinstance(error, ErrorMessage)
    assert error.error.details == {"bundle": "01", "path": "/x"}
    fatal = pair.to_client(pair.server.send_fatal(TorporError("over")))
    assert fatal.id is None


@pytest.mark.one_in(2)
@given(st.data())
def test_a_conversation_means_the_same_however_it_is_chunked(data: st.DataObject) -> None:
    pair = Pair(greet=False)
    stream = pair.client.send_hello()
    for _ in range(3):
        stream += pair.client.send_request("append", {"session": "s", "tokens": [1, 300, 70_000]})[1]
    kinds = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        pair.server.feed(stream[:size])
        stream = stream[size:]
        while (message := pair.server.next_message()) is not None:
            kinds.append(type(message))
    assert kinds == [Hello, AcceptedRequest, AcceptedRequest, AcceptedRequest]


# --- breaches by the client


@pytest.mark.parametrize(
    "message",
    [
        {"type": "hello", "protocol": 1},
        {"type": "nonsense"},
        {},
        {"type": "request", "id": "1", "method": "status", "params": {}},
        {"type": "request", "id": -1, "method": "status", "params": {}},
        {"type": "request", "id": 2**63, "method": "status", "params": {}},
        {"type": "request", "id": True, "method": "status", "params": {}},
        {"type": "request", "id": 1, "method": "status", "params": []},
        {"type": "request", "id": 1, "method": "status", "params": {}, "extra": 1},
        {"type": "cancel"},
        {"type": "result", "id": 1, "result": {}},
    ],
    ids=str,
)
def test_a_message_that_may_not_come_is_a_breach(message: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        Pair().raw(**message)


@pytest.mark.parametrize("kind", ["request", "cancel"])
def test_nothing_comes_before_hello(kind: str) -> None:
    message = {"type": kind, "id": 1} | ({"method": "status"} if kind == "request" else {})
    with pytest.raises(MalformedMessage, match="before hello"):
        Pair(greet=False).raw(**message)


@pytest.mark.parametrize("protocol", [0, 2, 2**40, -1])
def test_another_protocol_version_is_named_whatever_else_its_hello_holds(protocol: int) -> None:
    with pytest.raises(UnsupportedProtocol) as caught:
        Pair(greet=False).raw(type="hello", protocol=protocol, future_field=[1])
    assert caught.value.supported == [1]


@pytest.mark.parametrize("protocol", [None, "1", True, 1.0])
def test_a_protocol_version_that_is_no_number_is_malformed(protocol: object) -> None:
    with pytest.raises(MalformedMessage):
        Pair(greet=False).raw(type="hello", protocol=protocol)


# --- requests that are refused while the connection goes on (threats 47, 48)


def refused(pair: Pair, method: str, params: dict[str, object], request_id: int = 900) -> Any:
    answer = pair.raw(type="request", id=request_id, method=method, params=params)
    assert isinstance(answer, RefusedRequest)
    assert answer.id not in pair.server.in_flight or answer.error.code == "duplicate_id"
    assert isinstance(pair.ask(), AcceptedRequest)  # the connection lives
    return answer.error


def test_an_unknown_method_is_refused_and_names_those_there_are() -> None:
    error = refused(Pair(), "__class__", {})
    assert error.code == "unknown_method"
    assert "generate" in error.message


def test_a_duplicate_id_is_refused_and_the_first_request_goes_on() -> None:
    pair = Pair()
    first = pair.ask("sleep", session="s")
    error = refused(pair, "status", {}, first.id)
    assert error.code == "duplicate_id"
    assert first.id in pair.server.in_flight
    pair.to_client(pair.answer(first.id, {}))
    assert isinstance(pair.raw(type="request", id=first.id, method="status"), AcceptedRequest)  # free again


def test_more_requests_than_allowed_are_refused_until_one_is_answered() -> None:
    pair = Pair(max_in_flight=2)
    first = pair.ask()
    pair.ask()
    refusal = pair.raw(type="request", id=50, method="status")
    assert isinstance(refusal, RefusedRequest)
    assert refusal.error.code == "too_many_requests"
    pair.answer(first.id, {})
    assert isinstance(pair.raw(type="request", id=51, method="status"), AcceptedRequest)


def test_a_refusal_does_not_repeat_what_the_client_sent() -> None:
    """Threat 60: refusals are logged and shown; prompts are not."""
    error = refused(Pair(), "append", {"session": "s", "text": {"secret": "swordfish"}})
    assert "swordfish" not in error.message + str(error.details)
    assert error.__cause__ is None
    assert "swordfish" not in str(error.__cause__)


# --- breaches by the server


@pytest.mark.parametrize(
    "send",
    [
        lambda s: s.send_hello(server="x", pid=1),
        lambda s: encode_frame({"type": "result", "id": 77, "result": {}}, max_frame_bytes=1000),
        lambda s: encode_frame({"type": "event", "id": 77, "event": {}}, max_frame_bytes=1000),
        lambda s: encode_frame({"type": "request", "id": 1, "method": "x"}, max_frame_bytes=1000),
        lambda s: b"\xff\xff\xff\xff",
    ],
)
def test_a_server_that_breaks_the_protocol_ends_the_connection(send: Callable[[ServerConnection], bytes]) -> None:
    pair = Pair()
    with pytest.raises(ProtocolError) as first:
        pair.to_client(send(pair.server))
    with pytest.raises(ProtocolError) as again:
        pair.client.next_message()
    assert again.value is first.value
    with pytest.raises(LocalProtocolError, match="dead"):
        pair.client.send_request("status", {})


def test_a_server_that_answers_before_hello_is_refused_but_may_say_why_it_hangs_up() -> None:
    early = encode_frame({"type": "result", "id": 1, "result": {}}, max_frame_bytes=1000)
    with pytest.raises(MalformedMessage, match="before"):
        Pair(greet=False).to_client(early)
    pair = Pair(greet=False)
    assert pair.to_client(pair.server.send_fatal(TorporError("full"))).error.message == "full"


def test_no_event_follows_a_result() -> None:
    pair = Pair()
    asked = pair.ask()
    pair.to_client(pair.answer(asked.id, {}))
    late = {"type": "event", "id": asked.id, "event": {"kind": "token", "token": 1, "text": ""}}
    with pytest.raises(MalformedMessage, match="not in flight"):
        pair.to_client(encode_frame(late, max_frame_bytes=1000))


# --- our own side


def test_answering_what_is_not_in_flight_is_our_own_fault() -> None:
    server = Pair().server
    for send in (
        lambda: whole(server.send_result(5, {})),
        lambda: server.send_event(5, {}),
        lambda: server.send_error(5, TorporError("x")),
    ):
        with pytest.raises(LocalProtocolError):
            send()


@pytest.mark.one_in(1)
def test_a_result_too_large_leaves_the_request_in_flight_so_that_it_can_be_failed() -> None:
    pair = Pair()
    asked = pair.ask()
    with pytest.raises(LocalProtocolError):
        pair.answer(asked.id, {"text": "x" * (64 * 2**20)})
    assert isinstance(pair.to_client(pair.server.send_error(asked.id, TorporError("too large"))), ErrorMessage)


def test_an_error_whose_details_cannot_be_sent_goes_without_them() -> None:
    pair = Pair()
    for details in ({"x": "y" * 300_000}, {"deep": [[[[[[["x"]]]]]]]}, {"odd": 2**200}, {"name": "\udcff"}):
        asked = pair.ask()
        message = pair.to_client(pair.server.send_error(asked.id, TorporError("broken \udcff name", **details)))
        assert message.error.message == "broken ? name"


def test_a_message_is_cut_to_its_limit() -> None:
    pair = Pair()
    told = pair.to_client(pair.server.send_error(pair.ask().id, TorporError("y" * 10_000)))
    assert told.error.message == "y" * 4096


def test_a_cancel_after_the_answer_sends_nothing() -> None:
    pair = Pair()
    asked = pair.ask()
    pair.to_client(pair.answer(asked.id, {}))
    assert pair.client.send_cancel(asked.id) == b""


def test_a_client_refuses_to_send_more_than_the_server_takes() -> None:
    pair = Pair()
    with pytest.raises(LocalProtocolError):
        pair.client.send_request("append", {"session": "s", "text": "x" * (16 * 2**20)})
    assert isinstance(pair.ask(), AcceptedRequest)


def test_a_frame_above_the_limit_of_its_direction_is_refused_by_either_side() -> None:
    pair = Pair()
    with pytest.raises(FrameTooLarge):
        pair.to_server((16 * 2**20 + 1).to_bytes(4, "little"))
    with pytest.raises(FrameTooLarge):
        pair.to_client((64 * 2**20 + 1).to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("method", "params", "at_least"),
    [
        ("append", {"session": "s", "tokens": [70_000] * 100_000}, 2 * 100_000 // 4096),
        ("chat", {"session": "s", "messages": [{"role": "user", "content": "hello"}] * 4096}, 2 * 4096 // 128),
        ("append", {"session": "s", "tokens": [1] * 4096}, 0),
    ],
    ids=["tokens", "messages", "small"],
)
def test_a_large_request_is_decoded_and_checked_in_pieces(method: str, params: dict[str, Any], at_least: int) -> None:
    pair = Pair()
    pair.server.feed(pair.client.send_request(method, params)[1])
    pieces, count = pair.server.next_message_in_pieces(), 0
    try:
        while True:
            next(pieces)
            count += 1
    except StopIteration as end:
        accepted = end.value
    assert isinstance(accepted, AcceptedRequest)
    for name in ("tokens", "messages"):
        if name in params:
            found = getattr(accepted.asked, name)
            assert list(found) == params[name]
    assert (count > at_least) if at_least else (count == 0)
