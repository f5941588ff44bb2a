"""Remarks on a wake, for every command: how the session is not as it was. And the plan of a wake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...daemon.api.session import Look, Recomputed
from ...memvid.answers import Finding, Lossy, PartDiffers
from ...memvid.units import format_bytes, format_count, format_plural
from .formatting import format_name
from .output import Output, plain

if TYPE_CHECKING:
    from ...daemon.api.waking import WakePlanResult, WakeResult


def remark_on_wake(output: Output, woken: WakeResult) -> None:
    """Say if the state was recomputed or is lossy, if something else computed it, or if there may be a newer one."""
    again, differs = woken.provenance.recomputed, woken.provenance.differs
    if again:
        output.remark(f"[yellow]{'healed' if again.damaged else 'recomputed'}[/]: {describe_recomputed(again)}")
    if woken.lossy:
        output.remark(f"[yellow]lossy[/]: {describe_loss(woken.lossy)}")
    if differs:
        output.remark(f"[yellow]differs since it slept[/]: {plain(describe_differing(differs))}")
    _remark_on_unreadable(output, woken.unreadable)


def _remark_on_unreadable(output: Output, unreadable: Sequence[Finding]) -> None:
    if unreadable:
        others = len(unreadable) - 1
        more = f" Likewise {format_plural(others, 'more manifest')}: torpor ls names all." if others else ""
        output.remark(f"[yellow]there may be a newer version[/]: {plain(unreadable[0].message)}{more}")


def remark_on_look(output: Output, session: str, look: Look | None) -> None:
    """Say if a session is awake before its end, and how to come back."""
    if look is not None:
        name = plain(format_name(session, bare=True))
        output.remark(
            f"[yellow]a look[/] at {_described(look.version, look.token_count)}: {_newest_of(look)} stays the newest,"
            f" unless something is read or written here. To go back to it: [cyan]torpor sleep {name}[/], then"
            f" [cyan]torpor wake {name}[/]"
        )


def remark_on_branch(output: Output, session: str, look: Look | None) -> None:
    """Say if history branches here, and how to come back."""
    if look is None:
        return
    name = plain(format_name(session, bare=True))
    back = f"{name}@{look.newest_version}"
    output.remark(
        f"[yellow]history branches here[/]: {plain(session)} goes on from {_described(look.version, look.token_count)}."
        f" {_newest_of(look).capitalize()} stays as it is; to come back to it:"
        f" [cyan]torpor sleep {name}[/], then [cyan]torpor wake {back}[/]; or [cyan]torpor fork {back} NAME[/]"
    )


def _described(version: int, tokens: int) -> str:
    return f"version {version}, token {format_count(tokens)}"


def _newest_of(look: Look) -> str:
    return f"version {look.newest_version}, with {format_plural(look.newest_tokens, 'token')},"


def remark_on_wake_in_passing(output: Output, woken: WakeResult | None) -> None:
    """As `remark_on_wake`, for a wake by another request. Also say if other tokens were computed."""
    if woken is None:
        return
    again = woken.provenance.recomputed
    read = woken.tokens_prefilled - (again.tokens if again else 0)
    if read > 0:
        tokens = f"{format_plural(read, 'token')} of {plain(woken.session)}"
        output.remark(f"[yellow]recomputed[/]: {tokens}, of which only the text was kept")
    remark_on_wake(output, woken)


def describe_loss(lossy: Lossy) -> str:
    """Say what a session has lost."""
    tokens = format_plural(lossy.tokens, "token")
    return f"keys and values of the first {tokens} were kept in {lossy.bits} bits; later tokens rest on those"


def describe_recomputed(part: Recomputed) -> str:
    """Say what was computed again, and whether it came out the same."""
    bits = "the same to the bit" if part.same_logits else "not the same to the bit"
    return (
        f"{format_plural(part.tokens, 'token')} from token {format_count(part.start)} of version {part.version} were"
        f" {'damaged on the disk and ' if part.damaged else ''}computed again; what follows from them is {bits}"
    )


def describe_differing(differs: Sequence[PartDiffers]) -> str:
    """List the differences since a session slept; a fact that its snapshot lacks is unknown."""
    return ", ".join(f"{each.field} {each.stored or 'unknown'} → {each.live or 'none'}" for each in differs)


def write_plan(output: Output, plan: WakePlanResult) -> None:
    """Write a plan, as lines or as one document."""
    if output.told("wake", plan, plan=True):
        return
    tokens = format_plural(plan.token_count, "token")
    if plan.already_awake:
        output.line(f"{plain(plan.session)}  awake already, {tokens}: a wake does nothing")
        return
    output.line(f"{plain(plan.session)}  a plan to wake version {plan.version}, {tokens}; nothing was done")
    if plan.is_fetched:
        output.line("  read    its keys and values, which the remote has: they come back from there first")
    else:
        output.line(f"  read    {format_bytes(plan.bytes_to_read)} of {format_plural(plan.blocks, 'block')}")
    output.line(f"  tokens  {format_count(plan.restored_tokens)} restored, {_computed(plan)}")
    output.line(f"  memory  {format_bytes(plan.memory_bytes)}{'' if plan.model_loaded else _TO_LOAD}")
    if plan.differs:
        output.remark(f"[yellow]differs since it slept[/]: {plain(describe_differing(plan.differs))}")
    _remark_on_unreadable(output, plan.unreadable)


_TO_LOAD = ", beside the model, which is not loaded: it would be first"


def _computed(plan: WakePlanResult) -> str:
    why = ": no keys and values of it are stored" if not plan.blocks and not plan.is_fetched else ""
    return f"{format_count(plan.computed_tokens)} computed{why}"
