"""What is told of a store's files: a finding for each fault, with a sentence that says what to do."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping
from typing import Final

from ..answers import Finding, VersionInfo
from ..errors import PUT_BACK, AmbiguousVersion, Corruption, IndexFailed, LimitExceeded, StoreError
from ..folder.journal import Journal
from ..folder.journal_findings import findings_beside, waiting_finding
from ..folder.marks import MARKS_FILE, Marks, findings_of_missing
from ..folder.store_file import JOURNAL, STORE_FILE, require_store_file
from ..folder.versions import told_of_rivals
from ..index.index import Index
from ..uri import SessionUri
from ..writing.core import StoreCore
from .packs import PackCheck

STRANGER: Final = "unknown_file"
_SECOND_LOOK_S: Final = 0.1
"""After so long a write of the journal that was under way has arrived."""

_REPAIR: Final = "`torpor repair` copies what is sound in it to a new pack, and moves it away."

# --- packs


def findings_of_pack(core: StoreCore, check: PackCheck) -> list[Finding]:
    path = core.folder.path_of(check.name)
    return [
        Finding(path, fault.code, _advised(fault, _REPAIR) if is_damage(fault) else fault.message)
        for fault in check.faults
    ]


def is_damage(fault: StoreError) -> bool:
    """Whether a fault says that bytes are not those that were written; else the system refused them, or they are of a
    later version."""
    return isinstance(fault, Corruption | LimitExceeded)


def findings_of_rivals(core: StoreCore, rows: Iterable[VersionInfo]) -> list[Finding]:
    """The findings that several versions of a session have one number."""
    by_claim: dict[tuple[SessionUri, int], list[VersionInfo]] = {}
    for row in sorted(rows, key=lambda row: row.bundle_id):
        by_claim.setdefault((row.uri, row.version), []).append(row)
    claims = (rivals for _, rivals in sorted(by_claim.items()) if len(rivals) > 1)
    return [
        Finding(core.folder.manifest_path(rivals[0].bundle_id), AmbiguousVersion.code, told_of_rivals(rivals))
        for rivals in (_at_one_moment(core, each) for each in claims)
        if len(rivals) > 1
    ]


def _at_one_moment(core: StoreCore, rows: Iterable[VersionInfo]) -> list[VersionInfo]:
    """Those of the versions whose manifests are there at one moment, between two looks. A daemon beside us may have
    deleted one and given its number to another."""
    there = [row for row in rows if core.folder.has_manifest(row.bundle_id)]
    return [row for row in there if core.folder.has_manifest(row.bundle_id)]


def _advised(error: StoreError, advice: str) -> str:
    return f"{error.message.replace(PUT_BACK, '').strip()} {advice}"


# --- the store's own files


def findings_of_store(core: StoreCore) -> list[Finding]:
    """What is wrong with the small files, the index's file and the journal, and what belongs to nobody."""
    return [*_of_small_files(core), *_of_index(core), *_of_journal(core), *find_strangers(core)]


def find_strangers(core: StoreCore) -> list[Finding]:
    message = "This does not belong in a store; move it away."
    try:
        return [Finding(path, STRANGER, message) for path in core.folder.list_strangers()]
    except StoreError as error:
        return [Finding.of(core.path, error)]


def _of_small_files(core: StoreCore) -> list[Finding]:
    findings = []
    try:
        require_store_file(core.folder.root_fd, core.path, core.folder.uuid)
    except StoreError as error:
        findings.append(Finding.of(f"{core.path}/{STORE_FILE}", error))
    try:
        Marks.load(core.folder)
        findings += findings_of_missing(core.folder, core.index.knows)
    except StoreError as error:
        findings.append(Finding.of(f"{core.path}/{MARKS_FILE}", error))
    return findings


def _of_index(core: StoreCore) -> list[Finding]:
    """The copy on disk may be missing, or of another moment; a damaged one is not believed."""
    try:
        index, why = Index.load(core.folder)
        index.close()
    except StoreError as error:
        return [Finding.of(core.index.path, error)]
    if why is None or why == "it is missing":
        return []
    message = f"{core.index.path}: {why}. Nothing is lost: it is made anew from the manifests and packs."
    return [Finding(core.index.path, IndexFailed.code, message)]


def _of_journal(core: StoreCore) -> list[Finding]:
    """What two looks find: what only the first one does a daemon was just writing."""
    try:
        if not (first := _look_at_journal(core)):
            return []
        time.sleep(_SECOND_LOOK_S)
        again = _look_at_journal(core)
        return [finding for finding in first if finding in again]
    except StoreError as error:
        return [Finding.of(f"{core.path}/{JOURNAL}", error)]


def _look_at_journal(core: StoreCore) -> list[Finding]:
    with Journal.load(core.folder, writable=False) as journal:
        beside = findings_beside(journal.folder_path, (core.journal if core.has_lock else journal).strange())
        return [*journal.findings, *findings_of_waiting(core, journal.bases()), *beside]


def findings_of_waiting(
    core: StoreCore, bases: Mapping[SessionUri, str], present: Container[str] = ()
) -> list[Finding]:
    """The turns that stand behind versions whose manifests are missing, but for those that count as there."""
    return [
        waiting_finding(core.journal.path, uri, f"{core.folder.manifest_path(base)} is missing. {PUT_BACK}")
        for uri, base in sorted(bases.items())
        if base not in present and not core.folder.has_manifest(base)
    ]
