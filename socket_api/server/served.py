"""One served connection: its deadlines, its requests as tasks, and its end.

Owns a connection between accept and close; `connection.py` owns the protocol, `outbox.py` the queue, `dispatch.py` the
methods.

Rules:
- A request runs as a task of its own. It is answered exactly once, unless the connection is gone.
- When the connection ends, requests that may be stopped are cancelled (threat 45). The others (a sleep, a wake, a
  delete) run to their end, and their answers are dropped (threat 46). `serve` returns only then, so the cap on
  connections also bounds the work of clients that have left.
- No client affects another connection: every failure here ends this one only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
from dataclasses import asdict

from ...daemon.api.events import WorkEvent
from ...daemon.events.events import Notice
from ...daemon.tasks.cancellation import LeftMidway
from ...daemon.tasks.holding import Holder, holder
from ...daemon.tasks.pieces import Pieces, in_pieces
from ...errors import TorporError
from ..errors import (
    ApiError,
    ConnectionEvicted,
    DaemonBusy,
    FrameTimeout,
    HelloTimeout,
    InternalError,
    LocalProtocolError,
    ProtocolError,
    ReplyTooLarge,
    RequestCancelled,
    ShuttingDown,
)
from ..limits import ServerLimits
from ..wire.connection import AcceptedRequest, RefusedRequest, ServerConnection, ServerInput
from ..wire.messages import Cancel, Hello
from ..wire.peer import has_left
from .budget import Held, RequestBudget
from .dispatch import Backend, ShutDown, call, event_map, notice_map
from .outbox import ClientStalled, Outbox

_LOG = logging.getLogger(__name__)
_READ_BYTES = 64 * 1024
_LOOK_S = 0.5
"""How soon a client that left unread, or a frame that is too slow, is noticed."""

_Frame = tuple[Held, Held]
"""The bytes of a frame in its connection's budget, and in the common one."""


