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
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..checking.set_aside_versions import list_waiting
from ..disk import durable
from ..disk.paths import closing_fd, list_names, opened_folder, stat_name
from ..errors import CorruptMarks, CorruptStoreFile, IndexFailed, MarksLost, StoreError, UnsafePath, UnsupportedFormat
from ..folder import quarantine
from ..folder.marks import MARKS_FILE, Marks
from ..folder.store_file import INCOMING, QUARANTINE
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..index.unknown_references import find_unknown_needs
from ..uri import SessionUri
from ..writing import deletion
from ..writing.core import StoreCore
from .last_copies import find_last_copies

BATCH: Final = 32
"""Files that are removed under the lock at a time."""

INCOMING_HOURS: Final = 24
"""How long a handed-over file may lie in `incoming`, by its time. A living client asks within seconds; a dead one never
does. Long enough for small errors of a clock."""


@dataclass(frozen=True, slots=True)
class Garbage:
    """The leftovers: retired bundles, names of temporary files, names in `incoming`, marked bundles that were deleted.

    `kept` are retired bundles that are not needed, but open.
    """

    retired: tuple[bytes, ...] = ()
    kept: tuple[bytes, ...] = ()
    temps: tuple[str, ...] = ()
    incoming: tuple[str, ...] = ()
    dangling: tuple[tuple[SessionUri, bytes], ...] = ()


