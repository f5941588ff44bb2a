"""The server over a real socket, against clients that send raw bytes: limits, deadlines, cancellation, the stop."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from typing import Any

import pytest
from torpor.daemon.api.process import StatusRequest, SubscribeResult
from torpor.socket_api.server import served
from torpor.socket_api.wire.framing import Pieces
from torpor.tests.socket_api.server_rig import RawClient, Running, frame, poll, serving, turns


def pass_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let the loop's clock go forward."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)


def waiting_replies(served: served.ServedConnection) -> list[int]:
    """The bytes of replies that wait for a client, each time that one more is put there."""
    outbox, waiting = served._outbox, [0]
    put = outbox.put_reply

    def watch(frame: bytes) -> None:
        put(frame)
        waiting.append(outbox._reply_bytes)

    outbox.put_reply = watch  # type: ignore[method-assign]
    return waiting


async def test_hello_says_who_serves_and_what_it_takes(state: Running) -> None:
    client = await state.connect(greet=False)
    hello = await client.hello()
    assert (hello["protocol"], hello["pid"], hello["server"][:7]) == (1, os.getpid(), "torpor ")
    assert hello["limits"] == {
        "max_request_frame_bytes": 16 * 2**20,
        "max_reply_frame_bytes": 64 * 2**20,
        "max_in_flight": 32,
    }


async def test_requests_of_one_connection_are_answered_as_they_end_not_as_they_came(state: Running) -> None:
    client = await state.connect("s")
    state.service.hold()
    client.ask(2, "generate", session="s", max_tokens=2)
    client.ask(3, "status")
    assert (await client.read())["id"] == 3
    state.service.release()
    kinds = [(await client.read())["type"] for _ in range(3)]
    assert kinds == ["event", "event", "result"]


# --- bad frames end their connection only


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"\xff\xff\xff\xff", "frame_too_large"),
        (b"\x05\x00\x00\x00hello", "malformed_frame"),
        (b"\x01\x00\x00\x00\xc1", "malformed_frame"),
        (b"\x00\x00\x00\x00", "malformed_frame"),
        (b"\x01\x00\x00\x00\x90", "malformed_frame"),
        (frame({"type": "?"}), "malformed_message"),
        (frame({"type": "hello", "protocol": 99, "shiny": True}), "unsupported_protocol"),
    ],
)
@pytest.mark.parametrize("greet", [True, False])
async def test_a_bad_frame_is_answered_and_ends_that_connection_only(
    state: Running, data: bytes, code: str, greet: bool
) -> None:
    """Threats 17 and 43."""
    client = await state.connect(greet=greet)
    client.writer.write(data)
    assert await client.error_code_then_end() == code
    await state.assert_serves_others()
    await state.until_left()


async def test_half_a_frame_and_then_a_disconnect_frees_everything_at_every_offset(state: Running) -> None:
    """Threat 42."""
    whole = frame({"type": "request", "id": 1, "method": "status", "params": {}})
    for cut in range(1, len(whole)):
        client = await state.connect()
        client.writer.write(whole[:cut])
        client.writer.write_eof()
        assert await client.error_code_then_end() == "truncated_frame"
        client.close()
    for cut in range(1, len(whole)):
        client = await state.connect()
        client.writer.write(whole[:cut])
        client.close()
    await poll(lambda: state.server.connections == 0, timeout_s=1)
    await state.assert_serves_others()


@serving(frame_timeout_s=0.15)
async def test_a_frame_that_does_not_end_runs_into_its_deadline(state: Running) -> None:
    """Threat 41: one byte now and then does not extend the deadline, which runs from the first."""
    client = await state.connect()
    client.writer.write(b"\xff\x00")

    async def drip() -> None:
        while not client.writer.is_closing():
            client.writer.write(b"\x00")
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert (await client.read())["error"]["code"] == "frame_timeout"
    dripping.cancel()
    await state.assert_serves_others()


@serving(frame_timeout_s=1000)
async def test_the_deadline_of_a_frame_does_not_hurt_an_idle_connection_nor_a_busy_one(
    state: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await state.connect()
    request = frame({"type": "request", "id": 1, "method": "status"})
    client.writer.write(request[:7])
    for _ in range(5):  # there is always a frame begun, and each has a deadline of its own
        client.writer.write(request[7:] + request[:7])
        assert (await client.read())["type"] == "result"
        pass_time(monkeypatch, 600)
    client.writer.write(request[7:])
    assert (await client.read())["type"] == "result"
    pass_time(monkeypatch, 3000)  # idle for longer than the deadline
    client.ask(0, "status")
    assert (await client.read())["type"] == "result"


@serving(hello_timeout_s=0.1)
async def test_a_connection_that_never_says_hello_is_closed(state: Running) -> None:
    """Threat 41."""
    silent = await state.connect(greet=False)
    half = await state.connect(greet=False)
    half.writer.write(b"\x20\x00")
    assert await silent.error_code_then_end() == "hello_timeout"
    assert await half.error_code_then_end() == "hello_timeout"


# --- limits


async def at_work(state: Running, name: str) -> RawClient:
    before = state.service.running
    client = await state.connect(name)
    client.ask(2, "generate", session=name, max_tokens=1)
    await poll(lambda: state.service.running == before + 1)
    return client


@serving(max_connections=2, reserved_connections=2)
async def test_a_new_connection_takes_the_place_of_the_one_idle_for_longest(state: Running) -> None:
    """Threat 41: connections that only stand there lock nobody out."""
    first, second = await state.connect(), await state.connect()
    first.ask(1, "status")  # now the second has been idle for longer
    await first.answer(1)
    third = await state.connect()
    assert await second.error_code_then_end() == "connection_evicted"
    for client in (first, third):
        client.ask(2, "status")
        assert (await client.answer(2))["type"] == "result"
    for _ in range(20):  # many at once, too
        state.clients.append(RawClient(*await asyncio.open_unix_connection(str(state.path))))
    for client in state.clients[-2:]:
        assert (await client.hello())["type"] == "hello"
    await state.until_left(2)


@serving(max_connections=2, reserved_connections=1)
async def test_while_all_connections_work_one_in_reserve_may_look_and_stop_and_takes_a_place_that_is_free(
    state: Running,
) -> None:
    state.service.hold()
    workers = [await at_work(state, name) for name in ("a", "b")]
    reserve = await state.connect()
    reserve.ask(1, "status")
    assert (await reserve.answer(1))["type"] == "result"
    reserve.ask(2, "show", session="a")
    assert await reserve.error_code(2) == "daemon_busy"
    workers[0].close()
    await state.until_left(2)
    reserve.ask(3, "show", session="a")
    assert (await reserve.answer(3))["type"] == "result"
    asking = await state.connect()  # in place of the idle one
    asking.ask(1, "shutdown", force=True)
    await poll(lambda: all(served.idle_since is None for served in state.server._served))
    other = await state.connect()
    other.ask(1, "shutdown", force=True)
    await poll(lambda: all(served.idle_since is None for served in state.server._served))
    refused = await state.connect(greet=False)
    assert await refused.error_code_then_end() == "too_many_connections"
    state.service.release()
    assert (await workers[1].answer(2))["type"] == "result"


@serving(max_connection_request_bytes=150_000, max_request_bytes=350_000)
async def test_requests_beyond_the_budgets_are_not_read_until_others_have_ended(state: Running) -> None:
    """Threat 44: bytes of requests in flight, counted at the service."""
    size = 100_000
    clients = [await state.connect(f"s{number}") for number in range(4)]
    state.service.hold()
    for number, client in enumerate(clients):
        for request_id in (2, 3, 4):
            client.ask(request_id, "append", session=f"s{number}", text="x" * size)
    await state.until_asked("append", 3)
    await turns(200)
    assert state.asked("append") == 3  # one of each connection, and of all of them three
    await state.assert_serves_others()  # what is small gets through
    state.service.release()
    for client in clients:
        for _ in range(3):
            while (message := await client.read())["type"] == "event":
                pass
            assert message["type"] == "result"
    assert state.asked("append") == 12
    assert state.held_bytes == 0


BIG = 2**24


@serving(frame_timeout_s=1000, max_request_bytes=24_000_000)
async def test_clients_that_announce_much_and_send_little_keep_nobody_waiting(state: Running) -> None:
    """Threats 41 and 44: forty bytes, as eight frames of 16 MiB each of which one byte comes."""
    for _ in range(8):
        slow = await state.connect()
        slow.writer.write(BIG.to_bytes(4, "little") + b"\x84")
    other = await state.connect("s")
    for request_id in (2, 3):
        other.ask(request_id, "append", session="s", text="x" * 10_000_000)
        assert (await other.answer(request_id))["type"] == "result"
    assert state.held_bytes == 8 * 5
    assert state.server.connections == 9, "and nobody minds the slow ones"


@pytest.mark.one_in(1)
@serving(frame_timeout_s=1000, max_request_bytes=24_000_000)
async def test_who_sends_slowly_while_others_wait_for_the_room_that_it_holds_is_dropped_and_they_go_on(
    state: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threats 41 and 44. Alone it may be as slow as the deadline of its frame allows."""
    slow, other = await state.connect(), await state.connect("s")
    slow.writer.write(BIG.to_bytes(4, "little") + b"x" * 15_000_000)
    await state.until_held(15_000_004)
    pass_time(monkeypatch, 100)
    slow.writer.write(b"x")
    await state.until_held(15_000_005)
    other.ask(2, "append", session="s", text="x" * 10_000_000)
    assert await slow.error_code_then_end() == "frame_timeout"
    assert (await other.answer(2))["type"] == "result"


