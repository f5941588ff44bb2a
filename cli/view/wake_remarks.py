"""Remarks on a wake, for every command: how the session is not as it was. And the plan of a wake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ...daemon.api.session import Look, Lossy
from ...daemon.api.waking import MeasuredRate, PartDiffers, WakePlanResult, WakeResult
from ...memvid.units import format_bytes, format_count, format_plural
from .formatting import format_id, format_seconds
from .output import Output, plain


def remark_on_wake(output: Output, woken: WakeResult) -> None:
    """Say if the state was salvaged, recomputed or lossy, or if something else computed it."""
    if woken.salvaged:
        told = describe_salvaged(woken.salvaged.tokens, woken.salvaged.of)
        output.remark(f"[yellow]saved by a repair[/]: {told}")
    if woken.recomputed:
        again = woken.recomputed
        bits = "the same to the bit" if again.same_logits else "not the same to the bit"
        what, why = ("healed", "damaged on the disk and ") if again.damaged else ("recomputed", "")
        output.remark(
            f"[yellow]{what}[/]: {format_plural(again.tokens, 'token')} from token {format_count(again.start)} of"
            f" version {again.version} were {why}computed again; what follows from them is {bits}"
        )
    if woken.lossy:
        output.remark(f"[yellow]lossy[/]: {describe_loss(woken.lossy)}")
    if woken.differs:
        output.remark(f"[yellow]differs since it slept[/]: {plain(describe_differing(woken.differs))}")


def remark_on_look(output: Output, session: str, look: Look | None) -> None:
    """Say if a session is awake before its end, and how to come back."""
    if look is not None:
        name = plain(session.removeprefix("torpor://").removeprefix("default/"))
        output.remark(
            f"[yellow]a look[/] at {_described(look.version, look.token_count)}: {_newest_of(look)} stays the newest,"
            f" unless something is read or written here. To have it: [cyan]torpor sleep {name}[/], then"
            f" [cyan]torpor wake {name}[/]"
        )


def remark_on_branch(output: Output, session: str, look: Look | None) -> None:
    """Say if history branches here, and how to come back."""
    if look is None:
        return
    name = plain(session.removeprefix("torpor://").removeprefix("default/"))
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
    read = woken.tokens_prefilled - (woken.recomputed.tokens if woken.recomputed else 0)
    if read > 0:
        tokens, were = format_plural(read, "token"), "was" if read == 1 else "were"
        output.remark(f"[yellow]read again[/]: {tokens} that {were} not restored, to wake {plain(woken.session)}")
    remark_on_wake(output, woken)


def describe_salvaged(tokens: int, of: int | None) -> str:
    """Say what a repair saved of a session, and where to find the file that brings back the rest."""
    first = f"the first {format_plural(tokens, 'token')}"
    saved = f"{format_count(tokens)} of {format_plural(of, 'token')}" if of else first
    return f"{saved}; [cyan]torpor verify[/] names the file that would bring back the rest"


def describe_loss(lossy: Lossy) -> str:
    """Say what a session has lost."""
    tokens = format_plural(lossy.tokens, "token")
    return f"keys and values of the first {tokens} were kept in {lossy.bits} bits; later tokens rest on those"


def describe_differing(differs: Sequence[PartDiffers]) -> str:
    """List the differences since a session slept; a fact that its snapshot lacks is unknown."""
    return ", ".join(f"{each.field} {each.stored or 'unknown'} → {each.live or 'none'}" for each in differs)


FILES_SHOWN = 4
"""Files named on the screen; --json has more."""
_NOT_MEASURED = "not measured"
_RATES = {
    "restore_bytes_per_s": "state read and hashed",
    "fixed_seconds": "all else of a wake",
    "prefill_tokens_per_s": "tokens read in chunks",
    "decode_tokens_per_s": "tokens one by one",
}


def write_plan(output: Output, plan: WakePlanResult) -> None:
    """Write a plan, as lines or as one document."""
    if output.as_json:
        output.document("wake", {"plan": True, **asdict(plan)})
        return
    tokens = format_plural(plan.token_count, "token")
    if plan.already_awake:
        output.line(f"{plain(plan.session)}  awake already, {tokens}: a wake does nothing")
        return
    output.line(f"{plain(plan.session)}  a plan to wake version {plan.version}, {tokens}; nothing was done")
    output.line(f"  restore    {_took(plan.restore_seconds)}: {_restoring(plan)}")
    output.line(f"  recompute  {_took(plan.recompute_seconds)}: {tokens} computed from the ledger")
    output.line(f"  chosen     [bold]{plan.way}[/]: {plain(plan.reason)}")
    output.line(f"  files      {_files(plan)}")
    output.line(f"  memory     {format_bytes(plan.memory_bytes)}{'' if plan.model_loaded else _TO_LOAD}")
    for rate in plan.rates:
        output.line(f"  measured   {_RATES.get(rate.name, plain(rate.name))}: {_rate(rate)}")
    if plan.differs:
        output.remark(f"[yellow]differs since it slept[/]: {plain(describe_differing(plan.differs))}")


_TO_LOAD = ", beside the model, which is not loaded: it would be first, and that is in none of the times"


def _restoring(plan: WakePlanResult) -> str:
    return (
        f"{format_bytes(plan.bytes_to_read)} of {format_plural(plan.blocks, 'block')} read and hashed,"
        f" {format_plural(plan.restored_tokens, 'token')} restored, {format_count(plan.computed_tokens)} computed"
    )


def _files(plan: WakePlanResult) -> str:
    shown = [f"{format_id(each.bundle_id)} ({format_bytes(each.bytes_to_read)})" for each in plan.files[:FILES_SHOWN]]
    left = len(plan.files) - len(shown) + plan.files_left_out
    return ", ".join(shown) + (f", and {left} more" if left else "")


def _took(seconds: float | None) -> str:
    return _NOT_MEASURED if seconds is None else format_seconds(seconds)


def _rate(rate: MeasuredRate) -> str:
    if rate.value is None:
        return _NOT_MEASURED
    if rate.name.endswith("_seconds"):
        value = format_seconds(rate.value)
    elif rate.name.endswith("bytes_per_s"):
        value = f"{format_bytes(int(rate.value))}/s"
    else:
        value = f"{rate.value:,.0f}/s"
    return f"{value} ({format_plural(rate.samples, 'sample')})"
