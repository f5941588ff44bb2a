"""What a person must hear of a wake, whichever command it was made by: in what the session is not as it was."""

from __future__ import annotations

from collections.abc import Sequence

from ...daemon.api.session import Look, Lossy
from ...daemon.api.waking import PartDiffers, WakeResult
from ...memvid.units import format_count, format_plural
from .output import Output, plain


def remark_on_wake(output: Output, woken: WakeResult) -> None:
    """Say it if the state is only what a repair saved, is lossy, or was computed by something else than what computes
    now."""
    if woken.salvaged:
        told = describe_salvaged(woken.salvaged.tokens, woken.salvaged.of)
        output.remark(f"[yellow]saved by a repair[/]: {told}")
    if woken.recomputed:
        again = woken.recomputed
        bits = "to the bit what it was" if again.same_logits else "not to the bit what it was"
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
    """Say it if a session is awake before its end, and how to come back."""
    if look is not None:
        name = plain(session.removeprefix("torpor://").removeprefix("default/"))
        output.remark(
            f"[yellow]a look[/] at {_described(look.version, look.token_count)}: {_newest_of(look)} stays the newest,"
            f" unless something is read or written here. To have it: [cyan]torpor sleep {name}[/], then"
            f" [cyan]torpor wake {name}[/]"
        )


def remark_on_branch(output: Output, session: str, look: Look | None) -> None:
    """Say it if history branches here, and how to come back."""
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
    """The same for a wake that was not asked for by itself, and say it if the model had to compute for it,
    or if what was read was taken for what was written."""
    if woken is None:
        return
    if woken.tokens_prefilled:
        tokens = format_plural(woken.tokens_prefilled, "token")
        were = "was" if woken.tokens_prefilled == 1 else "were"
        output.remark(f"[yellow]read again[/]: {tokens} that {were} not restored, to wake {plain(woken.session)}")
    if not woken.verified:
        output.remark("[yellow]trusted[/]: what was read was not hashed, as the daemon was told (serve --trusting)")
    remark_on_wake(output, woken)


def describe_salvaged(tokens: int, of: int | None) -> str:
    """Say in one line what a repair saved of a session, and what would bring back the rest."""
    first = f"the first {format_plural(tokens, 'token')}"
    saved = f"{format_count(tokens)} of {format_plural(of, 'token')}" if of else first
    return f"{saved}; which file would bring back the rest, [cyan]torpor verify[/] says"


def describe_loss(lossy: Lossy) -> str:
    """Say in one line what a session has lost."""
    tokens = format_plural(lossy.tokens, "token")
    return f"keys and values of the first {tokens} were kept in {lossy.bits} bits; what was read since rests on those"


def describe_differing(differs: Sequence[PartDiffers]) -> str:
    """Say in one line what is other than when a session slept; what its snapshot does not tell is unknown."""
    return ", ".join(f"{each.field} {each.stored or 'unknown'} → {each.live or 'none'}" for each in differs)
