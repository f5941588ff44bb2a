"""`torpor show`: everything about one session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ...daemon.api.session import Recomputed
from ...errors import TorporError
from ...memvid.answers import PartDiffers
from ...memvid.disk.location import default_store_path
from ...memvid.errors import SessionNotFound
from ...memvid.folder.versions import describe_versions
from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import DEFAULT_NAMESPACE, VERSION_MARK, names_version, parse_version_reference
from ..exit_codes import INTEGRITY, exit_status_of
from ..reach.daemon_link import find_daemon, find_ended_daemon
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument
from ..reach.store_view import STORED, find_marks_problem, find_missing, load_detail, open_store
from ..view.damage import add_suggestion
from ..view.formatting import format_id, format_marks, format_sampling, format_time
from ..view.output import Output, facts_table, neutralise, plain, render_problem, rows_table, typed
from ..view.wake_remarks import describe_differing, describe_recomputed

WIDE_COLUMNS = 100  # a narrower terminal is shown short ids
_FIGURES = ("BUNDLE", "PARENT", "TOKENS", "WRITTEN", "LOGICAL", "MADE")
_FIRST_TO_GO = ("PARENT", "LOGICAL", "BUNDLE")
_DEFAULT = f"torpor://{DEFAULT_NAMESPACE}/"
LINES_SHOWN = 6  # lines of a layer list on the screen; JSON has them all


def show(
    session: VersionArgument, socket: SocketOption = None, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Asks the daemon if one runs. With no daemon, or with --store, it reads the store's files, which tell everything
    but the text, which [cyan]torpor cat[/] writes. An earlier version is always shown from the files.

    [bold]Examples[/]

    [cyan]torpor show notes[/]
    [cyan]torpor show notes@before-refactor[/]
    [cyan]torpor show torpor://default/notes --json | jq .versions[/]
    """
    output = Output(as_json=as_json)
    source, place, detail = _load(session, socket, store)
    ended = find_ended_daemon() if source == "store" and store is None and socket is None else None
    missing = find_missing(place, detail["info"]["session"])
    problems = [problem for problem in (ended, find_marks_problem(place), *missing) if problem]
    if as_json:
        output.document("show", {"source": source, **detail, "problems": list(map(asdict, problems))})
        return
    output.show(render_detail(detail, output.stdout.width, earlier=names_version(session)))
    for problem in problems:
        output.remark(render_problem(problem))


def _load(session: str, socket: Path | None, store: Path | None) -> tuple[str, Path, dict[str, Any]]:
    """Give the detail's source (daemon or store), the store's path, and the detail."""
    daemon = find_daemon(socket, store)
    if daemon is not None:
        with daemon:
            place = Path(daemon.status().store)
            if names_version(session):
                return "store", place, _load_from_files(session, place)
            try:
                return "daemon", place, asdict(daemon.show(session))
            except TorporError as error:
                if error.code == SessionNotFound.code and parse_version_reference(session).id_alone:
                    return "store", place, _load_from_files(session, place)
                _add_others(error, place, session)
                raise
    place = store or default_store_path()
    return "store", place, _load_from_files(session, place)


def _load_from_files(session: str, place: Path) -> dict[str, Any]:
    try:
        with open_store(place) as opened:
            detail, environment = load_detail(opened, session)
    except TorporError as error:
        _add_others(error, place, session)
        raise
    document = asdict(detail) | {"tail_text": None, "environment": environment}
    document["info"]["state"] = STORED
    return document


def _add_others(error: TorporError, place: Path, session: str) -> None:
    """Name the version to wake instead of a damaged one, and others to show."""
    add_suggestion(error, place, session)
    if exit_status_of(error.code) != INTEGRITY.number:
        return
    try:
        with open_store(place) as opened:
            row = opened.resolve_version(session, look=True)
            others = sorted(each.version for each in opened.versions(row.uri) if each.version != row.version)
    except TorporError:
        return  # as in `add_suggestion`
    if others:
        error.details["other_versions"] = others
        error.message += f" Besides it has {describe_versions(others)}: `torpor show {row.uri}@{others[-1]}`."


def render_detail(detail: dict[str, Any], width: int, *, earlier: bool = False) -> RenderableType:
    """Draw a session, section by section. width: of the terminal, in columns. earlier: a version was named."""
    narrow = width < WIDE_COLUMNS
    info = detail["info"]
    parts: list[RenderableType] = [Text(neutralise(info["session"]), style="bold"), _facts(detail)]
    if detail["versions"]:
        parts += [_heading("versions"), _versions(detail["versions"])]
    if detail["lineage"]:
        parts += [_heading("lineage"), Text("  " + " → ".join(_lineage(detail)))]
    parts += [_heading("identity"), _pairs(detail["identity"], narrow=narrow)]
    if detail.get("backend"):
        parts += [_heading("backend"), _pairs(detail["backend"], narrow=narrow)]
    if detail.get("environment"):
        parts += [_heading("environment"), _pairs(detail["environment"], narrow=narrow)]
    if detail["layers"]:
        parts += [_heading(f"layers ({len(detail['layers'])})"), _layers(detail["layers"])]
    if detail["tail_text"]:
        parts += [_heading("ends with"), Text(_indented(neutralise(detail["tail_text"])), style="italic")]
    elif detail["tail_text"] is None:
        version = f"{VERSION_MARK}{info['version']}" if earlier else ""
        way = typed(f"torpor cat {neutralise(info['session']).removeprefix(_DEFAULT)}{version}")
        parts += [
            _heading("ends with"),
            Text.from_markup(f"  {way} writes its text, if its tokenizer is at hand", style="dim"),
        ]
    return Group(*parts)


