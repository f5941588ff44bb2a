"""The blocking client against a real server over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.api.process import StatusResult
from torpor.daemon.api.reading import Reuse
from torpor.daemon.api.session import ShowRequest
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.api.waking import PartDiffers
from torpor.socket_api import AsyncClient, Client, Sampling, TokenEvent
from torpor.socket_api.errors import (
    ApiError,
    ClientBusy,
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
from torpor.socket_api.wire.checking import load_request
from torpor.socket_api.wire.framing import encode_frame

from ..conftest import ServerThread
from ..fake_service import FakeBusy


@pytest.fixture
def client(server_thread: ServerThread) -> Iterator[Client]:
    with Client(server_thread.socket_path, timeout_s=20) as connected:
        yield connected


def test_the_conversation_of_the_readme_works(client: Client) -> None:
    agent = client.create("notes", labels=["a"], sampling=Sampling(temperature=0.5, seed=2**64 - 1))
    assert (agent.session, agent.labels, agent.sampling.seed) == ("torpor://default/notes", ("a",), 2**64 - 1)
    assert client.append("notes", text="one three five").tokens_added == 3
    pieces = list(client.stream_chat("notes", "hello", max_tokens=3))
    assert pieces == ["t4 ", "t5 ", "t6 "]
    receipt = client.sleep("notes")
    assert receipt.version == 1
    woken = client.wake("notes")
    assert (woken.tokens_prefilled, woken.bundle_id) == (0, receipt.bundle_id)
    assert [info.name for info in client.list_sessions()] == ["notes"]
    assert client.show("notes").versions[0].bundle_id == receipt.bundle_id
    assert client.status().models[0].name == "fake"
    assert client.delete("notes").versions_deleted == 1


def test_arguments_reach_the_service_as_they_were_given(client: Client, server_thread: ServerThread) -> None:
    client.create("s", system="be brief")
    client.append("s", tokens=[0, 7, 2**32 - 1])
    client.generate("s", max_tokens=1, text="x", stop=["END"], prove=True, sampling=Sampling(top_k=3))
    client.chat("s", "hi", max_tokens=1, role="tool")
    said = [{"role": "system", "content": ""}, {"role": "user", "content": "hi"}]
    assert client.chat("s", messages=said, on_divergence="rewind", max_tokens=2).tokens
    assert list(client.stream_chat("s", messages=said, max_tokens=1))
    transcripts = [given for method, given in server_thread.service.calls if "messages" in given]
    assert [(list(given["messages"]), given.get("on_divergence")) for given in transcripts] == [
        (said, "rewind"),
        (said, None),
    ]
    calls = dict(each for each in server_thread.service.calls if "messages" not in each[1])
    assert calls["create"]["system"] == "be brief"
    assert calls["append"] == {"session": "s", "tokens": (0, 7, 2**32 - 1)}
    assert calls["generate"]["stop"] == ("END",)
    assert calls["generate"]["prove"] is True
    assert calls["generate"]["sampling"] == {"top_k": 3}
    assert calls["chat"]["role"] == "tool"


def test_a_client_s_namespace_is_that_of_its_bare_names_and_of_what_it_asks_about_many(
    server_thread: ServerThread,
) -> None:
    with Client(server_thread.socket_path, namespace="lab") as client:
        for call in (
            lambda: client.create("s"),
            lambda: client.wake("s@3"),
            lambda: client.create("other/s"),
            lambda: client.fork("torpor://other/s", "t"),
            lambda: list(client.stream_generate("s", max_tokens=1)),
            lambda: client.warm(["s"]),
            lambda: client.warm(label="x"),
            client.list_sessions,
            lambda: client.list_sessions("other"),
            lambda: client.clear("x"),
        ):
            with contextlib.suppress(RemoteError):
                call()
        client.events().close()
        with contextlib.suppress(RemoteError):
            client.events(session="s").close()
    told = [
        {name: given[name] for name in ("session", "name", "sessions", "namespace") if given.get(name)}
        for _, given in server_thread.service.calls
    ]
    assert told == [
        {"session": "lab/s"},
        {"session": "lab/s@3"},
        {"session": "other/s"},
        {"session": "torpor://other/s", "name": "lab/t"},
        {"session": "lab/s"},
        {"sessions": ("lab/s",)},
        {"namespace": "lab"},
        {"namespace": "lab"},
        {"namespace": "other"},
        {"namespace": "lab"},
        {"namespace": "lab"},
        {"session": "lab/s"},
    ]


def test_a_request_names_of_the_sampling_what_its_caller_gave_defaults_too(
    client: Client, server_thread: ServerThread
) -> None:
    client.create("s", sampling=Sampling(temperature=0.5, top_p=0.9))
    assert client.set("s", sampling=Sampling(temperature=0.0)).sampling == Sampling(temperature=0.0, top_p=0.9)
    client.chat("s", "hi", max_tokens=1, sampling=Sampling(seed=0))
    asked = {method: given["sampling"] for method, given in server_thread.service.calls if "sampling" in given}
    assert (asked["set"], asked["chat"]) == ({"temperature": 0.0}, {"seed": 0})
    with pytest.raises(InvalidRequest, match="at least one"):
        client.set("s", sampling=Sampling())


def test_what_reads_makes_its_session_if_it_is_told_to(client: Client, server_thread: ServerThread) -> None:
    for name, verb in (
        ("a", lambda: client.append("a", text="x", create=True)),
        ("b", lambda: client.generate("b", text="x", create=True)),
        ("c", lambda: client.chat("c", "x", stop=["END"], create=True)),
        ("d", lambda: list(client.stream_chat("d", "x", stop="END", create=True))),
        ("e", lambda: list(client.stream_generate("e", text="x", create=True))),
    ):
        verb()
        assert server_thread.service.calls[-1][1]["session"] == name
        verb()
    assert sorted(info.name for info in client.list_sessions()) == ["a", "b", "c", "d", "e"]
    stops = [given.get("stop") for method, given in server_thread.service.calls if method == "chat"]
    assert stops == [("END",)] * 4
    with pytest.raises(RemoteError):
        client.chat("nobody", "x")


def test_results_carry_the_proof_when_asked(client: Client) -> None:
    client.create("s")
    assert client.generate("s", max_tokens=2).logits_blake3 is None
    assert len(client.generate("s", max_tokens=2, prove=True).logits_blake3 or ()) == 2


def test_progress_reaches_the_callback(client: Client) -> None:
    client.create("s")
    seen: list[ProgressEvent | TokenEvent] = []
    client.append("s", tokens=[1, 2, 3], on_event=seen.append)
    client.sleep("s", on_event=seen.append)
    client.wake("s", on_event=seen.append)
    assert [(event.stage, event.done) for event in seen if isinstance(event, ProgressEvent)] == [
        ("prefill", 2),
        ("prefill", 3),
        ("sleep", 12),
        ("wake", 1),
    ]


def test_the_store_is_looked_after_through_the_daemon(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    client.append("s", text="one two")
    client.sleep("s")
    report = client.maintain("prune", session="s", keep_last=3, keep_days=7.5, dry_run=True)
    assert (report.operation, report.dry_run, report.bytes_freed) == ("prune", True, 2048)
    assert (report.actions[0].kind, report.actions[0].session) == ("remove", "torpor://default/s")
    assert (report.actions_left_out, report.problems, report.problems_left_out) == (3, (), 0)
    assert client.maintain("gc").actions[0].session is None
    client.maintain("compact", session="s", cold_after_days=30)
    asked = [arguments for method, arguments in server_thread.service.calls if method == "maintain"]
    assert asked == [
        {"operation": "prune", "session": "s", "dry_run": True, "keep_last": 3, "keep_days": 7.5},
        {"operation": "gc"},
        {"operation": "compact", "session": "s", "cold_after_days": 30.0},
    ]
    client.maintain("forget", session="s")
    assert not client.list_sessions()


def test_a_version_is_analysed_under_a_kind_and_labels_that_may_be_named(
    client: Client, server_thread: ServerThread
) -> None:
    client.create("s")
    client.append("s", text="one two")
    client.sleep("s")
    told: list[object] = []
    found = client.analyse("s", on_event=told.append)
    assert (found.version, found.token_count, found.awake_tokens, found.artifact) == (1, 2, None, "{}\n")
    assert [event.stage for event in told] == ["analyse"]  # type: ignore[attr-defined]
    client.wake("s")
    assert client.analyse("s@1", kind="probe", labels=["a", "b"]).awake_tokens == 2
    assert [arguments for method, arguments in server_thread.service.calls if method == "analyse"] == [
        {"session": "s"},
        {"session": "s@1", "kind": "probe", "labels": ("a", "b")},
    ]
    for wrong in ({"kind": ""}, {"kind": "x" * 65}, {"labels": [""]}, {"labels": "text"}, {"labels": ["x"] * 65}):
        with pytest.raises(InvalidRequest):
            client.analyse("s", **wrong)  # type: ignore[arg-type]


def test_sessions_are_counted_warmed_and_cleared_by_label(client: Client, server_thread: ServerThread) -> None:
    client.create("s", labels=["x"])
    client.create("t", labels=["x", "y"])
    assert [figures.label for figures in client.stats().labels] == ["x", "y"]
    assert client.stats("y", namespace="default").total.sessions == 1
    assert [each.info.name for each in client.warm("s").sessions] == ["s"]
    assert [each.info.name for each in client.warm(["s"], label="y", namespace="default").sessions] == ["s", "t"]
    assert client.clear("y", dry_run=True).sessions == ("torpor://default/t",)
    assert client.clear("x", namespace="default").bytes_freed == 2048
    assert [arguments for method, arguments in server_thread.service.calls if method in ("warm", "clear")] == [
        {"sessions": ("s",)},
        {"sessions": ("s",), "label": "y", "namespace": "default"},
        {"label": "y", "dry_run": True},
        {"label": "x", "namespace": "default"},
    ]
    for wrong in ({}, {"namespace": "n"}, {"sessions": [""]}, {"sessions": ["s"], "namespace": "n"}):
        with pytest.raises(InvalidRequest):
            client.warm(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        client.clear("")


def test_why_tells_of_each_request(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    parted = ("torpor://default/s", 3, 9, 3, 1, "there", "asked", "clock", "Say it later.")
    server_thread.service.reuses = (Reuse("append", 1, "none"), Reuse("chat", 2, "diverged", *parted))
    told = client.why("s")
    assert told.session == "torpor://default/s"
    assert [(each.verb, each.outcome) for each in told.requests] == [("append", "none"), ("chat", "diverged")]
    assert (told.requests[1].position, told.requests[1].cause) == (3, "clock")


def test_a_priority_reaches_the_service_and_there_are_two(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    for priority in ("background", "normal"):
        client.append("s", tokens=[1], priority=priority)
        client.generate("s", max_tokens=1, priority=priority)
        assert list(client.stream_generate("s", max_tokens=1, priority=priority))
        client.chat("s", "hi", max_tokens=1, priority=priority)
        assert list(client.stream_chat("s", "hi", max_tokens=1, priority=priority))
        client.fold("s", f"of-{priority}", summary="x", priority=priority)

    async def as_well() -> None:
        async with AsyncClient(server_thread.socket_path) as other:
            await other.append("s", tokens=[1], priority="background")
            await other.generate("s", max_tokens=1, priority="background")
            assert [piece async for piece in other.stream_generate("s", max_tokens=1, priority="background")]
            await other.chat("s", "hi", max_tokens=1, priority="background")
            assert [piece async for piece in other.stream_chat("s", "hi", max_tokens=1, priority="background")]
            await other.fold("s", "another", summary="x", priority="background")

    asyncio.run(as_well())
    verbs = ["append", "generate", "generate", "chat", "chat", "fold"]
    told = [(verb, given.get("priority")) for verb, given in server_thread.service.calls if verb in verbs]
    assert told == [(verb, each) for each in ("background", None, "background") for verb in verbs]
    with pytest.raises(InvalidRequest, match="priority"):
        client.append("s", tokens=[1], priority="urgent")  # type: ignore[arg-type]


def test_a_session_is_folded_into_a_smaller_one(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    client.append("s", tokens=[1, 2, 3])
    made = client.fold("s", "t", summary="short", tail=2, labels=["x"])
    assert (made.session, made.tail_tokens, made.summary) == ("torpor://default/t", 2, "short")
    assert client.fold("s", "u", summarise=9).folded_from.tokens == 3
    assert [given for method, given in server_thread.service.calls if method == "fold"] == [
        {"session": "s", "name": "t", "summary": "short", "tail": 2, "labels": ("x",)},
        {"session": "s", "name": "u", "summarise": 9},
    ]
    for wrong in (
        {},
        {"summary": "x", "summarise": 1},
        {"summary": ""},
        {"summarise": 0},
        {"summary": "x", "tail": -1},
    ):
        with pytest.raises(InvalidRequest):
            client.fold("s", "other", **wrong)  # type: ignore[arg-type]


def test_a_session_is_forked_at_a_token_under_labels_of_its_own(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    client.append("s", text="one two")
    client.sleep("s")
    made = client.fork("s", "whole")
    assert (made.session, made.token_count, made.forked_from.tokens) == ("torpor://default/whole", 2, 2)
    assert client.fork("s@1", "part", at_token=1, labels=["x"]).forked_from.tokens == 1
    assert [arguments for method, arguments in server_thread.service.calls if method == "fork"] == [
        {"session": "s", "name": "whole"},
        {"session": "s@1", "name": "part", "at_token": 1, "labels": ("x",)},
    ]
    for wrong in ({"at_token": 0}, {"labels": "text"}, {"labels": [""]}):
        with pytest.raises(InvalidRequest):
            client.fork("s", "other", **wrong)  # type: ignore[arg-type]


def test_models_are_loaded_and_unloaded_by_name(client: Client, server_thread: ServerThread) -> None:
    assert client.load_model("fake").resident
    assert not client.unload_model("fake").resident
    assert [call for call in server_thread.service.calls if call[0].endswith("_model")] == [
        ("load_model", {"model": "fake"}),
        ("unload_model", {"model": "fake"}),
    ]
    for wrong in ("", 1):
        with pytest.raises(InvalidRequest):
            client.load_model(wrong)  # type: ignore[arg-type]


def test_versions_are_marked_and_bundles_imported_through_the_daemon(client: Client) -> None:
    client.create("s")
    client.append("s", text="one two")
    client.sleep("s")
    client.sleep("s")
    assert client.mark("s@1", tag="before").tags == ("before",)
    assert client.mark("s@1", tag="before", move=True).version == 1
    assert client.mark("s@1", pinned=True).pinned is True
    assert client.mark("s", pinned=False).version == 2
    unmarked = client.mark("s", untag="before")
    assert (unmarked.version, unmarked.tags, unmarked.pinned) == (1, (), True)
    assert client.import_bundle("ab" * 32).session == "torpor://default/imported"
    receipt = client.import_bundle("cd" * 32, session="other")
    assert (receipt.session, receipt.bundle_id) == ("torpor://default/other", "cd" * 32)


@pytest.mark.parametrize(
    ("operation", "options", "problem"),
    [
        ("defragment", {}, "operation"),
        ("gc", {"session": "s"}, "gc takes no session"),
        ("repair", {"keep_last": 1}, "repair takes no keep_last"),
        ("rebuild_index", {"session": "s"}, "rebuild_index takes no session"),
        ("compact", {"keep_days": 1.0}, "compact takes no keep_days"),
        ("prune", {"keep_last": 1, "cold_after_days": 1.0}, "prune takes no cold_after_days"),
        ("prune", {"session": "s"}, "prune needs keep_last, keep_days or both"),
        ("prune", {"keep_last": 0}, "keep_last"),
        ("prune", {"keep_days": 0.0}, "keep_days"),
        ("prune", {"keep_days": 36_501.0}, "keep_days"),
        ("compact", {"cold_after_days": -1.0}, "cold_after_days"),
        ("prune", {"keep_days": float("nan")}, "keep_days"),
        ("forget", {}, "forget needs the session"),
        ("forget", {"session": "s", "keep_last": 1}, "forget takes no keep_last"),
    ],
)
def test_an_operation_takes_what_belongs_to_it_and_nothing_else(
    client: Client, server_thread: ServerThread, operation: str, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        client.maintain(operation, **options)  # type: ignore[arg-type]
    assert server_thread.service.calls == []


@pytest.mark.parametrize(
    ("session", "marks"),
    [
        ("s", {}),
        ("s", {"tag": "a", "untag": "b"}),
        ("s", {"tag": "a", "pinned": False}),
        ("s", {"tag": ""}),
        ("s@2", {"untag": "a"}),
        ("s", {"untag": "a", "move": True}),
        ("s", {"pinned": 1}),
    ],
)
def test_one_mark_is_set_at_a_time(client: Client, session: str, marks: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        client.mark(session, **marks)  # type: ignore[arg-type]


@pytest.mark.parametrize("bundle_id", ["", "ab", "AB" * 32, "ab" * 32 + "\n", "../" + "a" * 61, "ab" * 33])
def test_only_an_id_names_a_bundle_to_import_threat_19(client: Client, bundle_id: str) -> None:
    with pytest.raises(InvalidRequest):
        client.import_bundle(bundle_id)


def test_a_wake_names_its_version_once(client: Client, server_thread: ServerThread) -> None:
    client.create("s@2")  # the double takes any name
    client.sleep("s@2")
    client.wake("s@2")
    assert server_thread.service.calls[-1][1]["session"] == "s@2"
    with pytest.raises(InvalidRequest, match="name the version once"):
        client.wake("s@2", version=2)


def test_a_plan_of_a_wake_asks_what_the_wake_would(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    client.sleep("s")
    plan = client.plan_wake("s", version=1, at_token=7, strict=True)
    asked = {"session": "s", "version": 1, "at_token": 7, "strict": True}
    assert server_thread.service.calls[-1] == ("plan_wake", asked)
    assert (plan.way, plan.restore_seconds, plan.recompute_seconds) == ("restore", 0.0125, None)
    assert [(each.name, each.value, each.samples) for each in plan.rates][1] == ("decode_tokens_per_s", None, 0)
    assert client.wake("s").already_awake is False, "the plan has woken nothing"
    assert client.plan_wake("s").way is None


def test_a_wake_tells_what_differs_and_may_be_strict(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    client.sleep("s")
    server_thread.service.differs = (PartDiffers("mlx", None, "1.2"),)
    (told,) = client.wake("s").differs
    assert (told.field, told.stored, told.live) == ("mlx", None, "1.2")
    assert server_thread.service.calls[-1][1] == {"session": "s"}
    client.wake("s", strict=True)
    assert server_thread.service.calls[-1][1]["strict"] is True


def test_a_stream_keeps_its_result(client: Client) -> None:
    client.create("s")
    stream = client.stream_generate("s", max_tokens=3)
    with pytest.raises(LocalProtocolError):
        _ = stream.result
    assert "".join(stream) == stream.result.text == "t0 t1 t2 "
    assert list(stream) == []


def test_results_are_frozen(client: Client) -> None:
    info = client.create("s")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"  # type: ignore[misc]


def test_requests_can_be_made_while_a_stream_is_open(client: Client) -> None:
    client.create("s")
    stream = client.stream_generate("s", max_tokens=5)
    first = next(stream)
    assert client.show("s").info.name == "s"
    assert first + "".join(stream) == stream.result.text


def test_a_stream_left_early_is_cancelled(client: Client, server_thread: ServerThread) -> None:
    """Threat 45, from the client's side; the connection goes on."""
    client.create("s")
    with client.stream_generate("s", max_tokens=1_000_000) as stream:
        next(stream)
    server_thread.wait_until(lambda: server_thread.service.running == 0)
    assert server_thread.service.cancelled == 1
    with pytest.raises(LocalProtocolError, match="cancelled") as caught:
        _ = stream.result
    assert caught.value.details["text"].startswith("t0 ")
    assert caught.value.details["tokens"][0] == 0
    assert client.status().sessions_awake == 1


