"""`torpor show`: everything about one session."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ...daemon.api.session import Provenance, SessionDetail
from ...memvid.answers import ShownVersion
from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import VERSION_MARK, names_version
from ...socket_api.errors import RemoteError
from ..exit_codes import INTEGRITY
from ..reach.daemon_link import find_ended_daemon
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument
from ..reach.store_view import find_marks_problem, find_missing
from ..reach.viewing import look
from ..view.formatting import format_id, format_marks, format_name, format_sampling, format_time
from ..view.markup import escape
from ..view.output import Output, facts_table, neutralise, plain, render_problem, rows_table, typed
from ..view.table import PlainTable
from ..view.wake_remarks import describe_differing, describe_recomputed

WIDE_COLUMNS = 100  # a narrower terminal is shown short ids
_FIGURES = ("BUNDLE", "PARENT", "TOKENS", "WRITTEN", "LOGICAL", "MADE")
_FIRST_TO_GO = ("PARENT", "LOGICAL", "BUNDLE")
LINES_SHOWN = 6  # lines of a layer list on the screen; JSON has them all


def show(
    session: VersionArgument, socket: SocketOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> int:
    """Asks the daemon if one runs. With no daemon, or with --store, it reads the store's files, which tell everything
    but the text, which [cyan]torpor cat[/] writes. Of a damaged version it shows what is known, with
    status 6.

    [bold]Examples[/]

    [cyan]torpor show notes[/]
    [cyan]torpor show notes@before-refactor[/]
    [cyan]torpor show torpor://default/notes --json | jq .versions[/]
    """
    output = Output(as_json=as_json)
    view = look(socket, store, lambda source: source.show(session))
    ended = find_ended_daemon() if view.source == "store" and store is None and socket is None else None
    missing = find_missing(view.place, view.record.info.session)
    problems = [problem for problem in (ended, find_marks_problem(view.place), *missing) if problem]
    damage = view.record.problems
    if output.told("show", replace(view.record, problems=(*problems, *damage)), source=view.source):
        return INTEGRITY.number if view.record.damaged else 0
    output.show(*render_detail(view.record, output.stdout.width, earlier=names_version(session)))
    for problem in problems:
        output.remark(render_problem(problem))
    if damage:
        raise RemoteError(damage[0].code, damage[0].message, path=damage[0].path)
    return 0


def render_detail(detail: SessionDetail, width: int, *, earlier: bool = False) -> Iterator[str | PlainTable]:
    """A session, section by section. width: of the terminal, in columns. earlier: a version was named."""
    narrow = width < WIDE_COLUMNS
    info = detail.info
    yield from (f"[bold]{plain(info.session)}[/]", _facts(detail))
    if detail.versions:
        yield from (_heading("versions"), _versions(detail.versions))
    if detail.lineage:
        yield from (_heading("lineage"), f"  {plain(' → '.join(_lineage(detail)))}")
    for name in ("identity", "backend", "environment"):
        if pairs := getattr(detail, name):
            yield from (_heading(name), _pairs(pairs, narrow=narrow))
    if detail.layers:
        yield _heading(f"layers ({len(detail.layers)})")
        yield from _layers(detail.layers)
    if detail.tail_text:
        yield _heading("ends with")
        yield from (f"  [italic]{escape(neutralise(line))}[/]" for line in detail.tail_text.splitlines())
    elif info.token_count:
        version = f"{VERSION_MARK}{info.version}" if earlier else ""
        way = typed(f"torpor cat {neutralise(format_name(info.session, bare=True))}{version}")
        yield from (_heading("ends with"), f"  [dim]{way} writes its text, if its tokenizer is at hand[/]")


def _facts(detail: SessionDetail) -> PlainTable:
    info = detail.info
    facts = facts_table()
    changed = ", changed since its last version" if info.dirty else ""
    kept = ", to be thrown away: a crash loses what it did since its last version" if info.durability else ""
    looked = f", a look at token {format_count(info.token_count)}" if info.look else ""
    facts.add_row("  state", plain(info.state) + changed + looked + kept)
    if info.machine:
        facts.add_row("  machine", f"{plain(info.machine)}, as far as is known here; what is here may be older")
    facts.add_row("  version", _version(detail))
    facts.add_row("  model", plain(info.model))
    facts.add_row("  tokens", format_count(info.token_count))
    if info.unread_tokens:
        unread = format_plural(info.unread_tokens, "token")
        facts.add_row("  to read again", f"its last {unread}, at the next use")
    if info.resident_bytes:
        facts.add_row("  resident", format_bytes(info.resident_bytes))
    if info.written_bytes:
        facts.add_row("  written", format_bytes(info.written_bytes))
    shown = next((version for version in detail.versions if version.bundle_id == info.bundle_id), None)
    if info.state != "awake" and shown is not None and shown.stripped:
        facts.add_row(
            "  stripped", "the next use fetches what a remote has of it, and reads again what nothing else has kept"
        )
    if info.lossy:
        tokens = format_plural(info.lossy.tokens, "token")
        facts.add_row("  lossy", f"keys and values of the first {tokens} in {info.lossy.bits} bits")
    for name, fact in _provenance(detail.provenance):
        facts.add_row(f"  {name}", plain(fact))
    facts.add_row("  bundle", plain(info.bundle_id or "– (no version yet)"))
    facts.add_row("  made", format_time(None if shown is None else shown.created_ns))
    if info.unnamed:
        facts.add_row("  named", "by nobody: a client began it over HTTP, under an id of its own or under none")
    if info.labels:
        facts.add_row("  labels", plain(" ".join(info.labels)))
    if info.sampling:
        facts.add_row("  sampling", plain(format_sampling(vars(info.sampling))))
    return facts


def _provenance(provenance: Provenance) -> Iterator[tuple[str, str]]:
    for way, origin, what in (
        ("forked", provenance.forked_from, "with"),
        ("folded", provenance.folded_from, "a summary of"),
    ):
        if origin:
            tokens = format_plural(origin.tokens, "token")
            yield f"{way} from", f"{origin.session} at version {origin.version}, {what} {tokens}"
    if again := provenance.recomputed:
        yield "recomputed", describe_recomputed(again)
    if provenance.elsewhere_tokens:
        tokens = format_plural(provenance.elsewhere_tokens, "token")
        yield "elsewhere", f"another backend computed its first {tokens}"
    if provenance.differs:
        yield "differs", f"since it slept: {describe_differing(provenance.differs)}"


def _version(detail: SessionDetail) -> str:
    """The version shown, and the newest if it is another one."""
    shown, newest = detail.info.version, detail.versions[-1:]
    if shown is None or not newest or newest[0].version == shown:
        return str(shown or "–")
    tokens = format_plural(newest[0].token_count, "token")
    return f"{shown}; the newest is version {newest[0].version}, with {tokens}"


def _versions(versions: Sequence[ShownVersion]) -> PlainTable:
    table = rows_table(
        *("  VERSION", *_FIGURES, "MARKS"),
        right=("TOKENS", "WRITTEN", "LOGICAL"),
        whole=("  VERSION", *_FIGURES),
        first_to_go=_FIRST_TO_GO,
    )
    for version in versions:
        figures = {
            "VERSION": f"  {version.version}",
            "BUNDLE": plain(format_id(version.bundle_id)),
            "PARENT": plain(format_id(version.parent)),
            "TOKENS": format_count(version.token_count),
            "WRITTEN": format_bytes(version.bundle_bytes),
            "LOGICAL": format_bytes(version.logical_bytes),
            "MADE": format_time(version.created_ns),
            "MARKS": plain(
                format_marks([*version.tags, *(mark for mark in ("pinned", "stripped") if getattr(version, mark))])
            ),
        }
        table.add_row(*figures.values())
    return table


def _lineage(detail: SessionDetail) -> Iterator[str]:
    there = {version.bundle_id for version in detail.versions}
    origins = [detail.provenance.forked_from, detail.provenance.folded_from]
    others = {origin.bundle_id: f"version {origin.version} of {origin.session}" for origin in origins if origin}
    for bundle in detail.lineage:
        whose = others.get(bundle, "gone since, and with it nothing of this version")
        yield _short(bundle) + ("" if bundle in there else f" ({whose})")


def _pairs(pairs: Mapping[str, str], *, narrow: bool) -> PlainTable:
    facts = facts_table()
    for name, value in sorted(pairs.items()):
        facts.add_row(f"  {plain(name)}", plain(_short(value) if narrow else value))
    return facts


def _layers(layers: Sequence[str]) -> Iterator[str]:
    alike = [(layer, len(list(run))) for layer, run in groupby(layers)]
    for layer, count in alike[:LINES_SHOWN]:
        yield f"  {plain(layer)}" + (f"  × {count}" if count > 1 else "")
    if len(alike) > LINES_SHOWN:
        yield "  … (--json has them all)"


def _heading(text: str) -> str:
    return f"\n[dim bold]{text}[/]"


def _short(line: str) -> str:
    is_id = len(line) == 64 and all(digit in "0123456789abcdef" for digit in line)
    return format_id(line) if is_id else line
