"""`torpor verify`: are the stored bytes still those that were written?"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from ..memvid.records import VerifyReport
from .exit_codes import INTEGRITY, OK
from .formatting import format_bytes, format_count, format_seconds
from .options import JsonOption, SocketOption, StoreOption
from .output import Output, neutralise, rows_table
from .store_view import choose_store, load_uri, open_store

VerifiedArgument = Annotated[
    str | None, typer.Argument(metavar="SESSION", show_default=False, help="Only this session; otherwise all.")
]
DeepOption = Annotated[bool, typer.Option("--deep", help="Read and hash every byte.", show_default=False)]


def verify(
    session: VerifiedArgument = None,
    deep: DeepOption = False,
    store: StoreOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Check a store: structure and references, and with --deep every byte against its digest.

    Reads the files of --store, of the running daemon's store, or of the default one. Changes nothing, repairs
    nothing, needs no daemon and disturbs none. Exit status 6 if anything is not what it was promised to be.

    [bold]Examples[/]

    [cyan]torpor verify[/]
    [cyan]torpor verify notes --deep[/]
    [cyan]torpor verify --deep --json | jq .findings[/]
    """
    output = Output(as_json=as_json)
    path = choose_store(store, socket)
    started = time.perf_counter()
    with open_store(path) as opened, output.progress("verifying") as on_progress:
        uri = load_uri(opened, session) if session is not None else None
        report = opened.verify(uri, deep=deep, on_progress=on_progress)
    return _finish(output, report, str(path), deep=deep, seconds=time.perf_counter() - started)


def _finish(output: Output, report: VerifyReport, path: str, *, deep: bool, seconds: float) -> int:
    status = OK if report.ok else INTEGRITY
    if output.as_json:
        body = {"store": path, "ok": report.ok, "seconds": seconds, **asdict(report)}
        output.document("verify", body)
        return status.number
    table = rows_table("CODE", "FILE", "WHAT IS WRONG")
    for finding in report.findings:
        table.add_row(f"[red]{finding.code}[/]", escape(neutralise(finding.path)), escape(neutralise(finding.message)))
    if report.findings:
        output.stdout.print(table)
    checked = (
        f"{format_count(report.bundles_checked)} bundles, {format_count(report.blocks_checked)} blocks,"
        f" {format_bytes(report.bytes_checked)} in {format_seconds(seconds)}"
    )
    if report.ok:
        output.line(f"[green]sound[/]  {checked}" + ("" if deep else "; --deep reads every byte"))
    else:
        count = len(report.findings)
        output.line(f"[red]damaged[/]  {count} finding{'s' if count != 1 else ''} in {checked}")
    return status.number