@pytest.mark.parametrize(
    "begin", [lambda client: client.stream_generate("s", max_tokens=1), lambda client: client.events()]
)
def test_an_interrupt_while_a_stream_begins_leaves_no_half_made_one_that_fails_at_its_end(
    client: Client, monkeypatch: pytest.MonkeyPatch, begin: Callable[[Client], object]
) -> None:
    def interrupted(_call: object) -> int:
        raise KeyboardInterrupt

    client.create("s")
    unraised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    monkeypatch.setattr(client._link, "begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(client)
    gc.collect()
    assert unraised == []


def test_a_stream_that_is_dropped_without_with_is_cancelled(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    for _ in client.stream_generate("s", max_tokens=1_000_000):
        break
    gc.collect()
    server_thread.wait_until(lambda: server_thread.service.cancelled == 1)
    assert client.status().sessions_awake == 1


def test_a_signal_handler_may_cancel_what_its_own_thread_waits_for(client: Client, server_thread: ServerThread) -> None:
    """Ctrl-C in `torpor chat`."""
    client.create("s")
    server_thread.do(server_thread.service.hold)
    stream = client.stream_generate("s", max_tokens=3)
    before = signal.signal(signal.SIGUSR1, lambda *_: stream.cancel())
    try:
        server_thread.wait_until(lambda: server_thread.service.running == 1)
        timer = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1))
        timer.start()
        assert list(stream) == []
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert server_thread.service.cancelled == 1


