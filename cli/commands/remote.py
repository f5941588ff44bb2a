"""`torpor push`, `torpor pull` and `torpor ls --remote`: what the daemon's remote has, and where each session is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...daemon.api.remote import PullResult, PushResult, RemoteSession, RemoteSessionsResult
from ...memvid.units import format_bytes, format_plural
from ..reach.batches import run_batch
from ..reach.daemon_link import connect, waiting_for_remote
from ..reach.options import JsonOption, SessionsArgument, SocketOption
from ..view.formatting import format_id, format_seconds
from ..view.output import Output, plain, render_problem, rows_table, typed

_COLUMNS = ("SESSION", "WHERE", "MACHINE", "KEEPS", "HERE", "BUNDLE")
_PLACE_STYLES = {"held": "green", "asleep": "blue", "free": "default"}
_HERE_STYLES = {"ahead": "yellow", "diverged": "red"}
_LEGENDS = {
    "held": "held: only that machine may use it, as it is awake there, or on its way to the remote",
    "ahead": "ahead: the remote lacks what this store has; torpor push NAME sends it now",
    "behind": "behind: this store lacks what the remote has; torpor wake NAME brings it",
    "diverged": "diverged: it has gone on in both places; torpor fork NAME OTHER keeps what is here, and the remote "
    "keeps its own",
}


def push(sessions: SessionsArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """The daemon sends each version by itself, behind its sleep. This waits until the newest one is durable in the
    remote ([cyan]torpor serve --remote[/]), and writes the receipt. A session that is awake is saved first, and stays
    awake. What the remote has already is not sent again. Ctrl-C ends the wait alone: the daemon sends it behind.

    [bold]Examples[/]

    [cyan]torpor push notes[/]
    [cyan]torpor push notes review --json[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:

        def act(session: str) -> PushResult:
            with waiting_for_remote(client, session):
                return client.push(session)

        return run_batch(output, "push", sessions, act, _push_line)


def pull(sessions: SessionsArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Every block is proven before it counts. The session stays where it is: [cyan]torpor wake[/] takes it, and pulls
    by itself. A session that has gone on here by itself is left as it is, and so is the remote.

    [bold]Examples[/]

    [cyan]torpor pull notes[/]
    """
    output = Output(as_json=as_json)
    with connect(socket) as client:
        return run_batch(output, "pull", sessions, client.pull, _pull_line)


def list_remote(namespace: str | None, socket: Path | None, output: Output) -> None:
    """Show the sessions of the remote, and where each is."""
    with connect(socket) as client:
        result = client.remote(namespace=namespace)
    if output.told("ls", result):
        return
    output.remark(f"[dim]the sessions of[/] {plain(result.url)}{', [dim]sealed[/]' if result.sealed else ''}")
    for problem in result.problems:
        output.remark(render_problem(problem))
    if not result.sessions:
        output.remark("It has none yet. A session that sleeps goes there: " + typed("torpor sleep NAME"))
        return
    output.show(_table(result))
    for fact, legend in _LEGENDS.items():
        if any(fact in (each.place, each.here) for each in result.sessions):
            output.remark(f"[dim]{legend}[/]")


def _table(result: RemoteSessionsResult) -> Any:
    table = rows_table(*_COLUMNS, right=("KEEPS",), whole=("SESSION", "WHERE"), first_to_go=("BUNDLE", "KEEPS"))
    for each in result.sessions:
        table.add_row(
            plain(each.session.removeprefix("torpor://")),
            f"[{_PLACE_STYLES[each.place]}]{each.place}[/]",
            _machine(each),
            format_plural(each.versions, "version"),
            _here(each),
            plain(format_id(each.bundle_id)) if each.bundle_id else "–",
        )
    return table


def _machine(each: RemoteSession) -> str:
    return "this one" if each.ours else plain(each.machine or "–")


def _here(each: RemoteSession) -> str:
    style = _HERE_STYLES.get(each.here, "default")
    return "–" if each.here == "absent" else f"[{style}]{each.here}[/]"


def _push_line(pushed: PushResult) -> str:
    place, blocks = plain(pushed.url), f"{format_plural(pushed.blocks_sent, 'block')} of {pushed.blocks}"
    return _line(pushed, pushed.bytes_sent, f"is in {place} already", f"durable in {place}", f"sent ({blocks})")


def _pull_line(pulled: PullResult) -> str:
    was_there = "has gone on here, and is left as it is" if pulled.ahead else "is here already"
    return _line(pulled, pulled.bytes_written, was_there, f"came from {plain(pulled.url)}", "written")


def _line(moved: PushResult | PullResult, size_bytes: int, was_there: str, came: str, how: str) -> str:
    what = f"version {moved.version}, bundle {plain(format_id(moved.bundle_id))}"
    if not size_bytes:
        return f"{plain(moved.session)}  {was_there}: {what}"
    seconds = format_seconds(moved.seconds)
    return f"{plain(moved.session)}  {came}: {what}, {format_bytes(size_bytes)} {how} in {seconds}"
