"""`torpor sleep`: put sessions to sleep and show the receipts."""

from __future__ import annotations

from ...daemon.api.waking import SleepResult
from ...memvid.units import format_bytes, format_count, format_plural
from ..reach.batches import run_batch
from ..reach.daemon_link import connect, progress_of
from ..reach.options import JsonOption, SessionsArgument, SocketOption
from ..view.formatting import format_id, format_seconds
from ..view.output import Output, plain


def sleep(sessions: SessionsArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """The receipt is written once the state is durable: synced, read back and checked. From then on it survives a
    crash of the daemon and of the machine.

    [bold]Examples[/]

    [cyan]torpor sleep notes[/]
    [cyan]torpor sleep notes review --json | jq -r '.results[].bundle_id'[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:

        def act(session: str) -> SleepResult:
            with progress_of(output, "sleep") as on_event:
                return client.sleep(session, on_event=on_event)

        return run_batch(output, "sleep", sessions, act, _line)


def _line(receipt: SleepResult) -> str:
    held = format_plural(receipt.token_count, "token")
    if not receipt.blocks_new and not receipt.bytes_written:
        bundle = plain(format_id(receipt.bundle_id))
        how = "was asleep already" if receipt.already_asleep else "asleep again"
        line = f"{plain(receipt.session)}  {how} as version {receipt.version}, bundle {bundle}: {held}"
        line += "" if receipt.already_asleep else ", nothing new to write"
        looked_at = receipt.looked_at
        return line + (f"; the look at token {format_count(looked_at)} is dropped" if looked_at is not None else "")
    return (
        f"{plain(receipt.session)}  asleep as version {receipt.version}, bundle {plain(format_id(receipt.bundle_id))}:"
        f" {held}, {format_bytes(receipt.bytes_written)} written"
        f" ({format_plural(receipt.blocks_new, 'block')} new, {receipt.blocks_reused} reused)"
        f" in {format_seconds(receipt.seconds)}"
    )
