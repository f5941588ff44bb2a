"""Repair: from whatever is left of a store to a sound one, throwing nothing away.

Owns the order of a repair's steps, and what each asks again before it counts. What is to be done, repair_plan.py says.

What is done, in this order; each step is durable before the next begins, and each may be the last:
1. shelve: of a file that is to leave, the sound frames that others look for become a retired file of the same bundle.
2. bring back: a version whose whole file was put back in its place is entered as one again, and one in quarantine all
   of whose blocks are sound somewhere again gets its place again, those that others look into first.
3. mend: a version all of whose blocks are sound somewhere gets a new file under its own bundle id.
4. salvage: of the newest version that is lost, the longest beginning that is sound becomes a new version.
5. set aside: damaged retired files, those that only lost versions need, retired files beside live ones that have all
   that is in them, what was saved from a version that is back, and last the lost versions' files go to quarantine.
6. versions whose files are nowhere are given up.
7. marks that cannot be read go to quarantine; an index that says something else than the bundles is made anew.

Rules:
- What takes a damaged file's place is written, flushed and read back before the damaged one leaves its name, and the
  damaged bytes are in quarantine before anything takes their name.
- A sound version is never written to, and keeps every block that it looks for elsewhere.
- A version that is set aside or given up keeps its number, its marks and what it needs: the index goes on saying so, in
  its file, before the version's file moves. An index that cannot have its file again stops a repair.
- Each step asks again, under the lock, for what its plan rests on: the file as it was looked at, the version's row, the
  version that it yields to, the blocks that were nowhere, and who needs what leaves. Somebody may have deleted, slept,
  imported or compacted meanwhile.
- No budget refuses what a repair writes, for it is what keeps sessions from being lost; it counts for the day.
- A second run finishes what was begun; after that there is nothing to do.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..checking import scanning, set_aside_versions
from ..checking.set_aside_versions import LOST
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.paths import Stamp
from ..errors import BundleMissing, Corruption, CorruptMarks, CorruptStoreFile, IndexFailed, MarksLost, StoreError
from ..folder import duplicate_files, quarantine
from ..folder.folder import STORE_FILE
from ..folder.marks import MARKS_FILE, Marks, marks_lost
from ..format.blocks import span_parents
from ..format.bundle import FilePool, FrameFile, require_promised
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.ledger_tail import unread_of
from ..format.manifest import Manifest, bundle_id_of
from ..format.records import Action, Finding, IndexRow, MaintenanceReport
from ..format.salvaged import SALVAGED_FROM
from ..format.writer import BundleWriter
from ..index.index import Index
from ..index.rows import ASIDE, LIVE, UNREADABLE, IndexedBundle, row_of
from ..index.schema import IndexUnusable
from ..index.unknown_references import missed_finding
from ..units import format_plural
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.sleeping import publish
from . import reindexing, restoring
from .repair_plan import (
    GiveUp,
    Layout,
    Mend,
    RepairPlan,
    Restore,
    Return,
    Salvage,
    SetAside,
    Shelve,
    plan_repair,
)
from .survey import FileState, Survey, open_frames_of, open_source, take_survey

__all__ = ["CHANGED", "LOST", "STRANGER", "rebuild_index", "repair"]

CHANGED: Final = "changed_meanwhile"
STRANGER: Final = "unknown_file"


# --- the run


def repair(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make a store sound again from what is left of it, or say what that would do.

    Raises:
        NoSpace, StoreIoError: what was done so far is whole; run it again. Nothing was, where the index went on in
            memory and cannot have its file again.
        DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    if dry_run:
        core.require_open()
    else:
        core.require_writable()
    run = _Run(core, dry_run)
    if not dry_run:
        run.require_index_file()
    run.mend_store_file()
    if not _is_readable(core.index):
        run.mend_index(set())
        if dry_run:  # whose the bundles are is not known before that
            return run.report()
    run.settle_leaving()
    run.survey = take_survey(core)
    plan = plan_repair(run.survey, core.folder.bundle_path, functools.partial(open_frames_of, core))
    run.problems += plan.problems
    run.carry_out(plan)
    run.mend_marks()
    run.mend_index(plan.bundle_ids)
    run.problems += [missed_finding(core.folder.bundle_path(one), row) for one, row in _missed(core.index)]
    run.problems += _strangers(core)
    if not dry_run:
        core.folder.recount()  # files have moved past it
        run.count()
    return run.report()


def _is_readable(index: Index) -> bool:
    try:
        index.all_rows()
    except StoreError:
        return False
    return True


def _missed(index: Index) -> list[tuple[bytes, IndexRow]]:
    """The versions that only their marks tell of; none of an index that a failure has left unreadable."""
    try:
        return sorted(index.missed().items())
    except StoreError:
        return []


def _strangers(core: StoreCore) -> list[Finding]:
    message = "This does not belong in a store; move it away."
    return [Finding(path, STRANGER, message) for path in core.folder.list_strangers()]


class _Changed(Exception):  # the store is not any more as the survey found it; never leaves this module
    pass


@dataclass(slots=True)
class _Run:
    """A repair under way, or only thought through.

    `later` are bundles whose files are put right after others are led to them; `_held` those that a step which failed
    still needs; `_stamps` what the files of those that were changed by a step are since; `_shelved` the blocks that the
    retired files hold which a step has written.
    """

    core: StoreCore
    dry_run: bool
    survey: Survey = field(default_factory=lambda: Survey({}, frozenset()))
    actions: list[Action] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    bytes_written: int = 0
    bytes_freed: int = 0
    later: set[bytes] = field(default_factory=set)
    _held: set[bytes] = field(default_factory=set)
    _stamps: dict[tuple[bytes, str], Stamp | None] = field(default_factory=dict)
    _shelved: dict[bytes, frozenset[bytes]] = field(default_factory=dict)

    def report(self) -> MaintenanceReport:
        return MaintenanceReport(
            "repair", self.dry_run, tuple(self.actions), self.bytes_freed, self.bytes_written, tuple(self.problems)
        )

    def count(self) -> None:
        """What was written counts for the day."""
        if self.bytes_written:
            with contextlib.suppress(StoreError):
                self.core.index.add_written(utc_day(now_ns()), self.bytes_written)

    def _do(
        self,
        path: str,
        actions: Sequence[Action],
        work: Callable[[], None],
        *,
        layout: Layout | None = None,
        copied: FileState | None = None,
        needs: Iterable[bytes] = (),
        of: bytes | None = None,
        loss: str = "",
    ) -> bool:
        """Do a step, or note what it would do: that it writes a file of this layout, and a copy of a damaged one. One
        that fails stops none but those that would take away what it needs. A bundle `of` which it is, and which is no
        more, has no problem.

        Raises:
            NoSpace, StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
        """
        if self.dry_run:
            self.bytes_written += layout.size_bytes if layout else 0
            self.bytes_written += copied.file_bytes if copied is not None and copied.damage else 0
        elif not self._succeeds(path, work, needs, of):
            return False
        self.actions += actions
        if loss:
            self._report(path, LOST, loss)
        return True

    def _succeeds(
        self, path: str, work: Callable[[], None], needs: Iterable[bytes] = (), of: bytes | None = None
    ) -> bool:
        try:
            work()
            return True
        except _Changed:
            message = f"{path} is in use or has changed since it was looked at; it was left. Run it again."
            if of is None or not self._went(of):
                self._report(path, CHANGED, message)
        except Corruption as error:
            self._report(path, error.code, f"{path} was left as it is: {error.message}")
        except IndexUnusable as error:
            self._report(path, CHANGED, f"{path} was left as it is: {error}. Run it again.")
        self._held.update(needs)
        return False

    def _went(self, bundle_id: bytes) -> bool:
        """Whether a version was deleted since, or a file that was none is gone."""
        core = self.core
        was_version = bundle_id in self.survey.rows or bundle_id in self.survey.given_up
        return not core.index.knows(bundle_id) and (was_version or core.folder.is_gone(bundle_id))

    def _report(self, path: str, code: str, message: str) -> None:
        self.problems.append(Finding(path, code, message))

    # --- steps

    def carry_out(self, plan: RepairPlan) -> None:
        """All that a plan says, in its order."""
        for shelf in plan.shelves:
            self.shelve(shelf)
        self.later = {step.file.bundle_id for step in plan.restores} | {step.file.bundle_id for step in plan.mends}
        for one in plan.returns:
            self.take_back(one)
        for restore in plan.restores:
            self.restore(restore)
        for mend in plan.mends:
            self.mend(mend)
        for salvage in plan.salvages:
            self.salvage(salvage)
        for step in plan.aside:
            self.set_aside(step)
        for row in plan.rows:
            self.give_up(row)

    def shelve(self, step: Shelve) -> None:
        file = step.file
        actions = []
        if not file.is_live:
            actions.append(_action("quarantine", file, f"{file.damage} What is sound in it stays for others."))
        self._do(
            file.path,
            actions,
            lambda: self._shelve(step),
            layout=step.layout,
            needs=[file.bundle_id],
            of=file.bundle_id,
        )

    def _shelve(self, step: Shelve) -> None:
        file, core = step.file, self.core
        beside = self.survey.twins.get(file.bundle_id) if file.is_live else file
        with contextlib.ExitStack() as stack:
            copy = stack.enter_context(self._copied(beside)) if beside is not None else None
            temp, _ = stack.enter_context(self._written(step.layout, b"", None, file.bundle_id, pinning=False))
            stack.enter_context(self._committing())
            self._require_free(file)
            kept = frozenset(block_id for block_id, _ in step.layout.frames)
            if not file.is_live:
                self._require_unneeded(file, kept)
            elif self.survey.judge(file) == "lost":
                self._require_still_lost(file)
            if copy is not None:
                copy.publish()
            core.folder.put_beside(temp, file.bundle_id)
            self._shelved[file.bundle_id] = kept
            self._note(file.bundle_id)

    def mend(self, step: Mend) -> None:
        file = step.file
        reason = file.damage or "Blocks of it are not where it looks for them; they are copied from where they are."
        actions = [_action("rewrite", file, reason, step.layout.size_bytes)]
        if file.damage:
            actions.insert(0, _action("quarantine", file, "A copy of the damaged file, as it is."))
        self._do(
            file.path,
            actions,
            lambda: self._mend(step),
            layout=step.layout,
            copied=file,
            needs=self._needs(step),
            of=file.bundle_id,
        )

    def _mend(self, step: Mend) -> None:
        file, manifest = step.file, step.file.manifest
        assert manifest is not None
        with (
            self._written(step.layout, manifest.encode(), manifest, file.bundle_id) as (temp, bundle),
            self._copied(file) as copy,
            self._committing(),
        ):
            self._require_standing(file)
            self._require_number(manifest, file)
            _require_held(self.core, manifest, bundle)
            if copy is not None:
                copy.publish()
            index = self.core.index
            index.begin_rewrite(file.bundle_id, bundle.refs)
            self.core.folder.replace(temp, file.bundle_id, LIVE_SUFFIX)
            self._note(file.bundle_id)
            if file.bundle_id in self.survey.rows:
                index.finish_rewrite(self.core.in_place(bundle))
            else:  # its owner was unknown
                index.reconcile([self.core.in_place(bundle)], [file.bundle_id])

    def restore(self, step: Restore) -> None:
        row, size_bytes = step.row, step.layout.size_bytes if step.layout else 0
        path = self.core.folder.bundle_path(row.bundle_id)
        reason = "All its blocks are there again, so it is a version again."
        is_back = self._do(
            path,
            [Action("restore", path, row.uri, row.version, size_bytes, reason)],
            lambda: self._restore(step),
            layout=step.layout,
            needs=self._needs(step),
            of=row.bundle_id,
        )
        if not is_back:
            self.later.discard(row.bundle_id)  # no other version may come back to look into it

    def _restore(self, step: Restore) -> None:
        file, manifest, core = step.file, step.file.manifest, self.core
        assert manifest is not None
        if step.layout is not None:
            encoded = manifest.encode()
            with self._written(step.layout, encoded, manifest, file.bundle_id) as (temp, bundle), self._committing():
                self._require_still_aside(step)
                _require_held(core, manifest, bundle, but_for=self.later)
                core.index.set_aside({file.bundle_id} & self.survey.rows.keys())
                publish(core, temp, bundle)
                self._drop_twin(file.bundle_id)
            return
        name = os.path.basename(file.path)
        with self._committing():
            self._require_still_aside(step)
            if quarantine.stamp_of_name(core.folder, name) != file.stamp:
                raise _Changed
            bundle = _as_it_lies(file, manifest)
            _require_held(core, manifest, bundle, but_for=self.later)
            quarantine.move_back(core.folder, name, file.bundle_id)
            core.index.reconcile([core.in_place(bundle)], [file.bundle_id])
            self._drop_twin(file.bundle_id)

    def _drop_twin(self, bundle_id: bytes) -> None:
        """A retired file beside the one that came back is not needed any more."""
        duplicate_files.remove_redundant(self.core.folder, [bundle_id])
        self._note(bundle_id)

    def _require_still_aside(self, step: Restore) -> None:
        index, row = self.core.index, step.row
        is_listed = row.bundle_id in self.survey.rows  # its file is missing, and it was not given up
        present = index.rows_of([row.bundle_id]) if is_listed else index.given_up()
        used = index.find(row.uri, row.version)
        if present.get(row.bundle_id) != row or (used is not None and used.bundle_id != row.bundle_id):
            raise _Changed  # its session was deleted, or it is back already
        if self._stamp(row.bundle_id, LIVE_SUFFIX) is not None or self._is_changed(row.bundle_id):
            raise _Changed

    def take_back(self, step: Return) -> None:
        file = step.file
        self._do(
            file.path,
            [_action("restore", file, "Its file was put back in its place, so it is a version again.", 0)],
            lambda: self._take_back(step),
            needs=[file.bundle_id],
            of=file.bundle_id,
        )

    def _take_back(self, step: Return) -> None:
        file, manifest, core = step.file, step.file.manifest, self.core
        assert manifest is not None
        bundle = _as_it_lies(file, manifest)
        with self._committing():
            self._require_standing(file)
            self._require_number(manifest, file)
            _require_held(core, manifest, bundle, but_for=self.later)
            core.index.reconcile([core.in_place(bundle)], [file.bundle_id])

    def salvage(self, step: Salvage) -> None:
        file = step.file
        assert file.manifest is not None
        whole = file.manifest.token_count + unread_of(file.manifest)
        tokens = f"{step.ledger_tokens} of its {format_plural(whole, 'token')}"
        reason = f"The first {tokens} are sound and become a new version."
        action = _action("salvage", file, reason, step.layout.size_bytes)
        self._do(
            file.path,
            [action],
            lambda: self._salvage(step),
            layout=step.layout,
            needs=self._needs(step),
            of=file.bundle_id,
        )

    def _salvage(self, step: Salvage) -> None:
        lost = step.file.manifest
        assert lost is not None
        with self.core.next_version(lost.uri) as version:
            manifest = step.manifest(version)
            encoded = manifest.encode()
            with (
                self._written(step.layout, encoded, manifest, bundle_id_of(encoded)) as (temp, bundle),
                self._committing(),
            ):
                self._require_standing(step.file)
                self._require_still_lost(step.file)
                self._require_newest(lost.uri, version)
                _require_held(self.core, manifest, bundle)
                publish(self.core, temp, bundle)

    def set_aside(self, step: SetAside) -> None:
        file = step.file
        if file.bundle_id in self._held:
            if all(problem.path != file.path for problem in self.problems) and not self._went(file.bundle_id):
                message = f"{file.path} stays where it is, because what was to be saved from it could not be saved."
                self._report(file.path, CHANGED, message)
            return
        if step.role == "twin" and not file.damage:
            action = _action("remove", file, step.reason)
            if self._do(file.path, [action], lambda: self._remove_twin(step), of=file.bundle_id):
                self.bytes_freed += file.file_bytes
            return
        kept = " What is sound in it stays for others." if step.kept else ""
        action = _action("quarantine", file, f"{step.reason}{kept}")
        is_done = self._do(file.path, [action], lambda: self._set_aside(step), of=file.bundle_id, loss=step.loss)
        if not is_done and file.is_live:
            self._unshelve(file.bundle_id)

    def _unshelve(self, bundle_id: bytes) -> None:
        """What was written beside a file that stays after all is not needed."""
        if bundle_id in self._shelved:
            with self._committing():
                duplicate_files.remove_redundant(self.core.folder, [bundle_id])
                self._note(bundle_id)

    def _remove_twin(self, step: SetAside) -> None:
        with self._committing():
            self._require_still_so(step)
            if not duplicate_files.remove_redundant(self.core.folder, [step.file.bundle_id]):
                raise _Changed
            self._note(step.file.bundle_id)

    def _set_aside(self, step: SetAside) -> None:
        file, core = step.file, self.core
        with self._committing():
            if step.role == "twin":
                self._require_still_so(step)
            else:
                self._require_free(file)
                self._require_unneeded(file, self._stays_of(file))
                self._require_still_so(step)
            # What others need lies in the retired file beside it, which is found from the moment that this one leaves.
            # Until then a row that was given up is read again with its file, if this ends here.
            rival = step.role == "rival"
            if rival:
                core.index.drop([file.bundle_id])
            elif file.is_live:
                self._give_up(file.bundle_id, file.manifest)
            if not file.is_live and file.content is not None and core.index.knows(file.content):
                quarantine.move_bundle(core.folder, file.bundle_id, file.suffix, as_version=file.content)
            else:
                ending = RETIRED_SUFFIX if rival else self._ending(file)
                quarantine.move_bundle(core.folder, file.bundle_id, file.suffix, as_suffix=ending)
            self._note(file.bundle_id)

    def _ending(self, file: FileState) -> str:
        """With which ending it is to lie in quarantine: a version that no row tells of, under another one's name, was
        deleted, and must not come back."""
        is_gone = file.content is not None and not self.core.index.knows(file.content)
        return RETIRED_SUFFIX if is_gone else file.suffix

    def _give_up(self, bundle_id: bytes, manifest: Manifest | None) -> None:
        """No version at present: its number stays its own, and what it needs stays needed."""
        index = self.core.index
        stored = index.stored(bundle_id)
        if bundle_id in self.survey.rows or (stored and stored.status == UNREADABLE and stored.row):
            index.set_aside([bundle_id])
        elif bundle_id in index.given_up():
            return  # a repair that was cut off here has done it
        elif manifest is not None:
            row = row_of(manifest, bundle_id, 0)
            index.reconcile([IndexedBundle(bundle_id, ASIDE, row, (), ())], [bundle_id])
        else:
            index.drop([bundle_id])

    def give_up(self, step: GiveUp) -> None:
        row, core = step.row, self.core
        places = quarantine.places_of(core.folder, row.bundle_id.hex() + LIVE_SUFFIX)
        reason = f"Its file is {places[-1]} now." if places else "Its file is missing."

        def work() -> None:
            with self._committing():
                self._require_row(row.bundle_id)
                if core.folder.stamp_of(row.bundle_id, LIVE_SUFFIX) is not None:
                    raise _Changed
                core.index.set_aside([row.bundle_id])

        self._do(
            step.path,
            [Action("index", step.path, row.uri, row.version, 0, reason)],
            work,
            of=row.bundle_id,
            loss=step.loss,
        )

    def mend_store_file(self) -> None:
        """See to a store.json that was lost or damaged since the store was opened: without it none opens again."""
        core = self.core
        path = f"{core.path}/{STORE_FILE}"
        try:
            core.folder.require_store_file()
        except CorruptStoreFile as error:
            wrong = f"{error.details['reason'].capitalize()}."
            actions = restoring.actions_for(core.folder.root_fd, core.path, wrong)
            self._do(path, actions, self._make_store_file)
        except StoreError as error:
            self._report(path, error.code, error.message)

    def _make_store_file(self) -> None:
        with self.core.committing():
            try:
                self.core.folder.require_store_file()
            except CorruptStoreFile:
                restoring.make_store_file(self.core.folder)

    def mend_marks(self) -> None:
        core = self.core
        path = f"{core.path}/{MARKS_FILE}"
        try:
            Marks.load(core.folder)
        except CorruptMarks as error:
            # As a dry run tells it.
            lost = marks_lost(core.folder, quarantine.next_place_of(core.folder, MARKS_FILE)).message
            self._do(path, [Action("quarantine", path, None, None, 0, error.message)], self._set_marks_aside)
            self._report(path, MarksLost.code, lost)
        except CorruptStoreFile:
            pass  # only thought of mending it; without it, it is unknown whether there were marks
        except StoreError as error:
            self._report(path, error.code, error.message)

    def _set_marks_aside(self) -> None:
        with self._committing():
            try:
                Marks.load(self.core.folder)
            except CorruptMarks:
                if not self.core.folder.says_marked():
                    self.core.folder.say_marked()  # else they would look as if there had never been any
                quarantine.move_file(self.core.folder, MARKS_FILE)

    def mend_index(self, done: set[bytes]) -> None:
        """Make the index anew where it says something else than the bundles; `done` were seen to one by one."""
        core = self.core
        ahead = scanning.read_ahead(core.folder)
        actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
        if actions and not self.dry_run:
            self._succeeds(core.index.path, lambda: self._rebuild_index(ahead))
        elif actions:
            with core.committing() if core.writable else contextlib.nullcontext():
                actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
            paths = {core.folder.bundle_path(one, suffix) for one in done for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)}
            self.actions += [action for action in actions if action.path not in paths]

    def _rebuild_index(self, ahead: scanning.Readings) -> None:
        """Under the lock folder and index are of one moment: what others slept and deleted meanwhile is no fault."""
        with self._committing():
            actions, _ = reindexing.plan_rebuild(self.core.folder, self.core.index, ahead)
            if actions:
                reindexing.rebuild(self.core.folder, self.core.index, ahead)
        self.actions += actions

    # --- how a step is done

    def require_index_file(self) -> None:
        """Give an index that went on in memory its file again: what a repair sets aside, and what it moves away under
        the eyes of rows that still stand in the file, must not depend on the store being closed in peace.

        Raises:
            NoSpace, StoreIoError, DurabilityLost: it cannot be written.
        """
        with self._committing():
            pass

    def settle_leaving(self) -> None:
        """End what a delete has begun in quarantine: a version that is set aside after it would look deleted.

        Raises:
            UnsafePath, NoSpace, StoreIoError, DurabilityLost: it cannot be ended.
        """
        if self.dry_run:
            return
        with self._committing():
            for error in set_aside_versions.settle_leaving(self.core.folder, self.core.index).values():
                raise error

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        """As the core's, with an index that is in its file: a delete beside this repair may have left that behind."""
        with self.core.committing():
            self.core.index.return_to_file()
            yield

    @contextlib.contextmanager
    def _written(
        self, layout: Layout, encoded: bytes, manifest: Manifest | None, bundle_id: bytes, *, pinning: bool = True
    ) -> Iterator[tuple[TempFile, IndexedBundle]]:
        """A new file with these frames, flushed and read back, and what the index is to be told of it."""
        core = self.core
        with core.pinning() as pin, contextlib.ExitStack() as stack:
            sources = {self.survey.by_key[key].bundle_id for _, key in layout.frames}
            for other in {*layout.holders.values(), *sources} if pinning else ():
                pin(other)
            pool = stack.enter_context(contextlib.closing(FilePool(self._open_source)))
            with core.poisoning():
                temp = core.new_temp()
                stack.callback(temp.close)
                writer = BundleWriter(temp)
                self._copy_frames(writer, pool, layout, manifest)
                blocks = manifest.blocks if manifest else ()
                directory = writer.finish(encoded, blocks, bundle_id, layout.holders)
            self.bytes_written += temp.size_bytes
            row = row_of(manifest, bundle_id, temp.size_bytes) if manifest else None
            yield temp, IndexedBundle(bundle_id, LIVE, row, directory.holders, tuple(writer.frames))

    def _copy_frames(self, writer: BundleWriter, pool: FilePool, layout: Layout, manifest: Manifest | None) -> None:
        """Copy frames, each proven to be what the manifest says, if it lists it."""
        listed = {entry.id: entry for entry in manifest.blocks} if manifest else {}
        parents = span_parents(manifest.blocks) if manifest else {}

        def frame_bytes(frame: tuple[bytes, bytes]) -> int:
            return self.survey.by_key[frame[1]].frame_bytes[frame[0]]

        for block_id, source in writer.each(layout.frames, frame_bytes):
            with pool.holding(source) as file:
                if manifest is not None and block_id in listed:
                    header = file.read_head(block_id)[0]
                    require_promised(header, listed[block_id], parents[block_id], manifest.identity.digest, file.path)
                writer.add_copy(file, block_id)

    def _open_source(self, key: bytes) -> FrameFile:
        return open_source(self.core, self.survey.by_key[key])

    def _needs(self, step: Mend | Restore | Salvage) -> set[bytes]:
        """The bundles that must stay where they are if a step cannot be done."""
        layout = step.layout
        sources = {self.survey.by_key[key].bundle_id for _, key in layout.frames} if layout else set()
        return {step.file.bundle_id, *sources, *(layout.holders.values() if layout else ())}

    @contextlib.contextmanager
    def _copied(self, file: FileState) -> Iterator[quarantine.QuarantineCopy | None]:
        """A copy of a damaged file for the quarantine; None for one that is only written anew."""
        if not file.damage:
            yield None
            return
        with self.core.poisoning():
            copy = quarantine.QuarantineCopy(self.core.folder, file.bundle_id, file.suffix, self._ending(file))
        with contextlib.closing(copy):
            self.bytes_written += copy.bytes_written
            yield copy

    def _is_changed(self, bundle_id: bytes) -> bool:
        """Whether a bundle's files are others than they were when they were looked at, but for what steps have done."""
        stamp_of = self.core.folder.stamp_of
        return any(
            stamp_of(bundle_id, suffix) != self._stamp(bundle_id, suffix) for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)
        )

    def _stamp(self, bundle_id: bytes, suffix: str) -> Stamp | None:
        """What a bundle's file of this ending was when it was looked at, or became by a step; None for no file."""
        if (bundle_id, suffix) in self._stamps:
            return self._stamps[bundle_id, suffix]
        return next((file.stamp for file in self.survey.of(bundle_id) if file.suffix == suffix), None)

    def _note(self, bundle_id: bytes) -> None:
        for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX):
            self._stamps[bundle_id, suffix] = self.core.folder.stamp_of(bundle_id, suffix)

    def _require_row(self, bundle_id: bytes) -> None:
        """Raise unless a bundle is still the version that it was, or still none."""
        if self.core.index.rows_of([bundle_id]).get(bundle_id) != self.survey.rows.get(bundle_id):
            raise _Changed

    def _require_standing(self, file: FileState) -> None:
        """Raise unless a version is as it was looked at: its session may have been deleted or forgotten since."""
        if self._is_changed(file.bundle_id):
            raise _Changed
        self._require_row(file.bundle_id)

    def _require_number(self, manifest: Manifest, file: FileState) -> None:
        """Raise where another bundle has become the version that this file is."""
        row = self.core.index.find(manifest.uri, manifest.version)
        if row is not None and row.bundle_id != file.bundle_id:
            raise _Changed

    def _require_newest(self, uri: SessionUri, version: int) -> None:
        """Raise where a session has slept since it was looked at, or is about to: what is left of an old version would
        be newer than what was just put to sleep."""
        latest = self.core.index.find(uri)
        known = max((row.version for row in self.survey.rows.values() if row.uri == uri), default=0)
        if (latest.version if latest else 0) > known or any(one < version for one in self.core.being_written(uri)):
            raise _Changed

    def _require_still_so(self, step: SetAside) -> None:
        """Raise unless what a file is set aside for is still so: the other bundle that is used as its version, the live
        file that has all that is in it, or that nothing holds the blocks which it lacks. A sleep or an import may have
        written them since."""
        file, manifest, index = step.file, step.file.manifest, self.core.index
        if step.role == "twin":
            with contextlib.closing(self.core.open_bundle(file.bundle_id)) as live:
                is_all = live.path.endswith(LIVE_SUFFIX) and live.frames.keys() >= set(file.sound)
            if not is_all or self.core.folder.stamp_of(file.bundle_id, file.suffix) != file.stamp:
                raise _Changed
        elif step.role == "superseded" and manifest is not None:
            self._require_newest(manifest.uri, manifest.version)
            source = manifest.environment[SALVAGED_FROM]
            marked = Marks.load(self.core.folder).of(file.bundle_id)
            if marked or not index.rows_of([bytes.fromhex(source)]):
                raise _Changed
        elif step.role == "rival" and manifest is not None:
            row = index.find(manifest.uri, manifest.version)
            if row is None or row.bundle_id == file.bundle_id:
                raise _Changed
        elif step.role == "lost":
            self._require_still_lost(file)

    def _require_still_lost(self, file: FileState) -> None:
        if not self._is_still_lost(file):
            raise _Changed

    def _is_still_lost(self, file: FileState) -> bool:
        """Whether the blocks that a version lacks are still nowhere: no file that may hold one of them, by its own
        directory or by the index, has come or was written anew since it was looked at."""
        if file.manifest is None:
            return True
        missing = [entry.id for entry in file.manifest.blocks if not self.survey.is_sound(entry.id)]
        if file.places is None:
            holders = set(self.survey.refs.get(file.bundle_id, ()))
        else:
            holders = {file.places[block_id] for block_id in missing}
        holders.update(holder for block_id in missing for holder in self.core.index.holders_of(block_id))
        return not any(map(self._is_changed, holders))

    def _require_free(self, file: FileState) -> None:
        """Raise unless the file is as it was, and no reader has it open: no sleep is about to refer to what is in
        it."""
        self._require_standing(file)
        if self.core.pins.count(file.bundle_id):
            raise _Changed

    def _stays_of(self, file: FileState) -> frozenset[bytes]:
        """The sound blocks that a bundle still holds once this file of it is gone."""
        twin = self.survey.twins.get(file.bundle_id)
        if not file.is_live:
            return frozenset()
        return self._shelved.get(file.bundle_id, frozenset(twin.sound if twin is not None else ()))

    def _require_unneeded(self, file: FileState, stays: frozenset[bytes]) -> None:
        """Raise where a version looks into a file for a block that leaves with it: a sleep may have ended since what
        is needed of it was counted."""
        leaving = set(file.sound) - stays
        users = self.core.index.users_of(file.bundle_id) if leaving else []
        if any(self._looks_for(user, file.bundle_id, leaving) for user in users):
            raise _Changed

    def _looks_for(self, user: bytes, holder: bytes, blocks: Container[bytes]) -> bool:
        """Whether a version that is to stay needs one of these blocks there; what a lost one needs is lost with it."""
        known = self.survey.files.get(user)
        is_lost = known is not None and self.survey.judge(known) == "lost"
        if known is not None and is_lost and not self._is_changed(user) and self._is_still_lost(known):
            return False
        try:
            with contextlib.closing(self.core.open_bundle(user)) as opened:
                return any(entry.bundle_id == holder and entry.id in blocks for entry in opened.entries)
        except BundleMissing:
            return False


