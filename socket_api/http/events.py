"""`/v1/events`: what happens in the daemon, as server-sent events.

Owns what a client of one namespace is told: events about its own sessions, without what store and memory have of all in
common, and without a session of another namespace. A client that lost its connection names the last event that it got
(`Last-Event-ID`, as browsers and libraries do) and misses nothing, or is told that it did. Without a reader the daemon
makes no event.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Send

from ...daemon.api.verbs import SUBSCRIBE
from ...daemon.events.events import Notice
from ..server.dispatch import ResumableEvents, notice_map
from ..wire.common_store import without_others
from .access import Caller
from .requests import ClientLeft, has_left
from .routing import EventStream, Sending
from .work import desk_of

PATH: Final = "/v1/events"

_OF_DAEMON: Final = frozenset(("free_bytes", "held_bytes", "budget_bytes", "ahead", "sessions", "models"))
"""Facts that depend on the work of all namespaces."""


def routes() -> list[Route]:
    """The stream."""
    return [Route(PATH, Sending(_events), methods=["GET"])]


async def _events(request: Request, send: Send) -> None:
    """Tell events until the client leaves, or the daemon has stopped. Raises InvalidRequest, HttpRefused, and as
    `resume` of the service."""
    query, stream = request.query_params, EventStream(request, send)
    names = {"names": query.getlist("names")} if "names" in query else {}
    asked = await request.state.caller.request_of(SUBSCRIBE, {**query, **names})
    after = request.headers.get("last-event-id")
    backend = desk_of(request).backend
    events = backend.resume(asked.names, asked.session, asked.namespace, after=after)
    with events as notices:
        if request.method == "HEAD":
            return await stream.tell(b"", {}, last=True)
        leaving = asyncio.create_task(has_left(request.receive))
        try:
            await _tell(request, stream, events, notices, leaving)
        finally:
            leaving.cancel()


async def _tell(
    request: Request,
    stream: EventStream,
    events: ResumableEvents,
    notices: AsyncIterator[Notice],
    leaving: asyncio.Task[None],
) -> None:
    """Send each event when it comes, and an empty one after a long silence. Returns when the client has left."""
    silence_s = desk_of(request).limits.silence_s
    while True:
        coming = asyncio.ensure_future(anext(notices, None))
        try:
            while not coming.done():
                await asyncio.wait({coming, leaving}, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not coming.done():
                    await stream.tell(_silence(events), {})
            notice = coming.result()
            told = b"" if notice is None else _told(notice, events, request.state.caller)
            await stream.tell(told, {}, last=notice is None)
        except ClientLeft:
            return
        finally:
            coming.cancel()
        if notice is None:
            return


def _told(notice: Notice, events: ResumableEvents, caller: Caller) -> bytes:
    values = notice_map(notice)
    if not caller.is_owner:
        facts = without_others(values["facts"], caller.bound_to).items()
        values["facts"] = {name: value for name, value in facts if name not in _OF_DAEMON}
        del values["number"], values["request"]  # they count what all namespaces do
    place = events.id_of(notice)
    named = "" if place is None else f"id: {place}\n"
    return f"{named}data: {json.dumps(values, ensure_ascii=False)}\n\n".encode()


def _silence(events: ResumableEvents) -> bytes:
    """A comment, with the place: what was not for this client is not asked for again."""
    return f": nothing happened\nid: {events.place}\n\n".encode()
