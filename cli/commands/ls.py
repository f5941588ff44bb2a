"""`torpor ls`: the sessions there are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from ...daemon.api.session import ListResult
from ...memvid.answers import Finding
from ...memvid.units import format_bytes, format_count
from ...memvid.uri import SessionUri
from ..errors import InvalidUsage
from ..reach.daemon_link import ask_plainly, find_ended_daemon
from ..reach.files import Files
from ..reach.options import NAMESPACE_VARIABLE, JsonOption, SocketOption, StoreOption, argument, enter_namespace, option
from ..reach.store_view import (
    describe_holder,
    find_holder,
    find_marks_problem,
    find_missing,
    find_unreadable,
)
from ..reach.viewing import answering
from ..view.disk import remark_on_room
from ..view.formatting import format_id, format_time
from ..view.output import Output, describe_turns, plain, render_problem, rows_table, typed

_COLUMNS = (
    *("SESSION", "STATE", "TOKENS", "VERSION", "WRITTEN", "RESIDENT"),
    *("MODEL", "BUNDLE", "LAST VERSION", "LABELS"),
)
_FIRST_TO_GO = ("BUNDLE", "LABELS", "LAST VERSION", "RESIDENT", "MODEL", "VERSION")

NamespaceArgument = Annotated[
    str | None, argument("NAMESPACE", "Only the sessions of this namespace.", callback=enter_namespace)
]
RemoteOption = Annotated[bool, option("--remote", "The sessions of the daemon's remote, and at which machine each is.")]
ClusterOption = Annotated[
    str | None, option("--cluster URL", "The replicas of the cluster that serves at this address, and their sessions.")
]
MARKS = {  # by field of a session: the mark behind its state, its style and its meaning
    "dirty": ("*", "default", "changed since its last version"),
    "unread_tokens": ("+", "default", "the next use reads its last tokens again: torpor show says how many"),
    "stripped": (
        "~",
        "yellow",
        "stripped: the next use fetches what a remote has of it, and reads again what nothing else has kept",
    ),
    "lossy": ("≈", "yellow", "keys and values were kept in few bits: torpor show says of how many tokens"),
    "look": ("<", "cyan", "woken before its end, to look at: its newest version stays until it reads or writes"),
    "branches": ("^", "cyan", "a tree of branches stands on it, in memory: torpor log shows them"),
    "unnamed": ("?", "default", "nobody named it: a client began it over HTTP, under an id of its own or under none"),
    "machine": ("@", "yellow", "at another machine, and perhaps older here: torpor ls --remote says at which"),
    "durability": ("-", "yellow", "made to be thrown away: a crash loses what it did since its last version"),
    "unreadable": (
        "!",
        "red",
        "its newest version cannot be read: a sleep of one that is awake writes another; else torpor verify says more",
    ),
}
STATE_STYLES = {"awake": "green", "asleep": "blue", "stored": "blue"}


def ls(
    namespace: NamespaceArgument = None,
    remote: RemoteOption = False,
    cluster: ClusterOption = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Asks the daemon if one runs, so that awake sessions are listed too. With no daemon, or with --store, it reads the
    store's files. They do not tell whether a session is awake, so its state is [cyan]stored[/]. Piped, one tab stands
    between two cells.

    [bold]Examples[/]

    [cyan]torpor ls[/]
    [cyan]torpor ls --json | jq -r '.sessions[].session'[/]
    [cyan]torpor ls --store /backup/store[/]
    [cyan]torpor ls --remote[/]
    [cyan]torpor ls --cluster http://127.0.0.1:8000[/]
    """
    output = Output(as_json=as_json)
    if remote or cluster is not None:
        _list_elsewhere(remote, cluster, namespace, socket, store, output)
        return
    source, place, sessions, journalled, unknown = _load_sessions(namespace, socket, store)
    unserved = source == "store" and store is None
    holder = find_holder(Path(place)) if unserved else None
    ended = find_ended_daemon() if unserved and holder is None else None
    missing = find_missing(Path(place))
    problems = [problem for problem in (ended, find_marks_problem(Path(place)), *unknown, *missing) if problem]
    unreadable = find_unreadable(Path(place), sessions)
    if as_json:
        body = {"source": source, "store": place, "sessions": sessions, "problems": [*problems, *unreadable]}
        output.document("ls", body | {"locked_by": holder, "journalled": [str(uri) for uri in journalled]})
        return
    for problem in problems:
        output.remark(render_problem(problem))
    if source == "store":
        output.remark(f"[dim]no daemon asked: these are the files of[/] {plain(place)}")
    remark_on_room(output, place)
    if holder is not None:
        output.remark(f"[yellow]no daemon answers, but {plain(describe_holder(holder, Path(place)))}[/]")
    if journalled:
        output.remark(describe_turns(journalled))
    if sessions:
        output.show(render_sessions(sessions))
        for legend in legends_of(sessions):
            output.remark(f"[dim]{legend}[/]")
    elif journalled:
        output.remark("No session has a version yet.")
    elif namespace is not None:
        everywhere = f"{NAMESPACE_VARIABLE}= torpor ls" if os.environ.get(NAMESPACE_VARIABLE) else "torpor ls"
        output.remark(
            f"No sessions in namespace {plain(namespace)}. All sessions: {typed(everywhere)}. One session:"
            f" {typed(f'torpor show {namespace}')}"
        )
    else:
        output.remark("No sessions yet. Begin one: " + typed('torpor chat NAME "Hello"'))