def _require_held(
    core: StoreCore, manifest: Manifest, bundle: IndexedBundle, but_for: Container[bytes] = frozenset()
) -> None:
    """Raise unless every block that has no frame in the new file is where it says, at this moment. Of one that looks
    into `but_for`, whose turn comes, that is not asked."""
    here = set(bundle.blocks)
    elsewhere = {entry.id for entry in manifest.blocks} - here
    if any(holder in but_for for holder in bundle.refs):
        return
    for holder in bundle.refs:
        try:
            with contextlib.closing(core.open_frames(holder)) as file:
                elsewhere -= file.frames.keys()
        except StoreError as error:
            raise _Changed from error
    if elsewhere:
        raise _Changed


def _as_it_lies(file: FileState, manifest: Manifest) -> IndexedBundle:
    """What the index is told of a file that is moved as it is."""
    places = file.places or {}
    refs = tuple(dict.fromkeys(place for place in places.values() if place != file.bundle_id))
    return IndexedBundle(file.bundle_id, LIVE, row_of(manifest, file.bundle_id, file.file_bytes), refs, file.sound)


def _action(kind: str, file: FileState, reason: str, size_bytes: int | None = None) -> Action:
    manifest = file.manifest
    uri, version = (manifest.uri, manifest.version) if manifest else (None, None)
    return Action(kind, file.path, uri, version, file.file_bytes if size_bytes is None else size_bytes, reason)


# --- the index alone


def rebuild_index(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make the index anew from the bundles, or say in what it differs from them.

    Raises:
        StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    if dry_run:
        core.require_open()
        actions, found = reindexing.plan_rebuild(core.folder, core.index)
        return MaintenanceReport("rebuild_index", True, tuple(actions), 0, 0, tuple(found))
    core.require_writable()
    ahead = scanning.read_ahead(core.folder)
    with core.committing():
        actions, _ = reindexing.plan_rebuild(core.folder, core.index, ahead)
        report = reindexing.rebuild(core.folder, core.index, ahead)
    problems = report.unreadable
    if not core.index.has_file:
        message = (
            f"The index was made anew and has no file: {report.index_rebuilt}. Free some space, or see to the disk; "
            "until it has one, each opening makes it anew."
        )
        problems += (Finding(core.index.path, IndexFailed.code, message),)
    return MaintenanceReport("rebuild_index", False, tuple(actions), 0, 0, problems)