@pytest.mark.one_in(1)
@serving(frame_timeout_s=1000, max_request_bytes=24_000_000)
async def test_a_daemon_that_stood_still_drops_nobody_for_it(state: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threats 41 and 44. What was sent meanwhile waits in the socket, and was not slow."""
    sender, other = await state.connect(), await state.connect("t")
    whole = frame(
        {"type": "request", "id": 1, "method": "create", "params": {"session": "s", "system": "x" * 15_000_000}}
    )
    sender.writer.write(whole[:-200_000])
    await state.until_held(len(whole) - 200_000)
    other.ask(2, "append", session="t", text="x" * 10_000_000)
    await poll(lambda: state.server._budget.is_short)
    pass_time(monkeypatch, 100)
    sender.writer.write(whole[-200_000:])
    assert (await sender.answer(1))["id"] == 1
    assert (await other.answer(2))["type"] == "result"


@pytest.mark.one_in(1)
@serving(max_request_bytes=20_000_000)
async def test_halves_of_frames_never_keep_each_other_from_becoming_whole(state: Running) -> None:
    """Threat 44: more is sent at once than there is room for, and all of it is served, within the bound."""
    clients = [await state.connect(f"s{number}") for number in range(6)]
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, state.held_bytes)
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    for number, client in enumerate(clients):
        client.ask(2, "append", session=f"s{number}", text="x" * 8_000_000)
    for client in clients:
        assert (await client.answer(2))["type"] == "result"
    watching.cancel()
    assert 8_000_000 < most <= 20_000_000
    assert state.held_bytes == 0


@serving(max_connection_request_bytes=250_000)
async def test_a_client_that_leaves_while_it_is_not_read_is_seen_to_leave(state: Running) -> None:
    client = await state.connect("s")
    state.service.hold()
    for request_id in (2, 3):
        client.ask(request_id, "append", session="s", text="x" * 200_000)
    await state.until_asked("append")
    client.close()
    await state.until_left()
    assert state.held_bytes == 0


async def test_the_bytes_of_frames_that_break_off_or_are_refused_are_given_back(state: Running) -> None:
    half, wrong = await state.connect(), await state.connect()
    half.writer.write((10_000_000).to_bytes(4, "little") + b"x" * 100_000)
    await state.until_held(100_004)  # what came, and not what was announced
    wrong.ask(1, "append", session="s", text=["x" * 10_000])
    assert await wrong.error_code(1) == "invalid_request"
    assert state.held_bytes == 100_004
    half.close()
    await state.until_held(0)


async def test_a_duplicate_id_fails_the_second_request_and_not_the_first(state: Running) -> None:
    """Threat 47."""
    client = await state.connect("s")
    state.service.hold()
    client.ask(7, "generate", session="s", max_tokens=1)
    client.ask(7, "status")
    assert (await client.read())["error"]["code"] == "duplicate_id"
    state.service.release()
    assert (await client.answer(7))["result"]["text"] == "t0 "


async def test_ids_of_one_connection_say_nothing_about_another(state: Running) -> None:
    """Threat 47: a forged cancel reaches only the forger's own requests."""
    mine, other = await state.connect("s"), await state.connect()
    state.service.hold()
    mine.ask(5, "generate", session="s", max_tokens=1)
    await poll(lambda: state.service.running == 1)
    other.send(type="cancel", id=5)
    other.ask(5, "status")
    assert (await other.read())["id"] == 5
    state.service.release()
    assert (await mine.answer(5))["type"] == "result"


@serving(max_waiting_event_bytes=500_000)
async def test_a_client_that_stops_reading_a_stream_is_dropped_and_others_go_on(state: Running) -> None:
    """Threat 44: the bound on waiting events."""
    state.service.piece = "x" * 10_000
    with state.deaf(10**6):
        await state.until_asked("generate")
        await state.assert_serves_others()
        await poll(lambda: state.service.cancelled == 1 and state.server.connections == 0)
        await state.assert_serves_others()


@serving(stall_timeout_s=0.1)
async def test_a_client_that_takes_no_bytes_is_dropped_after_the_stall_deadline(state: Running) -> None:
    """Threat 44: the deadline, for a client below the bound of bytes."""
    state.service.piece = "x" * 100_000
    with state.deaf(20):
        await state.until_asked("generate")
        await state.until_left()


@pytest.mark.one_in(1)
@serving(stall_timeout_s=0.2, max_waiting_reply_bytes=100_000)
async def test_a_flood_of_bad_requests_is_read_no_faster_than_its_answers_are_taken(state: Running) -> None:
    """Threat 44 for refusals: what waits for a client that only sends is bounded, and then the client is dropped."""
    deaf = socket.socket(socket.AF_UNIX)
    deaf.connect(str(state.path))
    deaf.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(deaf, frame({"type": "hello", "protocol": 1}))
    bad = frame({"type": "request", "id": 1, "method": "x" * 60}) * 100
    await poll(lambda: len(state.server._served) == 1)
    (served,) = state.server._served
    waiting = waiting_replies(served)
    with pytest.raises(OSError):  # noqa: PT012
        while True:
            await loop.sock_sendall(deaf, bad)
    assert 100_000 <= max(waiting) < 101_000
    await state.until_left()
    deaf.close()


def unnamed(connected: object) -> int:
    raise OSError


@pytest.mark.parametrize(
    "state", [{"find_peer_uid": lambda connected: os.geteuid() + 1}, {"find_peer_uid": unnamed}], indirect=True
)
async def test_another_user_and_a_peer_that_the_kernel_does_not_name_are_refused_before_hello(state: Running) -> None:
    """Threat 39."""
    client = await state.connect(greet=False)
    assert await client.error_code_then_end() == "peer_refused"
    assert state.server.connections == 0


# --- cancellation and disconnects


async def test_cancel_stops_a_generation_and_answers_it(state: Running) -> None:
    client = await state.connect("s")
    client.ask(2, "generate", session="s", max_tokens=10**6)
    assert (await client.read())["event"]["kind"] == "token"
    client.send(type="cancel", id=2)
    error = (await client.answer(2))["error"]
    assert error["code"] == "cancelled"
    committed = state.service.sessions["s"].tokens
    assert error["details"]["tokens"] == tuple(committed)  # what stays in the ledger, said to who cancelled
    assert error["details"]["text"] == "".join(f"t{token} " for token in committed)
    assert state.service.running == 0
    client.send(type="cancel", id=2)  # too late, and no fault
    client.ask(3, "status")
    assert (await client.read())["id"] == 3


async def test_cancel_in_the_same_write_as_its_request_still_gets_one_answer(state: Running) -> None:
    client = await state.connect("s")
    client.ask(2, "generate", session="s", max_tokens=10**6)
    client.send(type="cancel", id=2)
    client.ask(3, "status")
    assert {(await client.read())["id"], (await client.read())["id"]} == {2, 3}


async def test_cancel_does_not_stop_a_sleep(state: Running) -> None:
    """A sleep that is half done helps nobody: it runs to its receipt."""
    client = await state.connect("s")
    state.service.hold()
    client.ask(2, "sleep", session="s")
    client.send(type="cancel", id=2)
    client.ask(3, "status")
    await client.answer(3)
    state.service.release()
    assert (await client.answer(2))["result"]["version"] == 1


@pytest.mark.parametrize("how", ["abort", "eof", "broken frame"])
async def test_a_disconnect_cancels_the_generations_of_that_connection_only(state: Running, how: str) -> None:
    """Threat 45 (QX16)."""
    going, staying = await state.connect("a"), await state.connect("b")
    for client, name in ((going, "a"), (staying, "b")):
        client.ask(2, "generate", session=name, max_tokens=10**6)
        await client.read()
    if how == "abort":
        going.close()
    elif how == "eof":
        going.writer.write_eof()
    else:
        going.writer.write(b"\xff\xff\xff\xff")
    await poll(lambda: state.service.cancelled == 1)
    assert state.service.running == 1
    assert (await staying.read())["type"] == "event"


async def test_a_disconnect_lets_a_sleep_finish_and_holds_its_place_until_then(state: Running) -> None:
    """Threat 46; and clients that leave cannot pile up work beyond the cap on connections."""
    client = await state.connect("s")
    state.service.hold()
    client.ask(2, "sleep", session="s")
    await state.until_asked("sleep")
    client.close()
    await turns()
    assert state.server.connections == 1
    state.service.release()
    await state.until_left()
    assert len(state.service.sessions["s"].versions) == 1


# --- failures of the service


@pytest.mark.parametrize("fault", [RuntimeError("swordfish"), MemoryError(), KeyError("swordfish")])
async def test_a_fault_fails_its_request_without_details_and_the_connection_goes_on(
    state: Running, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    client = await state.connect("s")
    state.service.fault = fault
    client.ask(2, "generate", session="s", max_tokens=1)
    error = (await client.answer(2))["error"]
    assert error["code"] == "internal_error"
    assert "swordfish" not in error["message"]
    client.ask(3, "status")
    assert (await client.answer(3))["type"] == "result"
    assert "fault in generate" in caplog.text


async def test_a_result_too_large_for_a_frame_is_an_error_and_not_the_end(
    state: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await state.connect("s")
    monkeypatch.setattr("torpor.socket_api.limits.MAX_REPLY_FRAME_BYTES", 1000)
    client.ask(2, "generate", session="s", max_tokens=30, prove=True)
    error = (await client.answer(2))["error"]
    assert error["code"] == "reply_too_large"
    assert "at the session with show, or at the tree with branches, and ask for less" in error["message"]


async def test_a_result_that_is_not_what_the_protocol_says_is_a_fault_of_the_daemon_and_not_sent(
    state: Running,
) -> None:
    """A client would take it for a breach of the protocol, and give up the connection."""
    client = await state.connect()

    async def drifted(_request: object) -> object:
        return SubscribeResult(-5, 0)

    state.service.answers[StatusRequest] = drifted
    client.ask(1, "status")
    assert await client.error_code(1) == "internal_error"


@serving(max_waiting_reply_bytes=100_000)
async def test_results_wait_until_those_before_them_are_taken(state: Running) -> None:
    """Threat 44: results that wait for a client which does not read are at most the bound and one more."""
    state.service.piece = "x" * 300_000
    client = await state.connect("s")
    (served,) = state.server._served
    waiting = waiting_replies(served)
    served._send_event = lambda request_id, event: None  # type: ignore[method-assign]
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    for request_id in range(1, 9):
        client.ask(request_id, "generate", session="s", max_tokens=1)
    await state.until_asked("generate", 8)
    await poll(lambda: state.service.running == 0)
    await turns(100)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    for _ in range(8):
        assert (await client.read())["type"] == "result"
    assert max(waiting) < 700_000


async def test_accepting_goes_on_after_the_process_had_no_descriptors_left(
    state: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torpor.socket_api.server.server._ACCEPT_PAUSE_S", 0.02)
    listener = state.server._listener
    assert listener is not None
    failures = [OSError(24, "Too many open files")]

    class Exhausted:
        def accept(self) -> object:
            if failures:
                raise failures.pop()
            return listener.socket.accept()

        def fileno(self) -> int:
            return listener.socket.fileno()

    broken = replace(listener, socket=Exhausted())  # type: ignore[arg-type]
    asyncio.get_running_loop().remove_reader(listener.socket)
    state.server._watch(broken)
    await state.assert_serves_others()
    assert "Too many open files" in caplog.text


# --- the stop


async def test_stop_answers_what_is_in_flight_says_goodbye_and_removes_the_socket(state: Running) -> None:
    client, idle = await state.connect("s"), await state.connect()
    client.ask(2, "generate", session="s", max_tokens=10**6)
    await client.read()
    await state.server.stop()
    assert not state.path.exists()
    assert await client.error_code(2) == "shutting_down"
    assert await client.error_code_then_end() == "shutting_down"
    assert await idle.error_code_then_end() == "shutting_down"
    assert state.server.connections == 0
    assert not state.service.closed  # whoever made the service closes it
    await state.server.stop()


async def test_stop_waits_for_a_sleep_and_sends_its_receipt(state: Running) -> None:
    client = await state.connect("s")
    state.service.hold()
    client.ask(2, "sleep", session="s")
    await state.until_asked("sleep")
    stopping = asyncio.create_task(state.server.stop())
    await turns()
    assert not stopping.done()
    state.service.release()
    await stopping
    assert (await client.answer(2))["result"]["version"] == 1


async def test_stop_is_not_held_up_by_a_client_that_does_not_read(state: Running) -> None:
    state.service.piece = "x" * 100_000
    with state.deaf(20):
        await state.until_asked("generate")
        async with asyncio.timeout(5):
            await state.server.stop()


async def test_a_large_request_is_checked_in_pieces_one_at_a_time_and_in_its_order(
    state: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threat 44. While one is checked others are served, another large one waits, and what its client asked behind it
    begins behind it."""
    pieces_of: list[int] = []

    async def counted(pieces: Pieces[Any]) -> Any:
        def counting() -> Pieces[Any]:
            at = len(pieces_of)
            pieces_of.append(0)
            while True:
                try:
                    next(pieces)
                except StopIteration as end:
                    return end.value
                pieces_of[at] += 1
                yield

        return await behind(counting())

    behind = served.in_pieces
    monkeypatch.setattr(served, "in_pieces", counted)
    client = await state.connect("s")
    async with state.server._checking:
        pieces_of.clear()
        client.ask(2, "append", session="s", tokens=[70_000] * 100_000)
        client.ask(3, "show", session="s")
        await poll(lambda: state.held_bytes > 100_000)
        await state.assert_serves_others()
        assert max(pieces_of, default=0) == 0
        state.service.calls.clear()
    assert (await client.answer(3))["type"] == "result"
    assert [name for name, _ in state.service.calls] == ["append", "show"]
    assert max(pieces_of) > 2 * 100_000 // 4096
