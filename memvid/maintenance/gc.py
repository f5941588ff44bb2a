"""Gc: removes leftovers, and nothing that might be needed.

It removes: retired files that no version needs and no reader has open; temporary files without a writer; files in
`incoming` that were not taken for INCOMING_HOURS; tags and pins of deleted versions, which the index once had and has
no more. Marks of a version stay if the index was made anew without it. Files that repair has set aside stay, with
their needs and marks, until the user empties the quarantine and so gives them up for good.

Rules:
- While a bundle is unreadable or missed, or is set aside with unknown needs, nothing is removed: its needs are
  unknown, and so are the versions that marks mean. Emptying the quarantine gives the last kind up.
- A file in quarantine stays while a listed version needs blocks that are sound nowhere else.
- A version is given up only while it is set aside: not if it is back, or has its file under bundles/ again.
- Each removal is checked again under the lock, in steps of BATCH, so that no sleep waits long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Final

from ..checking.set_aside_versions import list_waiting
from ..disk import durable
from ..disk.paths import list_names, opened_folder, stat_name
from ..errors import CorruptMarks, CorruptStoreFile, IndexFailed, MarksLost, StoreError, UnsafePath, UnsupportedFormat
from ..folder import quarantine
from ..folder.folder import list_retired
from ..folder.marks import MARKS_FILE, Marks
from ..folder.store_file import INCOMING, QUARANTINE
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..index.unknown_references import find_unknown_needs
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from .last_copies import find_last_copies

BATCH: Final = 32
"""Files that are removed under the lock at a time."""

INCOMING_HOURS: Final = 24
"""How long a handed-over file may lie in `incoming`, by its time. A living client asks within seconds; a dead one never
does. Long enough for small errors of a clock."""


def gc(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """See `Store.gc`."""
    core.begin_upkeep(dry_run=dry_run)
    run = MaintenanceRun(core, "gc", dry_run)
    run.problems += [*find_unknown_needs(core.folder, core.index), *_unasked_marks(core)]
    if not run.problems:
        _collect(run)
    return run.report()


def _collect(run: MaintenanceRun) -> None:
    """Look at all leftovers, then remove them."""
    core = run.core
    unneeded = deletion.unneeded(core.index, sorted(list_retired(core.folder)))
    is_open = {one for one in unneeded if core.pins.count(one)}
    retired = [one for one in unneeded if one not in is_open]
    temps = core.folder.temps.leftovers()
    incoming = list(_left_in_incoming(run))
    dangling = _dangling(run)
    for one in filter(is_open.__contains__, unneeded):
        path = core.folder.bundle_path(one, RETIRED_SUFFIX)
        run.did("keep", path, 0, "No version needs it, but somebody has it open; it goes after that.")
    for at in range(0, len(retired), BATCH):
        _remove_retired(run, retired[at : at + BATCH])
    _remove_names(run, core.folder.bundles_fd, core.folder.bundles_path, temps, "An unfinished write left it.")
    if incoming:
        path = f"{core.path}/{INCOMING}"
        with opened_folder(core.folder.root_fd, INCOMING, path) as fd:
            _remove_names(run, fd, path, incoming, f"It was not taken for {INCOMING_HOURS} hours.")
    if dangling:
        _unmark_dangling(run, dangling)


def _unasked_marks(core: StoreCore) -> list[Finding]:
    """The problem that marks name versions which the index lacks because it was made without marks: these may have been
    deleted, or be missed and need files."""
    if not core.index.marks_unseen():
        return []
    try:
        named = Marks.load(core.folder).dangling(core.index.bundle_ids())
    except StoreError:
        return []
    path = f"{core.path}/{MARKS_FILE}"
    message = (
        f"{path} could not be read when the index was made anew, and names versions that the index does not know. Run "
        "`torpor rebuild-index`, or start the daemon again: until then nothing is removed."
    )
    return [Finding(path, MarksLost.code, message)] if named else []


def empty_quarantine(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """See `Store.empty_quarantine`. Stays: files that somebody else put there, and versions set aside during this call.
    A crash leaves some files; another call finishes."""
    core.begin_upkeep(dry_run=dry_run)
    emptying = _Emptying(core, dry_run)
    emptying.empty()
    rest = gc(core, dry_run=dry_run)
    behind = [_told_again(core)] if emptying.gave_up and core.index.file_is_behind else []
    return dataclasses.replace(
        rest,
        operation="empty_quarantine",
        actions=(*emptying.run.actions, *rest.actions),
        bytes_freed=rest.bytes_freed + emptying.run.bytes_freed,
        bytes_written=rest.bytes_written + emptying.run.bytes_written,
        problems=(*rest.problems, *deletion.still_noted(core.index, emptying.gave_up), *behind),
    )


def _told_again(core: StoreCore) -> Finding:
    message = (
        f"{core.index.path} takes no change. If that lasts until this store is closed, the versions that were given up "
        "are listed as set aside again: free some space then, and empty the quarantine again."
    )
    return Finding(core.index.path, IndexFailed.code, message)


class _Emptying:
    """An emptying of the quarantine, carried out or only planned."""

    def __init__(self, core: StoreCore, dry_run: bool) -> None:
        self.run = MaintenanceRun(core, "empty_quarantine", dry_run)
        self._core = core
        self._asked = core.index.given_up().keys()
        self._names: dict[bytes | None, list[str]] = {}
        self._last_copies = find_last_copies(core)
        content = {name: bundle_id for bundle_id, _, name in list_waiting(core.folder)}
        for name, _ in quarantine.list_ours(core.folder):
            self._names.setdefault(content.get(name, quarantine.bundle_of(name)), []).append(name)
        self.gave_up: list[bytes] = []

    def empty(self) -> None:
        wanted = [*self._names, *sorted(self._asked - self._names.keys())]
        for at in range(0, len(wanted), BATCH):
            with self.run.committing():
                if self._may_need_what_goes():
                    return
                self._give_up(wanted[at : at + BATCH])

    def _may_need_what_goes(self) -> bool:
        """Whether a bundle with unknown needs remains that is not given up here."""
        rows, suffix_of = self._core.index.given_up(), self._core.folder.suffix_of
        return any(
            one not in self._asked or one not in rows or suffix_of(one) == LIVE_SUFFIX
            for one in self._core.index.needs_unknown()
        )

    def _give_up(self, bundle_ids: Sequence[bytes | None]) -> None:
        core = self._core
        rows = core.index.given_up()
        gone = []
        for bundle_id in bundle_ids:
            row = rows.get(bundle_id) if bundle_id is not None else None
            if row is not None and row.bundle_id not in self._asked:
                continue  # set aside since the look
            if row is not None and core.folder.suffix_of(row.bundle_id) == LIVE_SUFFIX:
                self.run.did("keep", core.folder.bundle_path(row.bundle_id), 0, _PUT_BACK, row)
                continue
            names = self._names.get(bundle_id, ())
            if any(name in self._last_copies for name in names):
                self._keep(names)
                continue
            self._remove(names, row)
            gone += [row.bundle_id] if row is not None else []
        if gone and not self.run.dry_run:
            unmarked, written = deletion.unmark_without_files(core.folder, gone)
            self.run.actions += [_unmarked(core, rows[one].uri, one) for one in unmarked]
            self.run.bytes_written += written
            core.index.drop(gone)
            self.gave_up += gone

    def _keep(self, names: Sequence[str]) -> None:
        needed = next(self._last_copies[name] for name in names if name in self._last_copies)
        reason = (
            f"Version {needed.version} of {needed.uri} needs blocks that may be sound nowhere else: let `torpor "
            "repair` see to it, and empty the quarantine then."
        )
        for name in names:
            self.run.did("keep", f"{self._core.path}/{QUARANTINE}/{name}", 0, reason, needed)

    def _remove(self, names: Sequence[str], row: IndexRow | None) -> None:
        core = self._core
        for name in names:
            size_bytes = quarantine.size_of(core.folder, name)
            if not self.run.dry_run:
                quarantine.remove(core.folder, name)
            self.run.freed("remove", f"{core.path}/{QUARANTINE}/{name}", size_bytes, "Repair had set it aside.", row)
        if row is not None and not names:
            path = core.folder.bundle_path(row.bundle_id)
            self.run.did("index", path, 0, "It was set aside, and its file is nowhere.", row)


_PUT_BACK: Final = (
    "Its file is under bundles/ again: it is a version once `torpor repair` has looked, or the store is opened again."
)


def _unmarked(core: StoreCore, uri: SessionUri, bundle_id: bytes) -> Action:
    reason = f"The version that it marked ({bundle_id.hex()[:12]}) is gone."
    return Action("unmark", f"{core.path}/{MARKS_FILE}", uri, None, 0, reason)


def _left_in_incoming(run: MaintenanceRun) -> Iterator[str]:
    path = f"{run.core.path}/{INCOMING}"
    youngest = time.time() - INCOMING_HOURS * 3600
    try:
        with opened_folder(run.core.folder.root_fd, INCOMING, path) as fd:
            for name in list_names(fd, path):
                status = stat_name(fd, name, f"{path}/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_mtime < youngest and _is_ours(name):
                    yield name
    except FileNotFoundError:
        return
    except UnsafePath as error:
        run.tell(path, error.code, error.message)


def _is_ours(name: str) -> bool:
    stem, _, ending = name.partition(".")
    return bool(durable.TEMP_NAME.fullmatch(name)) or (len(stem) == 64 and ending == "mvb")


def _dangling(run: MaintenanceRun) -> list[tuple[SessionUri, bytes]]:
    try:
        marks = Marks.load(run.core.folder)
    except StoreError as error:
        run.tell(f"{run.core.path}/{MARKS_FILE}", error.code, error.message)
        return []
    return marks.dangling(run.core.index.bundle_ids())


def _remove_retired(run: MaintenanceRun, bundle_ids: Sequence[bytes]) -> None:
    core = run.core
    if run.dry_run:
        removed = {bundle_id: core.folder.size_of(bundle_id) for bundle_id in bundle_ids}
    else:
        with core.committing():
            removed = deletion.remove_retired(core.folder, core.index, core.pins, bundle_ids)
    for bundle_id, size_bytes in removed.items():
        path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
        run.freed("remove", path, size_bytes, "Its session was deleted, and no version needs its blocks any more.")


def _remove_names(run: MaintenanceRun, folder_fd: int, path: str, names: Sequence[str], reason: str) -> None:
    """Remove files of a folder that is open; one that is gone counts no bytes."""
    for name in names:
        size_bytes = 0
        with contextlib.suppress(FileNotFoundError):
            size_bytes = stat_name(folder_fd, name, f"{path}/{name}").st_size
            with run.committing():
                if not run.dry_run:
                    durable.remove(folder_fd, name, path)
        run.freed("remove", f"{path}/{name}", size_bytes, reason)


def _unmark_dangling(run: MaintenanceRun, dangling: Sequence[tuple[SessionUri, bytes]]) -> None:
    core = run.core
    try:
        if not run.dry_run:
            with core.committing():
                marks = Marks.load(core.folder)
                gone = [bundle_id for _, bundle_id in marks.dangling(core.index.bundle_ids())]
                run.bytes_written += marks.without_bundles(gone).save(core.folder)
    except (CorruptMarks, MarksLost, CorruptStoreFile, UnsupportedFormat, UnsafePath) as error:
        run.fail(core.path, error)
        return
    run.actions += [_unmarked(core, uri, bundle_id) for uri, bundle_id in dangling]