def test_an_answer_that_comes_with_the_end_of_the_connection_is_still_an_answer(short_path: Path) -> None:
    """As that of a shutdown does."""
    hello = {"type": "hello", "protocol": 1, "server": "t", "pid": 5}
    hello["limits"] = {"max_request_frame_bytes": 2**20, "max_reply_frame_bytes": 2**20, "max_in_flight": 9}
    result = {"type": "result", "id": 1, "result": {"slept": ["x"], "failed": {}, "empty": []}}
    goodbye = {"type": "error", "id": None, "error": {"code": "shutting_down", "message": "Over.", "details": {}}}
    frames = [encode_frame(message, max_frame_bytes=999) for message in (hello, result, goodbye)]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "t.sock"))
        listening.listen(1)

        def answer() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(65536)
                connected.sendall(frames[0])
                connected.recv(65536)
                connected.sendall(frames[1] + frames[2])

        answering = threading.Thread(target=answer)
        answering.start()
        with Client(short_path / "t.sock", timeout_s=20) as client:
            assert client.shutdown().slept == ("x",)
        answering.join(timeout=20)


def test_a_client_used_from_two_threads_says_so_and_goes_on(client: Client, server_thread: ServerThread) -> None:
    client.create("s")
    server_thread.do(server_thread.service.hold)
    first = threading.Thread(target=client.generate, args=("s",), kwargs={"max_tokens": 1})
    first.start()
    server_thread.wait_until(lambda: server_thread.service.running == 1)
    with pytest.raises(ClientBusy, match="each thread"):
        client.status()
    server_thread.do(server_thread.service.release)
    first.join(timeout=20)
    assert client.status().sessions_awake == 1


