"""`torpor wake`: put a session's state back, without reading anything again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ...daemon.api.waking import WakeResult
from ...memvid.units import format_bytes, format_count, format_plural
from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, SocketOption, VersionArgument, option, require_sessions
from ..reach.store_view import find_missing
from ..view.formatting import format_seconds
from ..view.output import Output, plain
from ..view.wake_remarks import remark_on_look, remark_on_wake, write_plan

if TYPE_CHECKING:
    from ...daemon.api.events import WorkEvent
    from ..reach.daemon_link import OnEvent

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
ForkOption = Annotated[
    str | None,
    option(
        "--fork NAME",
        "If another machine has it awake, or the remote does not answer, go on here with a fork of that name. "
        "Refused if it is awake here.",
        callback=require_sessions,
    ),
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


def wake(
    session: VersionArgument,
    at: AtOption = None,
    strict: StrictOption = False,
    fork: ForkOption = None,
    plan: PlanOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Any command that needs a sleeping session wakes it by itself; this one does it ahead of time, and reports the
    cost. A refused wake says what differs, and changes nothing. If another device or other versions of the libraries
    computed the session, it comes back to the bit, but what follows may differ in its last bits. The wake says so, and
    --strict refuses it. Another machine of the same remote that has it awake is asked for it. --plan says what the
    wake would read and compute, and does nothing.

    [bold]Examples[/]

    [cyan]torpor wake notes[/]
    [cyan]torpor wake notes@2[/]
    [cyan]torpor wake notes@before-refactor[/]
    [cyan]torpor wake notes --at 1500[/]
    [cyan]torpor wake notes~2:1500[/]
    [cyan]torpor wake notes --fork notes-here[/]
    [cyan]torpor wake notes --plan[/]
    """
    output = Output(as_json=as_json)
    if plan and fork is not None:
        raise InvalidUsage("A plan forks nothing: leave --fork or --plan out.", option="--fork")
    if plan:
        with connect(socket) as client:
            place = Path(client.status().store)
            planned = client.plan_wake(session, at_token=at, strict=strict)
            write_plan(
                output, replace(planned, unreadable=(*planned.unreadable, *find_missing(place, planned.session)))
            )
        return
    with connect(socket) as client, progress_of(output, "wake") as on_event:
        place = Path(client.status().store)
        telling = _telling(output, session, on_event)
        result = client.wake(session, at_token=at, strict=strict, fork=fork, on_event=telling)
        result = replace(result, unreadable=(*result.unreadable, *find_missing(place, result.session)))
        ignore_interrupts()
    if not output.told("wake", result):
        output.line(_line(result))
    if (origin := result.provenance.forked_from) and (why := result.remote_problem):
        output.remark(
            f"[yellow]a fork[/] of {plain(origin.session)} at version {origin.version}, with"
            f" {format_plural(origin.tokens, 'token')}: {plain(why.message)}"
        )
    remark_on_wake(output, result)
    remark_on_look(output, result.session, result.look)


def _telling(output: Output, session: str, on_event: OnEvent) -> OnEvent:
    """Also say, once, that another machine is asked for the session."""
    from ...daemon.api.events import ProgressEvent

    asked = list[str | None]()

    def told(event: WorkEvent) -> None:
        if not isinstance(event, ProgressEvent) or event.stage != "handover":
            on_event(event)
        elif not asked:
            asked.append(event.machine)
            output.remark(
                f"[dim]asking[/] {plain(event.machine)} [dim]for[/] {plain(session)}[dim]: it comes once no request"
                f" uses it there, and that machine has sent it, in {format_seconds(event.total)} at most. Ctrl-C leaves"
                " it there.[/]"
            )

    return told


def _line(woken: WakeResult) -> str:
    tokens = format_plural(woken.token_count, "token")
    if woken.already_awake:
        return f"{plain(woken.session)}  was awake already, {tokens}"
    canary = "lossy" if woken.lossy and woken.canary == "same_bits" else woken.canary
    again = woken.provenance.recomputed
    if again and not again.same_logits:
        canary = "not_run"  # a part has other bits, as the remark says: two lines must not contradict each other
    fetched = f"{format_bytes(woken.bytes_fetched)} fetched, " if woken.bytes_fetched else ""
    came = f", from {plain(woken.came_from)} in {format_seconds(woken.waited_seconds)}" if woken.came_from else ""
    return (
        f"{plain(woken.session)}  awake at version {woken.version}{came}: {tokens},"
        f" {format_count(woken.tokens_prefilled)} of them prefilled, {fetched}{format_bytes(woken.bytes_read)} read"
        f" in {format_seconds(woken.seconds - woken.waited_seconds)}{_CANARY[canary]}"
    )