def _list_elsewhere(
    remote: bool,
    cluster: str | None,
    namespace: str | None,
    socket: Path | None,
    store: Path | None,
    output: Output,
) -> None:
    if remote and store is not None:
        raise InvalidUsage("The daemon knows the remote: --remote and --store do not go together.", option="--remote")
    if cluster is None:
        from .remote import list_remote  # a listing of the store does not wait for its records

        list_remote(namespace, socket, output)
        return
    if remote or store is not None or socket is not None:
        raise InvalidUsage("--cluster asks the cluster alone: give no other place with it.", option="--cluster")
    from .cluster import list_cluster

    list_cluster(cluster, namespace, output)


def _load_sessions(
    namespace: str | None, socket: Path | None, store: Path | None
) -> tuple[str, str, list[dict[str, Any]], list[SessionUri], list[Finding]]:
    """Give the listing's source (daemon or store), the store's path, the sessions, those with turns that the journal of
    a store alone has, and manifests that cannot be read and may be of any session."""
    asked = {} if namespace is None else {"namespace": namespace}
    if told := ask_plainly(socket, store, ("list", asked, ListResult)):
        served, listed = told
        return "daemon", served.store, [{**vars(info)} for info in listed], [], list(served.unreadable)
    with answering(socket, store) as (source, place):
        sessions = [{**vars(info)} for info in source.list_sessions(namespace)]
        if not isinstance(source, Files):
            return "daemon", str(place), sessions, [], list(source.status().unreadable)
        journalled = [uri for uri in source.store.acknowledged() if namespace in (None, uri.namespace)]
        return "store", str(place), sessions, journalled, source.store.unreadable()


def render_sessions(sessions: list[dict[str, Any]]) -> Any:
    """Draw the listing."""
    figures = ("TOKENS", "VERSION", "WRITTEN", "RESIDENT")
    whole = ("SESSION", "STATE", *figures, "LAST VERSION")
    table = rows_table(*_COLUMNS, right=figures, whole=whole, first_to_go=_FIRST_TO_GO)
    for info in sessions:
        style = STATE_STYLES.get(info["state"], "default")
        cells = {
            "SESSION": plain(f"{info['namespace']}/{info['name']}"),
            "STATE": f"[{style}]{plain(info['state'])}[/]"
            + "".join(f"[{style}]{mark}[/]" for fact, (mark, style, _) in MARKS.items() if info[fact]),
            "TOKENS": format_count(info["token_count"]),
            "VERSION": str(info["version"] or "–"),
            "WRITTEN": format_bytes(info["written_bytes"]) if info["written_bytes"] else "–",
            "RESIDENT": format_bytes(info["resident_bytes"]) if info["resident_bytes"] else "–",
            "MODEL": plain(info["model"]),
            "BUNDLE": plain(format_id(info["bundle_id"])),
            "LAST VERSION": format_time(info["slept_ns"]),
            "LABELS": plain(" ".join(info["labels"])) or "–",
        }
        table.add_row(*(cells[name] for name in _COLUMNS))
    return table


def legends_of(sessions: list[dict[str, Any]]) -> list[str]:
    """The meanings of the marks behind the states of these sessions."""
    return [f"{mark} {meaning}" for fact, (mark, _, meaning) in MARKS.items() if any(info[fact] for info in sessions)]
