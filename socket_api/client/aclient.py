"""The asynchronous client: the same verbs as `client.py`, for many requests at once on one connection.

Owns nothing but the verbs and the stream of a generation; the connection is `alink.py`'s. Imports neither MLX nor the
daemon (tests/socket_api/test_imports.py).

Rules: as for the synchronous client, nothing is ever sent twice. A request whose awaiting task is cancelled is
cancelled in the daemon. An instance belongs to the event loop on which it was connected.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ApiError, LocalProtocolError
from ..wire import calls, results
from ..wire.address import default_socket_path
from ..wire.calls import Call, R, committed_of, remote_error
from ..wire.messages import ErrorMessage, EventMessage, HelloReply, ResultMessage, ServerMessage
from ..wire.methods import Priority
from ..wire.results import GenerateResult, NoticeEvent, Sampling, TokenEvent
from .alink import AsyncLink
from .client import OnEvent
from .ensuring import ensure_daemon
from .link import DEFAULT_TIMEOUT_S
from .subscription import AsyncSubscription


class AsyncClient:
    """A connection to the daemon: `async with AsyncClient() as torpor`, or `connect` and `close`.

    Args and errors are those of `Client`; the connection is made by `connect`.
    """

    def __init__(
        self,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.socket_path = Path(default_socket_path() if socket_path is None else socket_path)
        self.namespace = namespace
        self._link = AsyncLink(self.socket_path, timeout_s=timeout_s)

    @classmethod
    async def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """As `Client.ensure`: connected, to a daemon that was started if none answered."""
        socket = await asyncio.to_thread(ensure_daemon, socket_path, store=store, config=config)
        return await cls(socket, namespace=namespace, timeout_s=timeout_s).connect()

    # --- verbs

    async def status(self) -> results.StatusResult:
        """The daemon as a whole."""
        return await self._run(calls.status())

    async def create(
        self,
        session: str,
        *,
        model: str | None = None,
        labels: Sequence[str] = (),
        sampling: Sampling | None = None,
        system: str | None = None,
    ) -> results.SessionInfo:
        """Make a session. `system` opens its chat."""
        call = calls.create(session, model=model, labels=labels, sampling=sampling, system=system)
        return await self._run(call)

    async def append(
        self,
        session: str,
        *,
        text: str | None = None,
        tokens: Sequence[int] | None = None,
        create: bool = False,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> results.AppendResult:
        """Let the session read text, or token ids. Never sent twice, whatever fails."""
        return await self._run(
            calls.append(session, text=text, tokens=tokens, create=create, priority=priority), on_event
        )

    async def generate(
        self,
        session: str,
        *,
        max_tokens: int | None = None,
        text: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> GenerateResult:
        """Continue the session's text, after reading `text` if there is some."""
        call = calls.generate(
            session,
            max_tokens=max_tokens,
            text=text,
            sampling=sampling,
            stop=stop,
            prove=prove,
            create=create,
            priority=priority,
        )
        return await self._run(call, on_event)

    def stream_generate(
        self,
        session: str,
        *,
        max_tokens: int | None = None,
        text: str | None = None,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> AsyncTextStream:
        """As `generate`, piece by piece; asked for when the stream is first iterated or entered."""
        call = calls.generate(
            session,
            max_tokens=max_tokens,
            text=text,
            sampling=sampling,
            stop=stop,
            prove=prove,
            create=create,
            priority=priority,
        )
        return AsyncTextStream(self._link, call.within(self.namespace), on_event)

    async def chat(
        self,
        session: str,
        message: str | None = None,
        *,
        max_tokens: int | None = None,
        role: str = "user",
        messages: Sequence[Mapping[str, str]] | None = None,
        on_divergence: str = "refuse",
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> GenerateResult:
        """One turn of a chat: a new message, or `messages`, the whole transcript (maps of role and content); the
        daemon reads what is new of it. on_divergence: what becomes of a transcript that is not what the session has."""
        call = calls.chat(
            session,
            message,
            max_tokens=max_tokens,
            role=role,
            messages=messages,
            on_divergence=on_divergence,
            sampling=sampling,
            stop=stop,
            prove=prove,
            create=create,
            priority=priority,
        )
        return await self._run(call, on_event)

    def stream_chat(
        self,
        session: str,
        message: str | None = None,
        *,
        max_tokens: int | None = None,
        role: str = "user",
        messages: Sequence[Mapping[str, str]] | None = None,
        on_divergence: str = "refuse",
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        prove: bool = False,
        create: bool = False,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> AsyncTextStream:
        """As `chat`, piece by piece; asked for when the stream is first iterated or entered."""
        call = calls.chat(
            session,
            message,
            max_tokens=max_tokens,
            role=role,
            messages=messages,
            on_divergence=on_divergence,
            sampling=sampling,
            stop=stop,
            prove=prove,
            create=create,
            priority=priority,
        )
        return AsyncTextStream(self._link, call.within(self.namespace), on_event)

    async def set(self, session: str, *, sampling: Sampling, on_event: OnEvent | None = None) -> results.SessionInfo:
        """Change how the session draws its tokens, from now on: what is given of `sampling`, and nothing else."""
        return await self._run(calls.set_sampling(session, sampling), on_event)

    async def sleep(self, session: str, *, on_event: OnEvent | None = None) -> results.SleepResult:
        """Put the session to sleep. When this returns, its state is durable."""
        return await self._run(calls.sleep(session), on_event)

    async def wake(
        self,
        session: str,
        *,
        version: int | None = None,
        at_token: int | None = None,
        strict: bool = False,
        on_event: OnEvent | None = None,
    ) -> results.WakeResult:
        """Wake the session; nothing is prefilled again. at_token: with only so many of its tokens, what it takes to get
        there computed. strict: refuse what another backend computed."""
        return await self._run(calls.wake(session, version=version, at_token=at_token, strict=strict), on_event)

    async def plan_wake(
        self, session: str, *, version: int | None = None, at_token: int | None = None, strict: bool = False
    ) -> results.WakePlanResult:
        """What `wake` would do if it were asked the same, and how long that would take there; nothing is done."""
        return await self._run(calls.plan_wake(session, version=version, at_token=at_token, strict=strict))

    async def fork(
        self,
        session: str,
        name: str,
        *,
        at_token: int | None = None,
        labels: Sequence[str] | None = None,
        on_event: OnEvent | None = None,
    ) -> results.ForkResult:
        """Make a session `name` that begins as `session` stands (or its version `NAME@3`), at an earlier token if
        one is given. It has all blocks in common with it, and sleeps."""
        return await self._run(calls.fork(session, name, at_token=at_token, labels=labels), on_event)

    async def load_model(self, model: str) -> results.ModelInfo:
        """Load a model, if it is not; idle sessions and models make room for it."""
        return await self._run(calls.load_model(model))

    async def unload_model(self, model: str) -> results.ModelInfo:
        """Put the sessions on a model to sleep, and free its memory until it is needed again."""
        return await self._run(calls.unload_model(model))

    async def fold(
        self,
        session: str,
        name: str,
        *,
        summary: str | None = None,
        summarise: int | None = None,
        tail: int = 0,
        labels: Sequence[str] | None = None,
        priority: Priority = "normal",
        on_event: OnEvent | None = None,
    ) -> results.FoldResult:
        """Make `session` durable, and begin a smaller one, `name`, with its system text, a summary (given, or written
        by the model in at most `summarise` tokens) and its last `tail` tokens."""
        call = calls.fold(
            session, name, summary=summary, summarise=summarise, tail=tail, labels=labels, priority=priority
        )
        return await self._run(call, on_event)

    async def list_sessions(self, namespace: str | None = None) -> tuple[results.SessionInfo, ...]:
        """All sessions, or those of one namespace: this one, else the client's."""
        return (await self._run(calls.list_sessions(namespace))).sessions

    async def stats(self, label: str | None = None, namespace: str | None = None) -> results.StatsResult:
        """Figures of all sessions, or of those of a label or namespace: together, and by label."""
        return await self._run(calls.stats(label, namespace))

    async def warm(
        self,
        sessions: Sequence[str] = (),
        *,
        label: str | None = None,
        namespace: str | None = None,
        on_event: OnEvent | None = None,
    ) -> results.WarmResult:
        """Wake sessions ahead of need, by name or by label, as far as memory is free: none other goes to sleep."""
        return await self._run(calls.warm(sessions, label=label, namespace=namespace), on_event)

    async def clear(self, label: str, *, namespace: str | None = None, dry_run: bool = False) -> results.ClearResult:
        """Delete all sessions of a label, from memory and disk; `dry_run` tells which, and changes nothing."""
        return await self._run(calls.clear(label, namespace=namespace, dry_run=dry_run))

    async def show(self, session: str) -> results.SessionDetail:
        """Everything that can be seen of one session."""
        return await self._run(calls.show(session))

    async def why(self, session: str) -> results.WhyResult:
        """What became of the prefixes of the session's last requests: what was kept, where one diverged, and why."""
        return await self._run(calls.why(session))

    async def analyse(
        self,
        session: str,
        *,
        kind: str | None = None,
        labels: Sequence[str] | None = None,
        on_event: OnEvent | None = None,
    ) -> results.AnalysisResult:
        """Figures of a stored version (`NAME@3`; the newest of a bare name), as a JSON document in `artifact`."""
        return await self._run(calls.analyse(session, kind=kind, labels=labels), on_event)

    async def delete(self, session: str) -> results.DeleteResult:
        """Remove the session and all its versions."""
        return await self._run(calls.delete(session))

    async def maintain(
        self,
        operation: str,
        *,
        session: str | None = None,
        dry_run: bool = False,
        keep_last: int | None = None,
        keep_days: float | None = None,
        cold_after_days: float | None = None,
        bits: int | None = None,
        after_days: float | None = None,
    ) -> results.MaintenanceResult:
        """Have the daemon look after its store: gc, compact, repair, rebuild_index, prune, forget,
        quantise.

        It reports no progress and may take long; `dry_run` tells what it would do and changes nothing.
        """
        call = calls.maintain(
            operation,
            session=session,
            dry_run=dry_run,
            keep_last=keep_last,
            keep_days=keep_days,
            cold_after_days=cold_after_days,
            bits=bits,
            after_days=after_days,
        )
        return await self._run(call)

    async def mark(
        self,
        session: str,
        *,
        tag: str | None = None,
        untag: str | None = None,
        pinned: bool | None = None,
        move: bool = False,
    ) -> results.MarksResult:
        """Put one mark on a version (`NAME@3`; the latest of a bare name), or take one off.

        `move` takes a tag from the version that has it.
        """
        return await self._run(calls.mark(session, tag=tag, untag=untag, pinned=pinned, move=move))

    async def import_bundle(self, bundle_id: str, *, session: str | None = None) -> results.SleepResult:
        """Adopt a bundle that was put into the store's folder `incoming`, under its own name or another."""
        return await self._run(calls.import_bundle(bundle_id, session=session))

    def events(
        self, names: Sequence[str] | None = None, *, session: str | None = None, namespace: str | None = None
    ) -> AsyncSubscription:
        """What happens in the daemon from now on, until the subscription is closed or the daemon stops: sleeps, wakes,
        evictions, what is read and written, with sizes and times. Who reads too slowly is told how many were `lost`.

        names: only events of these names (docs/protocol.md); session, namespace: only events about these.
        """
        call = calls.subscribe(names=names, session=session, namespace=namespace)
        return AsyncSubscription(self._link, call.within(self.namespace))

    async def shutdown(self, *, force: bool = False) -> results.ShutdownResult:
        """Stop the daemon. When this returns, it has put its sessions to sleep, and its process (`peer_pid`) ends.

        Where a session cannot be put to sleep, this raises RemoteError with the code `stop_refused`, and the daemon
        goes on. With `force` it stops all the same, and `failed` of the result names such sessions: what they did since
        their last sleep is lost.
        """
        return await self._run(calls.shutdown(force=force))

    # --- life

    @property
    def hello(self) -> HelloReply:
        """What the daemon said of itself. Raises LocalProtocolError before `connect`."""
        return self._link.hello

    async def connect(self) -> Self:
        """Connect and wait to be greeted; once for each client.

        Raises:
            DaemonUnreachable: no daemon answers there.
            RemoteError: the daemon refused the connection.
        """
        await self._link.connect()
        return self

    @property
    def peer_pid(self) -> int | None:
        """As `Client.peer_pid`; None before the connection is made."""
        return self._link.peer_pid

    async def close(self) -> None:
        """Close the connection; the daemon stops the generations that were asked for on it. Idempotent."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self, call: Call[R], on_event: OnEvent | None = None) -> R:
        request_id = self._link.begin(call.within(self.namespace))
        try:
            await self._link.flush()
            while True:
                message = await self._link.wait_for(request_id)
                if isinstance(message, EventMessage):
                    if on_event is not None and not isinstance(message.event, NoticeEvent):
                        on_event(message.event)
                elif isinstance(message, ResultMessage):
                    return call.load_result(message.result)
                else:
                    assert isinstance(message, ErrorMessage)
                    raise remote_error(message.error)
        finally:
            self._link.abandon(request_id)


class AsyncTextStream:
    """A generation as it happens: `async for` pieces of text, then read `result`. See `TextStream`.

    As there, `async with` cancels what is unfinished, and so does dropping it, when it is collected.
    """

    def __init__(self, link: AsyncLink, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        self._link = link
        self._call = call
        self._on_event = on_event
        self._result: GenerateResult | None = None
        self._id: int | None = None
        self._ended = False
        self._cancelled = False
        self._committed: dict[str, Any] = {}

    @property
    def result(self) -> GenerateResult:
        """The whole generation, once the stream has ended. Raises LocalProtocolError before."""
        if self._result is None:
            raise LocalProtocolError(
                "This stream was cancelled before it had a result."
                if self._ended
                else "This stream has not ended. Iterate to its end, or call cancel and iterate on.",
                **self._committed,
            )
        return self._result

    def cancel(self) -> None:
        """Ask the daemon to stop. Iteration goes on until it has: a few more pieces may come. Idempotent."""
        if self._ended or self._cancelled:
            return
        self._cancelled = True
        if self._id is None:
            self._ended = True
        else:
            self._link.cancel(self._id)

    async def close(self) -> None:
        """Cancel if unfinished, and wait for the end. `result` may then say what was generated. Idempotent."""
        if self._ended:
            return
        try:
            self.cancel()
            async for _ in self:
                pass
        except ApiError:
            pass  # the generation is over either way, and its failure was not waited for
        finally:
            self._end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not self._ended:
            message = await self._next_message()
            if isinstance(message, EventMessage):
                if self._on_event is not None and not isinstance(message.event, NoticeEvent):
                    self._on_event(message.event)
                if isinstance(message.event, TokenEvent) and message.event.text:
                    return message.event.text
            else:
                self._finish(message)
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True) and self._id is not None:
            self._link.drop(self._id)

    def _begin(self) -> int:
        if self._id is None:
            self._id = self._link.begin(self._call)
        return self._id

    async def _next_message(self) -> ServerMessage:
        try:
            request_id = self._begin()
            await self._link.flush()
            return await self._link.wait_for(request_id)
        except BaseException:
            self._end()  # cancelled while waiting, too: the daemon stops with its reader
            raise

    def _finish(self, message: ServerMessage) -> None:
        self._end()
        if isinstance(message, ResultMessage):
            self._result = self._call.load_result(message.result)
        elif isinstance(message, ErrorMessage):
            if not (self._cancelled and message.error.code == "cancelled"):
                raise remote_error(message.error)
            self._committed = committed_of(message.error)

    def _end(self) -> None:
        self._ended = True
        if self._id is not None:
            self._link.abandon(self._id)
