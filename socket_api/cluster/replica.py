"""One replica: a service with a store of its own, behind the same app as the HTTP server's. It answers one request
after the other that a door passes on, each as a stream of messages.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from starlette.types import Message

from ...daemon.api.creating import ListRequest
from ...daemon.api.process import StatusRequest
from ...daemon.api.verbs import VERBS
from ...daemon.api.waking import WakeRequest
from ...daemon.config.settings import settings_of
from ...daemon.service import Service
from ...errors import TorporError
from ..http.access import Access
from ..http.app import app_of
from ..http.work import Desk
from ..server.serving import harden_process
from ..server.spans import traced
from ..tokens import Tokens
from .passing import REPLICA_HEADER, Order

MOST_TOLD: Final = 10_000
"""Sessions of one replica that routers know of, the ones used last."""

_MOST_STORES: Final = 1024
"""Of one machine."""


@dataclass(slots=True)
class _PassedOn:
    """What the app asks of a connection. left: set once nobody waits for the answer."""

    left: asyncio.Event
    on_unix: bool = False

    def abort(self) -> None:
        """End it."""
        self.left.set()


class Replica:
    """A service that answers what is passed on to it. Made by `open`."""

    def __init__(self, service: Service, name: str, tokens: Path) -> None:
        """name: by which routers and people know it. tokens: the file of tokens."""
        self._service = service
        self._name = name
        self._desk = Desk(traced(service), Access(Tokens(tokens), passed_on=True))
        self._app = app_of(self._desk)

    @classmethod
    async def open(cls, given: Mapping[str, Any], stores: Path, name: str, tokens: Path) -> Replica:
        """Take the first store below a folder that no other process has, and open a service on it: a replica that
        takes the place of a dead one has its sessions back at once. given: as of `settings_of`. Raises as
        `Service.open`."""
        harden_process()
        for number in itertools.count():
            settings = settings_of({**given, "store": stores / str(number)})
            try:
                service = await Service.open(settings.options, models=settings.models)
            except TorporError as error:
                if error.code != "store_locked" or number == _MOST_STORES:
                    raise
            else:
                return cls(service, name, tokens)
        raise AssertionError

    async def answer(self, order: Order) -> AsyncGenerator[Message]:
        """The messages of an answer, of which the first has its head. Who closes it early is a client that left."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        connection = _PassedOn(asyncio.Event())
        work = asyncio.create_task(self._carry_out(order, connection, messages))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    told = f"{self._name}; {order.why.get(self._name, '')}"
                    message["headers"] = [*message["headers"], (REPLICA_HEADER.encode(), told.encode())]
                yield message
            await work
        finally:
            connection.left.set()
            if not work.done():
                await asyncio.wait({work})

    async def _carry_out(self, order: Order, connection: _PassedOn, messages: asyncio.Queue[Message | None]) -> None:
        unread = [order.body]

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await connection.left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.put_nowait(message)

        if order.brings:
            await self._bring(order.wanted.session, connection)
        scope = {**order.scope, "type": "http", "asgi": {"version": "3.0"}, "root_path": "", "client": None}
        await self._app({**scope, "server": None, "state": {"connection": connection}}, receive, send)

    async def _bring(self, session: str | None, connection: _PassedOn) -> None:
        """Have a session here that another replica may have, awake or left behind. Whatever hinders that, the request
        is told of by itself."""
        if session is None or self._service.is_awake(session):
            return
        waking = asyncio.ensure_future(self._service.ask(VERBS["wake"], WakeRequest(session)))
        leaving = asyncio.ensure_future(connection.left.wait())
        try:
            await asyncio.wait({waking, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            waking.cancel()
        with suppress(TorporError, asyncio.CancelledError):
            await waking

    async def standing(self) -> dict[str, Any]:
        """What routers are told, as the fields of `Standing`; and how much of the memory for sessions is in use."""
        sessions = await self._service.ask(VERBS["list"], ListRequest())
        memory = (await self._service.ask(VERBS["status"], StatusRequest())).memory
        newest = sorted(sessions, key=lambda each: each.used_ns or each.slept_ns or 0, reverse=True)[:MOST_TOLD]
        return {
            "awake": {each.session: each.resident_bytes for each in newest if each.state == "awake"},
            "asleep": {each.session: each.written_bytes for each in newest if each.state != "awake"},
            "used_share": memory.sessions_bytes / max(1, memory.budget_bytes - memory.weights_bytes),
            "free_bytes": memory.budget_bytes - memory.weights_bytes - memory.sessions_bytes - memory.reserved_bytes,
        }

    async def close(self) -> None:
        """Put every session to sleep, and into the remote, so that others have it; and end the service."""
        await self._desk.works.quiesce()
        await self._service.close()
