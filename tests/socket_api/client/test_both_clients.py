"""Both clients against a real server over a real socket: verbs, streams, and each way in which a request fails."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.socket_api import AsyncClient, AsyncTextStream, Client, Sampling, TextStream
from torpor.socket_api.errors import (
    ApiError,
    ClientClosed,
    ConnectionLost,
    DaemonUnreachable,
    InvalidRequest,
    LocalProtocolError,
    PeerRefused,
    RemoteError,
    RequestTimeout,
    SocketPathTooLong,
    UnsupportedProtocol,
)
from torpor.tests.socket_api.both_clients import connected
from torpor.tests.socket_api.fake_service import FakeService
from torpor.tests.socket_api.server_rig import HELLO, Last, ServerThread, answer, frame, refusal, scripted


@pytest.fixture(params=["blocking", "awaited"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(server_thread: ServerThread, kind: str) -> Iterator[Any]:
    with connected(server_thread.socket_path, kind, timeout_s=20) as client:
        yield client


@pytest.fixture
def service(server_thread: ServerThread) -> FakeService:
    return server_thread.service


def test_both_clients_offer_the_same_verbs_with_the_same_arguments() -> None:
    for one, other in ((Client, AsyncClient), (TextStream, AsyncTextStream)):
        verbs = {name for name in vars(one) if not name.startswith("_")}
        assert verbs == {name for name in vars(other) if not name.startswith("_")} - {"connect"}
        for name in verbs:
            member = inspect.getattr_static(one, name)
            if inspect.isfunction(member):
                theirs = inspect.signature(getattr(other, name)).parameters
                assert list(inspect.signature(member).parameters) == list(theirs)


def test_a_client_s_namespace_is_that_of_its_bare_names_and_of_what_it_asks_about_many(
    server_thread: ServerThread, kind: str
) -> None:
    told: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
        (lambda c: c.create("s"), {"session": "lab/s"}),
        (lambda c: c.wake("s@3"), {"session": "lab/s@3"}),
        (lambda c: c.create("other/s"), {"session": "other/s"}),
        (lambda c: c.fork("torpor://other/s", "t"), {"session": "torpor://other/s", "name": "lab/t"}),
        (lambda c: list(c.stream_generate("s", max_tokens=1)), {"session": "lab/s"}),
        (lambda c: c.warm(["s"]), {"sessions": ("lab/s",)}),
        (lambda c: c.warm(label="x"), {"namespace": "lab"}),
        (lambda c: c.list_sessions(), {"namespace": "lab"}),
        (lambda c: c.list_sessions("other"), {"namespace": "other"}),
        (lambda c: c.clear("x"), {"namespace": "lab"}),
        (lambda c: c.events().__enter__().close(), {"namespace": "lab"}),
        (lambda c: c.events(session="s").__enter__().close(), {"session": "lab/s"}),
    ]
    naming = ("session", "name", "sessions", "namespace")
    with connected(server_thread.socket_path, kind, namespace="lab") as client:
        for call, expected in told:
            with contextlib.suppress(RemoteError):  # the double has no such session
                call(client)
            given = server_thread.service.calls[-1][1]
            assert {name: given[name] for name in naming if given.get(name)} == expected


# --- streams


def test_a_stream_keeps_its_result_and_other_requests_go_on_beside_it(client: Any) -> None:
    client.create("s")
    events: list[Any] = []
    stream = client.stream_chat("s", "hello", max_tokens=3, on_event=events.append)
    with pytest.raises(LocalProtocolError, match="not ended"):
        _ = stream.result
    first = next(stream)
    assert client.show("s").info.name == "s"
    assert first + "".join(stream) == stream.result.text == "t1 t2 t3 "
    assert list(stream) == []
    assert [each.kind for each in events] == ["progress", "token", "token", "token"]


def test_a_stream_left_early_is_cancelled(client: Any, server_thread: ServerThread, service: FakeService) -> None:
    """Threat 45, from the client's side; the connection goes on."""
    client.create("s")
    with client.stream_generate("s", max_tokens=1_000_000) as stream:
        next(stream)
    server_thread.wait_until(lambda: service.running == 0)
    assert service.cancelled == 1
    with pytest.raises(LocalProtocolError, match="cancelled") as caught:
        _ = stream.result
    assert caught.value.details["text"].startswith("t0 ")
    assert caught.value.details["tokens"][0] == 0
    assert client.status().sessions_awake == 1


# --- failures


