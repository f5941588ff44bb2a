"""`torpor prune`: looking after a store."""

from __future__ import annotations

from typing import Annotated

import typer

from .errors import InvalidUsage
from .maintenance_report import write_report
from .options import DryRunOption, JsonOption, SocketOption, WrittenStoreOption
from .output import Output
from .upkeep import Order, carry_out

OnlySessionArgument = Annotated[
    str | None, typer.Argument(metavar="SESSION", show_default=False, help="Only this session; otherwise all.")
]
KeepLastOption = Annotated[
    int | None,
    typer.Option("--keep-last", min=1, metavar="N", show_default=False, help="Keep the N newest of each session."),
]
KeepDaysOption = Annotated[
    float | None,
    typer.Option(
        "--keep-days",
        min=0,
        metavar="D",
        show_default=False,
        help="Keep what slept in the D days before the newest of its session.",
    ),
]


def prune(
    session: OnlySessionArgument = None,
    keep_last: KeepLastOption = None,
    keep_days: KeepDaysOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Remove earlier versions of sessions. What either option keeps stays; one of the two is needed.

    The newest version of a session always stays, and so does every version that has a tag or is pinned. Look at
    [cyan]--dry-run[/] first: it lists what would go, and why the rest stays.

    [bold]Examples[/]

    [cyan]torpor prune --keep-last 5 --dry-run[/]
    [cyan]torpor prune notes --keep-last 1 --keep-days 30[/]
    """
    output = Output(as_json=as_json)
    if keep_last is None and keep_days is None:
        raise InvalidUsage("Say what to keep: --keep-last N, --keep-days D, or both.")
    order = Order("prune", session, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    return write_report(output, "prune", carry_out(order, socket, store))
