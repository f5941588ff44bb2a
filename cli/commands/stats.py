"""`torpor stats`: the number of sessions, their space, and how often they were found."""

from __future__ import annotations

from typing import Any

from ...daemon.api.store import LabelFigures, StatsResult
from ...memvid.units import format_bytes, format_count
from ..reach.daemon_link import connect
from ..reach.options import JsonOption, LabelChoice, NamespaceChoice, SocketOption
from ..view.output import Output, plain, rows_table


def stats(
    label: LabelChoice = None,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """WRITTEN is what their versions have written; [cyan]torpor du[/] tells what of the disk they need now. HITS counts
    since the daemon began. A hit is a [cyan]torpor warm[/] that finds the session awake, or a new session that takes
    over its tokens. A session with several labels counts in each.

    [bold]Examples[/]

    [cyan]torpor stats[/]
    [cyan]torpor stats --label nightly --json | jq .total.tokens[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        result = client.stats(label, namespace)
    if not output.told("stats", result):
        output.show(render_stats(result, of_all=label is None))


def render_stats(result: StatsResult, *, of_all: bool) -> Any:
    """Draw a row for each label. of_all: and one for all sessions, set apart."""
    numbers = ("SESSIONS", "AWAKE", "TOKENS", "RESIDENT", "WRITTEN", "HITS")
    table = rows_table("LABEL", *numbers, right=numbers)
    for figures in result.labels:
        table.add_row(*_row(plain(figures.label), figures))
    if of_all:
        if result.labels:
            table.add_row()  # so that no label, which may be any text, looks like the total
        table.add_row(*_row("[dim]all[/]", result.total))
    return table


def _row(name: str, figures: LabelFigures) -> list[str]:
    return [
        name,
        format_count(figures.sessions),
        format_count(figures.awake),
        format_count(figures.tokens),
        format_bytes(figures.resident_bytes),
        format_bytes(figures.written_bytes),
        format_count(figures.hits),
    ]