def _facts(detail: dict[str, Any]) -> RenderableType:
    info, lossy = detail["info"], detail["info"]["lossy"]
    facts = facts_table()
    changed = ", changed since its last version" if info["dirty"] else ""
    kept = ", to be thrown away: a crash loses what it did since its last version" if info["durability"] else ""
    looked = f", a look at token {format_count(info['token_count'])}" if info["look"] else ""
    facts.add_row("  state", plain(info["state"]) + changed + looked + kept)
    facts.add_row("  version", _version(detail))
    facts.add_row("  model", plain(info["model"]))
    facts.add_row("  tokens", format_count(info["token_count"]))
    if unread := info["unread_tokens"]:
        facts.add_row("  to compute", f"the last {format_plural(unread, 'token')}, again at the next use")
    if info["resident_bytes"]:
        facts.add_row("  resident", format_bytes(info["resident_bytes"]))
    if info["written_bytes"]:
        facts.add_row("  written", format_bytes(info["written_bytes"]))
    if info["state"] != "awake" and _is_stripped(detail):
        facts.add_row("  stripped", "the next use reads those tokens again whose keys and values nothing else has kept")
    if lossy:
        tokens = format_plural(lossy["tokens"], "token")
        facts.add_row("  lossy", f"keys and values of the first {tokens} in {lossy['bits']} bits")
    for name, fact in _provenance(detail["provenance"]):
        facts.add_row(f"  {name}", plain(fact))
    facts.add_row("  bundle", plain(info["bundle_id"] or "– (no version yet)"))
    made = {version["bundle_id"]: version["created_ns"] for version in detail["versions"]}
    facts.add_row("  made", format_time(made.get(info["bundle_id"])))
    if info["unnamed"]:
        facts.add_row("  named", "by nobody: a client began it over HTTP, under an id of its own or under none")
    if info["labels"]:
        facts.add_row("  labels", plain(" ".join(info["labels"])))
    if info["sampling"]:
        facts.add_row("  sampling", plain(format_sampling(info["sampling"])))
    return facts


def _provenance(provenance: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for way, what in (("forked", "with"), ("folded", "a summary of")):
        if origin := provenance[f"{way}_from"]:
            tokens = format_plural(origin["tokens"], "token")
            yield f"{way} from", f"{origin['session']} at version {origin['version']}, {what} {tokens}"
    if again := provenance["recomputed"]:
        yield "recomputed", describe_recomputed(Recomputed(**again))
    if tokens := provenance["elsewhere_tokens"]:
        yield "elsewhere", f"another backend computed its first {format_plural(tokens, 'token')}"
    if differs := provenance["differs"]:
        yield "differs", f"since it slept: {describe_differing([PartDiffers(**each) for each in differs])}"


def _is_stripped(detail: dict[str, Any]) -> bool:
    shown = detail["info"]["bundle_id"]
    return any(version["stripped"] for version in detail["versions"] if version["bundle_id"] == shown)


def _version(detail: dict[str, Any]) -> str:
    """The version shown, and the newest if it is another one."""
    shown, newest = detail["info"]["version"], detail["versions"][-1:]
    if shown is None or not newest or newest[0]["version"] == shown:
        return str(shown or "–")
    tokens = format_plural(newest[0]["token_count"], "token")
    return f"{shown}; the newest is version {newest[0]['version']}, with {tokens}"


def _versions(versions: list[dict[str, Any]]) -> RenderableType:
    table = rows_table(
        *("  VERSION", *_FIGURES, "MARKS"),
        right=("TOKENS", "WRITTEN", "LOGICAL"),
        whole=("  VERSION", *_FIGURES),
        first_to_go=_FIRST_TO_GO,
    )
    for version in versions:
        figures = {
            "VERSION": f"  {version['version']}",
            "BUNDLE": plain(format_id(version["bundle_id"])),
            "PARENT": plain(format_id(version["parent"])),
            "TOKENS": format_count(version["token_count"]),
            "WRITTEN": format_bytes(version["bundle_bytes"]),
            "LOGICAL": format_bytes(version["logical_bytes"]),
            "MADE": format_time(version["created_ns"]),
            "MARKS": plain(
                format_marks([*version["tags"], *(mark for mark in ("pinned", "stripped") if version[mark])])
            ),
        }
        table.add_row(*figures.values())
    return table


def _lineage(detail: dict[str, Any]) -> Iterator[str]:
    there = {version["bundle_id"] for version in detail["versions"]}
    origins = [detail["provenance"][f"{way}_from"] for way in ("forked", "folded")]
    others = {
        origin["bundle_id"]: f"version {origin['version']} of {origin['session']}" for origin in origins if origin
    }
    for bundle in detail["lineage"]:
        whose = others.get(bundle, "gone since, and with it nothing of this version")
        yield _short(bundle) + ("" if bundle in there else f" ({neutralise(whose)})")


def _pairs(pairs: dict[str, str], *, narrow: bool) -> RenderableType:
    facts = facts_table()
    for name, value in sorted(pairs.items()):
        facts.add_row(f"  {plain(name)}", plain(_short(value) if narrow else value))
    return facts


def _layers(layers: list[str]) -> RenderableType:
    alike = [(layer, len(list(run))) for layer, run in groupby(layers)]
    shown = [f"  {neutralise(layer)}" + (f"  × {count}" if count > 1 else "") for layer, count in alike[:LINES_SHOWN]]
    if len(alike) > LINES_SHOWN:
        shown.append("  … (--json has them all)")
    return Text("\n".join(shown))


def _heading(text: str) -> RenderableType:
    return Text(f"\n{text}", style="dim bold")


def _short(line: str) -> str:
    is_id = len(line) == 64 and all(digit in "0123456789abcdef" for digit in line)
    return format_id(line) if is_id else neutralise(line).replace("\n", "␊")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
