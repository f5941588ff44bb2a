"""The daemon's process around a service: harden, open, serve, wait for a signal, stop in order.

Owns the order of start and stop, and the signals. `main.py` passes in how a service is made.

A client's `shutdown` is tried first, while connections are taken and all but work on sessions is served: generations
cancelled → the service puts its sessions to sleep. If one cannot sleep, the stop is refused, and the daemon goes on. A
signal, and a `shutdown` with `force`, skip this: the machine may be going down, and unsaved work is given up.

Then the order is: no new connections, socket removed, generations cancelled, and from then on the service puts the
remaining sessions to sleep → work in flight answered → the service closed → the report sent to clients that asked for
the stop → connections closed. A second signal ends the process at once; the store is made for that.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from ...daemon.api.process import ShutdownResult
from ...daemon.api.verbs import VERBS
from ...daemon.tasks.cancellation import to_the_end
from ..errors import StopIncomplete
from ..wire.checking import built
from ..wire.framing import whole
from ..wire.listener import require_free
from .descriptors import limits_within, raise_limit
from .dispatch import Backend
from .notifying import tell_supervisor
from .server import ApiServer
from .spans import traced

_STDERR = 2
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP: the daemon's terminal is gone."""


class ClosableBackend(Backend, Protocol):
    """A service that this module opens and closes."""

    async def reload_config(self) -> None: ...

    async def begin_close(self) -> None: ...

    async def close(self) -> ShutdownResult: ...


class Door(Protocol):
    """Another server over the same service, which starts and stops with the daemon."""

    @property
    def max_connections(self) -> int: ...

    async def start(self, backend: Backend) -> None: ...

    def give_way(self) -> None: ...

    async def quiesce(self) -> None: ...

    async def stop(self) -> None: ...


OpenBackend = Callable[[], Awaitable[ClosableBackend]]
FindDoors = Callable[[], Sequence[Door]]
OnReady = Callable[[str], None]
OnStopped = Callable[[ShutdownResult], None]


def serve_until_signal(
    open_backend: OpenBackend,
    socket_path: str | os.PathLike[str],
    *,
    on_ready: OnReady,
    on_stopped: OnStopped,
    rereads: bool = False,
    find_doors: FindDoors = tuple,
) -> None:
    """Run the daemon in this process until SIGTERM, SIGINT or SIGHUP, or until a client asks it to stop.

    rereads: there is a configuration file, and SIGHUP reloads it instead of stopping. find_doors: called when the
    service is open.

    Raises:
        SocketInUse, UnsafeSocketPath, SocketPathTooLong: before anything is loaded.
        TooFewDescriptors: fewer files may be open than a daemon needs.
        StopIncomplete: stopped, but a session could not be put to sleep.
        TorporError: as the opening of the service.
    """
    harden_process()
    files = raise_limit()
    asyncio.run(
        _serve(open_backend, socket_path, on_ready, on_stopped, files=files, rereads=rereads, find_doors=find_doors)
    )


def harden_process() -> None:
    """Keep the daemon's data from other users: no core dumps, no file readable by them (threat 60). Instead of a core
    dump, stderr gets the stack of every thread at a crash."""
    faulthandler.enable(file=_STDERR)
    os.umask(0o077)
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


async def _serve(
    open_backend: OpenBackend,
    socket_path: str | os.PathLike[str],
    on_ready: OnReady,
    on_stopped: OnStopped,
    *,
    files: int | None = None,
    rereads: bool = False,
    find_doors: FindDoors = tuple,
) -> None:
    """files: how many this process may open; None: enough."""
    stop, reread = asyncio.Event(), asyncio.Event()
    _on_first_signal(stop.set, reread.set if rereads else None)
    await asyncio.to_thread(require_free, socket_path)
    await asyncio.to_thread(whole, built(VERBS["status"]))  # the first of all takes pydantic 90 ms, and no other
    backend = await _opened(open_backend, stop)
    if backend is None:
        on_stopped(ShutdownResult((), {}))
        return
    doors = find_doors()
    limits = None if files is None else limits_within(files - sum(door.max_connections for door in doors))
    seen = traced(backend)
    server = ApiServer(
        seen,
        socket_path,
        limits=limits,
        on_shutdown=stop.set,
        beside=doors,
    )
    rereading: asyncio.Task[None] | None = None
    try:
        if not stop.is_set():
            await server.start()
            for door in doors:
                await door.start(seen)
            on_ready(os.path.abspath(socket_path))
            tell_supervisor("READY=1")
            rereading = asyncio.ensure_future(_reread_on_demand(backend, reread))
            await stop.wait()
    finally:
        try:
            report = await _close(backend, [server, *doors], rereading)
            server.announce(report)
        finally:
            await asyncio.gather(server.stop(), *(door.stop() for door in doors))
    on_stopped(report)
    if report.failed:
        raise StopIncomplete.of(report.failed)


async def _opened(open_backend: OpenBackend, stop: asyncio.Event) -> ClosableBackend | None:
    """The service; None if the stop came while it could still give up its opening."""
    opening, stopping = asyncio.ensure_future(open_backend()), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        opening.cancel()
    try:
        return await opening
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
        return None


async def _close(
    backend: ClosableBackend, doors: Sequence[ApiServer | Door], rereading: asyncio.Task[None] | None
) -> ShutdownResult:
    """Stop the service. Sessions go to sleep from the first moment on, while other work still ends."""
    tell_supervisor("STOPPING=1")
    keeping = asyncio.ensure_future(backend.begin_close())
    await asyncio.gather(*(door.quiesce() for door in doors))
    if rereading is not None:
        rereading.cancel()
        await asyncio.wait({rereading})
    await keeping
    return await backend.close()


async def _reread_on_demand(backend: ClosableBackend, reread: asyncio.Event) -> None:
    while True:
        await reread.wait()
        reread.clear()
        await to_the_end(backend.reload_config())


def _on_first_signal(stop: Callable[[], None], hang_up: Callable[[], None] | None = None) -> None:
    """hang_up: called at each SIGHUP; if None, SIGHUP stops like the others."""
    loop = asyncio.get_running_loop()

    def handle() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would unwind a sleep half-way
        stop()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:  # nohup asks for that
            loop.add_signal_handler(number, handle)
    if hang_up is not None:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
