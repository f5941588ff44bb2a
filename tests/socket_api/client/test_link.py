"""What a connection owes: requests that the daemon has not begun are sent again, and none of them twice."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.verbs import VERBS
from torpor.socket_api import AsyncClient
from torpor.socket_api.client import link as link_module
from torpor.socket_api.client.blocking import BlockingTransport, blocking_link, wait
from torpor.socket_api.client.link import Link
from torpor.socket_api.client.reaching import MOST_REPEATS
from torpor.socket_api.errors import ConnectionLost
from torpor.socket_api.limits import REQUEST_LIMITS
from torpor.socket_api.wire.asking import Call
from torpor.socket_api.wire.framing import FrameDecoder
from torpor.socket_api.wire.messages import ErrorMessage, ResultMessage
from torpor.tests.socket_api.real_daemon import until
from torpor.tests.socket_api.server_rig import EVICTION, HELLO, Last, answer, frame, refusal, scripted

LIST = Call(VERBS["list"], {})


@contextlib.contextmanager
def greeted(path: Path, *replies: Callable[[list[int]], bytes]) -> Iterator[tuple[Link, list[int]]]:
    """A link to a daemon that takes so many connections, one after the other, and what was asked of it, by id.
    replies: what it says on each when something more was asked."""
    asked: list[int] = []

    def told(reply: Callable[[list[int]], bytes], request: dict[str, Any]) -> bytes:
        asked.append(request["id"])
        return reply(asked)

    with scripted(path, *(lambda all, reply=reply: told(reply, all[-1]) for reply in replies)):  # type: ignore[misc]
        link = blocking_link(path, timeout_s=20)
        try:
            yield link, asked
        finally:
            wait(link.close())


def listed(request_id: int) -> bytes:
    return answer(request_id, sessions=())


def refused(request_id: int) -> bytes:
    return refusal(request_id, "daemon_busy")


def refuse_the_second_once(asked: list[int]) -> bytes:
    return {(1, 2): refused(2), (1, 2, 2): listed(2)}.get(tuple(asked), b"")


def test_an_interrupt_in_the_pause_after_a_refusal_loses_no_request(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another request is waited for, and given up then."""

    def interrupt() -> None:
        until(lambda: link._first_owed()[0] < math.inf)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    monkeypatch.setattr(link_module, "pause_s", lambda _attempt: 0.2)
    with greeted(short_path / "t.sock", refuse_the_second_once) as (link, asked):
        one, other = wait(link.begin(LIST)), wait(link.begin(LIST))
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            wait(link.wait_for(one))
        interrupting.join()
        link.abandon(one)
        assert isinstance(wait(link.wait_for(other)), ResultMessage)
    signal.signal(signal.SIGINT, before)
    assert asked == [one, other, other]


