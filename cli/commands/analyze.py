"""`torpor analyze`: figures of the keys and values of one version, head by head."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ...daemon.api.store import AnalysisResult
from ...memvid.units import format_count, format_plural
from ..reach.artifacts import ArtifactFile, KindOption, LabelOption, OverwriteOption, require_file
from ..reach.daemon_link import connect, progress_of
from ..reach.options import JsonOption, SocketOption, VersionArgument, option
from ..view.formatting import format_id
from ..view.output import Output, facts_table, plain, rows_table
from ..view.table import PlainTable

WIDE_COLUMNS = 100  # a terminal this wide is shown all columns
_LEFT_OUT_IF_NARROW = ("SHAPE", "DRIFT")
HEADS_NAMED = 3  # heads with outliers that a cell names
NONE = "–"

OutOption = Annotated[str | None, option("--out FILE", "Write the whole document, as JSON, to this file.")]


def analyze(
    version: VersionArgument,
    out: OutOption = None,
    kind: KindOption = None,
    label: LabelOption = None,
    overwrite: OverwriteOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The table shows means over the heads of each array; --json and --out have every head. Only what is stored is
    read: of an awake session the last version, without what it has read since.

    [bold]Examples[/]

    [cyan]torpor analyze notes[/]
    [cyan]torpor analyze notes@before-refactor --out notes.json --label probe[/]
    [cyan]torpor analyze notes --json | jq '.artifact.layers[0].arrays[0].rms'[/]
    """
    output = Output(as_json=as_json)
    if out is not None:
        require_file(out, "analyze --out")
    with connect(socket) as client:
        file = ArtifactFile(out, Path(client.status().store), replacing=overwrite) if out is not None else None
        with progress_of(output, "analyze") as on_event:
            result = client.analyze(version, kind=kind, labels=label or None, on_event=on_event)
    if file is not None:
        file.write(result.artifact.encode())
    document = json.loads(result.artifact)
    if as_json:
        body = {name: value for name, value in asdict(result).items() if name != "artifact"}
        output.document("analyze", {**body, "path": file.path if file else None, "artifact": document})
        return
    output.show(*render_analysis(document, output.stdout.width))
    if file is not None:
        output.remark(f"written to {plain(file.path)}")
    _remark_awake(output, result)


def _remark_awake(output: Output, result: AnalysisResult) -> None:
    if result.awake_tokens is not None:
        output.remark(
            f"[dim]{plain(result.session)} is awake with {format_plural(result.awake_tokens, 'token')}; this is version"
            f" {result.version}, with {format_plural(result.token_count, 'token')}[/]"
        )


def render_analysis(document: dict[str, Any], width: int) -> Iterator[str | PlainTable]:
    """A document, part by part. width: of the terminal, in columns."""
    yield from (f"[bold]{plain(document['session'])}[/]", _facts(document), "")
    yield from (_rows(document, narrow=width < WIDE_COLUMNS), "")
    yield from (f"[dim]  {plain(note)}[/]" for note in _notes(document))


def _facts(document: dict[str, Any]) -> PlainTable:
    facts = facts_table()
    facts.add_row("  version", f"{document['version']}  (bundle {plain(format_id(document['bundle_id']))})")
    facts.add_row("  model", plain(document["model"]))
    facts.add_row("  tokens", format_count(document["token_count"]))
    facts.add_row("  kind", plain(document["kind"]))
    facts.add_row("  labels", plain(" ".join(document["labels"])))
    return facts


