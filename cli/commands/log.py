"""`torpor log`: the versions of sessions, and where each came from."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from ...daemon.api.history import HistoryEntry, HistoryResult, InMemory
from ...daemon.api.limits import DEFAULT_HISTORY, MAX_HISTORY
from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import VERSION_MARK
from ..reach.options import (
    JsonOption,
    NamespaceChoice,
    SocketOption,
    StoreOption,
    argument,
    option,
    require_versions,
)
from ..reach.since import SinceOption, parse_since
from ..reach.store_view import find_marks_problem
from ..reach.viewing import View, look
from ..view.formatting import format_id, format_marks, format_name, format_time
from ..view.graph import SIGNS, join_line, laid_out, node_line
from ..view.lines import Lines
from ..view.output import Output, plain, render_problem, typed

_NEEDED: Final = 3
"""Parts of a line that stay on the narrowest terminal."""

_PARTS: Final = ("bundle", "name", "how it came about", "date", "tokens", "bytes written")


HistoriesArgument = Annotated[
    list[str] | None,
    argument(
        "[SESSION[@VERSION]]...",
        "Only these sessions and their kin, or a version and what it came from; otherwise all.",
        callback=require_versions,
    ),
]
GraphOption = Annotated[bool, option("--graph", "Draw lanes from each version down to what it came from.")]
OnelineOption = Annotated[bool, option("--oneline", "Of each its bundle, its name with marks, and how it came about.")]
LimitOption = Annotated[
    int, option("-n N", f"At most N versions, the newest. Default: {DEFAULT_HISTORY}.", min=1, max=MAX_HISTORY)
]


def log(
    sessions: HistoriesArgument = None,
    graph: GraphOption = False,
    oneline: OnelineOption = False,
    since: SinceOption = None,
    limit: LimitOption = DEFAULT_HISTORY,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """The newest come first. The kin of a session are the versions that it came from, and the forks, folds and branches
    that came from it; [cyan]torpor show NAME[/] lists its own alone. Asks the daemon if one runs, so that it shows what
    is awake, and trees of branches, too. With no daemon, or with --store, it reads the store's files. To see or to have
    a session as it was at some time, take the version from here: [cyan]torpor cat NAME@3[/] tells its text,
    [cyan]torpor wake NAME@3[/] goes on from it.

    [bold]Examples[/]

    [cyan]torpor log notes[/]
    [cyan]torpor log notes@before-refactor[/]
    [cyan]torpor log --graph[/]
    [cyan]torpor log --since 2h --oneline[/]
    """
    output = Output(as_json=as_json)
    asked: dict[str, Any] = {
        "namespace": namespace if not sessions else None,
        "since_ns": parse_since(since),
        "limit": limit,
    }
    view = look(
        socket,
        store,
        lambda source: source.history(sessions or (), **asked),
        ("history", {name: value for name, value in ({"sessions": sessions} | asked).items() if value}, HistoryResult),
    )
    if not output.told("log", view.record, source=view.source, store=str(view.place)):
        _show(output, view, namespace, graph=graph, oneline=oneline)


def _show(output: Output, view: View[HistoryResult], namespace: str | None, *, graph: bool, oneline: bool) -> None:
    """Without a namespace, names of the default one are shown as they are typed."""
    found = view.record
    for problem in filter(None, (find_marks_problem(view.place), *found.problems)):
        output.remark(render_problem(problem))
    if view.source == "store":
        output.remark(f"[dim]no daemon asked: these are the files of[/] {plain(view.place)}")
    lines = list(_lines_of(found, bare=namespace is None))
    most = _NEEDED if oneline else None
    if not lines:
        where = "here" if namespace is None else f"in namespace {plain(namespace)}"
        output.remark(f"No versions {where}. {typed('torpor save NAME')} makes one of a session.")
    else:
        output.show(
            _drawn(lines, most) if graph else Lines(_NEEDED, _PARTS, True, [((), each.parts[:most]) for each in lines])
        )
    if found.left_out:
        shown, total = len(found.entries), len(found.entries) + found.left_out
        output.remark(
            f"[dim]the newest {format_count(shown)} of {format_plural(total, 'version')};[/] "
            f"{typed(f'-n {min(MAX_HISTORY, total)}')} [dim]shows more[/]"
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: of a version, or of what is in memory. key, origin: what it is, and what it came from, as the graph
    names them. sign: its own in the graph, if it has one. parts: markup of the bundle, the name with its marks, how it
    came about, when, its tokens, what was written."""

    key: Hashable
    origin: Hashable | None
    sign: str
    parts: tuple[str, ...]


