"""`torpor verify`: are the stored bytes still those that were written?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from ...memvid.answers import Finding
from ...memvid.errors import AmbiguousVersion
from ...memvid.folder.store_file import PACKS
from ...memvid.format.records import VerifyReport
from ...memvid.units import format_bytes, format_count, format_plural
from ..exit_codes import INTEGRITY, OK
from ..reach.options import JsonOption, OnlySessionArgument, SocketOption, StoreOption, option
from ..reach.store_view import choose_store, open_store
from ..view.damage import SessionDamage, VersionState, damage_by_session
from ..view.formatting import format_id, format_seconds
from ..view.output import Output, plain, render_problem, typed

SESSIONS_SHOWN = 20  # sessions that are not whole, on the screen; JSON has them all
LINES_SHOWN = 8  # lines of versions, and files to put back, of one of them
NAMED = 6  # versions that are alike and named one by one

DeepOption = Annotated[bool, option("--deep", "Read and hash every byte.")]


def verify(
    session: OnlySessionArgument = None,
    deep: DeepOption = False,
    store: StoreOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Of each session that is damaged it says which versions are whole, which are whole up to a token, what to put
    back, and how the session goes on without it. Reads the files of --store, of the running daemon's store, or of the
    default one. Changes nothing, repairs nothing, needs no daemon and disturbs none. Exit status 6 if anything is
    damaged or missing.

    [bold]Examples[/]

    [cyan]torpor verify[/]
    [cyan]torpor verify notes --deep[/]
    [cyan]torpor verify --deep --json | jq .sessions[/]
    """
    output = Output(as_json=as_json)
    path = choose_store(store, socket)
    started = time.perf_counter()
    with open_store(path) as opened, output.progress("verifying", unit="bytes") as on_progress:
        uri = opened.resolve(session) if session is not None else None
        report = opened.verify(uri, deep=deep, on_progress=on_progress)
        damaged = damage_by_session(opened, report)
    seconds = time.perf_counter() - started
    status = OK if report.ok else INTEGRITY
    if as_json:
        output.document("verify", _document(report, damaged) | {"store": str(path), "seconds": seconds})
        return status.number
    _write_files(output, report.findings)
    _write_sessions(output, damaged)
    checked = (
        f"{format_plural(report.bundles_checked, 'version')}, {format_plural(report.blocks_checked, 'block')},"
        f" {format_bytes(report.bytes_checked)} read in {format_seconds(seconds)}"
    )
    more = "" if deep else "; --deep reads every byte"
    verdict = "[green]sound[/] " if report.ok else f"[red]damaged[/]  {_harm(report, damaged)} Checked:"
    output.line(f"{verdict} {checked}{more}")
    return status.number


def _document(report: VerifyReport, damaged: Sequence[SessionDamage]) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "bundles_checked": report.bundles_checked,
        "blocks_checked": report.blocks_checked,
        "bytes_checked": report.bytes_checked,
        "findings": report.findings,
        "sessions": [asdict(each) for each in damaged],
    }


def _harm(report: VerifyReport, damaged: Sequence[SessionDamage]) -> str:
    """How much is not whole, in a sentence."""
    found = format_plural(len(report.findings), "finding")
    others = [finding for finding in report.findings if finding.code != AmbiguousVersion.code]
    if not damaged and any(finding.path.endswith(".mvm") for finding in others):
        return f"{found}: a version's manifest cannot be read, and nothing tells which one it is. All others are whole."
    if not damaged:
        return f"{found}, but every version is whole."
    of = format_plural(len(damaged), "session")
    not_whole = format_plural(len(report.damaged), "version")
    return f"{not_whole} of {of} {'is' if len(report.damaged) == 1 else 'are'} not whole."


def _write_files(output: Output, findings: Sequence[Finding]) -> None:
    """Write the findings of files; those of versions are told by session."""
    for finding in findings:
        if finding.version is None:
            output.line(render_problem(finding))


def _write_sessions(output: Output, damaged: Sequence[SessionDamage]) -> None:
    for each in damaged[:SESSIONS_SHOWN]:
        output.line("\n".join(render_damage(each)))
    if len(damaged) > SESSIONS_SHOWN:
        output.line(f"[dim]… and {format_plural(len(damaged) - SESSIONS_SHOWN, 'more session')} (--json has them)[/]")


def render_damage(damage: SessionDamage) -> list[str]:
    """Markup of a session that is not whole: its versions, what to put back, and how it goes on."""
    lines = [f"[bold]{plain(damage.session)}[/]"]
    times = Counter(each.version for each in damage.versions)
    for _, run in groupby(damage.versions, key=_likeness):
        lines.append(f"  {_state_of(list(run), times)}")
    lines = _cut(lines, LINES_SHOWN + 1)
    files = _cut([plain(each) for each in damage.put_back], LINES_SHOWN)
    lines.append(f"  [dim]put back[/]  {files[0]}")
    lines += [f"            {each}" for each in files[1:]]
    lines.append(f"            or let {typed('torpor repair --from FOLDER')} take it from a backup")
    if any(Path(each).parent.name == PACKS and Path(each).exists() for each in damage.put_back):
        lines.append(f"            {typed('torpor repair')} alone copies what is sound out of a damaged pack")
    lines.append(f"  [dim]goes on[/]   {plain(damage.goes_on)}")
    return lines


def _cut(lines: list[str], most: int) -> list[str]:
    """The first of many lines, and how many more there are."""
    more = len(lines) - most
    return (
        lines
        if more <= 0
        else [*lines[:most], f"            [dim]… and {format_count(more)} more (--json has them)[/]"]
    )


def _likeness(state: VersionState) -> tuple[bool, str, int]:
    """Versions that are alike in this are told in one line."""
    return state.is_whole, state.manifest, 0 if state.is_whole else state.whole_up_to


def _state_of(run: Sequence[VersionState], times: Mapping[int, int]) -> str:
    """times: how many versions have a number; where that is more than one, their ids are told."""
    first = run[0]
    numbers = [
        f"{each.version} ({plain(format_id(each.bundle_id))})" if times[each.version] > 1 else str(each.version)
        for each in run
    ]
    if len(run) == 1:
        name = f"version {numbers[0]}"
    elif len(run) <= NAMED:
        name = f"versions {', '.join(numbers[:-1])} and {numbers[-1]}"
    else:
        name = f"{format_count(len(run))} versions, {numbers[0]} to {numbers[-1]}"
    if first.is_whole:
        return f"{name}: [green]whole[/]"
    if first.manifest != "sound":
        return f"{name}: [red]manifest {first.manifest}[/]"
    of = f" of {format_count(first.token_count)}" if len(run) == 1 else ""
    return f"{name}: [red]whole up to token {format_count(first.whole_up_to)}{of}[/]"
