"""What `torpor wake --plan` writes: what a wake would do, how long it would take, and on what that rests."""

from __future__ import annotations

from dataclasses import asdict

from ...daemon.api.waking import MeasuredRate, WakePlanResult
from ...memvid.units import format_bytes, format_count, format_plural
from .formatting import format_id, format_seconds
from .output import Output, plain
from .wake_remarks import describe_differing

FILES_SHOWN = 4
"""Files that are named; --json has more."""
_NOT_MEASURED = "not measured"
_RATES = {
    "restore_bytes_per_s": "state read and hashed",
    "trusting_restore_bytes_per_s": "state read without hashing",
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
    hashed = "read and hashed" if plan.verified else "read"
    return (
        f"{format_bytes(plan.bytes_to_read)} of {format_plural(plan.blocks, 'block')} {hashed},"
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
