"""Maintenance of a store: by its daemon if one runs, else by this process under the store's lock.

Owns that choice, and the opening of a store that no daemon serves. The store does the operation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ...daemon.api.store import MaintainRequest, MarkRequest
from ...daemon.api.verbs import VERBS
from ...daemon.api.waking import SleepResult
from ...errors import TorporError
from ...memvid import operations
from ...memvid.answers import DeleteReport, MaintenanceReport, MarkedVersion
from ...memvid.disk.location import default_store_path
from ...memvid.disk.paths import closing_fd
from ...memvid.errors import SessionNotFound
from ...memvid.exchange.incoming import hand_over, take_back
from ...memvid.folder.store_file import load_store_uuid, open_existing_root
from ...memvid.recovery.restoring import restore_store_file
from ...memvid.store import Store
from ...memvid.uri import SessionUri, parse_reference
from ...socket_api.client.client import Client
from ...socket_api.errors import RemoteError
from ..errors import Interrupted, InvalidUsage
from ..reach.daemon_link import find_daemon
from ..reach.store_view import open_store
from ..view.output import OnProgress, Output, render_problem

# To read every byte of a large store takes long, and no progress is reported meanwhile.
PATIENCE_S = 24 * 3600.0


def carry_out(
    output: Output, order: MaintainRequest, socket: Path | None, store: Path | None, sources: Sequence[Path] = ()
) -> MaintenanceReport:
    """Carry an operation out, and show that it is under way: by the daemon if one runs and no store is named. A plan
    needs no lock. sources: folders that a repair may copy from; by this process alone, for a daemon opens no file that
    a client names.

    Raises:
        InvalidUsage: there are sources, and a daemon serves the store.
        StoreLocked: another process has the store.
        NoStore: there is none, and none is made.
        Interrupted: Ctrl-C; the message tells the state of the work.
    """
    with output.progress(order.operation):
        return _carry_out(order, socket, store, sources)


def _carry_out(
    order: MaintainRequest, socket: Path | None, store: Path | None, sources: Sequence[Path]
) -> MaintenanceReport:
    daemon = find_keeper(socket, store)
    if daemon is not None and sources:
        with daemon:
            raise InvalidUsage(
                f"A daemon serves {daemon.status().store}, and it opens no folder that a client names. Stop it "
                "(`torpor stop`), repair the store with --from, and start it again (`torpor ensure`).",
                option="--from",
            )
    for folder in sources:
        if not folder.is_dir():
            raise InvalidUsage(f"--from takes a folder, and {folder} is none.", option="--from")
    if daemon is not None:
        with daemon, _telling(order, "The daemon ends the work that it has begun; ask again for the rest."):
            answer: MaintenanceReport = daemon.ask(VERBS["maintain"], order)
            return answer
    path = store or default_store_path()
    restored = restore_store_file(path, dry_run=order.dry_run) if order.operation == "repair" else ()
    if restored and order.dry_run:  # the rest cannot be told before that
        return MaintenanceReport("repair", True, restored)
    with (
        _telling(order, "The store is sound, and the work done so far stays; the same command does the rest."),
        open_store(path) if order.dry_run else open_to_maintain(path) as opened,
    ):
        uri, version = _named(opened, order)
        report = operations.carry_out(
            opened,
            operations.Order(
                operation=order.operation,
                uri=uri,
                dry_run=order.dry_run,
                keep_last=order.keep_last,
                keep_days=order.keep_days,
                cold_after_days=order.cold_after_days,
                version=version,
                sources=tuple(map(str, sources)),
            ),
        )
    return dataclasses.replace(report, actions=(*restored, *report.actions))


@contextlib.contextmanager
def _telling(order: MaintainRequest, consequence: str) -> Iterator[None]:
    """Let Ctrl-C report the state of the work; a plan has done none."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("Interrupted." if order.dry_run else f"Interrupted. {consequence}") from None