class ServedConnection:
    """Serves one accepted connection. `serve` runs once; `shut_down` may be called while it does."""

    def __init__(
        self,
        backend: Backend,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        shut_down: ShutDown,
        budget: RequestBudget,
        checking: asyncio.Lock,
        server_name: str,
        limits: ServerLimits,
        reserved: bool = False,
    ) -> None:
        """budget: of all connections. checking: held by the connection that checks a large frame. reserved: see
        `ServerLimits.reserved_connections`."""
        self.reserved = reserved
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
        self._own_budget = RequestBudget(limits.max_connection_request_bytes, largest_bytes=0)
        self._budget = budget
        self._checking = checking
        self._held: _Frame = Held(), Held()  # for the frame that is being read
        self._pace = 0.0, 0  # the wait since that frame was last fast enough, and its bytes then
        self._quiet = False
        self._gave_way: set[int] = set()
        self._holder = Holder()
        self._stopping = asyncio.Event()
        self._farewell: TorporError = _shutting_down()
        self._gone = False
        loop = asyncio.get_running_loop()
        self._deadline: float | None = loop.time() + limits.hello_timeout_s
        self._active_at = loop.time()

    @property
    def idle_since(self) -> float | None:
        """When this connection last did something, on the loop's clock; None if it works, holds something or ends."""
        is_busy = self._work or self._answers or self._holder or self._gone or self._stopping.is_set()
        return None if is_busy else self._active_at

    async def serve(self) -> None:
        """Serve until the client leaves or breaks the protocol, or until `shut_down`. Raises only our own faults."""
        sender = asyncio.create_task(self._send())
        reading = asyncio.create_task(self._read_until_end())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({sender, reading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._stopping.is_set() and not reading.done():
                reading.cancel()  # no new requests; those in flight are answered
                self._cancel_work()
                await self._see_watching_end()
                await self._wait_for_answers()
                self._outbox.put_reply(self._connection.send_fatal(self._farewell))
        finally:
            self._gone = True
            reading.cancel()
            stopping.cancel()
            self._cancel_work()
            self._cancel_watching()
            self._outbox.finish()
            await self._close(sender)
            await asyncio.wait({reading, stopping})
            await self._wait_for_answers()
            await self._holder.end()
            self._give_back(self._held)
            if not reading.cancelled() and (fault := reading.exception()) is not None:
                raise fault  # ours, not the client's: the server logs it

    def give_way(self) -> None:
        """Cancel the work that may be cancelled, for a stop that may still be refused. Later requests are taken."""
        self._gave_way.update(id for id, (request, _) in self._work.items() if _is_stoppable(request))
        self._cancel_work()

    def refuse_work(self) -> None:
        """Take only requests of methods that are `always` taken; cancel the work that may be cancelled."""
        self._quiet = True
        self._cancel_work()

    async def quiesce(self) -> None:
        """As `refuse_work`, and wait for the work in flight. The connection stays, for the answers."""
        self.refuse_work()
        if going := [
            work for request, work in self._work.values() if not (request.verb.always or request.verb.watches)
        ]:
            await asyncio.wait(going)

    def shut_down(self) -> None:
        """Take no more requests, cancel the work that may be cancelled, answer the rest, end. Returns at once."""
        self._stopping.set()

    def evict(self) -> None:
        """End an idle connection, to make room for a new one."""
        self._farewell = ConnectionEvicted(
            "This connection was the one idle for longest when a new one needed its place. Nothing of it was in flight."
            " Open a new one."
        )
        self._stopping.set()

    # --- reading

    async def _read_until_end(self) -> None:
        try:
            while data := await self._read():
                self._connection.feed(data)
                self._active_at = asyncio.get_running_loop().time()
                taken = False
                while True:
                    if not await self._make_room():
                        return
                    if (message := await self._next_message()) is None:
                        break
                    taken = True
                    await self._handle(message)
                self._set_deadline(frame_ended=taken)
            self._connection.require_clean_end()
        except ProtocolError as error:
            _LOG.warning("connection closed: %s", error.code)
            self._outbox.put_reply(self._connection.send_fatal(error))
        except OSError:
            pass  # the client reset it: an end like any other

    async def _next_message(self) -> ServerInput | None:
        """The client's next message. A large frame is decoded and checked in pieces, so that no stream waits. Only one
        connection does so at a time, to bound its memory (threat 44)."""
        if not self._connection.is_large_frame_whole:
            return self._connection.next_message()
        async with self._checking:
            message = await in_pieces(self._connection.next_message_in_pieces())
        self._pace = 0.0, 0  # the check was not the client's time
        return message

    async def _make_room(self) -> bool:
        """Count the received part of the next frame in the budgets. Waits for room, and reads nothing meanwhile. False
        if the client left."""
        size_bytes = self._connection.next_frame_bytes
        if size_bytes <= self._limits.uncounted_frame_bytes:
            return True
        taking = asyncio.create_task(self._take(size_bytes, min(size_bytes, self._connection.waiting_bytes)))
        try:
            while not (await asyncio.wait({taking}, timeout=_LOOK_S))[0]:
                if self._connection.greeted:
                    self._deadline = None  # we keep the client waiting, not it us
                if has_left(self._writer.get_extra_info("socket")):
                    return False
        finally:
            taking.cancel()
            await asyncio.wait({taking})
        return True

    async def _take(self, size_bytes: int, come_bytes: int) -> None:
        """Take a whole frame from the client's own budget first: a frame that waits there holds no room that other
        clients need."""
        own, shared = self._held
        if not own.size_bytes:
            await self._own_budget.take(own, size_bytes)
            self._own_budget.complete(own)
        await self._budget.take(shared, come_bytes - shared.size_bytes)
        if come_bytes == size_bytes:
            self._budget.complete(shared)

    async def _read(self) -> bytes:
        holds_room = self._held[1].size_bytes > 0
        if not holds_room:
            self._pace = 0.0, 0
        clock, data = asyncio.get_running_loop().time, None
        while data is None:
            begun = clock()
            data = await self._read_for(_LOOK_S if holds_room else None)
            if holds_room:
                # A wait beyond a look was our own standstill; the client may have sent meanwhile.
                self._require_pace(min(clock() - begun, _LOOK_S), self._connection.waiting_bytes + len(data or b""))
        return data

    def _require_pace(self, waited_s: float, come_bytes: int) -> None:
        """Refuse a slow frame that holds room while others wait for it."""
        waited_s += self._pace[0]
        if come_bytes - self._pace[1] >= self._limits.min_frame_bytes or not self._budget.is_short:
            self._pace = 0.0, come_bytes
        elif waited_s >= self._limits.slow_frame_s:
            raise FrameTimeout(
                f"A frame came slower than {self._limits.min_frame_bytes} bytes in {self._limits.slow_frame_s:g} s,"
                " while others waited for room.",
                limit_s=self._limits.slow_frame_s,
            )
        else:
            self._pace = waited_s, self._pace[1]

    async def _read_for(self, look_s: float | None) -> bytes | None:
        """Read bytes; None if nothing came in this time, before the deadline."""
        until = None if look_s is None else asyncio.get_running_loop().time() + look_s
        if self._deadline is not None:
            until = self._deadline if until is None else min(until, self._deadline)
        try:
            async with asyncio.timeout_at(until):
                return await self._reader.read(_READ_BYTES)
        except TimeoutError:
            if self._deadline is None or asyncio.get_running_loop().time() < self._deadline:
                return None
            if not self._connection.greeted:
                limit_s = self._limits.hello_timeout_s
                raise HelloTimeout(f"No hello came within {limit_s:g} s.", limit_s=limit_s) from None
            limit_s = self._limits.frame_timeout_s
            raise FrameTimeout(f"A frame was not complete after {limit_s:g} s.", limit_s=limit_s) from None

    def _set_deadline(self, *, frame_ended: bool) -> None:
        """Set the deadline of an incomplete frame, from its start. Before the hello the first deadline stands."""
        if not self._connection.greeted:
            return
        if not self._connection.waiting_bytes:
            self._deadline = None
        elif self._deadline is None or frame_ended:
            self._deadline = asyncio.get_running_loop().time() + self._limits.frame_timeout_s

    async def _handle(self, message: ServerInput) -> None:
        if isinstance(self._farewell, ConnectionEvicted):
            return  # an unanswered request was not begun, and can be sent again
        if isinstance(message, AcceptedRequest):
            refusal = None if message.verb.always else self._find_refusal()
            if refusal is None:
                held, self._held = self._held, (Held(), Held())
                self._begin(message, held)
            else:
                await self._outbox.wait_for_room()
                self._outbox.put_reply(self._connection.send_error(message.id, refusal))
        elif isinstance(message, RefusedRequest):
            await self._outbox.wait_for_room()  # bad requests are read no faster than the client takes their answers
            self._outbox.put_reply(self._connection.send_refusal(message))
        elif isinstance(message, Cancel):
            self._cancel(message.id)
        elif isinstance(message, Hello):
            self._outbox.put_reply(self._connection.send_hello(server=self._server_name, pid=os.getpid()))
        self._give_back(self._held)

    def _give_back(self, held: _Frame) -> None:
        for budget, each in zip((self._own_budget, self._budget), held, strict=True):
            budget.give_back(each)

    # --- requests

    def _find_refusal(self) -> ApiError | None:
        if self._quiet:
            return _shutting_down()
        if self.reserved:
            return DaemonBusy(
                f"All {self._limits.max_connections} connections are working; this one takes status and shutdown only."
                " Try again when one of them is done.",
                limit=self._limits.max_connections,
            )
        return None

    def _begin(self, request: AcceptedRequest, held: _Frame) -> None:
        def emit(event: WorkEvent) -> None:
            self._send_event(request.id, event_map(event))

        async def tell(notice: Notice) -> None:
            await self._outbox.wait_for_quiet()
            self._send_event(request.id, notice_map(notice))

        context = contextvars.copy_context()
        context.run(holder.set, self._holder)
        doing = call(self._backend, self._shut_down, request.verb, request.asked, emit, tell)
        work = asyncio.create_task(doing, context=context)
        self._work[request.id] = (request, work)
        answer = asyncio.create_task(self._answer(request, work, held))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    def _send_event(self, request_id: int, event: dict[str, object]) -> None:
        if self._gone or request_id not in self._work:
            return
        try:
            self._outbox.put_event(self._connection.send_event(request_id, event))
        except ClientStalled as stalled:
            self._drop(stalled)

    async def _answer(self, request: AcceptedRequest, work: asyncio.Task[dict[str, object]], held: _Frame) -> None:
        await asyncio.wait({work})  # not awaited itself: its cancellation is an answer, not that of this task
        self._give_back(held)
        await self._outbox.wait_for_room()
        self._active_at = asyncio.get_running_loop().time()
        del self._work[request.id]
        if not self._gone:
            self._outbox.put_reply(await in_pieces(self._answer_frame(request, work)))
        elif not work.cancelled():
            work.exception()  # taken, so that asyncio does not log it; no client is left to tell
        self._gave_way.discard(request.id)

    def _answer_frame(self, request: AcceptedRequest, work: asyncio.Task[dict[str, object]]) -> Pieces[bytes]:
        if work.cancelled():
            return self._connection.send_error(request.id, self._why_cancelled(request, work))
        # Not raised: a raised error would hold this frame, and so itself and the request's session, until a garbage
        # collection.
        if (failure := work.exception()) is not None:
            return self._connection.send_error(request.id, _error_to_tell(request, failure))
        try:
            return (yield from self._connection.send_result(request.id, work.result()))
        except LocalProtocolError as unsendable:
            error = ReplyTooLarge(
                f"{request.verb.name} was carried out, but its result cannot be sent: {unsendable.message}"
                " Look at the session with show, or at the tree with branches, and ask for less at a time."
            )
        return self._connection.send_error(request.id, error)

    def _why_cancelled(self, request: AcceptedRequest, work: asyncio.Task[dict[str, object]]) -> TorporError:
        left, facts = _left_of(request, work)
        if self._quiet or self._stopping.is_set():
            return ShuttingDown(
                f"The daemon is stopping, so {request.verb.name} was cancelled. {left} Go on when the daemon has been"
                " started again.",
                **facts,
            )
        if request.id in self._gave_way:
            return ShuttingDown(
                f"The daemon was told to stop, so {request.verb.name} was cancelled. {left} Ask for the rest again:"
                " soon if the daemon could not stop, else when it is back.",
                **facts,
            )
        return RequestCancelled(f"{request.verb.name} was cancelled. {left}", **facts)

    def _cancel(self, request_id: int) -> None:
        # An unknown id is no fault: the result and the cancel may have crossed.
        if request_id in self._work:
            request, work = self._work[request_id]
            if request.verb.cancellable:
                work.cancel()

    def _cancel_work(self) -> None:
        """Stop the work that may be stopped, but not subscriptions: they hear of the stop to its end."""
        for request_id, (request, _) in list(self._work.items()):
            if _is_stoppable(request):
                self._cancel(request_id)

    def _cancel_watching(self) -> None:
        for request_id, (request, _) in list(self._work.items()):
            if request.verb.watches:
                self._cancel(request_id)

    async def _see_watching_end(self) -> None:
        """Wait for subscriptions to end: the service has ended, and their clients take the last events."""
        if watching := [work for request, work in self._work.values() if request.verb.watches]:
            await asyncio.wait(watching, timeout=self._limits.goodbye_timeout_s)
        self._cancel_watching()

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
            pass  # the client is gone; the reading task sees it too

    def _drop(self, stalled: ClientStalled) -> None:
        _LOG.warning("client dropped: %s", stalled)
        self._gone = True
        self._outbox.finish()
        self._writer.transport.abort()

    async def _close(self, sender: asyncio.Task[None]) -> None:
        """Give the client a moment to take the queued messages, then close."""
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


def _is_stoppable(request: AcceptedRequest) -> bool:
    return request.verb.cancellable and not request.verb.watches


def _error_to_tell(request: AcceptedRequest, failure: BaseException) -> TorporError:
    """The error for the client; a fault of one request must not end the daemon."""
    if isinstance(failure, TorporError):
        return failure
    _LOG.error("fault in %s", request.verb.name, exc_info=failure)
    return InternalError(
        f"{request.verb.name} failed by a fault of the daemon ({type(failure).__name__}). See its log."
    )


def _left_of(request: AcceptedRequest, work: asyncio.Task[dict[str, object]]) -> tuple[str, dict[str, object]]:
    """The work that stays of a cancelled request, as a sentence and as facts."""
    try:
        work.result()
    except LeftMidway as left:
        read = "Its input was read. " if left.was_read else ""
        written = f"{len(left.tokens)} tokens of the answer stay." if left.tokens else "No answer began."
        branches = f" History branches here: version {left.branched.newest_version} stays." if left.branched else ""
        facts = {
            "was_read": left.was_read,
            "tokens": left.tokens,
            "text": left.text,
            "token_count": left.token_count,
            **({"branched": asdict(left.branched)} if left.branched else {}),
        }
        return f"{read}{written} The session holds {left.token_count} tokens now.{branches}", facts
    except asyncio.CancelledError:
        return request.verb.leaves or "", {}
    raise AssertionError("asked only of what was cancelled")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("The daemon is stopping; its sessions are put to sleep. Try again when it has been started.")
