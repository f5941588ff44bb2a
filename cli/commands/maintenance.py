"""`torpor gc`, `compact`, `prune`, `repair` and `rebuild-index`: looking after a store."""

from __future__ import annotations

from typing import Annotated

import typer

from ...daemon.api.limits import MAX_DAYS
from ...daemon.api.store import MaintainRequest, Operation
from ..errors import InvalidUsage
from ..reach.options import DryRunOption, JsonOption, OnlySessionArgument, SocketOption, WrittenStoreOption, option
from ..view.output import Output
from .maintenance_report import write_report
from .upkeep import carry_out

ColdAfterOption = Annotated[
    float | None, option("--cold-after-days D", "Pack what is older than D days tighter.", min=0)
]


def _require_days(days: float | None) -> float | None:
    if days is not None and not 0 < days <= MAX_DAYS:
        raise InvalidUsage(
            f"--keep-days takes a number of days above 0 and up to {MAX_DAYS}, not {days:g}. The newest version of a"
            " session always stays: --keep-last 1 keeps that alone.",
            option="--keep-days",
        )
    return days


KeepLastOption = Annotated[int | None, option("--keep-last N", "Keep the N newest of each session.", min=1)]
KeepDaysOption = Annotated[
    float | None,
    option(
        "--keep-days D", "Keep versions that slept in the D days before their session's newest.", callback=_require_days
    ),
]


QuarantineOption = Annotated[
    bool, typer.Option("--quarantine", help="Remove what repair has set aside, too: it cannot come back then.")
]


def gc(
    quarantine: QuarantineOption = False,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Deleting a session leaves files that other sessions share. This removes those that no session needs any more, and
    what unfinished work has left. A file that somebody needs, or has open, is never removed.

    What repair has set aside stays, with all that it needs, because it may still come back. [cyan]--quarantine[/]
    gives it up for good.

    [bold]Examples[/]

    [cyan]torpor gc --dry-run[/]
    [cyan]torpor gc[/]
    [cyan]torpor gc --quarantine[/]
    """
    output = Output(as_json=as_json)
    operation: Operation = "empty_quarantine" if quarantine else "gc"
    return write_report(output, "gc", carry_out(output, MaintainRequest(operation, dry_run=dry_run), socket, store))


def compact(
    session: OnlySessionArgument = None,
    cold_after_days: ColdAfterOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Every byte that is copied is checked before the old file goes. A daemon serves and sleeps meanwhile.

    [bold]Examples[/]

    [cyan]torpor compact --dry-run[/]
    [cyan]torpor compact notes --cold-after-days 30[/]
    """
    output = Output(as_json=as_json)
    order = MaintainRequest("compact", session=session, dry_run=dry_run, cold_after_days=cold_after_days)
    return write_report(output, "compact", carry_out(output, order, socket, store))


def prune(
    session: OnlySessionArgument = None,
    keep_last: KeepLastOption = None,
    keep_days: KeepDaysOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """The newest version of a session always stays, and so does every version that has a tag or is pinned. Look at
    [cyan]--dry-run[/] first: it lists what would go, and why the rest stays.

    [bold]Examples[/]

    [cyan]torpor prune --keep-last 5 --dry-run[/]
    [cyan]torpor prune notes --keep-last 1 --keep-days 30[/]
    """
    output = Output(as_json=as_json)
    if keep_last is None and keep_days is None:
        raise InvalidUsage("Say what to keep: --keep-last N, --keep-days D, or both.")
    order = MaintainRequest("prune", session=session, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    return write_report(output, "prune", carry_out(output, order, socket, store))


def repair(
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Every byte is read. Damaged files are set aside in the store's folder [cyan]quarantine[/], after what is sound in
    them and needed has been saved. Exit status 6 if something stays wrong; each problem says what it costs.

    [bold]Examples[/]

    [cyan]torpor repair --dry-run[/]
    [cyan]torpor repair --store /backup/store --json | jq .problems[/]
    """
    output = Output(as_json=as_json)
    return write_report(output, "repair", carry_out(output, MaintainRequest("repair", dry_run=dry_run), socket, store))


def rebuild_index(
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """A damaged, missing or stale index is made anew by itself when a store is opened; this is for doubts.

    [bold]Examples[/]

    [cyan]torpor rebuild-index[/]
    [cyan]torpor rebuild-index --store /backup/store[/]
    """
    output = Output(as_json=as_json)
    report = carry_out(output, MaintainRequest("rebuild_index", dry_run=dry_run), socket, store)
    made = "[green]done[/]  the index was rebuilt, and is the same as before"
    nothing = "nothing would change" if dry_run else made
    return write_report(output, "rebuild-index", report, nothing=nothing)
