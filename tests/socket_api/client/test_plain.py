"""What is asked without the client's checks is what the client gets; and all else is left to the client."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.history import HistoryResult
from torpor.daemon.api.process import StatusResult
from torpor.daemon.api.session import ListResult, SessionDetail, SessionInfo
from torpor.memvid.answers import Finding
from torpor.socket_api import Client
from torpor.socket_api.client.plain import ask_plainly, record_of
from torpor.socket_api.limits import MAX_REPLY_FRAME_BYTES, PROTOCOL_VERSION
from torpor.socket_api.wire.framing import encode_frame
from torpor.tests.socket_api.server_rig import ServerThread


def test_the_answers_are_those_of_the_client(short_path: Path) -> None:
    running = ServerThread(short_path / "t.sock")
    try:
        with Client(short_path / "t.sock") as client:
            for name in ("notes", "writer"):
                client.create(name, labels=["a", "b"])
                client.append(name, text="some words")
            client.sleep("notes")
            listed, detail, history = client.list_sessions(), client.show("notes"), client.history()
            status = client.status()
        asked = ("list", {}, ListResult), ("show", {"session": "notes"}, SessionDetail), ("history", {}, HistoryResult)
        found = ask_plainly(short_path / "t.sock", ("status", {}, StatusResult), *asked)
        assert found is not None
        assert found[1:] == [listed, detail, history]
        assert (found[0].store, found[0].models) == (status.store, status.models)
        assert ask_plainly(short_path / "t.sock", ("show", {"session": "nobody"}, SessionDetail)) is None
        assert ask_plainly(short_path / "t.sock", ("no_such_verb", {}, ListResult)) is None
        assert ask_plainly(short_path / "t.sock", ("list", {}, SessionDetail)) is None, "it is another record"
    finally:
        running.stop()


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode_frame({"type": "hello", "protocol": PROTOCOL_VERSION + 1}, max_frame_bytes=MAX_REPLY_FRAME_BYTES),
        encode_frame({"type": "error", "id": None, "error": {}}, max_frame_bytes=MAX_REPLY_FRAME_BYTES),
        encode_frame({"type": "hello", "protocol": PROTOCOL_VERSION}, max_frame_bytes=MAX_REPLY_FRAME_BYTES),
        b"\xff\xff\xff\xff",
    ],
)
def test_what_is_no_daemon_of_this_protocol_is_left_to_the_client(short_path: Path, said: bytes) -> None:
    path = short_path / "t.sock"
    assert ask_plainly(path, ("list", {}, ListResult)) is None, "nobody is there"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connected, _ = listener.accept()
            with connected:
                connected.sendall(said)
                connected.shutdown(socket.SHUT_WR)
                while connected.recv(1024):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        assert ask_plainly(path, ("list", {}, ListResult)) is None
        thread.join()


@pytest.mark.parametrize(
    "wrong", [{"token_count": "3"}, {"token_count": True}, {"labels": "a"}, {"labels": [1]}, {"state": "gone"}, None]
)
def test_a_value_of_another_kind_makes_no_record(wrong: dict[str, Any] | None) -> None:
    right: dict[str, Any] = {
        "session": "torpor://default/a",
        "namespace": "default",
        "name": "a",
        "state": "asleep",
        "model": "m",
        "token_count": 3,
        "version": None,
        "bundle_id": None,
        "resident_bytes": 0,
        "written_bytes": 5,
        "dirty": False,
        "labels": ["a"],
        "slept_ns": 1,
        "sampling": None,
        "of_a_later_release": 1,
    }
    assert record_of(SessionInfo, right).labels == ("a",)
    with pytest.raises(TypeError):
        record_of(SessionInfo, {**right, **wrong} if wrong else {})


def test_a_record_may_have_others_in_it() -> None:
    finding = {"path": "/p", "code": "c", "message": "m"}
    assert record_of(HistoryResult, {"entries": [], "problems": [finding]}).problems == (Finding("/p", "c", "m"),)