@pytest.mark.parametrize("timeout_s", [-1, 0, float("nan"), 1e30, float("inf")])
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_timeout_that_is_no_time_is_refused(
    kind: type[Client] | type[AsyncClient], timeout_s: float, short_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="timeout_s"):
        kind(short_path / "nobody.sock", timeout_s=timeout_s)


def test_wrong_arguments_are_explained_in_a_sentence(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.append("s")
    assert caught.value.message == "give either text, tokens or messages."
    with pytest.raises(InvalidRequest) as caught:
        client.generate("s", max_tokens=0)
    assert caught.value.message == "max_tokens: it must be greater than or equal to 1."


@pytest.mark.parametrize("pid", [-1, 0, 1, 2**31])
def test_a_process_id_that_would_mean_a_group_or_everything_is_no_status(pid: int) -> None:
    """It may be signalled."""
    fields = {"version": "1", "store": "/", "models": (), "sessions_awake": 0, "sessions_asleep": 0, "blas": "none"}
    counts = ("sessions_bytes", "reserved_bytes", "waiting", "slept_by_pressure", "slept_by_idling")
    fields |= {"memory": {"budget_bytes": 2, "weights_bytes": 1, **dict.fromkeys(counts, 0)}}
    fields |= {"queue": {"waiting": 0, "background": 0, "limit": 1}}
    TypeAdapter(StatusResult).validate_python({**fields, "uptime_s": 0.0, "pid": 4711})
    with pytest.raises(ValueError, match="pid"):
        TypeAdapter(StatusResult).validate_python({**fields, "uptime_s": 0.0, "pid": pid})


def test_the_daemons_failure_is_a_remote_error_with_its_code(client: Client) -> None:
    with pytest.raises(RemoteError, match="no session 'ghost'") as caught:
        client.show("ghost")
    assert caught.value.code == "session_not_found"
    assert caught.value.details == {"session": "ghost"}
    client.create("alive")  # the connection goes on


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("params", lambda c: c.append("s", text="a", tokens=[1])),
        ("params", lambda c: c.append("s")),
        ("text", lambda c: c.append("s", text="")),
        ("tokens.1", lambda c: c.append("s", tokens=[1, -1])),
        ("max_tokens", lambda c: c.generate("s", max_tokens=2**63)),
        ("labels", lambda c: c.create("s", labels="abc")),
        ("role", lambda c: c.chat("s", "x", max_tokens=1, role="emperor")),
        ("params", lambda c: c.chat("s", "x", messages=[{"role": "user", "content": "x"}], max_tokens=1)),
        ("messages.0.content", lambda c: c.chat("s", messages=[{"role": "user"}], max_tokens=1)),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(
    client: Client, server_thread: ServerThread, field: str, ask: object
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(client)  # type: ignore[operator]
    assert caught.value.field == field
    assert server_thread.service.calls == []


def test_silence_beyond_the_timeout_is_an_error_and_cancels(server_thread: ServerThread) -> None:
    with Client(server_thread.socket_path, timeout_s=0.05) as client:
        client.create("s")
        server_thread.do(server_thread.service.hold)
        with pytest.raises(RequestTimeout):
            client.generate("s", max_tokens=5)
        server_thread.wait_until(lambda: server_thread.service.running == 0)
        server_thread.do(server_thread.service.release)
        assert client.generate("s", max_tokens=1).text == "t0 "  # late answers are not taken for this one's


def test_an_interrupted_request_is_cancelled_and_the_client_goes_on(
    client: Client, server_thread: ServerThread
) -> None:
    client.create("s")

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate("s", max_tokens=1_000_000, on_event=interrupt)
    server_thread.wait_until(lambda: server_thread.service.running == 0)
    assert client.show("s").info.name == "s"


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    client.close()
    with pytest.raises(ClientClosed):
        client.status()


def test_closing_in_the_middle_of_a_stream_ends_the_stream_and_the_generation(
    client: Client, server_thread: ServerThread
) -> None:
    client.create("s")
    stream = client.stream_generate("s", max_tokens=1_000_000)
    next(stream)
    client.close()
    with pytest.raises(ClientClosed):
        for _ in stream:
            pass
    server_thread.wait_until(lambda: server_thread.service.running == 0)


def test_a_stopping_daemon_ends_requests_with_its_reason(short_path: Path) -> None:
    running = ServerThread(short_path / "t.sock")
    client = Client(running.socket_path)
    client.create("s")
    running.do(running.service.hold)  # tokens that nobody reads until the stop is over would keep its reason from us
    stream = client.stream_generate("s", max_tokens=1_000_000)
    running.wait_until(lambda: running.service.running == 1)
    running.stop()
    with pytest.raises(RemoteError) as caught:
        for _ in stream:
            pass
    assert caught.value.code == "shutting_down"
    with pytest.raises((ConnectionLost, RemoteError)):
        client.status()
    with pytest.raises(ConnectionLost, match="new client"):
        client.status()
    client.close()


def test_what_a_request_that_failed_had_in_hand_is_let_go_of_without_a_garbage_collection(
    client: Client, server_thread: ServerThread
) -> None:
    """A session's memory, say; an error that is raised where it is answered holds that frame, and so itself."""
    had: list[weakref.ref[Box]] = []

    async def fail(_request: object) -> None:
        held = Box()
        had.append(weakref.ref(held))
        raise FakeBusy("No.")

    server_thread.service.answers[ShowRequest] = fail
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RemoteError):
            client.show("s")
        server_thread.wait_until(lambda: had[0]() is None)
    finally:
        gc.enable()


class Box:
    """Something that can be seen to go."""


def test_nobody_there_is_unreachable_and_says_what_to_start(short_path: Path) -> None:
    with pytest.raises(DaemonUnreachable) as caught:
        Client(short_path / "none.sock")
    assert caught.value.path == str(short_path / "none.sock")
    assert f"Start a daemon with `torpor ensure --socket {short_path / 'none.sock'}`." in caught.value.message


def test_where_a_daemon_is_by_default_it_is_started_without_a_path(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_SOCKET", str(short_path / "none.sock"))
    with pytest.raises(DaemonUnreachable, match=r"Start a daemon with `torpor ensure`\."):
        Client()


def test_a_path_too_long_is_refused_before_connecting() -> None:
    with pytest.raises(SocketPathTooLong):
        Client("/tmp/" + "x" * 200)


def test_a_daemon_of_another_user_is_not_talked_to(
    server_thread: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threat 39, the other way round: prompts must not go to whoever made a socket at our path."""
    monkeypatch.setattr("torpor.socket_api.client.reaching.peer_uid", lambda connected: 4_000_000)
    with pytest.raises(PeerRefused):
        Client(server_thread.socket_path)


HELLO = {
    "type": "hello",
    "protocol": 1,
    "server": "x",
    "pid": 1,
    "limits": {"max_request_frame_bytes": 1000, "max_reply_frame_bytes": 1000, "max_in_flight": 1},
}


class Impostor:
    """A listening socket that answers one connection with given bytes, then closes or holds it."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self.answers = answers
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        connected, _ = self._listener.accept()
        with connected:
            for answer in self.answers:
                connected.recv(65536)
                connected.sendall(answer)

    def end(self) -> None:
        self._thread.join(timeout=10)
        self._listener.close()


def frame(message: dict[str, object]) -> bytes:
    return encode_frame(message, max_frame_bytes=2**20)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"", "connection_lost"),
        (frame({"type": "result", "id": 1, "result": {}})[:5], "truncated_frame"),
        (b"\xff\xff\xff\xff", "frame_too_large"),
        (b"\x01\x00\x00\x00\xc1", "malformed_frame"),
        (frame({"type": "result", "id": 9, "result": {}}), "malformed_message"),
        (frame({"type": "result", "id": 1, "result": {"version": 5}}), "malformed_message"),
        (frame({"type": "surprise"}), "malformed_message"),
        (frame(HELLO), "malformed_message"),
    ],
)
def test_a_connection_that_dies_or_lies_mid_request_is_a_typed_error(
    short_path: Path, answer: bytes, code: str
) -> None:
    impostor = Impostor(short_path / "i.sock", frame(HELLO), answer)
    with Client(short_path / "i.sock", timeout_s=10) as client:
        with pytest.raises(ApiError) as caught:
            client.status()
        assert caught.value.code == code
    impostor.end()