def test_wrong_arguments_are_explained_in_a_sentence_before_anything_is_sent(client: Any, service: FakeService) -> None:
    for ask, field, said in (
        (lambda: client.append("s"), "params", "give either text, tokens or messages."),
        (lambda: client.generate("s", max_tokens=0), "max_tokens", "it must be greater than or equal to 1."),
        (lambda: client.create("s", labels="abc"), "labels", "it is no list; give a list."),
        (lambda: client.append("s", tokens=[1, -1]), "tokens.1", "it must be greater than or equal to 0."),
        (
            lambda: client.set("s", sampling=Sampling()),
            "params",
            "name at least one of the sampling's parameters, or labels.",
        ),
    ):
        with pytest.raises(InvalidRequest) as caught:
            ask()
        assert caught.value.field == field
        assert caught.value.message == (said if field == "params" else f"{field}: {said}")
    assert service.calls == []


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), 1e30, float("inf")])
def test_a_timeout_that_is_no_time_is_refused(timeout_s: float, kind: str, short_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"), connected(short_path / "t.sock", kind, timeout_s=timeout_s):
        pass


def test_silence_beyond_the_timeout_is_an_error_and_cancels(
    server_thread: ServerThread, service: FakeService, kind: str
) -> None:
    with connected(server_thread.socket_path, kind, timeout_s=0.05) as client:
        client.create("s")
        server_thread.do(service.hold)
        with pytest.raises(RequestTimeout):
            client.generate("s", max_tokens=5)
        server_thread.wait_until(lambda: service.cancelled == 1)
        server_thread.do(service.release)
        assert client.generate("s", max_tokens=1).text == "t0 "  # late answers are not taken for this one's


def test_a_closed_client_says_so_and_its_stream_and_the_generation_end(
    client: Any, server_thread: ServerThread, service: FakeService
) -> None:
    client.create("s")
    stream = client.stream_generate("s", max_tokens=1_000_000)
    next(stream)
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        list(stream)
    with pytest.raises(ClientClosed):
        client.status()
    server_thread.wait_until(lambda: service.running == 0)


def test_a_stopping_daemon_ends_requests_with_its_reason(short_path: Path, kind: str) -> None:
    running = ServerThread(short_path / "t.sock")
    with connected(running.socket_path, kind) as client:
        client.create("s")
        running.do(running.service.hold)  # tokens that are not read until the stop would keep its reason from us
        with client.stream_generate("s", max_tokens=1_000_000) as stream:
            running.wait_until(lambda: running.service.running == 1)
            running.stop()
            with pytest.raises(RemoteError) as caught:
                list(stream)
        assert caught.value.code == "shutting_down"
        for _ in range(2):
            with pytest.raises((ConnectionLost, RemoteError)) as after:
                client.status()
        assert isinstance(after.value, ConnectionLost)
        assert "new client" in after.value.message


def test_nobody_there_is_unreachable_and_says_what_to_start(short_path: Path, kind: str) -> None:
    with pytest.raises(DaemonUnreachable) as caught, connected(short_path / "none.sock", kind):
        pass
    assert caught.value.path == str(short_path / "none.sock")
    assert f"Start a daemon with `torpor ensure --socket {short_path / 'none.sock'}`." in caught.value.message
    with pytest.raises(SocketPathTooLong), connected(Path("/tmp") / ("x" * 200), kind):
        pass


def test_a_daemon_of_another_user_is_not_talked_to(
    server_thread: ServerThread, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Threat 39, the other way round: prompts must not go to whoever made a socket at our path."""
    monkeypatch.setattr("torpor.socket_api.client.reaching.peer_uid", lambda connected: 4_000_000)
    with pytest.raises(PeerRefused), connected(server_thread.socket_path, kind):
        pass


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"", "connection_lost"),
        (answer(1)[:5], "truncated_frame"),
        (b"\xff\xff\xff\xff", "frame_too_large"),
        (b"\x01\x00\x00\x00\xc1", "malformed_frame"),
        (answer(9), "malformed_message"),
        (answer(1, version=5), "malformed_message"),
        (frame({"type": "surprise"}), "malformed_message"),
        (frame(HELLO), "malformed_message"),
    ],
)
def test_a_connection_that_dies_or_lies_mid_request_is_a_typed_error(
    short_path: Path, said: bytes, code: str, kind: str
) -> None:
    with (
        scripted(short_path / "i.sock", lambda _: Last(said)),
        connected(short_path / "i.sock", kind, timeout_s=10) as client,
    ):
        with pytest.raises(ApiError) as caught:
            client.status()
        assert caught.value.code == code


def test_an_answer_that_comes_with_the_end_of_the_connection_is_still_an_answer(short_path: Path, kind: str) -> None:
    """As that of a shutdown does."""
    said = Last(answer(1, slept=["x"], failed={}, empty=[]) + refusal(None, "shutting_down"))
    with scripted(short_path / "t.sock", lambda _: said), connected(short_path / "t.sock", kind) as client:
        assert client.shutdown().slept == ("x",)


def test_a_request_larger_than_the_daemon_takes_is_not_sent(short_path: Path, kind: str) -> None:
    with (
        scripted(short_path / "i.sock", lambda _: b"") as asked,
        connected(short_path / "i.sock", kind) as client,
        pytest.raises(LocalProtocolError, match="smaller"),
    ):
        client.append("s", text="x" * 2000)
    assert asked == []


def test_a_daemon_of_another_protocol_is_refused(short_path: Path, kind: str) -> None:
    hello = frame({**HELLO, "protocol": 2, "new": True})
    with (
        scripted(short_path / "i.sock", lambda _: b"", hello=hello),
        pytest.raises(UnsupportedProtocol, match="speaks protocol 2"),
        connected(short_path / "i.sock", kind),
    ):
        pass
