"""`torpor rm`: delete sessions, awake or asleep, with all their versions; or single versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ...errors import TorporError
from ...memvid.answers import DeleteReport
from ...memvid.disk.location import default_store_path
from ...memvid.errors import StoreError
from ...memvid.store import Store
from ...memvid.units import format_bytes, format_plural
from ...memvid.uri import SessionUri, names_version, parse_reference
from ...socket_api.client.client import Client
from ..exit_codes import ERROR
from ..reach.batches import run_batch
from ..reach.consent import YesOption, has_consent, what_goes_with_it
from ..reach.daemon_link import find_daemon
from ..reach.options import JsonOption, SocketOption, VersionsArgument, WrittenStoreOption
from ..reach.store_view import open_store, sizes_of
from ..view.output import Output, plain
from .upkeep import deleting


def rm(
    sessions: VersionsArgument,
    yes: YesOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Asks first on a terminal; in a script, --yes is required. Bytes that others share stay. What the daemon's remote
    has of it goes, too; [cyan]torpor strip[/] frees this disk alone. A version whose manifest is missing or damaged can
    be deleted, too. Tags and pins go with what they name: the question and the result tell them.

    [bold]Examples[/]

    [cyan]torpor rm notes[/]
    [cyan]torpor rm notes@3[/]
    [cyan]torpor rm notes review --yes --json[/]
    [cyan]torpor rm notes@3 --store /backup/store[/]
    """
    output = Output(as_json=as_json)
    daemon = find_daemon(socket, store)
    with contextlib.nullcontext() if daemon is None else daemon:
        path = store or default_store_path() if daemon is None else Path(daemon.status().store)
        may_be_there = daemon is not None and daemon.status().remote is not None
        marks = _marks_of(path, sessions, _names(daemon, path), to_the_end=yes or may_be_there)
        named = ", ".join(f"{each} (with {marks[each]})" if marks.get(each) else each for each in sessions)
        sizes = "" if yes or as_json else sizes_of(path, sessions) + what_goes_with_it(daemon)
        if not (yes or has_consent(f"Delete {named} for good?{sizes}", "delete", as_json=as_json)):
            output.remark("nothing deleted")
            return ERROR.number
        with deleting(daemon, path) as delete_one:
            status = _delete(output, sessions, delete_one, marks)
        whole = [session for session in sessions if not names_version(session) and not as_json]
        names = _names(daemon, path) if whole else ()
        for session in whole:
            if branches := _branches_of(session, names):
                output.remark(
                    f"{format_plural(len(branches), 'session')} named after {plain(session)} stay, as a tree that was "
                    f"kept leaves its branches: {plain(branches[0])} to {plain(branches[-1])}. Delete them by their "
                    "names. A tree that is kept with a label goes whole by `torpor clear --label`."
                )
        return status


def _delete(
    output: Output,
    sessions: Sequence[str],
    delete_one: Callable[[str], DeleteReport],
    marks: Mapping[str, str],
) -> int:
    gone = ""

    def delete(session: str) -> DeleteReport:
        nonlocal gone
        report, gone = delete_one(session), marks.get(session, "")
        for problem in report.problems:
            output.remark(f"[yellow]{problem.code}[/] {plain(problem.message)}")
        return report

    def line(report: DeleteReport) -> str:
        with_it = f"; with it went {plain(gone)}" if gone else ""
        return (
            f"{plain(report.session)}  deleted: {format_plural(report.versions_deleted, 'version')},"
            f" {format_bytes(report.bytes_freed)} freed{_there(report)}{with_it}"
        )

    return run_batch(output, "rm", sessions, delete, line)


def _there(report: DeleteReport) -> str:
    return f"; {format_plural(report.remote_objects, 'object')} of the remote gone" if report.remote_objects else ""


def _marks_of(
    path: Path, sessions: Sequence[str], names: Collection[SessionUri], *, to_the_end: bool
) -> dict[str, str]:
    """The tags and pins that go with what is to be deleted, in words. to_the_end: a name that nothing has is told when
    its turn comes; else here, before anybody is asked. Files that cannot be read tell nothing of it either way."""
    try:
        store = open_store(path)
    except StoreError:  # beside a daemon, which has them open
        return {}
    marks = {}
    with store:
        for session in sessions:
            try:
                marks[session] = _marks_in(store, session, names)
            except TorporError:
                if not to_the_end:
                    raise
    return marks


def _marks_in(store: Store, session: str, names: Collection[SessionUri]) -> str:
    """Raises SessionNotFound, AmbiguousVersion."""
    named = store.named(session, names).require_whole()
    if named.row is not None:
        of_version = store.marks_to_show(named.uri).of(named.row.bundle_id)
        tags, pins = list(of_version.tags), int(of_version.pinned)
    else:
        of = store.marks_to_show(named.uri)
        tags, pins = list(of.tags), len(of.pins)
    told = [f"the tag{'s' * (len(tags) > 1)} {', '.join(sorted(tags))}"] if tags else []
    return " and ".join([*told, *([format_plural(pins, "pin")] if pins else [])])


def _names(daemon: Client | None, path: Path) -> list[SessionUri]:
    if daemon is not None:
        return [parse_reference(each.session) for each in daemon.list_sessions()]
    with open_store(path) as store:
        return [row.uri for row in store.iter_sessions()]


def _branches_of(session: str, names: Collection[SessionUri]) -> list[SessionUri]:
    """The sessions `NAME.1`, `NAME.2` and so on."""
    of = parse_reference(session)
    named = [each for each in names if each.namespace == of.namespace and each.name.startswith(f"{of.name}.")]
    numbered = {int(end): each for each in named if (end := each.name.removeprefix(f"{of.name}.")).isdecimal()}
    return [numbered[at] for at in sorted(numbered)]