def test_a_request_larger_than_the_daemon_takes_is_not_sent(short_path: Path) -> None:
    impostor = Impostor(short_path / "i.sock", frame(HELLO))
    with Client(short_path / "i.sock", timeout_s=10) as client, pytest.raises(LocalProtocolError, match="smaller"):
        client.append("s", text="x" * 2000)
    impostor.end()


def test_a_daemon_of_another_protocol_is_refused(short_path: Path) -> None:
    impostor = Impostor(short_path / "i.sock", frame({**HELLO, "protocol": 2, "new": True}))
    with pytest.raises(UnsupportedProtocol, match="speaks protocol 2"):
        Client(short_path / "i.sock")
    impostor.end()


@pytest.mark.parametrize(
    ("field", "messages", "problem"),
    [
        ("messages", [], "it has 0 entries; give at least 1."),
        (
            "messages.0.content",
            [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "it is no text; give one text for each message: join a list of parts, write a tool call out.",
        ),
        ("messages.0.content", [{"role": "user"}], "it is missing; give it."),
        ("messages.0.name", [{"role": "user", "content": "hi", "name": "x"}], "there is no such field; leave it out."),
    ],
)
def test_a_transcript_that_is_none_is_refused_in_our_words(field: str, messages: list[Any], problem: str) -> None:
    raw = {"session": "a", "max_tokens": 1, "messages": tuple(messages)}
    with pytest.raises(InvalidRequest) as caught:
        load_request(VERBS["chat"], raw)
    assert str(caught.value) == f"{field}: {problem}"
    assert caught.value.details["field"] == field
