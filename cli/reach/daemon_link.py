"""How commands talk to the daemon: open a client, show its events, name what is missing.

Opens no store: it only compares the path of the named one with the path that the daemon serves. Imports the client only
where a daemon may answer: that import brings the whole protocol, and a command that reads files should not wait for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import TorporError
from ...memvid.answers import Finding
from ...memvid.disk.location import STORE_VARIABLE, named_store_path
from ...memvid.uri import parse_reference
from ...places import default_log_path
from ...records import Result
from ...socket_api.errors import DaemonUnreachable
from ...socket_api.wire.address import default_socket_path, require_path_fits
from ..errors import Interrupted, InvalidUsage
from ..view.output import OnProgress, Output, plain

if TYPE_CHECKING:
    from ...daemon.api.events import WorkEvent
    from ...socket_api.client.client import Client

R = TypeVar("R")
OnEvent = Callable[["WorkEvent"], None]

CLEAN_UP_TIMEOUT_S = 10.0  # to ask where a stopped request left its session; a daemon that hangs is not waited for
STAGE_NAMES = {
    "prefill": ("reading", "tokens"),
    "sleep": ("sleeping", "tokens"),
    "wake": ("waking", "bytes"),
    "analyze": ("analyzing", "bytes"),
    "download": ("loading", "bytes"),
}


def connect(socket: Path | None, *, store: Path | None = None, timeout_s: float | None = None) -> Client:
    """Open a client on the given socket, or on the default one. store: as named by an option; else $TORPOR_STORE
    counts. timeout_s: the longest silence, if not the client's own.

    Raises:
        DaemonUnreachable: no daemon answers there.
        InvalidUsage: it serves another store than the named one.
    """
    client = _client(socket, timeout_s)
    mismatch = find_mismatch(client, store)
    if mismatch is not None:
        client.close()
        raise mismatch
    return client


def find_daemon(socket: Path | None, store: Path | None = None, *, timeout_s: float | None = None) -> Client | None:
    """Open a client of the daemon to ask; None if the caller must read files itself. That is so if --store was given,
    or if no socket was named and no daemon is there or it serves another store than $TORPOR_STORE.

    A named daemon must answer, and a silent one must not be passed over: the files read instead could be another
    store's.

    Raises:
        DaemonUnreachable: no process answers on the named socket, or the process there is silent.
        InvalidUsage: the daemon on the named socket serves another store than $TORPOR_STORE.
    """
    if store is not None or (socket is None and _no_socket_at(default_socket_path())):
        return None
    try:
        client = _client(socket, timeout_s)
    except DaemonUnreachable as error:
        if socket is None and nobody_is_there(error):
            return None
        raise
    mismatch = find_mismatch(client)
    if mismatch is None:
        return client
    client.close()
    if socket is None:
        return None
    raise mismatch


def ask_plainly(
    socket: Path | None, store: Path | None, *asked: tuple[str, Mapping[str, Any], type[Result]]
) -> list[Any] | None:
    """The answers of the daemon that `find_daemon` would find, `ServedStore` first: as of `plain.ask_plainly`, for a
    command that only lists. None: there is none, or a client has to ask."""
    path = socket or default_socket_path()
    if store is not None or _no_socket_at(path):
        return None
    from ...socket_api.client import plain

    answers = plain.ask_plainly(path, ("status", {}, ServedStore), *asked)
    wanted = named_store_path()
    if answers is None or (wanted and os.path.realpath(wanted) != os.path.realpath(answers[0].store)):
        return None
    return answers


class ServedStore(Result):
    """What a listing needs of a daemon's status."""

    store: str
    unreadable: tuple[Finding, ...] = ()


def _client(socket: Path | None, timeout_s: float | None) -> Client:
    from ...socket_api.client.client import Client

    return Client(socket) if timeout_s is None else Client(socket, timeout_s=timeout_s)


def _no_socket_at(path: Path) -> bool:
    """Whether nothing has that name. A client reports any other fault."""
    try:
        os.lstat(require_path_fits(path))
    except FileNotFoundError:
        return True
    except OSError:
        pass
    return False


def find_mismatch(client: Client, store: Path | None = None) -> InvalidUsage | None:
    """The error of a daemon that serves another store than an option or $TORPOR_STORE names; None if it is the same, or
    none was named."""
    wanted = store or named_store_path()
    if wanted is None:
        return None
    served = client.status().store
    if os.path.realpath(wanted) == os.path.realpath(served):
        return None
    name, leave_out = ("--store", "Leave --store out") if store else (f"${STORE_VARIABLE}", f"Unset {STORE_VARIABLE}")
    return InvalidUsage(
        f"The daemon on {client.socket_path} serves the store {served}, but {name} names {wanted}. {leave_out} to use"
        " this daemon, or name the socket of another one with --socket.",
        socket=str(client.socket_path),
        store=served,
    )


def nobody_is_there(error: TorporError) -> bool:
    """Whether a connection failed because no process listens, not because one is silent."""
    cause = error.__cause__
    return (
        isinstance(error, DaemonUnreachable)
        and isinstance(cause, OSError)
        and cause.errno in (errno.ENOENT, errno.ECONNREFUSED)
    )


