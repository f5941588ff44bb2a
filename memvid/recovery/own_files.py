"""Repairs the store's own files: store.json, the marks, and the index."""

from __future__ import annotations

import contextlib

from ..checking import scanning
from ..errors import CorruptMarks, CorruptStoreFile, MarksLost, StoreError
from ..folder import quarantine
from ..folder.marks import MARKS_FILE, Marks, marks_lost
from ..folder.store_file import STORE_FILE
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import Action
from . import reindexing, restoring
from .repair_run import RepairRun


class OwnFiles:
    """Mends them, or plans it."""

    def __init__(self, run: RepairRun) -> None:
        self._run = run

    def mend_store_file(self) -> None:
        """Repair a store.json that was lost or damaged since the store was opened: without it none opens again."""
        core = self._run.core
        path = f"{core.path}/{STORE_FILE}"
        try:
            core.folder.require_store_file()
        except CorruptStoreFile as error:
            wrong = f"{error.details['reason'].capitalize()}."
            actions = restoring.actions_for(core.folder.root_fd, core.path, wrong)
            self._run.do(path, actions, self._make_store_file)
        except StoreError as error:
            self._run.tell(path, error.code, error.message)

    def _make_store_file(self) -> None:
        with self._run.core.committing():
            try:
                self._run.core.folder.require_store_file()
            except CorruptStoreFile:
                restoring.make_store_file(self._run.core.folder)

    def mend_marks(self) -> None:
        core = self._run.core
        path = f"{core.path}/{MARKS_FILE}"
        try:
            Marks.load(core.folder)
        except CorruptMarks as error:
            # as a dry run tells it
            lost = marks_lost(core.folder, quarantine.next_place_of(core.folder, MARKS_FILE)).message
            self._run.do(path, [Action("quarantine", path, None, None, 0, error.message)], self._set_marks_aside)
            self._run.tell(path, MarksLost.code, lost)
        except CorruptStoreFile:
            pass  # a dry run has not mended it; without it, nothing says whether there were marks
        except StoreError as error:
            self._run.tell(path, error.code, error.message)

    def _set_marks_aside(self) -> None:
        with self._run.committing_to_file():
            try:
                Marks.load(self._run.core.folder)
            except CorruptMarks:
                folder = self._run.core.folder
                if not folder.require_store_file().marked:
                    folder.write_store_file(marked=True)  # or it would look as if there had never been marks
                quarantine.move_file(folder, MARKS_FILE)

    def mend_index(self, done: set[bytes]) -> None:
        """Make the index anew if it differs from the bundles; `done` were repaired one by one."""
        core = self._run.core
        ahead = scanning.read_ahead(core.folder)
        actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
        if actions and not self._run.dry_run:
            self._run.succeeds(core.index.path, lambda: self._rebuild_index(ahead))
        elif actions:
            with core.committing() if core.writable else contextlib.nullcontext():
                actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
            paths = {core.folder.bundle_path(one, suffix) for one in done for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)}
            self._run.actions += [action for action in actions if action.path not in paths]

    def _rebuild_index(self, ahead: scanning.Readings) -> None:
        """Under the lock, folder and index are of one moment: sleeps and deletes of others meanwhile are no fault."""
        with self._run.committing_to_file():
            actions, _ = reindexing.plan_rebuild(self._run.core.folder, self._run.core.index, ahead)
            if actions:
                reindexing.rebuild(self._run.core.folder, self._run.core.index, ahead)
        self._run.actions += actions