def _rows(document: dict[str, Any], *, narrow: bool) -> PlainTable:
    names = ("ARRAY", "SHAPE", "RMS", "MAX", "NEXT", "MEAN", "RANK", "DRIFT", "OUTLIERS")
    shown = [name for name in names if not (narrow and name in _LEFT_OUT_IF_NARROW)]
    right = tuple(name for name in shown if name not in ("ARRAY", "SHAPE", "OUTLIERS"))
    columns = [f"  {name}" if name == "ARRAY" else name for name in shown]
    table = rows_table(*columns, right=right, whole=tuple(columns[:-1]))
    drifts = {(each["path"], each["name"]): each["relative_l2"] for each in document["drift"]["arrays"]}
    for layer in document["layers"]:
        for array in layer["arrays"]:
            cells = _cells(array) | {
                "ARRAY": f"  {plain(layer['path'])}.{plain(array['name'])}",
                "DRIFT": _figure(drifts.get((layer["path"], array["name"]))),
            }
            table.add_row(*(cells.get(name, NONE) for name in shown))
    return table


def _cells(array: dict[str, Any]) -> dict[str, str]:
    if array["why"] is not None:
        return {"SHAPE": plain("x".join(map(str, array["shape"])))}
    outliers = array["outliers"]
    if "coherence" not in array:
        return {
            "SHAPE": "x".join(map(str, array["shape"])),
            "RMS": _figure(array["rms"]),
            "MAX": _figure(array["max_abs"]),
            "OUTLIERS": _outliers({name: [value] for name, value in outliers.items()}, named=False),
        }
    return {
        "SHAPE": f"{array['heads']}x{array['tokens']}x{array['dim']}",
        "RMS": _figure(_mean(array["rms"]["mean"])),
        "MAX": _peak(array["rms"]),
        "NEXT": _figure(_mean(array["coherence"]["consecutive"])),
        "MEAN": _figure(_mean(array["coherence"]["with_mean"])),
        "RANK": _figure(_mean(array["spectrum"]["effective_rank"])),
        "OUTLIERS": _outliers(outliers),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    told = [value for value in values if value is not None]
    return sum(told) / len(told) if told else None


def _figure(value: float | None) -> str:
    return NONE if value is None else f"{value:#.3g}".rstrip(".")


def _peak(rms: dict[str, Any]) -> str:
    """The largest norm of all heads, and its token."""
    peaks = [(value, -at) for value, at in zip(rms["max"], rms["max_at"], strict=True) if value is not None]
    if not peaks:
        return NONE
    value, at = max(peaks)
    return f"{_figure(value)} @{-at}"


def _outliers(outliers: dict[str, Any], *, named: bool = True) -> str:
    """The share of outliers, and the heads with most of them, each with its channel."""
    share = _mean(outliers["share"])
    if share is None:
        return NONE
    heads = [(count, -head) for head, count in enumerate(outliers["count"]) if count]
    if not heads:
        return "none"
    if not named:
        return f"{share:.2%}"
    most = [f"h{-head}:c{outliers['channel'][-head]}" for _, head in sorted(heads, reverse=True)[:HEADS_NAMED]]
    more = f" +{len(heads) - HEADS_NAMED}" if len(heads) > HEADS_NAMED else ""
    return f"{share:.2%} {' '.join(most)}{more}"


def _notes(document: dict[str, Any]) -> Iterator[str]:
    yield "NEXT, MEAN: cosine with the next token, and with the mean of the head"
    yield "RANK: effective rank; OUTLIERS: share beyond 6 sigma, heads with most"
    for layer in document["layers"]:
        if layer["why"] is not None:
            yield f"{layer['path']}: {layer['why']}"
        for array in layer["arrays"]:
            if array["why"] is not None:
                yield f"{layer['path']}.{array['name']}: {array['why']}"
    yield _drift_note(document["drift"])


def _drift_note(drift: dict[str, Any]) -> str:
    if drift["why"] is not None:
        return f"no drift: {drift['why']}"
    blocks, parent = drift["blocks"], drift["parent"]
    text = (
        f"drift from version {parent['version']}: {format_plural(drift['common_tokens'], 'token')} in common,"
        f" {blocks['same']} of {format_plural(blocks['common'], 'block')} the same"
    )
    told = [each for each in drift["arrays"] if each["relative_l2"]]
    if told:
        most = max(told, key=lambda each: each["relative_l2"])
        text += f"; the largest in {most['path']}.{most['name']}, {most['relative_l2']:.3g} of its length"
    return text