def test_an_interrupt_while_messages_are_sorted_is_told_at_once_and_waits_for_none_that_is_gone(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause_s(_attempt: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(link_module, "pause_s", pause_s)
    with greeted(short_path / "t.sock", refuse_the_second_once) as (link, _):
        one, other = wait(link.begin(LIST)), wait(link.begin(LIST))
        with pytest.raises(KeyboardInterrupt):
            wait(link.wait_for(one))
        with pytest.raises(ConnectionLost, match="reading was interrupted"):
            wait(link.wait_for(other))


def test_the_pause_after_a_refusal_holds_up_no_answer_of_another_request(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "pause_s", lambda _attempt: 5.0)
    said = {(1, 2): refused(2) + listed(1), (1, 2, 2): listed(2)}
    with greeted(short_path / "t.sock", lambda asked: said.get(tuple(asked), b"")) as (link, asked):
        one, other = wait(link.begin(LIST)), wait(link.begin(LIST))
        assert isinstance(wait(link.wait_for(one)), ResultMessage)
        assert asked == [one, other], "the other was not sent again yet"


def test_an_interrupt_while_an_evicted_connection_is_made_anew_loses_no_request(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed = Link._send_again

    def interrupted(*_: Any) -> None:
        monkeypatch.setattr(Link, "_send_again", renewed)
        raise KeyboardInterrupt

    monkeypatch.setattr(Link, "_send_again", interrupted)
    evict = {(1, 2): EVICTION}
    with greeted(
        short_path / "t.sock",
        lambda asked: evict.get(tuple(asked), b""),
        lambda asked: b"".join(map(listed, asked[2:])) if len(asked) == 4 else b"",
    ) as (link, asked):
        one, other = wait(link.begin(LIST)), wait(link.begin(LIST))
        with pytest.raises(KeyboardInterrupt):
            wait(link.wait_for(one))
        assert isinstance(wait(link.wait_for(other)), ResultMessage)
    assert asked == [one, other, one, other]


def test_what_was_sent_again_when_an_interrupt_came_is_not_sent_once_more(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon may have begun it."""
    send = Link._send

    def interrupted(link: Link, data: bytes) -> None:
        send(link, data)
        monkeypatch.setattr(Link, "_send", send)
        raise KeyboardInterrupt

    with greeted(short_path / "t.sock", refuse_the_second_once) as (link, asked):
        one, other = wait(link.begin(LIST)), wait(link.begin(LIST))
        monkeypatch.setattr(Link, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            wait(link.wait_for(one))
        with pytest.raises(ConnectionLost):
            wait(link.wait_for(other))
    assert asked == [one, other, other]


# --- what a socket cannot be made to do


class Canned(BlockingTransport):
    """A daemon whose every word is given, or an exception that is raised instead of the next one. behind: an interrupt
    just behind the next one."""

    def __init__(self, *said: bytes | BaseException) -> None:
        super().__init__(20)
        self.said = deque(said)
        self._decoder = FrameDecoder(REQUEST_LIMITS)
        self.flushes: list[BaseException] = []
        self.behind: list[BaseException] = []

    @property
    def sent(self) -> list[tuple[str, int | None]]:
        return [(message["type"], message.get("id")) for message in iter(self._decoder.next_frame, None)]

    async def open(self, connected: socket.socket, receiver: object) -> None:
        connected.close()
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def write(self, data: bytes) -> None:
        assert self.is_open
        self._decoder.feed(data)

    async def flush(self) -> None:
        if self.flushes:
            raise self.flushes.pop()

    async def wait(self, inbox: object, until: float, arrived: list[bytes]) -> None:
        said = self.said.popleft()
        if isinstance(said, BaseException):
            raise said
        arrived.append(said)
        if self.behind:
            raise self.behind.pop()


GREETING = frame(HELLO)


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Link, Canned]]:
    def connect(*said: bytes | BaseException) -> tuple[Link, Canned]:
        transport = Canned(GREETING, *said)
        link = Link(Path("/none"), transport, client_name="x", timeout_s=20)
        wait(link.connect())
        return link, transport

    def try_to_connect(_path: str) -> socket.socket:
        return socket.socket(socket.AF_UNIX)

    monkeypatch.setattr(link_module, "try_to_connect", try_to_connect)
    return connect


Connected = Callable[..., tuple[Link, Canned]]


def test_what_was_cancelled_before_it_is_sent_again_is_sent_with_its_cancel(connected: Connected) -> None:
    link, daemon = connected(EVICTION, GREETING, refusal(1, "cancelled"))
    number = wait(link.begin(LIST))
    link.received(daemon.said.popleft())  # type: ignore[arg-type]
    link.cancel(number)
    assert isinstance(wait(link.wait_for(number)), ErrorMessage)
    assert daemon.sent == [("hello", None), ("request", 1), ("hello", None), ("request", 1), ("cancel", 1)]


def test_a_request_whose_beginning_was_interrupted_is_not_sent_by_a_renewal(connected: Connected) -> None:
    link, daemon = connected(EVICTION, GREETING, listed(2))
    daemon.flushes.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        wait(link.begin(LIST))
    assert isinstance(wait(link.wait_for(wait(link.begin(LIST)))), ResultMessage)
    assert [each for each in daemon.sent if each[0] == "request"] == [("request", 1), ("request", 2), ("request", 2)]


def test_interrupts_before_the_greeting_of_a_new_connection_leave_it_to_the_next_wait(connected: Connected) -> None:
    """However many: they are no evictions, of which too many in a row are the end."""
    link, _ = connected(EVICTION, *[KeyboardInterrupt()] * (2 * MOST_REPEATS), GREETING, listed(1))
    number = wait(link.begin(LIST))
    for _ in range(2 * MOST_REPEATS):
        with pytest.raises(KeyboardInterrupt):
            wait(link.wait_for(number))
    assert isinstance(wait(link.wait_for(number)), ResultMessage)


def test_an_interrupt_just_behind_an_answer_loses_none(connected: Connected) -> None:
    """Its request would be sent again after an eviction, and be carried out twice."""
    link, daemon = connected(listed(1) + EVICTION)
    number = wait(link.begin(LIST))
    daemon.behind.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        wait(link.wait_for(number))
    assert isinstance(wait(link.wait_for(number)), ResultMessage)
    assert daemon.sent == [("hello", None), ("request", 1)]


# --- many tasks


async def test_tasks_that_find_their_connection_evicted_make_one_new_one_and_send_nothing_before_it_greets(
    short_path: Path,
) -> None:
    def evict_at_the_third(asked: list[dict[str, Any]]) -> bytes:
        return EVICTION if len(asked) == 3 else b""

    def never(asked: list[dict[str, Any]]) -> bytes:
        raise AssertionError(asked)

    greetings = [GREETING, Last(refusal(None, "too_many_connections")), GREETING]
    replies = [evict_at_the_third, never, lambda asked: listed(asked[-1]["id"])]
    with scripted(short_path / "t.sock", *replies, hello=greetings) as asked:
        async with AsyncClient(short_path / "t.sock", timeout_s=20) as client:
            assert await asyncio.gather(*(client.list_sessions() for _ in range(3)))
            assert (await client.list_sessions()).sessions == ()
    assert [each["id"] for each in asked] == [1, 2, 3, 1, 2, 3, 4]


async def test_a_request_that_begins_while_a_connection_is_made_waits_for_it(short_path: Path) -> None:
    with scripted(short_path / "t.sock", lambda asked: listed(asked[-1]["id"])) as asked:
        client = AsyncClient(short_path / "t.sock", timeout_s=20)
        _, sessions = await asyncio.gather(client.connect(), client.list_sessions())
        assert (len(asked), sessions.sessions) == (1, ())
        await client.close()
