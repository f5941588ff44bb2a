"""What a connection owes: requests that the daemon has not begun are sent again, and none of them twice."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.verbs import VERBS
from torpor.socket_api.client import link as link_module
from torpor.socket_api.client.link import Link
from torpor.socket_api.errors import ConnectionLost
from torpor.socket_api.wire.asking import Call
from torpor.socket_api.wire.messages import ResultMessage
from torpor.tests.socket_api.real_daemon import until
from torpor.tests.socket_api.server_rig import EVICTION, answer, refusal, scripted

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
        link = Link(path, timeout_s=20)
        try:
            yield link, asked
        finally:
            link.close()


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
        one, other = link.begin(LIST), link.begin(LIST)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            link.wait_for(one)
        interrupting.join()
        link.abandon(one)
        assert isinstance(link.wait_for(other), ResultMessage)
    signal.signal(signal.SIGINT, before)
    assert asked == [one, other, other]


def test_an_interrupt_while_messages_are_sorted_is_told_at_once_and_waits_for_none_that_is_gone(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pause_s(_attempt: int) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(link_module, "pause_s", pause_s)
    with greeted(short_path / "t.sock", refuse_the_second_once) as (link, _):
        one, other = link.begin(LIST), link.begin(LIST)
        with pytest.raises(KeyboardInterrupt):
            link.wait_for(one)
        with pytest.raises(ConnectionLost, match="reading was interrupted"):
            link.wait_for(other)


def test_the_pause_after_a_refusal_holds_up_no_answer_of_another_request(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "pause_s", lambda _attempt: 5.0)
    said = {(1, 2): refused(2) + listed(1), (1, 2, 2): listed(2)}
    with greeted(short_path / "t.sock", lambda asked: said.get(tuple(asked), b"")) as (link, asked):
        one, other = link.begin(LIST), link.begin(LIST)
        assert isinstance(link.wait_for(one), ResultMessage)
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
        one, other = link.begin(LIST), link.begin(LIST)
        with pytest.raises(KeyboardInterrupt):
            link.wait_for(one)
        assert isinstance(link.wait_for(other), ResultMessage)
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
        one, other = link.begin(LIST), link.begin(LIST)
        monkeypatch.setattr(Link, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            link.wait_for(one)
        with pytest.raises(ConnectionLost):
            link.wait_for(other)
    assert asked == [one, other, other]
