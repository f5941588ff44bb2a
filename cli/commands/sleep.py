"""`torpor sleep` and `torpor save`: make sessions durable and show the receipts."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

from ...daemon.api.waking import SleepResult
from ...memvid.units import format_bytes, format_count, format_plural
from ..reach.batches import run_batch
from ..reach.daemon_link import connect, progress_of, waiting_for_remote
from ..reach.options import JsonOption, SessionsArgument, SocketOption, option
from ..view.formatting import format_id, format_seconds
from ..view.output import Output, plain

RemoteOption = Annotated[bool, option("--remote", "Wait until it is durable in the daemon's remote, too.")]


def sleep(
    sessions: SessionsArgument, remote: RemoteOption = False, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """The receipt is written once the state is durable: synced, read back and checked. From then on it survives a
    crash of the daemon and of the machine. Versions that the daemon has written by itself go then. Their numbers are
    not used again, so a first sleep may be version 2.

    With [cyan]--remote[/] a second receipt follows. If the remote fails, the first one stands, and the status says so.
    Ctrl-C ends the wait alone: the daemon sends the version behind.

    [bold]Examples[/]

    [cyan]torpor sleep notes[/]
    [cyan]torpor sleep notes review --json | jq -r '.results[].bundle_id'[/]
    [cyan]torpor sleep notes --remote[/]
    """
    return _keep("sleep", sessions, socket, remote=remote, as_json=as_json)


def save(
    sessions: SessionsArgument, remote: RemoteOption = False, socket: SocketOption = None, as_json: JsonOption = False
) -> int:
    """Writes the version that [cyan]torpor sleep[/] would write, with the same receipt. The next sleep writes only what
    is new since then. A session that sleeps stays asleep, and nothing is written.

    [bold]Examples[/]

    [cyan]torpor save notes[/]
    """
    return _keep("save", sessions, socket, remote=remote, as_json=as_json)


def _keep(verb: str, sessions: list[str], socket: Path | None, *, remote: bool, as_json: bool) -> int:
    output = Output(as_json=as_json)
    with connect(socket) as client:
        ask = {"sleep": client.sleep, "save": client.save}[verb]

        def act(session: str) -> SleepResult:
            waiting = waiting_for_remote(client, session) if remote else nullcontext()
            with waiting, progress_of(output, "sleep") as on_event:
                return ask(session, remote=remote, on_event=on_event)

        say = partial(_lines, saved=verb == "save")
        return run_batch(output, verb, sessions, act, say, lambda receipt: receipt.remote_problem)


def _lines(receipt: SleepResult, *, saved: bool) -> str:
    """One for each receipt."""
    line, there = _line(receipt, saved=saved), receipt.remote
    if there is None:
        return line
    return (
        f"{line}\n{plain(receipt.session)}  remote: durable in {plain(there.url)} as version {there.version}, "
        f"{format_bytes(there.bytes_sent)} sent in {format_seconds(there.seconds)}"
    )


def _line(receipt: SleepResult, *, saved: bool) -> str:
    bundle, held = plain(format_id(receipt.bundle_id)), format_plural(receipt.token_count, "token")
    name, version = plain(receipt.session), f"version {receipt.version}, bundle {bundle}: {held}"
    if receipt.blocks_new or receipt.bytes_written:
        return (
            f"{name}  {'saved' if saved else 'asleep'} as {version}, {format_bytes(receipt.bytes_written)} written"
            f" ({format_plural(receipt.blocks_new, 'block')} new, {receipt.blocks_reused} reused)"
            f" in {format_seconds(receipt.seconds)}"
        )
    if receipt.already_asleep:
        line = f"{name}  was asleep already as {version}"
    else:
        line = f"{name}  {'saved already' if saved else 'asleep again'} as {version}, nothing new to write"
    if receipt.looked_at is None:
        return line
    return f"{line}; the look at token {format_count(receipt.looked_at)} {'stays' if saved else 'is dropped'}"
