"""`torpor du`: the disk space of a store, by session, and the part that can be freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...memvid.answers import COINS, SessionUsage, Together, UsageReport
from ...memvid.units import format_bytes, format_count, format_plural
from ..reach.options import JsonOption, OnlySessionsArgument, SocketOption, StoreOption
from ..reach.store_view import choose_served_store, open_store
from ..view.disk import budgets_in, remark_on_room
from ..view.formatting import format_name
from ..view.output import Output, facts_table, plain, render_problem, rows_table, typed
from ..view.table import PlainTable

if TYPE_CHECKING:
    from ...daemon.api.process import DiskInfo

# The parts of the store's bytes, in the order of the table; an empty part is left out.
_PLACES = (
    ("version_bytes", "manifests of versions"),
    ("pack_bytes", "packs"),
    ("damaged_bytes", "moved away by repair"),
    ("incoming_bytes", "waiting to be imported"),
    ("index_bytes", "index"),
    ("temp_bytes", "unfinished"),
    ("journal_bytes", "journal of turns"),
    ("other_bytes", "marks, diary and everything else"),
)


def du(
    sessions: OnlySessionsArgument = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reads the files of --store, of the running daemon's store, or of the default one, and disturbs no work. LOGICAL
    is raw state. STORED is what of the disk a session needs: SHARED, which others need too, and ALONE, which is freed
    when it is forgotten. TOKENS are those of the newest version. The line of all sessions counts once what they share;
    with the rest it is the disk. Below is which sessions share how much. Of several sessions the line below them tells
    what they need together: ALONE is freed when all of them go.

    [bold]Examples[/]

    [cyan]torpor du[/]
    [cyan]torpor du notes[/]
    [cyan]torpor du notes review[/]
    [cyan]torpor du --json | jq .unneeded_bytes[/]
    """
    output = Output(as_json=as_json)
    path, served = choose_served_store(store, socket)
    disk = None if served is None else served.disk
    with open_store(path) as opened:
        report, together = opened.usage_together({opened.resolve(each) for each in sessions or ()})
    if sessions:
        report = replace(report, sessions=tuple(each for each in report.sessions if each.session in together.sessions))
    if output.told("du", report, store=str(path), disk=disk, together=together if sessions else None):
        return
    if report.sessions:
        output.show(render_sessions(report.sessions, together if sessions else report))
    if report.shared_by:
        output.show("", render_shared(report, of_all=not sessions))
    if not sessions:
        output.show("", render_store(report, path, disk))
        remark_on_room(output, path)
    for problem in report.problems:
        output.line(render_problem(problem))
    if report.problems:
        named = f" {plain(sessions[0])}" if sessions and len(sessions) == 1 else ""
        output.remark(f"{typed(f'torpor verify{named} --deep')} says which versions that harms, and what to do.")


def render_sessions(sessions: Sequence[SessionUsage], sums: UsageReport | Together) -> PlainTable:
    """Draw the space of each session, the largest first. sums: of the store, or of several sessions, told below."""
    figures = ("VERSIONS", "TOKENS", *(coin.upper() for coin in COINS))
    first_to_go = ("VERSIONS", "TOKENS", "LOGICAL")
    table = rows_table("SESSION", *figures, right=figures, whole=("SESSION", *figures), first_to_go=first_to_go)
    for usage in sorted(sessions, key=lambda usage: (-usage.stored_bytes, usage.session)):
        counts = [format_count(usage.versions), format_count(usage.token_count)]
        table.add_row(plain(format_name(usage.session)), *counts, *_coins(usage))
    counts = [format_count(sum(getattr(one, name) for one in sessions)) for name in ("versions", "token_count")]
    if isinstance(sums, UsageReport):
        table.add_row("[dim]all, shared once[/]", *counts, *_coins(sums))
        table.add_row("[dim]the rest[/]", "", "", "", format_bytes(sums.rest_bytes), "", "")
        table.add_row("[dim]on disk[/]", "", "", "", format_bytes(sums.file_bytes), "", "")
    elif len(sums.sessions) > 1:
        table.add_row("[dim]together[/]", *counts, *_coins(sums))
    return table


def render_shared(report: UsageReport, *, of_all: bool) -> PlainTable:
    """Draw what is shared, by who shares it. of_all: the smaller parts, too, as a sum."""
    table = rows_table("SHARED", "BY", right=("SHARED",), whole=("SHARED",))
    for part in report.shared_by:
        others = part.session_count - len(part.sessions)
        more = f" and {format_plural(others, 'other')}" if others else ""
        table.add_row(format_bytes(part.size_bytes), plain(", ".join(map(format_name, part.sessions)) + more))
    rest = report.shared_bytes - sum(part.size_bytes for part in report.shared_by)
    if of_all and rest:
        table.add_row(format_bytes(rest), "[dim]in smaller parts[/]")
    return table


def _coins(told: SessionUsage | UsageReport | Together) -> list[str]:
    return [format_bytes(getattr(told, f"{coin}_bytes")) for coin in COINS]


def render_store(report: UsageReport, path: Path, disk: DiskInfo | None) -> PlainTable:
    """Draw the space of the whole store. disk: as of the status of a daemon that serves it, which alone knows its
    budgets."""
    facts = facts_table()
    facts.add_row("  store", plain(path))
    facts.add_row("  on disk", format_bytes(report.file_bytes))
    for field, name in _PLACES:
        if size_bytes := getattr(report, field):
            facts.add_row(f"    {name}", format_bytes(size_bytes))
    hint = f": {typed('torpor repack')} gives back what is worth it" if report.unneeded_bytes else ""
    facts.add_row("  unneeded", f"{format_bytes(report.unneeded_bytes)}{hint}")
    facts.add_row("  written today", f"at least {format_bytes(report.written_today_bytes)}")
    facts.add_row("  free on the disk", format_bytes(report.free_bytes))
    if disk is not None:
        facts.add_row("  budgets", ", ".join(budgets_in(vars(disk))) or "none (torpor serve --store-budget)")
    return facts