def gc(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Remove what nothing needs, or with `dry_run` plan it.

    Raises:
        StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    core.begin_upkeep(dry_run=dry_run)
    problems = [*find_unknown_needs(core.folder, core.index), *_unasked_marks(core)]
    if problems:
        return MaintenanceReport("gc", dry_run, (), 0, 0, tuple(problems))
    garbage = _find(core, problems)
    collection = _Collection(core, dry_run)
    collection.keep(garbage.kept)
    for at in range(0, len(garbage.retired), BATCH):
        collection.remove_retired(garbage.retired[at : at + BATCH])
    collection.remove_temps(garbage.temps)
    collection.remove_incoming(garbage.incoming)
    collection.unmark(garbage.dangling, problems)
    return MaintenanceReport(
        "gc", dry_run, tuple(collection.actions), collection.bytes_freed, collection.bytes_written, tuple(problems)
    )


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
    """Remove the files that repair has set aside, and free all that was kept for them; or with `dry_run` plan it.

    Stays: files that somebody else put there; versions set aside during this call; versions with a file under bundles/
    again; blocks that a listed version needs and that are sound nowhere else. A crash leaves some files; another call
    finishes.

    Raises:
        NoSpace, StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed, UnsafePath
    """
    if dry_run:
        core.require_open()
    else:
        core.require_writable()
    emptying = _Emptying(core, dry_run)
    emptying.run()
    rest = gc(core, dry_run=dry_run)
    behind = [_told_again(core)] if emptying.gave_up and core.index.file_is_behind else []
    return dataclasses.replace(
        rest,
        operation="empty_quarantine",
        actions=(*emptying.actions, *rest.actions),
        bytes_freed=rest.bytes_freed + sum(action.size_bytes for action in emptying.actions),
        bytes_written=rest.bytes_written + emptying.bytes_written,
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
        self._core = core
        self._dry_run = dry_run
        self._asked = core.index.given_up().keys()
        self._names: dict[bytes | None, list[str]] = {}
        self._last_copies = find_last_copies(core)
        content = {name: bundle_id for bundle_id, _, name in list_waiting(core.folder)}
        for name, _ in quarantine.list_ours(core.folder):
            self._names.setdefault(content.get(name, quarantine.bundle_of(name)), []).append(name)
        self.actions: list[Action] = []
        self.bytes_written = 0
        self.gave_up: list[bytes] = []

    def run(self) -> None:
        wanted = [*self._names, *sorted(self._asked - self._names.keys())]
        for at in range(0, len(wanted), BATCH):
            with self._core.committing() if not self._dry_run else contextlib.nullcontext():
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
                path = core.folder.bundle_path(row.bundle_id)
                self.actions.append(Action("keep", path, row.uri, row.version, 0, _PUT_BACK))
                continue
            names = self._names.get(bundle_id, ())
            if any(name in self._last_copies for name in names):
                self._keep(names)
                continue
            self._remove(names, row)
            gone += [row.bundle_id] if row is not None else []
        if gone and not self._dry_run:
            self._unmark(gone, rows)
            core.index.drop(gone)
            self.gave_up += gone

    def _unmark(self, bundle_ids: Sequence[bytes], rows: Mapping[bytes, IndexRow]) -> None:
        unmarked, written = deletion.unmark_without_files(self._core.folder, bundle_ids)
        self.actions += [_unmarked(self._core, rows[one].uri, one) for one in unmarked]
        self.bytes_written += written

    def _keep(self, names: Sequence[str]) -> None:
        needed = next(self._last_copies[name] for name in names if name in self._last_copies)
        reason = (
            f"Version {needed.version} of {needed.uri} needs blocks that may be sound nowhere else: let `torpor "
            "repair` see to it, and empty the quarantine then."
        )
        for name in names:
            path = f"{self._core.path}/{QUARANTINE}/{name}"
            self.actions.append(Action("keep", path, needed.uri, needed.version, 0, reason))

    def _remove(self, names: Sequence[str], row: IndexRow | None) -> None:
        core = self._core
        uri, version = (row.uri, row.version) if row is not None else (None, None)
        for name in names:
            size_bytes = quarantine.size_of(core.folder, name)
            if not self._dry_run:
                quarantine.remove(core.folder, name)
            path = f"{core.path}/{QUARANTINE}/{name}"
            self.actions.append(Action("remove", path, uri, version, size_bytes, "Repair had set it aside."))
        if row is not None and not names:
            path = core.folder.bundle_path(row.bundle_id)
            self.actions.append(Action("index", path, uri, version, 0, "It was set aside, and its file is nowhere."))


_PUT_BACK: Final = (
    "Its file is under bundles/ again: it is a version once `torpor repair` has looked, or the store is opened again."
)


def _unmarked(core: StoreCore, uri: SessionUri, bundle_id: bytes) -> Action:
    reason = f"The version that it marked ({bundle_id.hex()[:12]}) is gone."
    return Action("unmark", f"{core.path}/{MARKS_FILE}", uri, None, 0, reason)


def _find(core: StoreCore, problems: list[Finding]) -> Garbage:
    retired = [one for one, suffix in sorted(core.folder.list_bundles().items()) if suffix == RETIRED_SUFFIX]
    unneeded = deletion.unneeded(core.index, retired)
    return Garbage(
        retired=tuple(one for one in unneeded if not core.pins.count(one)),
        kept=tuple(one for one in unneeded if core.pins.count(one)),
        temps=tuple(core.folder.temps.leftovers()),
        incoming=tuple(_left_in_incoming(core, problems)),
        dangling=tuple(_dangling(core, problems)),
    )


def _left_in_incoming(core: StoreCore, problems: list[Finding]) -> Iterator[str]:
    path = f"{core.path}/{INCOMING}"
    youngest = time.time() - INCOMING_HOURS * 3600
    try:
        with opened_folder(core.folder.root_fd, INCOMING, path) as fd:
            for name in list_names(fd, path):
                status = stat_name(fd, name, f"{path}/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_mtime < youngest and _is_ours(name):
                    yield name
    except FileNotFoundError:
        return
    except UnsafePath as error:
        problems.append(Finding(path, error.code, error.message))


def _is_ours(name: str) -> bool:
    stem, _, ending = name.partition(".")
    return bool(durable.TEMP_NAME.fullmatch(name)) or (len(stem) == 64 and ending == "mvb")


def _dangling(core: StoreCore, problems: list[Finding]) -> list[tuple[SessionUri, bytes]]:
    try:
        marks = Marks.load(core.folder)
    except StoreError as error:
        problems.append(Finding(f"{core.path}/{MARKS_FILE}", error.code, error.message))
        return []
    return marks.dangling(core.index.bundle_ids())


class _Collection:
    """A gc, carried out or only planned."""

    def __init__(self, core: StoreCore, dry_run: bool) -> None:
        self._core = core
        self._dry_run = dry_run
        self.actions: list[Action] = []
        self.bytes_freed = 0
        self.bytes_written = 0

    def keep(self, bundle_ids: Sequence[bytes]) -> None:
        for bundle_id in bundle_ids:
            path = self._core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            self.actions.append(
                Action(
                    "keep", path, None, None, 0, "No version needs it, but somebody has it open; it goes after that."
                )
            )

    def remove_retired(self, bundle_ids: Sequence[bytes]) -> None:
        core = self._core
        if self._dry_run:
            removed = {bundle_id: self._size_of(bundle_id) for bundle_id in bundle_ids}
        else:
            with core.committing():
                removed = deletion.remove_retired(core.folder, core.index, core.pins, bundle_ids)
        for bundle_id, size_bytes in removed.items():
            path = core.folder.bundle_path(bundle_id, RETIRED_SUFFIX)
            self._removed(path, size_bytes, "Its session was deleted, and no version needs its blocks any more.")

    def _size_of(self, bundle_id: bytes) -> int:
        with contextlib.suppress(StoreError), closing_fd(self._core.folder.open_bundle(bundle_id)[0]) as fd:
            return os.fstat(fd).st_size
        return 0

    def remove_temps(self, names: Sequence[str]) -> None:
        core = self._core
        path = core.folder.bundles_path
        for name in names:
            size_bytes = self._remove(core.folder.bundles_fd, name, path)
            self._removed(f"{path}/{name}", size_bytes, "An unfinished write left it.")

    def remove_incoming(self, names: Sequence[str]) -> None:
        core = self._core
        path = f"{core.path}/{INCOMING}"
        if not names:
            return
        with opened_folder(core.folder.root_fd, INCOMING, path) as fd:
            for name in names:
                size_bytes = self._remove(fd, name, path)
                self._removed(f"{path}/{name}", size_bytes, f"It was not taken for {INCOMING_HOURS} hours.")

    def _remove(self, folder_fd: int, name: str, path: str) -> int:
        try:
            size_bytes = stat_name(folder_fd, name, f"{path}/{name}").st_size
        except FileNotFoundError:
            return 0
        if not self._dry_run:
            with self._core.committing():
                durable.remove(folder_fd, name, path)
        return size_bytes

    def _removed(self, path: str, size_bytes: int, reason: str) -> None:
        self.actions.append(Action("remove", path, None, None, size_bytes, reason))
        self.bytes_freed += size_bytes

    def unmark(self, dangling: Sequence[tuple[SessionUri, bytes]], problems: list[Finding]) -> None:
        core = self._core
        if not dangling:
            return
        try:
            if not self._dry_run:
                self._unmark()
        except (CorruptMarks, MarksLost, CorruptStoreFile, UnsupportedFormat, UnsafePath) as error:
            problems.append(Finding(str(error.details.get("path", core.path)), error.code, error.message))
            return
        self.actions += [_unmarked(core, uri, bundle_id) for uri, bundle_id in dangling]

    def _unmark(self) -> None:
        core = self._core
        with core.committing():
            marks = Marks.load(core.folder)
            gone = [bundle_id for _, bundle_id in marks.dangling(core.index.bundle_ids())]
            self.bytes_written += marks.without_bundles(gone).save(core.folder)
