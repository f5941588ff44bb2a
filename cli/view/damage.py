"""Damage in terms of sessions: which versions a damaged bundle affects, and which one can still be woken.

Reads a store's index and manifests. Only the store decides whether a byte is sound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...errors import TorporError
from ...memvid.errors import PUT_BACK, CorruptBlock
from ...memvid.format.records import Finding, IndexRow
from ...memvid.store import Store
from ...memvid.uri import VERSION_MARK, SessionUri
from ...socket_api.client.client import Client
from ..exit_codes import INTEGRITY, exit_status_of
from .output import MENDING, way_out

OF_NO_VERSION = frozenset({"twin_file", "rival_version", "version_lost", "unknown_file"})
"""Codes of findings that say what to do, of files that no version needs."""

_NOT_MENDED = frozenset({"unsafe_path", "store_io", "unsupported_format"})
"""Codes of findings that say what to do, of files that versions need."""


def explain_findings(store: Store, findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Add to each finding its bundle (`bundle`, or None), the versions that need that bundle (`versions`), and the
    remedies, by session (`remedies`) and in one text (`remedy`)."""
    if not findings:
        return []
    needs = _needs_among(store, _all_rows(store), findings)
    rows_of: dict[SessionUri, list[IndexRow]] = {}
    for row in needs:
        rows_of.setdefault(row.uri, []).append(row)
    damaged = _damaged(findings)
    explained = []
    for finding in findings:
        bundle = _bundle_named(finding.path)
        hit = [] if finding.code in OF_NO_VERSION else [row for row, bundles in needs.items() if bundle in bundles]
        uris = [] if finding.code in _NOT_MENDED else sorted({row.uri for row in hit})
        mending = "" if MENDING in finding.message else f"{PUT_BACK} "
        remedies = [mending + _what_is_intact(uri, rows_of[uri], needs, damaged) for uri in uris]
        versions = [{"session": str(row.uri), "version": row.version} for row in hit]
        what_to_do = {"remedies": remedies, "remedy": " ".join(remedies)}
        explained.append({**asdict(finding), "bundle": bundle, "versions": versions, **what_to_do})
    return explained


def add_suggestion(error: TorporError, store_path: Path, session: str) -> None:
    """If an error says that a session's state is damaged, add the session's latest intact version, as `intact_version`
    and as a sentence. The sentence comes after the way to bring the damaged version back: once an older one was woken
    and sleeps, that is the newest.

    Every byte is read, because a suggestion that fails too would be worse than none.
    """
    if exit_status_of(error.code) != INTEGRITY.number:
        return
    try:
        with Store.open(store_path, writable=False) as store:
            uri = store.resolve(session.partition(VERSION_MARK)[0])
            findings = store.verify(uri, deep=True).findings
            needs, damaged = _needs_among(store, store.versions(uri), findings), _damaged(findings)
    except TorporError:
        return  # the fault is reported already; a missing suggestion needs no second error
    if not needs or not damaged:
        return
    sound = _sound(list(needs), needs, damaged)
    if sound:
        error.details["intact_version"] = max(sound)
    error.message += f"{way_out(error)} {_what_is_intact(uri, list(needs), needs, damaged)}"


@contextmanager
def naming_the_intact(client: Client, session: str) -> Iterator[None]:
    """Add to a daemon's error about damage the session's latest intact version."""
    try:
        yield
    except TorporError as error:
        if exit_status_of(error.code) == INTEGRITY.number:
            add_suggestion(error, Path(client.status().store), session)
        raise


@contextmanager
def naming_the_intact_in(store_path: Path, session: str) -> Iterator[None]:
    """As `naming_the_intact`, for a command that reads the store's files."""
    try:
        yield
    except TorporError as error:
        add_suggestion(error, store_path, session)
        raise


def _what_is_intact(
    uri: SessionUri, rows: list[IndexRow], needs: Mapping[IndexRow, frozenset[str]], damaged: set[str | None]
) -> str:
    sound = _sound(rows, needs, damaged)
    if not sound:
        return f"No version of {uri} is intact."
    if max(row.version for row in rows) in sound:
        return f"The newest version of {uri} is intact; earlier ones are damaged."
    return (
        f"Version {max(sound)} of {uri} is intact: `torpor wake {uri} --version {max(sound)}` goes on from there, and"
        " what sleeps then is the newest."
    )


def _sound(rows: list[IndexRow], needs: Mapping[IndexRow, frozenset[str]], damaged: set[str | None]) -> list[int]:
    return [row.version for row in rows if not needs[row] & damaged]


def _all_rows(store: Store) -> list[IndexRow]:
    uris = [row.uri for row in store.iter_sessions()]
    return [row for uri in sorted(uris) for row in sorted(store.versions(uri), key=lambda row: row.version)]


def _needs_among(store: Store, rows: Sequence[IndexRow], findings: Sequence[Finding]) -> dict[IndexRow, frozenset[str]]:
    """The bundles that each version needs. One with nothing but damaged blocks is not needed by a version that has none
    of these: so a version that can be read whole is read."""
    named: dict[str | None, set[str]] = {}
    for finding in findings:
        named.setdefault(_bundle_named(finding.path), set()).add(finding.code)
    in_blocks = {bundle for bundle, codes in named.items() if codes == {CorruptBlock.code}}
    needs = {}
    for row in rows:
        needs[row] = _bundles_of(store, row)
        if (common := needs[row] & in_blocks) and _is_whole(store, row):
            needs[row] -= common
    return needs


def _is_whole(store: Store, row: IndexRow) -> bool:
    """Whether each byte of a version is as it was written. Takes the memory of one slot."""
    try:
        with store.open_bundle(row.bundle_id) as reader:
            for entry in reader.entries:
                for slot in range(len(reader.read_header(entry).slots)):
                    reader.read_slot(entry, slot)
    except TorporError:
        return False
    return True


def _bundles_of(store: Store, row: IndexRow) -> frozenset[str]:
    """The bundles that a version needs: its own, and those with blocks of its chain."""
    own = frozenset({row.bundle_id.hex()})
    try:
        with store.open_bundle(row.bundle_id) as reader:
            return own | {entry.bundle_id.hex() for entry in reader.entries if entry.bundle_id is not None}
    except TorporError:
        return own  # a damaged bundle is among the damaged anyway


def _damaged(findings: Sequence[Finding]) -> set[str | None]:
    """The damaged bundles that versions may need."""
    return {_bundle_named(finding.path) for finding in findings if finding.code not in OF_NO_VERSION}


def _bundle_named(path: str) -> str | None:
    """The id of the bundle file that a path names, in 64 digits; None for other files."""
    stem = Path(path).name.partition(".")[0]
    return stem if len(stem) == 64 else None
