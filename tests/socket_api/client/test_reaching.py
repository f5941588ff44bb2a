"""What waits in a client: in order, whole for a request, bounded for a subscription."""

from __future__ import annotations

import pytest
from torpor.daemon.api.events import NoticeEvent, TokenEvent
from torpor.socket_api.client import reaching as module
from torpor.socket_api.client.reaching import Inbox
from torpor.socket_api.wire.messages import EventMessage, ServerMessage


def notice(number: int, name: str = "first_token", **facts: int) -> EventMessage:
    event = NoticeEvent(
        name=name,
        number=number,
        monotonic_s=float(number),
        time_ns=number,
        request=7,
        session="torpor://a/b",
        facts=facts,
    )
    return EventMessage(id=1, event=event)


def taken(inbox: Inbox) -> list[tuple[str, int, dict[str, object]]]:
    found = []
    while inbox:
        message = inbox.take()
        assert isinstance(message, EventMessage)
        assert isinstance(message.event, NoticeEvent)
        found.append((message.event.name, message.event.number, dict(message.event.facts)))
    return found


@pytest.fixture
def inbox(monkeypatch: pytest.MonkeyPatch) -> Inbox:
    monkeypatch.setattr(module, "MAX_WAITING_NOTICES", 3)
    return Inbox()


def test_events_that_fit_are_all_there_in_their_order(inbox: Inbox) -> None:
    for number in range(3):
        inbox.put(notice(number))
    assert [number for _, number, _ in taken(inbox)] == [0, 1, 2]
    assert not inbox


def test_of_too_many_events_the_newest_stay_and_one_tells_how_many_are_missing(inbox: Inbox) -> None:
    for number in range(10):
        inbox.put(notice(number))
    assert taken(inbox) == [
        ("lost", 6, {"count": 7}),
        ("first_token", 7, {}),
        ("first_token", 8, {}),
        ("first_token", 9, {}),
    ]
    inbox.put(notice(10))
    assert taken(inbox) == [("first_token", 10, {})], "a loss is told once"


def test_what_the_daemon_dropped_is_counted_with_what_the_client_did(inbox: Inbox) -> None:
    inbox.put(notice(5, "lost", count=40))
    for number in range(6, 10):
        inbox.put(notice(number))
    assert taken(inbox)[0] == ("lost", 6, {"count": 41})


def test_no_message_of_a_request_that_ends_is_dropped(inbox: Inbox) -> None:
    sent: list[ServerMessage] = [EventMessage(id=1, event=TokenEvent(token=number, text="x")) for number in range(10)]
    for message in sent:
        inbox.put(message)
    assert [inbox.take() for _ in range(10)] == sent
