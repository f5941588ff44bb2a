"""The synchronous client: the verbs of the daemon as blocking methods.

Owns nothing but the verbs and the stream of a generation; the connection is `link.py`'s. Imports neither MLX nor the
daemon (tests/socket_api/test_imports.py).

Rules: nothing is ever sent twice. If a connection ends while a request is in flight, whether the daemon carried it out
is unknown, and the caller is told so (`ConnectionLost`). A client is for one thread; requests on it may overlap only in
that a stream is open while others are made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ..errors import ApiError, LocalProtocolError
from ..wire import calls, results
from ..wire.address import default_socket_path
from ..wire.calls import Call, R, committed_of, remote_error
from ..wire.messages import ErrorMessage, EventMessage, HelloReply, ResultMessage, ServerMessage
from ..wire.methods import Priority
from ..wire.results import GenerateResult, NoticeEvent, ProgressEvent, Sampling, TokenEvent
from .ensuring import ensure_daemon
from .link import DEFAULT_TIMEOUT_S, Link
from .subscription import Subscription

OnEvent = Callable[[ProgressEvent | TokenEvent], None]


class Client:
    """A connection to the daemon.

    Args:
        socket_path: as the daemon was told; the default is `default_socket_path()`.
        namespace: the one that is worked in: a bare name is a name of it, and lists, figures, events and labels are
            about its sessions. None: bare names are of `default`, and lists about all.
        timeout_s: the longest time without a message of the daemon about a request; None waits forever.

    Raises:
        DaemonUnreachable: no daemon answers there.
        RemoteError: the daemon refused the connection (`code` says why).
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
        self._link = Link(self.socket_path, timeout_s=timeout_s)

    @classmethod
    def ensure(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        store: str | os.PathLike[str] | None = None,
        config: str | os.PathLike[str] | None = None,
        namespace: str | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Self:
        """Connect to the daemon on that socket; where none answers, start one in the background first, as `torpor
        ensure` does. store, config: for one that is started.

        Raises:
            DaemonNotStarted: why it could not be. Nothing is left running.
        """
        socket = ensure_daemon(socket_path, store=store, config=config)
        return cls(socket, namespace=namespace, timeout_s=timeout_s)

    # --- verbs

    def status(self) -> results.StatusResult:
        """The daemon as a whole."""
        return self._run(calls.status())

    def create(
        self,
        session: str,
        *,
        model: str | None = None,
        labels: Sequence[str] = (),
        sampling: Sampling | None = None,
        system: str | None = None,
    ) -> results.SessionInfo:
        """Make a session. `system` opens its chat."""
        return self._run(calls.create(session, model=model, labels=labels, sampling=sampling, system=system))

    def append(
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
        return self._run(calls.append(session, text=text, tokens=tokens, create=create, priority=priority), on_event)

    def generate(
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
        """Continue the session's text, after reading `text` if there is some. sampling: what is given of it overrides
        the session's, for this request."""
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
        return self._run(call, on_event)

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
    ) -> TextStream:
        """As `generate`, piece by piece."""
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
        return TextStream(self._link, call.within(self.namespace), on_event)

    def chat(
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
        return self._run(call, on_event)

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
    ) -> TextStream:
        """As `chat`, piece by piece."""
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
        return TextStream(self._link, call.within(self.namespace), on_event)

    def set(self, session: str, *, sampling: Sampling, on_event: OnEvent | None = None) -> results.SessionInfo:
        """Change how the session draws its tokens, from now on: what is given of `sampling`, and nothing else."""
        return self._run(calls.set_sampling(session, sampling), on_event)

    def sleep(self, session: str, *, on_event: OnEvent | None = None) -> results.SleepResult:
        """Put the session to sleep. When this returns, its state is durable."""
        return self._run(calls.sleep(session), on_event)

    def wake(
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
        return self._run(calls.wake(session, version=version, at_token=at_token, strict=strict), on_event)

    def plan_wake(
        self, session: str, *, version: int | None = None, at_token: int | None = None, strict: bool = False
    ) -> results.WakePlanResult:
        """What `wake` would do if it were asked the same, and how long that would take there; nothing is done."""
        return self._run(calls.plan_wake(session, version=version, at_token=at_token, strict=strict))

    def fork(
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
        return self._run(calls.fork(session, name, at_token=at_token, labels=labels), on_event)

    def load_model(self, model: str) -> results.ModelInfo:
        """Load a model, if it is not; idle sessions and models make room for it."""
        return self._run(calls.load_model(model))

    def unload_model(self, model: str) -> results.ModelInfo:
        """Put the sessions on a model to sleep, and free its memory until it is needed again."""
        return self._run(calls.unload_model(model))

    def fold(
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
        return self._run(call, on_event)

    def list_sessions(self, namespace: str | None = None) -> tuple[results.SessionInfo, ...]:
        """All sessions, or those of one namespace: this one, else the client's."""
        return self._run(calls.list_sessions(namespace)).sessions

    def stats(self, label: str | None = None, namespace: str | None = None) -> results.StatsResult:
        """Figures of all sessions, or of those of a label or namespace: together, and by label."""
        return self._run(calls.stats(label, namespace))

    def warm(
        self,
        sessions: Sequence[str] = (),
        *,
        label: str | None = None,
        namespace: str | None = None,
        on_event: OnEvent | None = None,
    ) -> results.WarmResult:
        """Wake sessions ahead of need, by name or by label, as far as memory is free: none other goes to sleep."""
        return self._run(calls.warm(sessions, label=label, namespace=namespace), on_event)

    def clear(self, label: str, *, namespace: str | None = None, dry_run: bool = False) -> results.ClearResult:
        """Delete all sessions of a label, from memory and disk; `dry_run` tells which, and changes nothing."""
        return self._run(calls.clear(label, namespace=namespace, dry_run=dry_run))

    def show(self, session: str) -> results.SessionDetail:
        """Everything that can be seen of one session."""
        return self._run(calls.show(session))

    def why(self, session: str) -> results.WhyResult:
        """What became of the prefixes of the session's last requests: what was kept, where one diverged, and why."""
        return self._run(calls.why(session))

    def analyse(
        self,
        session: str,
        *,
        kind: str | None = None,
        labels: Sequence[str] | None = None,
        on_event: OnEvent | None = None,
    ) -> results.AnalysisResult:
        """Figures of a stored version (`NAME@3`; the newest of a bare name), as a JSON document in `artifact`."""
        return self._run(calls.analyse(session, kind=kind, labels=labels), on_event)

    def delete(self, session: str) -> results.DeleteResult:
        """Remove the session and all its versions."""
        return self._run(calls.delete(session))

    def maintain(
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
        return self._run(call)

    def mark(
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
        return self._run(calls.mark(session, tag=tag, untag=untag, pinned=pinned, move=move))

    def import_bundle(self, bundle_id: str, *, session: str | None = None) -> results.SleepResult:
        """Adopt a bundle that was put into the store's folder `incoming`, under its own name or another."""
        return self._run(calls.import_bundle(bundle_id, session=session))

    def events(
        self, names: Sequence[str] | None = None, *, session: str | None = None, namespace: str | None = None
    ) -> Subscription:
        """What happens in the daemon from now on, until the subscription is closed or the daemon stops: sleeps, wakes,
        evictions, what is read and written, with sizes and times. Who reads too slowly is told how many were `lost`.

        names: only events of these names (docs/protocol.md); session, namespace: only events about these.
        """
        call = calls.subscribe(names=names, session=session, namespace=namespace)
        return Subscription(self._link, call.within(self.namespace))

    def shutdown(self, *, force: bool = False) -> results.ShutdownResult:
        """Stop the daemon. When this returns, it has put its sessions to sleep, and its process (`peer_pid`) ends.

        Where a session cannot be put to sleep, this raises RemoteError with the code `stop_refused`, and the daemon
        goes on. With `force` it stops all the same, and `failed` of the result names such sessions: what they did since
        their last sleep is lost.
        """
        return self._run(calls.shutdown(force=force))

    # --- life

    @property
    def peer_pid(self) -> int | None:
        """The process that answered when this client connected, as the kernel says; None where it does not."""
        return self._link.peer_pid

    @property
    def hello(self) -> HelloReply:
        """What the daemon said of itself when the connection began."""
        return self._link.hello

    def close(self) -> None:
        """Close the connection; the daemon stops the generations that were asked for on it. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Call[R], on_event: OnEvent | None = None) -> R:
        request_id = self._link.begin(call.within(self.namespace))
        try:
            while True:
                message = self._link.wait_for(request_id)
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


class TextStream:
    """A generation as it happens: iterate for pieces of text, then read `result`.

    Use it as a context manager if it may be left before its end (by `break`, an exception): on the way out it cancels
    what is unfinished and waits for its end. Without one, a stream that is dropped unfinished asks the daemon to stop
    when it is collected, which CPython does at once and other Pythons at some time, and waits for nothing.
    """

    def __init__(self, link: Link, call: Call[GenerateResult], on_event: OnEvent | None) -> None:
        self._link = link
        self._call = call
        self._on_event = on_event
        self._result: GenerateResult | None = None
        self._cancelled = False
        self._committed: dict[str, Any] = {}
        self._id = link.begin(call)
        self._ended = False  # from here on there is something that a finaliser has to stop

    @property
    def result(self) -> GenerateResult:
        """The whole generation, once the stream has ended.

        Raises:
            LocalProtocolError: it has not ended, or was cancelled before it had a result; then its details hold the
                facts of what stays (docs/protocol.md, `cancelled`), if anything does.
        """
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
        if not self._ended and not self._cancelled:
            self._cancelled = True
            self._link.cancel(self._id)

    def close(self) -> None:
        """Cancel if unfinished, and wait for the end. `result` may then say what was generated. Idempotent."""
        if self._ended:
            return
        try:
            self.cancel()
            for _ in self:
                pass
        except ApiError:
            pass  # the generation is over either way, and its failure was not waited for
        finally:
            self._end()

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ended:
            message = self._wait()
            if isinstance(message, EventMessage):
                if self._on_event is not None and not isinstance(message.event, NoticeEvent):
                    self._on_event(message.event)
                if isinstance(message.event, TokenEvent) and message.event.text:
                    return message.event.text
            else:
                self._finish(message)
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_ended", True):  # a constructor that failed left nothing to stop
            self._link.drop(self._id)

    def _wait(self) -> ServerMessage:
        try:
            return self._link.wait_for(self._id)
        except ApiError:
            self._end()
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
        self._link.abandon(self._id)