def _lines_of(found: HistoryResult, *, bare: bool) -> Iterator[_Line]:
    awake = {each.bundle_id for each in found.in_memory if _is_as_stored(each)}
    in_memory = {each.bundle_id for each in found.in_memory if each.branch is None and each.back_at is None}
    damaged = {(each.session, each.version) for each in found.problems}
    machines = dict(found.machines)  # told once of each session, at the newest of its versions
    for state in found.in_memory:
        if not _is_as_stored(state):
            yield _line_in_memory(state, bare=bare)
    for entry in found.entries:
        flags = {"awake": entry.bundle_id in awake, "pinned": entry.pinned, "stripped": entry.stripped}
        if entry.bundle_id in in_memory:  # nothing of it is to be computed
            entry = replace(entry, unread_tokens=0)
        flags |= {"damaged": (entry.session, entry.version) in damaged}
        yield _line_of(entry, flags, machines.pop(entry.session, None), bare=bare)


def _is_as_stored(state: InMemory) -> bool:
    """Whether it is a session that stands where its version ends, so that a mark there tells of it."""
    return state.branch is None and not state.added_tokens and state.back_at is None and state.version is not None


def _line_of(entry: HistoryEntry, flags: Mapping[str, bool], machine: str | None, *, bare: bool) -> _Line:
    """machine: another one that has the session."""
    marks = [*entry.tags, *(name for name, holds in flags.items() if holds)]
    marks += [f"at {machine}"] if machine else []
    marks += [f"{entry.lossy.bits} bits"] if entry.lossy else []
    name = f"{format_name(entry.session, bare=bare)}{VERSION_MARK}{entry.version}"
    color = "red" if flags["damaged"] else "green"
    parts = (
        f"[yellow]{format_id(entry.bundle_id)}[/]",
        f"[bold]{plain(name)}[/]" + (f" [{color}]{plain(format_marks(marks))}[/]" if marks else ""),
        plain(_how(entry, bare=bare)),
        f"[dim]{format_time(entry.created_ns)}[/]",
        format_plural(entry.token_count, "token"),
        format_bytes(entry.bundle_bytes),
    )
    return _Line(entry.bundle_id, entry.follows, "", parts)


def _how(entry: HistoryEntry, *, bare: bool) -> str:
    """How it came about, and what it added, in words."""
    origin, words = entry.origin, _WAYS[entry.way]
    if entry.way == "went_back":
        words += _place(entry.parent_version, entry.back_at)
    if origin is not None:
        words += f" {format_name(origin.session, bare=bare)}{VERSION_MARK}{origin.version}"
        words += "" if entry.way == "folded" else f" at {format_count(origin.tokens)}"
    branches = f"a tree of {format_count(entry.branches + 1)} branches" if entry.branches else ""
    unread = f"the last {format_count(entry.unread_tokens)} to compute" if entry.unread_tokens else ""
    return ", ".join(filter(None, (words, _added(entry.added_tokens), branches, unread)))


_WAYS: Final = {
    "began": "began",
    "went_on": "",
    "went_back": "back",
    "cut_off": "behind a version that is gone",
    "forked": "forked from",
    "folded": "folded from",
    "branched": "branch of",
    "imported": "imported",
    "quantized": "kept in fewer bits",
    "unknown": "its manifest cannot be read",
}


def _place(version: int | None, token: int | None) -> str:
    """What it has of the version that it went back in. More than up to where it went, if the same was drawn there."""
    name = f"{VERSION_MARK}{version}"
    return f" to {name}" if token is None else f": the first {format_plural(token, 'token')} of {name}"


def _added(tokens: int | None) -> str:
    """Tokens that it has more or fewer, with their sign; empty for none."""
    return f"{'+' if tokens > 0 else '−'}{format_plural(abs(tokens), 'token')}" if tokens else ""


def _line_in_memory(state: InMemory, *, bare: bool) -> _Line:
    is_branch = state.branch is not None
    what = [f"branch {state.branch}"] if is_branch else [] if state.bundle_id else ["no version yet"]
    if state.back_at is not None:
        what.append(("a look back" if state.look else "back") + _place(state.version, state.back_at))
    parts = (
        "",
        f"[bold]{plain(format_name(state.session, bare=bare))}[/] [green]({'in memory' if is_branch else 'awake'})[/]",
        ", ".join(filter(None, (*what, _added(state.added_tokens)))),
        "[dim]now[/]",
        format_plural(state.token_count, "token"),
        "",
    )
    return _Line(
        ("branch", state.branch) if is_branch else ("awake", state.session),
        state.bundle_id if state.parent is None else ("branch", state.parent),
        "@",
        parts,
    )


def _drawn(lines: Sequence[_Line], most: int | None) -> Lines:
    """With lanes. most: parts of a line."""
    ascii_only = not _takes(SIGNS + "●○", sys.stdout.encoding or "ascii")
    sign, end = ("*", "o") if ascii_only else ("●", "○")
    drawn = Lines(_NEEDED, _PARTS)
    for line, row in zip(lines, laid_out([(each.key, each.origin) for each in lines]), strict=True):
        node = node_line(row, line.sign or (end if row.ends else sign), ascii_only=ascii_only)
        drawn.add(node, line.parts[:most])
        if joined := join_line(row, ascii_only=ascii_only):
            drawn.add(joined, ())
    return drawn


def _takes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
