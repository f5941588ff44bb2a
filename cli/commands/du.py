"""`torpor du`: the disk space of a store, by session, and the part that can be freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType

from ...memvid.answers import COINS, SessionUsage, UsageReport
from ...memvid.units import format_bytes, format_count
from ..reach.options import JsonOption, OnlySessionArgument, SocketOption, StoreOption
from ..reach.store_view import choose_served_store, open_store
from ..view.disk import budgets_in, remark_on_room
from ..view.output import Output, facts_table, plain, render_problem, rows_table, typed

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
    session: OnlySessionArgument = None,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Reads the files of --store, of the running daemon's store, or of the default one, and disturbs no work. LOGICAL
    is raw state. STORED is what of the disk a session needs: SHARED, which others need too, and ALONE, which is freed
    when it is forgotten. The line of all sessions counts once what they share; with the rest it is the disk.

    [bold]Examples[/]

    [cyan]torpor du[/]
    [cyan]torpor du notes[/]
    [cyan]torpor du --json | jq .unneeded_bytes[/]
    """
    output = Output(as_json=as_json)
    path, served = choose_served_store(store, socket)
    disk = None if served is None or served.disk is None else asdict(served.disk)
    with open_store(path) as opened:
        only = opened.resolve(session) if session is not None else None
        report = opened.usage()
    if only is not None:
        report = replace(report, sessions=tuple(usage for usage in report.sessions if usage.session == str(only)))
    if as_json:
        output.document("du", {"store": str(path), **asdict(report), "disk": disk})
        return
    if report.sessions:
        output.show(render_sessions(report.sessions, report if only is None else None))
    if only is None:
        output.show(render_store(report, path, disk))
        remark_on_room(output, path)
    for problem in report.problems:
        output.line(render_problem(problem))
    if report.problems:
        named = f" {plain(session)}" if session is not None else ""
        output.remark(f"{typed(f'torpor verify{named} --deep')} says which versions that harms, and what to do.")


def render_sessions(sessions: Sequence[SessionUsage], report: UsageReport | None = None) -> RenderableType:
    """Draw the space of each session, the largest first. report: of the store, whose sums stand below then."""
    figures = ("VERSIONS", "TOKENS", *(coin.upper() for coin in COINS))
    first_to_go = ("VERSIONS", "TOKENS", "LOGICAL")
    table = rows_table("SESSION", *figures, right=figures, whole=("SESSION", *figures), first_to_go=first_to_go)
    for usage in sorted(sessions, key=lambda usage: (-usage.stored_bytes, usage.session)):
        counts = [format_count(usage.versions), format_count(usage.token_count)]
        table.add_row(plain(usage.session.removeprefix("torpor://")), *counts, *_coins(usage))
    if report is not None:
        counts = [format_count(sum(getattr(one, name) for one in sessions)) for name in ("versions", "token_count")]
        table.add_row("[dim]all, shared once[/]", *counts, *_coins(report))
        table.add_row("[dim]the rest[/]", "", "", "", format_bytes(report.rest_bytes), "", "")
        table.add_row("[dim]on disk[/]", "", "", "", format_bytes(report.file_bytes), "", "")
    return table


def _coins(told: SessionUsage | UsageReport) -> list[str]:
    return [format_bytes(getattr(told, f"{coin}_bytes")) for coin in COINS]


def render_store(report: UsageReport, path: Path, disk: dict[str, Any] | None) -> RenderableType:
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
    facts.add_row("  written today", f"{format_bytes(report.written_today_bytes)} at least: what the index has counted")
    facts.add_row("  free on the disk", format_bytes(report.free_bytes))
    if disk is not None:
        facts.add_row("  budgets", ", ".join(budgets_in(disk)) or "none (torpor serve --store-budget)")
    return Group("", facts)
