"""`torpor log`: the versions of sessions, and where each came from."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, Final

from rich.text import Text

from ...daemon.api.history import HistoryEntry, HistoryResult, InMemory
from ...daemon.api.limits import DEFAULT_HISTORY, MAX_HISTORY
from ...memvid.store import Store
from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import DEFAULT_NAMESPACE, VERSION_MARK, parse_reference
from ..reach.options import (
    JsonOption,
    NamespaceChoice,
    SocketOption,
    StoreOption,
    argument,
    option,
    require_sessions,
)
from ..reach.since import SinceOption, parse_since
from ..reach.store_view import find_marks_problem
from ..reach.viewing import View, look
from ..view.formatting import format_id, format_time
from ..view.graph import SIGNS, Piece, join_line, laid_out, node_line
from ..view.output import Output, plain, render_problem, typed

_NEEDED: Final = 3
"""Parts of a line that stay on the narrowest terminal: the bundle, the name with its marks, and how it came about."""

_COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue", "red")
_MOST_SIGNS: Final = 48
"""Of lanes, on a line: there may be one for each session."""

HistoriesArgument = Annotated[
    list[str] | None,
    argument("[SESSION]...", "Only these sessions and their kin; otherwise all.", callback=require_sessions),
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
    that came from it. Asks the daemon if one runs, so that it shows what is awake, and trees of branches, too. With no
    daemon, or with --store, it reads the store's files.

    [bold]Examples[/]

    [cyan]torpor log notes[/]
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
        lambda client: client.history(sessions or (), **asked),
        partial(_read, sessions=sessions or (), asked=asked),
    )
    if as_json:
        output.document("log", {"source": view.source, "store": str(view.place), **asdict(view.record)})
        return
    _show(output, view, graph=graph, oneline=oneline, bare=namespace is None)


def _read(store: Store, sessions: Sequence[str], asked: Mapping[str, Any]) -> HistoryResult:
    from ...daemon.views.history import history_of

    return history_of(store, [store.resolve(each) for each in sessions], **asked)


def _show(output: Output, view: View[HistoryResult], *, graph: bool, oneline: bool, bare: bool) -> None:
    """bare: names of the default namespace are shown as they are typed."""
    found = view.record
    for problem in filter(None, (find_marks_problem(view.place), *found.problems)):
        output.remark(render_problem(problem))
    if view.source == "store":
        output.remark(f"[dim]no daemon asked: these are the files of[/] {plain(view.place)}")
    lines = list(_lines_of(found, bare=bare))
    parts = [each.parts[: _NEEDED if oneline else None] for each in lines]
    if not lines:
        output.remark("No versions here. " + typed("torpor save NAME") + " makes one of a session.")
    elif graph:
        _draw(output, lines, parts)
    else:
        for each in _aligned(parts) if output.stdout.is_terminal else parts:
            _print(output, [], each)
    if found.left_out:
        shown, total = len(found.entries), len(found.entries) + found.left_out
        output.remark(
            f"[dim]the newest {format_count(shown)} of {format_plural(total, 'version')};[/] "
            f"{typed(f'-n {min(MAX_HISTORY, total)}')} [dim]shows more[/]"
        )


@dataclass(frozen=True, slots=True)
class _Line:
    """One line: of a version, or of what is in memory. key, origin: what it is, and what it came from, as the graph
    names them. sign: its own in the graph, if it has one. parts: the bundle, the name with its marks, how it came
    about, when, its tokens, what was written."""

    key: Hashable
    origin: Hashable | None
    sign: str
    parts: tuple[Text, ...]


def _lines_of(found: HistoryResult, *, bare: bool) -> Iterator[_Line]:
    shown = {each.bundle_id for each in found.entries}
    awake = {each.bundle_id for each in found.in_memory if _is_as_stored(each)}
    for state in found.in_memory:
        if not (_is_as_stored(state) and state.bundle_id in shown):
            yield _line_in_memory(state, bare=bare)
    for entry in found.entries:
        yield _line_of(entry, awake=entry.bundle_id in awake, bare=bare)


def _is_as_stored(state: InMemory) -> bool:
    """Whether it is a session that stands where its version ends, so that a mark there tells of it."""
    return state.branch is None and not state.added_tokens and not state.look and state.bundle_id is not None


def _line_of(entry: HistoryEntry, *, awake: bool, bare: bool) -> _Line:
    flags = {"awake": awake, "pinned": entry.pinned, "stripped": entry.stripped}
    marks = [*entry.tags, *(name for name, holds in flags.items() if holds)]
    marks += [f"{entry.lossy.bits} bits"] if entry.lossy else []
    name = f"{_short(entry.session, bare=bare)}{VERSION_MARK}{entry.version}"
    parts = (
        f"[yellow]{format_id(entry.bundle_id)}[/]",
        plain(name) + (f" [green]({plain(', '.join(marks))})[/]" if marks else ""),
        plain(_how(entry, bare=bare)),
        f"[dim]{format_time(entry.created_ns)}[/]",
        format_plural(entry.token_count, "token"),
        format_bytes(entry.bundle_bytes),
    )
    return _Line(entry.bundle_id, entry.follows, "", _texts(parts))


def _how(entry: HistoryEntry, *, bare: bool) -> str:
    """How it came about, and what it added, in words."""
    origin, words = entry.origin, _WAYS[entry.way]
    if entry.way == "went_back":
        words += f" to {VERSION_MARK}{entry.parent_version}"
    if origin is not None:
        words += f" {_short(origin.session, bare=bare)}{VERSION_MARK}{origin.version}"
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
}


def _added(tokens: int | None) -> str:
    """Tokens that it has more or fewer, with their sign; empty for none."""
    return f"{'+' if tokens > 0 else '−'}{format_plural(abs(tokens), 'token')}" if tokens else ""


def _line_in_memory(state: InMemory, *, bare: bool) -> _Line:
    is_branch = state.branch is not None
    what = f"branch {state.branch}" if is_branch else "" if state.bundle_id else "no version yet"
    added = f"a look at token {format_count(state.token_count)}" if state.look else _added(state.added_tokens)
    parts = (
        "",
        f"{plain(_short(state.session, bare=bare))} [green]({'in memory' if is_branch else 'awake'})[/]",
        ", ".join(filter(None, (what, added))),
        "[dim]now[/]",
        format_plural(state.token_count, "token"),
        "",
    )
    return _Line(
        ("branch", state.branch) if is_branch else ("awake", state.session),
        state.bundle_id if state.parent is None else ("branch", state.parent),
        "@",
        _texts(parts),
    )


def _short(session: str, *, bare: bool) -> str:
    uri = parse_reference(session)
    return uri.name if bare and uri.namespace == DEFAULT_NAMESPACE else f"{uri.namespace}/{uri.name}"


def _texts(parts: Sequence[str]) -> tuple[Text, ...]:
    return tuple(Text.from_markup(each, emoji=False) for each in parts)


# --- the lines on the screen


def _aligned(lines: Sequence[Sequence[Text]]) -> list[list[Text]]:
    """With blanks behind each part, so that the parts of all lines stand below each other."""
    widths = [max(each.cell_len for each in parts) for parts in zip(*lines, strict=True)]
    return [
        [each + Text(" " * (width - each.cell_len)) for each, width in zip(line, widths, strict=True)] for line in lines
    ]


def _draw(output: Output, lines: Sequence[_Line], parts: Sequence[Sequence[Text]]) -> None:
    ascii_only = not _takes(SIGNS + "●○", output.stdout.encoding)
    sign, end = ("*", "o") if ascii_only else ("●", "○")
    rows = laid_out([(each.key, each.origin) for each in lines])
    for line, row, told in zip(lines, rows, parts, strict=True):
        node = node_line(row, line.sign or (end if row.ends else sign), ascii_only=ascii_only)
        _print(output, node, told if not output.stdout.is_terminal else list(filter(None, told)))
        if joined := join_line(row, ascii_only=ascii_only):
            _print(output, joined, [])


def _print(output: Output, lanes: Sequence[Piece], parts: Sequence[Text]) -> None:
    """Write lanes and the parts of a line. On a terminal it is never broken: parts for which there is no room are left
    out, from the last one on, and what is needed is cut."""
    line, on_screen = Text(), output.stdout.is_terminal
    for signs, lane in lanes[:_MOST_SIGNS]:
        line.append(signs, None if lane is None else _COLORS[lane % len(_COLORS)])
    line.append("…" if len(lanes) > _MOST_SIGNS else "")
    for at, part in enumerate(parts):
        gap = "" if not (at or lanes) else "  " if on_screen else "\t"
        if on_screen and at >= _NEEDED and line.cell_len + len(gap) + part.cell_len > output.stdout.width:
            break
        line = line.append(gap).append_text(part)
    if on_screen:
        line.rstrip()
        line.truncate(output.stdout.width, overflow="ellipsis")
    output.stdout.print(line, soft_wrap=True)


def _takes(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
