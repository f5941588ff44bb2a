"""`torpor verify`: are the stored bytes still those that were written?"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from rich.console import RenderableType
from rich.text import Text

from ...memvid.format.records import VerifyReport
from ...memvid.units import format_bytes, format_plural
from ..exit_codes import INTEGRITY, OK
from ..reach.options import JsonOption, OnlySessionArgument, SocketOption, StoreOption, option
from ..reach.store_view import choose_store, open_store
from ..view.damage import OF_NO_VERSION, explain_findings
from ..view.formatting import format_seconds
from ..view.output import Output, plain

VERSIONS_SHOWN = 8  # affected versions of a finding on the screen; JSON has them all
REMEDIES_SHOWN = 3
_NAMES_A_BUNDLE = re.compile(r"/[0-9a-f]{64}\.mv[br]\b", re.ASCII)

DeepOption = Annotated[bool, option("--deep", "Read and hash every byte.")]


def verify(
    session: OnlySessionArgument = None,
    deep: DeepOption = False,
    store: StoreOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Reads the files of --store, of the running daemon's store, or of the default one. Changes nothing, repairs
    nothing, needs no daemon and disturbs none. Exit status 6 if anything is damaged or missing.

    [bold]Examples[/]

    [cyan]torpor verify[/]
    [cyan]torpor verify notes --deep[/]
    [cyan]torpor verify --deep --json | jq .findings[/]
    """
    output = Output(as_json=as_json)
    path = choose_store(store, socket)
    started = time.perf_counter()
    with open_store(path) as opened, output.progress("verifying", unit="bytes") as on_progress:
        uri = opened.resolve(session) if session is not None else None
        report = opened.verify(uri, deep=deep, on_progress=on_progress)
        findings = explain_findings(opened, report.findings)
    return _finish(output, report, findings, str(path), deep=deep, seconds=time.perf_counter() - started)


def _finish(
    output: Output, report: VerifyReport, findings: list[dict[str, Any]], path: str, *, deep: bool, seconds: float
) -> int:
    status = OK if report.ok else INTEGRITY
    if output.as_json:
        body = {"store": path, "ok": report.ok, "seconds": seconds, **asdict(report), "findings": findings}
        output.document("verify", body)
        return status.number
    for finding in together(findings):
        output.stdout.print(render_finding(finding), soft_wrap=True)
    checked = (
        f"{format_plural(report.bundles_checked, 'bundle')}, {format_plural(report.blocks_checked, 'block')},"
        f" {format_bytes(report.bytes_checked)} read in {format_seconds(seconds)}"
    )
    if report.ok:
        output.line(f"[green]sound[/]  {checked}" + ("" if deep else "; --deep reads every byte"))
    else:
        output.line(f"[red]damaged[/]  {format_plural(len(findings), 'finding')} in {checked}")
    return status.number


def together(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge findings whose message names the same bundle: one has the versions and remedies of all, and the count of
    further files (`more_files`)."""
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for finding in findings:
        own = "" if _NAMES_A_BUNDLE.search(finding["message"]) else finding["path"]
        new = {**finding, "versions": [], "remedies": [], "more_files": -1}
        one = merged.setdefault((finding["code"], finding["message"], own), new)
        one["more_files"] += 1
        one["versions"] += [version for version in finding["versions"] if version not in one["versions"]]
        one["remedies"] += [remedy for remedy in finding["remedies"] if remedy not in one["remedies"]]
    return list(merged.values())


def render_finding(finding: Mapping[str, Any]) -> RenderableType:
    """Draw one finding: the fault and its file, in whole lines, then the affected versions and the remedies."""
    versions = [f"{plain(one['session'])} version {one['version']}" for one in finding["versions"]]
    more = _more(finding.get("more_files", 0), "file")
    lines = [f"[red]{plain(finding['code'])}[/]  {plain(finding['path'])}{more}", f"  {plain(finding['message'])}"]
    if finding["bundle"] and finding["code"] not in OF_NO_VERSION:
        affected = ", ".join(versions[:VERSIONS_SHOWN]) + _more(len(versions) - VERSIONS_SHOWN, "version")
        lines.append(f"  [dim]affected:[/] {affected or 'no version that the index knows'}")
    remedies = [plain(remedy) for remedy in finding["remedies"]]
    if remedies:
        text = "\n          ".join(remedies[:REMEDIES_SHOWN])
        lines.append(f"  [dim]remedy:[/] {text}{_more(len(remedies) - REMEDIES_SHOWN, 'session')}")
    return Text.from_markup("\n".join(lines), emoji=False)


def _more(count: int, what: str) -> str:
    return f" [dim]… and {format_plural(count, f'more {what}')} (--json has them)[/]" if count > 0 else ""
