"""`torpor wake`: put a session's state back, without reading anything again."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import VERSION_MARK, names_version, session_in
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, SocketOption, VersionArgument, option
from ..reach.store_view import find_missing
from ..view.damage import naming_the_intact
from ..view.formatting import format_seconds
from ..view.output import Output, plain
from ..view.wake_remarks import remark_on_look, remark_on_wake, write_plan

VersionOption = Annotated[
    str | None, option("--version VERSION", "An earlier version: its number, a tag, or the beginning of its bundle id.")
]
AtOption = Annotated[
    int | None,
    option(
        "--at TOKEN",
        "As it was at its token TOKEN. The wake reports how many tokens it computes for that.",
        min=1,
    ),
]
StrictOption = Annotated[
    bool, option("--strict", "Also refuse a session that another device, BLAS or version of a library computed.")
]
PlanOption = Annotated[
    bool,
    option("--plan", "Say what the wake would read and compute; do nothing."),
]
_CANARY = {
    "same_bits": ", and it computes what it did when it slept, to the bit",
    "within_tolerance": ", and it computes what it did when it slept, but for the last bits",
    "lossy": ", and it computes what it did when it slept, in fewer bits",
    "not_run": "",
}
PLAIN_NUMBER_DIGITS = 7  # longer ones may also begin a bundle id, and the daemon looks for both


def wake(
    session: VersionArgument,
    version: VersionOption = None,
    at: AtOption = None,
    strict: StrictOption = False,
    plan: PlanOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Any command that needs a sleeping session wakes it by itself; this one does it ahead of time, and reports the
    cost. A refused wake says what differs, and changes nothing. If another device or other versions of the libraries
    computed the session, it comes back to the bit, but what follows may differ in its last bits. The wake says so, and
    --strict refuses it. --plan says what the wake would read and compute, and does nothing.

    [bold]Examples[/]

    [cyan]torpor wake notes[/]
    [cyan]torpor wake notes --version 2[/]
    [cyan]torpor wake notes@before-refactor[/]
    [cyan]torpor wake notes --at 1500[/]
    [cyan]torpor wake notes~2:1500[/]
    [cyan]torpor wake notes --plan[/]
    """
    output = Output(as_json=as_json)
    session, number = _named(session, version)
    if plan:
        with connect(socket) as client, naming_the_intact(client, session):
            place = Path(client.status().store)
            planned = client.plan_wake(session, version=number, at_token=at, strict=strict)
            write_plan(
                output, replace(planned, unreadable=(*planned.unreadable, *find_missing(place, planned.session)))
            )
        return
    with connect(socket) as client, progress_of(output, "wake") as on_event:
        place = Path(client.status().store)
        with naming_the_intact(client, session):
            result = client.wake(session, version=number, at_token=at, strict=strict, on_event=on_event)
            result = replace(result, unreadable=(*result.unreadable, *find_missing(place, result.session)))
        ignore_interrupts()
    if as_json:
        output.document("wake", asdict(result))
    elif result.already_awake:
        output.line(f"{plain(result.session)}  was awake already, {format_plural(result.token_count, 'token')}")
    else:
        canary = "lossy" if result.lossy and result.canary == "same_bits" else result.canary
        again = result.provenance.recomputed
        if again and not again.same_logits:
            canary = "not_run"  # a part has other bits, as the remark says: two lines must not contradict each other
        output.line(
            f"{plain(result.session)}  awake at version {result.version}: {format_plural(result.token_count, 'token')},"
            f" {format_count(result.tokens_prefilled)} of them prefilled, {format_bytes(result.bytes_read)} read"
            f" in {format_seconds(result.seconds)}{_CANARY[canary]}"
        )
    remark_on_wake(output, result)
    remark_on_look(output, result.session, result.look)


def _named(session: str, version: str | None) -> tuple[str, int | None]:
    """The session, and the version's number. Any other selector goes behind the session's @."""
    if version is None:
        return session, None
    if names_version(session):
        raise InvalidUsage(f"{session} names a version already; leave out --version.", option="--version")
    if version.isascii() and version.isdecimal() and len(version) <= PLAIN_NUMBER_DIGITS:
        return session, int(version)
    name = session_in(session)
    return f"{name}{VERSION_MARK}{version}{session[len(name) :]}", None