def find_ended_daemon(socket: Path | None = None, *, restarting: bool = False) -> Finding | None:
    """Describe a daemon that ended without a stop, and so left its socket behind; None if none did. socket: None is the
    default one. restarting: the caller starts another daemon, so the user need not."""
    socket = socket or default_socket_path()
    if not socket.is_socket() or somebody_is_on(socket):
        return None
    from ...socket_api.client.link import start_command

    message = (
        "The daemon that listened here ended without a stop. The next start brings each session back as it was at its"
        " last answer, or at its last sleep if the daemon ran with --durability sleep."
    )
    log = default_log_path()
    message += "" if restarting else f" Start it again with `{start_command(socket)}`."
    message += f" Why it ended may stand in {log}, or in the file that --log named." if log.exists() else ""
    return Finding(str(socket), DaemonUnreachable.code, message)


def somebody_is_on(socket: Path) -> bool:
    """Whether a process listens there, be it silent."""
    try:
        _client(socket, CLEAN_UP_TIMEOUT_S).close()
    except TorporError as error:
        return not nobody_is_there(error)
    return True


def with_session(
    output: Output,
    client: Client,
    session: str,
    model: str | None,
    act: Callable[[Mapping[str, Any]], R],
    *,
    labels: Sequence[str] | None = None,
    creates: bool = True,
) -> R:
    """Act on a session; if there is none of that name, and the request `creates` it, say so and let it. act: gets
    further parameters of the request.

    A refusal because there is no session has changed nothing, so a second try is safe. If that fails or is stopped
    before anything was read, the daemon has no new session.

    Raises:
        InvalidUsage: the session is on another model than the named one, or lacks one of the labels.
    """
    if model is not None or labels:
        _require_alike(client, session, model, labels or ())
    try:
        return act({})
    except TorporError as error:
        if error.code != "session_not_found" or not creates:
            raise
    uri, status = parse_reference(session), client.status()
    chosen = status.models[0] if model is None else status.model_named(model)
    if chosen is not None:  # else the daemon refuses it
        output.remark(f"[dim]new session[/] {plain(uri)} [dim]on model[/] {plain(chosen.name)}")
    try:
        return act({"create": True, "model": model, "labels": labels or None})
    except BaseException:
        with suppress(TorporError):  # the failure that led here is the one to report
            if chosen is not None and tokens_after(client.socket_path, session) is None:
                output.remark(
                    f"[dim]session[/] {plain(uri)} [dim]was new, so it is deleted again: nothing was read whole[/]"
                )
        raise


def _require_alike(client: Client, session: str, model: str | None, labels: Sequence[str]) -> None:
    """Raise InvalidUsage if the session exists, and on another model or without one of these labels."""
    wanted = str(parse_reference(session))
    found = next((info for info in client.list_sessions() if info.session == wanted), None)
    if found is None:
        return  # the next request says so
    if model not in (None, found.model):
        raise InvalidUsage(
            f"{found.session} is on model {found.model!r} and stays there; --model is for a session that does not"
            " exist yet. Leave it out, or choose another name.",
            session=found.session,
            model=found.model,
        )
    if not set(labels) <= set(found.labels):
        raise InvalidUsage(
            f"{found.session} is there already, and has {', '.join(found.labels) or 'no label'}; --label is for a"
            " session that does not exist yet. Leave it out, or fork the session with such labels (torpor fork"
            " --label).",
            session=found.session,
            labels=list(found.labels),
        )


def tokens_after(socket: Path, session: str) -> int | None:
    """How many tokens a session has once its stopped request has ended; None if there is no such session. Asks on a new
    connection: the old one may be lost."""
    try:
        with _client(socket, CLEAN_UP_TIMEOUT_S) as client:
            return client.plan_wake(session).token_count  # its answer waits until no other request holds the session
    except TorporError as error:
        if error.code != "session_not_found":
            raise
        return None


@contextmanager
def waiting_for_remote(client: Client, session: str) -> Iterator[None]:
    """Let Ctrl-C say what a session has here, and that the daemon sends it without this wait."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"Interrupted. {_had_here(client.socket_path, session)}") from None


def _had_here(socket: Path, session: str) -> str:
    """Asks on a new connection, as `tokens_after`."""
    try:
        uri = str(parse_reference(session))
        with _client(socket, CLEAN_UP_TIMEOUT_S) as client:
            found = next((each for each in client.list_sessions() if each.session == uri), None)
    except TorporError:
        return f"`torpor show {session}` tells where the session stands."
    if found is None or found.version is None:
        return f"{session} has no version here, so nothing of it is sent."
    return (
        f"{uri} is {found.state}, and version {found.version} is durable here. The daemon sends it to the remote "
        f"behind, if that lacks it; `torpor push {session}` waits for it."
    )


@contextmanager
def progress_of(output: Output, stage: str) -> Iterator[OnEvent]:
    """Show a stage's progress events as a bar on stderr."""
    what, unit = STAGE_NAMES[stage]
    with output.progress(what, unit=unit) as report:
        yield _progress_handler(report)


def _progress_handler(report: OnProgress) -> OnEvent:
    from ...daemon.api.events import ProgressEvent

    def on_event(event: WorkEvent) -> None:
        if isinstance(event, ProgressEvent):
            report(event.done, event.total)

    return on_event
