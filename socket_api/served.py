"""One served connection: its deadlines, its requests as tasks, and its end.

Owns the life of a connection between accept and close. The protocol is `connection.py`'s, the queue `outbox.py`'s, the
meaning of methods `dispatch.py`'s.

Rules:
- A request runs as a task of its own and is answered exactly once, unless the connection is gone by then.
- When the connection ends, requests that may be stopped are cancelled (threat 45); the others (a sleep, a wake, a
  delete) run to their end and their answers are dropped (threat 46). `serve` returns only then, so that the cap on
  connections bounds the work of clients that have left, too.
- Nothing that a client does reaches another connection: every failure here ends this one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os

from ..daemon.results import Event
from ..errors import TorporError
from .connection import AcceptedRequest, RefusedRequest, ServerConnection, ServerInput
from .dispatch import Backend, ShutDown, call, event_map
from .errors import (
    FrameTimeout,
    HelloTimeout,
    InternalError,
    LocalProtocolError,
    ProtocolError,
    ReplyTooLarge,
    RequestCancelled,
    ShuttingDown,
)
from .limits import ServerLimits
from .messages import Cancel, Hello
from .outbox import ClientStalled, Outbox

_LOG = logging.getLogger(__name__)
_READ_BYTES = 64 * 1024


class ServedConnection:
    """Serves one accepted connection. `serve` runs once; `shut_down` may be called while it does."""

    def __init__(
        self,
        backend: Backend,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        shut_down: ShutDown,
        server_name: str,
        limits: ServerLimits,
    ) -> None:
        self._backend = backend
        self._shut_down = shut_down
        self._reader = reader
        self._writer = writer
        self._server_name = server_name
        self._limits = limits
        self._connection = ServerConnection(max_in_flight=limits.max_in_flight)
        self._outbox = Outbox(limits)
        self._work: dict[int, tuple[AcceptedRequest, asyncio.Task[dict[str, object]]]] = {}
        self._answers: set[asyncio.Task[None]] = set()
        self._quiet = False
        self._stopping = asyncio.Event()
        self._gone = False
        loop = asyncio.get_running_loop()
        self._deadline: float | None = loop.time() + limits.hello_timeout_s

    async def serve(self) -> None:
        """Serve until the client leaves, or breaks the protocol, or `shut_down`. Raises only for faults of our own."""
        sender = asyncio.create_task(self._send())
        reading = asyncio.create_task(self._read_until_end())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({sender, reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and not reading.done():
                reading.cancel()  # no new requests; those in flight are answered
                self._cancel_work()
                await self._wait_for_answers()
                self._outbox.put_reply(self._connection.send_fatal(_shutting_down()))
        finally:
            self._gone = True
            reading.cancel()
            stopping.cancel()
            self._cancel_work()
            self._outbox.finish()
            await self._close(sender)
            await asyncio.wait({reading, stopping})
            await self._wait_for_answers()
            if not reading.cancelled() and (fault := reading.exception()) is not None:
                raise fault  # ours, not the client's: the server logs it

    def refuse_work(self) -> None:
        """Take no more requests but those of methods that are `always` taken; cancel what may be cancelled."""
        self._quiet = True
        self._cancel_work()

    async def quiesce(self) -> None:
        """As `refuse_work`; returns when the work in flight has ended. The connection stays, for the answers."""
        self.refuse_work()
        if going := [work for request, work in self._work.values() if not request.method.always]:
            await asyncio.wait(going)

    def shut_down(self) -> None:
        """Take no more requests, cancel what may be cancelled, answer what is in flight, end. Returns at once."""
        self._stopping.set()

    # --- reading

    async def _read_until_end(self) -> None:
        try:
            while data := await self._read():
                self._connection.feed(data)
                taken = False
                while (message := self._connection.next_message()) is not None:
                    taken = True
                    await self._handle(message)
                self._set_deadline(frame_ended=taken)
            self._connection.require_clean_end()
        except ProtocolError as error:
            _LOG.warning("connection closed: %s", error.code)
            self._outbox.put_reply(self._connection.send_fatal(error))
        except OSError:
            pass  # reset by the client: an end like any other

    async def _read(self) -> bytes:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._reader.read(_READ_BYTES)
        except TimeoutError:
            if not self._connection.greeted:
                limit_s = self._limits.hello_timeout_s
                raise HelloTimeout(f"No hello came within {limit_s:g} s.", limit_s=limit_s) from None
            limit_s = self._limits.frame_timeout_s
            raise FrameTimeout(f"A frame was not complete after {limit_s:g} s.", limit_s=limit_s) from None

    def _set_deadline(self, *, frame_ended: bool) -> None:
        """Before the hello the first deadline stands; later, one runs while a frame is incomplete, from its start."""
        if not self._connection.greeted:
            return
        if not self._connection.waiting_bytes:
            self._deadline = None
        elif self._deadline is None or frame_ended:
            self._deadline = asyncio.get_running_loop().time() + self._limits.frame_timeout_s

    async def _handle(self, message: ServerInput) -> None:
        if isinstance(message, AcceptedRequest):
            if self._quiet and not message.method.always:
                self._outbox.put_reply(self._connection.send_error(message.id, _shutting_down()))
            else:
                self._begin(message)
        elif isinstance(message, RefusedRequest):
            await self._outbox.wait_for_room()  # a flood of bad requests is read no faster than it takes its answers
            self._outbox.put_reply(self._connection.send_refusal(message))
        elif isinstance(message, Cancel):
            self._cancel(message.id)
        elif isinstance(message, Hello):
            self._outbox.put_reply(self._connection.send_hello(server=self._server_name, pid=os.getpid()))

    # --- requests

    def _begin(self, request: AcceptedRequest) -> None:
        def emit(event: Event) -> None:
            self._emit(request.id, event)

        work = asyncio.create_task(call(self._backend, self._shut_down, request.method, request.params, emit))
        self._work[request.id] = (request, work)
        answer = asyncio.create_task(self._answer(request, work))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    def _emit(self, request_id: int, event: Event) -> None:
        if self._gone or request_id not in self._work:
            return
        try:
            self._outbox.put_event(self._connection.send_event(request_id, event_map(event)))
        except ClientStalled as stalled:
            self._drop(stalled)

    async def _answer(self, request: AcceptedRequest, work: asyncio.Task[dict[str, object]]) -> None:
        await asyncio.wait({work})  # not awaited itself: its cancellation is an answer, not ours
        await self._outbox.wait_for_room()
        del self._work[request.id]
        if not self._gone:
            self._outbox.put_reply(self._answer_frame(request, work))
        elif not work.cancelled():
            work.exception()  # seen; nobody is left to tell

    def _answer_frame(self, request: AcceptedRequest, work: asyncio.Task[dict[str, object]]) -> bytes:
        try:
            return self._connection.send_result(request.id, work.result())
        except asyncio.CancelledError:
            error: TorporError = _shutting_down() if self._quiet or self._stopping.is_set() else _cancelled(request)
        except LocalProtocolError as unsendable:
            error = ReplyTooLarge(
                f"{request.method.name} was carried out, but its result cannot be sent: {unsendable.message}"
                " Look at the session with show, and ask for less at a time."
            )
        except TorporError as expected:
            error = expected
        except Exception as fault:  # noqa: BLE001  # a fault of one request must not end the daemon
            _LOG.error("fault in %s", request.method.name, exc_info=fault)
            error = InternalError(
                f"{request.method.name} failed by a fault of the daemon ({type(fault).__name__}). See its log."
            )
        return self._connection.send_error(request.id, error)

    def _cancel(self, request_id: int) -> None:
        # An unknown id is no fault: the result may have crossed the cancel on its way.
        if request_id in self._work:
            request, work = self._work[request_id]
            if request.method.cancellable:
                work.cancel()

    def _cancel_work(self) -> None:
        for request_id in list(self._work):
            self._cancel(request_id)

    async def _wait_for_answers(self) -> None:
        while self._answers:
            await asyncio.wait(set(self._answers))

    # --- writing and the end

    async def _send(self) -> None:
        try:
            await self._outbox.run(self._writer)
        except ClientStalled as stalled:
            self._drop(stalled)
        except OSError:
            pass  # the client is gone; reading sees it too

    def _drop(self, stalled: ClientStalled) -> None:
        _LOG.warning("client dropped: %s", stalled)
        self._gone = True
        self._outbox.finish()
        self._writer.transport.abort()

    async def _close(self, sender: asyncio.Task[None]) -> None:
        """Give the client a moment to take what is queued, then close, whether it did or not."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(self._limits.goodbye_timeout_s):
                await asyncio.wait({sender})
                self._writer.transport.set_write_buffer_limits(high=0)
                await self._writer.drain()
        sender.cancel()
        await asyncio.wait({sender})
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


def _cancelled(request: AcceptedRequest) -> RequestCancelled:
    return RequestCancelled(f"{request.method.name} was cancelled. What was committed before stays.")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The daemon is stopping; its sessions are put to sleep. Try again when it has been started.")
