"""`torpor sleep`: put sessions to sleep and show the receipts."""

from __future__ import annotations

from ..socket_api.results import SleepResult
from .batches import run_batch
from .daemon_link import connect, progress_of
from .formatting import format_bytes, format_count, format_id, format_seconds
from .options import JsonOption, SessionsArgument, SocketOption
from .output import Output


def sleep(sessions: SessionsArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Put sessions to sleep: their state goes to disk and their memory is freed.

    The receipt is written once the state is durable: synced, read back and checked. From then on it survives a
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
    return (
        f"{receipt.session}  asleep as version {receipt.version}, bundle {format_id(receipt.bundle_id)}:"
        f" {format_count(receipt.token_count)} tokens, {format_bytes(receipt.bytes_written)} written"
        f" ({receipt.blocks_new} blocks new, {receipt.blocks_reused} reused) in {format_seconds(receipt.seconds)}"
    )
