"""Before the system suspends, all sessions go to sleep: a machine that loses its power meanwhile keeps them whole.

systemd's logind delays a suspend for whoever holds a lock of it, for some seconds at most (`InhibitDelayMaxSec`). What
does not sleep by then goes on when the system is back; its turns are in the journal anyway.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..residency.idle_sleeps import IdleSleeps
from ..tasks.cancellation import settled

if TYPE_CHECKING:
    from dbus_fast.aio import MessageBus

_LOG = logging.getLogger(__name__)

_SHARE: Final = 0.8
"""So much of the delay is for sleeps; the rest is for one that has begun."""

_PATIENCE_S: Final = 2.0
"""For a look at the bus."""

_PATH: Final = "/org/freedesktop/login1"
_NAME: Final = "org.freedesktop.login1"
_MANAGER: Final = f"{_NAME}.Manager"
_SIGNAL: Final = "PrepareForSleep"


async def why_not() -> str | None:
    """Why sessions do not sleep before this system suspends; None if they do."""
    if (why := _why_no_bus()) is not None:
        return why
    try:
        async with asyncio.timeout(_PATIENCE_S), _logind() as logind:
            await logind.longest_delay_s()
    except _errors() as error:
        return f"the bus of the system does not help ({error})"
    return None


class Suspending:
    """Puts all sessions to sleep before each suspend, from `start` until `close`, where there is systemd."""

    def __init__(self, sleeps: IdleSleeps) -> None:
        self._sleeps = sleeps
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow the system."""
        if _why_no_bus() is None:
            self._following = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """Delay no more suspends."""
        if self._following is not None:
            self._following.cancel()
            await settled(self._following)

    async def _follow(self) -> None:
        try:
            async with _logind() as logind:
                within_s = _SHARE * await logind.longest_delay_s()
                with ExitStack() as lock:
                    lock.callback(os.close, await logind.lock())
                    while True:
                        if await logind.begins():
                            await self._sleeps.put_all_away("suspend", within_s)
                            lock.close()
                        else:
                            lock.close()
                            lock.callback(os.close, await logind.lock())
        except _errors() as error:
            _LOG.warning("sessions do not sleep before the system suspends: %s", error)


class _Logind:
    """systemd's logind, over the bus of the system."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self._news: asyncio.Queue[bool | None] = asyncio.Queue()
        """Whether a suspend begins, or has ended; None: the bus is gone."""
        bus.add_message_handler(self._take)
        asyncio.ensure_future(bus.wait_for_disconnect()).add_done_callback(self._take_end)

    async def lock(self) -> int:
        """The file whose end lets the system suspend."""
        reply = await self.ask(_NAME, _MANAGER, "Inhibit", "ssss", "sleep", "Torpor", "Sessions go to sleep.", "delay")
        return int(reply.unix_fds[reply.body[0]])

    async def longest_delay_s(self) -> float:
        """How long the system waits for all locks."""
        properties = "org.freedesktop.DBus.Properties"
        reply = await self.ask(_NAME, properties, "Get", "ss", _MANAGER, "InhibitDelayMaxUSec")
        return float(reply.body[0].value) / 1e6

    async def ask(self, destination: str, interface: str, member: str, signature: str, *body: str) -> Any:
        """The answer to a message. Raises OSError: it is an error, or the bus is gone."""
        from dbus_fast import Message, MessageType

        path = _PATH if destination == _NAME else "/org/freedesktop/DBus"
        message = Message(destination, path, interface, member, signature=signature, body=list(body))
        reply = await self._bus.call(message)
        if reply is None or reply.message_type is not MessageType.METHOD_RETURN:
            raise OSError(f"{member} of {destination} failed: {reply and reply.error_name}")
        return reply

    async def begins(self) -> bool:
        """Wait for the begin of a suspend, or for the end of one, and give which. Raises OSError: the bus is gone."""
        news = await self._news.get()
        if news is None:
            raise OSError("the bus of the system is gone")
        return news

    def _take(self, message: Any) -> None:
        """Take what is said to all: of that the bus passes on logind's alone. To us alone anybody may speak."""
        if message.member == _SIGNAL and message.interface == _MANAGER and message.destination is None:
            self._news.put_nowait(bool(message.body[0]))

    def _take_end(self, connection: asyncio.Future[None]) -> None:
        if not connection.cancelled():
            connection.exception()  # taken, so that asyncio does not log it
        self._news.put_nowait(None)


@asynccontextmanager
async def _logind() -> AsyncIterator[_Logind]:
    """Raises `_errors`."""
    from dbus_fast import BusType
    from dbus_fast.aio import MessageBus

    bus = await MessageBus(bus_type=BusType.SYSTEM, negotiate_unix_fd=True).connect()
    try:
        logind = _Logind(bus)
        rule = f"type='signal',sender='{_NAME}',interface='{_MANAGER}',member='{_SIGNAL}'"
        await logind.ask("org.freedesktop.DBus", "org.freedesktop.DBus", "AddMatch", "s", rule)
        yield logind
    finally:
        bus.disconnect()


def _why_no_bus() -> str | None:
    if "DBUS_SYSTEM_BUS_ADDRESS" not in os.environ and not Path("/run/systemd/system").is_dir():
        return "systemd does not run here"
    return None if find_spec("dbus_fast") else "Torpor's extra `suspend` is not installed"


def _errors() -> tuple[type[Exception], ...]:
    """What may go wrong on the bus."""
    from dbus_fast.errors import DBusFastError

    return OSError, EOFError, DBusFastError
