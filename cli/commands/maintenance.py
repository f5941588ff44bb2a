"""`torpor repack`, `strip`, `prune` and `repair`: looking after a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...daemon.api.limits import MAX_DAYS
from ...daemon.api.store import MaintainRequest
from ...daemon.api.verbs import VERBS
from ...memvid.answers import MaintenanceReport
from ..errors import InvalidUsage
from ..reach.daemon_link import connect
from ..reach.options import (
    DryRunOption,
    JsonOption,
    OnlySessionArgument,
    SocketOption,
    VersionArgument,
    WrittenStoreOption,
    option,
)
from ..view.output import Output, plain
from .maintenance_report import write_report
from .upkeep import PATIENCE_S, carry_out

ColdAfterOption = Annotated[
    float | None, option("--cold-after-days D", "Pack what is older than D days tighter.", min=0)
]


RemoteOption = Annotated[bool, option("--remote", "Free the daemon's remote, and not the store.")]


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


PlanOption = Annotated[bool, option("--plan", "Show what goes next where the store needs room, and why.")]

FromOption = Annotated[
    list[Path] | None,
    option("--from FOLDER", "Take what the store lacks from the files in FOLDER. Can be repeated. No daemon may run."),
]


def repack(
    session: OnlySessionArgument = None,
    cold_after_days: ColdAfterOption = None,
    remote: RemoteOption = False,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Deletes and strips leave bytes in packs that others need too. This removes packs that nothing needs, writes those
    anew that are mostly unneeded or too many for one session, and removes what unfinished work has left. Every byte
    that is copied is checked before the old pack goes. A daemon serves and sleeps meanwhile. No version changes.

    --remote frees the daemon's remote instead. What no session needs there leaves at first, and is removed by the next
    time, an hour later at least. The daemon does both by itself.

    [bold]Examples[/]

    [cyan]torpor repack --dry-run[/]
    [cyan]torpor repack --remote[/]
    [cyan]torpor repack notes --cold-after-days 30[/]
    """
    output = Output(as_json=as_json)
    if remote:
        if session is not None or cold_after_days is not None or store is not None:
            raise InvalidUsage(
                "--remote frees the whole remote of the daemon; leave the others out.", option="--remote"
            )
        with output.progress("repack"), connect(socket, timeout_s=PATIENCE_S) as client:
            freed: MaintenanceReport = client.ask(
                VERBS["maintain"], MaintainRequest("repack", remote=True, dry_run=dry_run)
            )
        return write_report(output, "repack", freed)
    order = MaintainRequest("repack", session=session, dry_run=dry_run, cold_after_days=cold_after_days)
    report = carry_out(output, order, socket, store)
    return write_report(output, "repack", report, nothing="no pack was touched" if report.problems else "nothing to do")


def strip(
    session: VersionArgument,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """The tokens stay, and with them the text; the keys and values leave the disk unless another version needs them.
    The next use of the session has the model read its tokens again, which takes the time that they took at first.
    Without an @ all versions of the session are stripped. It has to be asleep.

    [bold]Examples[/]

    [cyan]torpor strip notes --dry-run[/]
    [cyan]torpor strip notes@3[/]
    """
    output = Output(as_json=as_json)
    order = MaintainRequest("strip", session=session, dry_run=dry_run)
    nothing = f"{plain(session)} is stripped already"
    return write_report(output, "strip", carry_out(output, order, socket, store), nothing=nothing)


def prune(
    session: OnlySessionArgument = None,
    keep_last: KeepLastOption = None,
    keep_days: KeepDaysOption = None,
    plan: PlanOption = False,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """The newest version of a session always stays, and so does every version that has a tag or is pinned. Look at
    [cyan]--dry-run[/] first: it lists what would go, and why the rest stays. --plan tells what a daemon does unasked:
    which keys and values go next, in that order, once the store has reached its budget. It does nothing. Without a
    daemon it goes by the settings of one without options.

    [bold]Examples[/]

    [cyan]torpor prune --keep-last 5 --dry-run[/]
    [cyan]torpor prune notes --keep-last 1 --keep-days 30[/]
    [cyan]torpor prune --plan[/]
    """
    output = Output(as_json=as_json)
    if plan:
        if session is not None or keep_last is not None or keep_days is not None:
            raise InvalidUsage(
                "--plan is for the whole store, and says what goes by no rule of yours; leave the others out."
            )
        report = carry_out(output, MaintainRequest("strip", dry_run=True), socket, store)
        return write_report(
            output,
            "prune",
            report,
            nothing="nothing may go now: what is awake, was used in the last hour, or has a tag or a pin stays",
        )
    if keep_last is None and keep_days is None:
        raise InvalidUsage("Say what to keep: --keep-last N, --keep-days D, or both.")
    order = MaintainRequest("prune", session=session, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    return write_report(output, "prune", carry_out(output, order, socket, store))


def repair(
    sources: FromOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    store: WrittenStoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Every byte is read. What is sound in a damaged pack is copied to a new one; then the damaged file moves to the
    store's folder [cyan]damaged[/]. With --from, what is missing is copied from a folder: a backup, or one with files
    that were moved away. No version is given up: one that still lacks something stays, whole up to a token. A daemon
    also computes damaged parts of newest versions again, as far as it can. Exit status 6 if something stays wrong.

    [bold]Examples[/]

    [cyan]torpor repair --dry-run[/]
    [cyan]torpor repair --from /mnt/disk/torpor[/]
    [cyan]torpor repair --store /backup/store --json | jq .problems[/]
    """
    output = Output(as_json=as_json)
    order = MaintainRequest("repair", dry_run=dry_run)
    report = carry_out(output, order, socket, store, sources or ())
    return write_report(output, "repair", report, nothing="nothing to mend")