def set_mark(mark: MarkRequest, socket: Path | None, store: Path | None) -> MarkedVersion:
    """Set a mark, by the daemon if one runs and no store is named. Raises as `carry_out`."""
    daemon = find_keeper(socket, store)
    if daemon is not None:
        with daemon:
            answer: MarkedVersion = daemon.ask(VERBS["mark"], mark)
            return answer
    with open_to_maintain(store or default_store_path()) as opened:
        return operations.set_mark(
            opened, mark.session, tag=mark.tag, untag=mark.untag, pinned=mark.pinned, move=mark.move
        )


@contextlib.contextmanager
def deleting(daemon: Client | None, path: Path) -> Iterator[Callable[[str], DeleteReport]]:
    """How sessions and single versions are deleted: by the daemon, or in the files of the store at `path`, which is
    held for the block. Raises as `open_to_maintain`."""
    if daemon is not None:
        yield daemon.delete
        return
    with open_to_maintain(path) as opened:

        def delete(session: str) -> DeleteReport:
            named = opened.named(session).require_whole()
            if named.row is None:
                return opened.delete_session(named.uri)
            return opened.delete_version(named.uri, named.row.bundle_id)

        yield delete


def find_keeper(socket: Path | None, store: Path | None) -> Client | None:
    """Open a patient client of the daemon; None if this process does the work. Raises as `find_daemon`."""
    return find_daemon(socket, store, timeout_s=PATIENCE_S)


def open_to_maintain(path: Path) -> Store:
    """Open an existing store for writing; `Store.open` alone would make one. Damage to its journal is told here, on
    stderr: no later opening finds it again. Raises NoStore, NotAStore, UnsupportedFormat, StoreLocked, and memvid's
    other refusals."""
    with closing_fd(open_existing_root(os.path.abspath(path))) as root_fd:
        load_store_uuid(root_fd, str(path))
    store = Store.open(path, writable=True)
    for finding in store.opening.journal:
        Output(as_json=False).remark(render_problem(finding))
    return store


def import_bundle(
    source: Path, as_name: str | None, socket: Path | None, store: Path | None, on_progress: OnProgress
) -> tuple[SleepResult, int | None]:
    """Import a bundle from a file. Gives its receipt, and the session's newest version then (None: not known). Raises
    as `carry_out`, and Corruption.

    A running daemon is told no path: it gets a checked copy in its store's folder `incoming`, and that copy's id.
    """
    daemon = find_keeper(socket, store)
    if daemon is not None:
        with daemon:
            store_path = daemon.status().store
            bundle_id = hand_over(store_path, os.fspath(source))
            try:
                result = daemon.import_bundle(bundle_id, session=as_name)
            except RemoteError:  # it was not taken; after a lost connection that is unknown, and the copy stays
                take_back(store_path, bundle_id)
                raise
            return result, _newest_in(daemon, result.session)
    started = time.monotonic()
    with open_to_maintain(store or default_store_path()) as opened:
        wanted = None if as_name is None else parse_reference(as_name)
        receipt = opened.import_file(source, as_uri=wanted, on_progress=on_progress)
        newest = opened.find_session(receipt.uri)
    result = SleepResult.of(receipt, seconds=time.monotonic() - started)
    return result, newest.version if newest is not None else None


def _newest_in(daemon: Client, session: str) -> int | None:
    """The session's newest version; None if the daemon does not answer: the import is done all the same."""
    try:
        return next((info.version for info in daemon.list_sessions() if info.session == session), None)
    except TorporError:
        return None


def _named(store: Store, order: MaintainRequest) -> tuple[SessionUri | None, str | None]:
    """The session of an order, and the version that it names. A session to forget may be gone already, and an
    interrupted forget may have left its bytes."""
    if order.session is None:
        return None, None
    try:
        named = store.named(order.session).require_whole()
        return named.uri, None if named.row is None else named.row.bundle_id
    except SessionNotFound:
        if order.operation != "forget":
            raise
        return parse_reference(order.session), None
