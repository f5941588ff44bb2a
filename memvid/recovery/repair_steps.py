"""The steps of a repair, each durable before the next begins."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..disk.durable import TempFile
from ..folder import duplicate_files, quarantine
from ..format.blocks import span_parents
from ..format.bundle import FrameFile, require_promised
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.ledger_tail import unread_of
from ..format.manifest import Manifest, bundle_id_of
from ..format.reader import FilePool
from ..format.records import Action
from ..format.writer import BundleWriter
from ..index.rows import ASIDE, LIVE, UNREADABLE, IndexedBundle, row_of
from ..units import format_plural
from ..writing.sleeping import publish
from .plan_steps import GiveUp, Layout, Mend, RepairPlan, Restore, Return, Salvage, SetAside, Shelve
from .repair_guards import Guards, require_held
from .repair_run import CHANGED, Changed, RepairRun
from .survey import FileState, open_source


class RepairSteps:
    """Carries a plan out.

    `_later`: bundles whose files are repaired after others refer to them. `_shelved`: the blocks in the retired files
    that steps have written.
    """

    def __init__(self, run: RepairRun) -> None:
        self._run = run
        self._guards = Guards(run)
        self._later: set[bytes] = set()
        self._shelved: dict[bytes, frozenset[bytes]] = {}

    def carry_out(self, plan: RepairPlan) -> None:
        for shelf in plan.shelves:
            self.shelve(shelf)
        self._later = {step.file.bundle_id for step in plan.restores} | {step.file.bundle_id for step in plan.mends}
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
        self._run.do(
            file.path,
            actions,
            lambda: self._shelve(step),
            layout=step.layout,
            needs=[file.bundle_id],
            of=file.bundle_id,
        )

    def _shelve(self, step: Shelve) -> None:
        file, core = step.file, self._run.core
        beside = self._run.survey.twins.get(file.bundle_id) if file.is_live else file
        with contextlib.ExitStack() as stack:
            copy = stack.enter_context(self._copied(beside)) if beside is not None else None
            temp, _ = stack.enter_context(self._written(step.layout, b"", None, file.bundle_id, pinning=False))
            stack.enter_context(self._run.committing_to_file())
            self._guards.require_free(file)
            kept = frozenset(block_id for block_id, _ in step.layout.frames)
            if not file.is_live:
                self._guards.require_unneeded(file, kept)
            elif self._run.survey.judge(file) == "lost":
                self._guards.require_still_lost(file)
            if copy is not None:
                copy.publish()
            core.folder.put_beside(temp, file.bundle_id)
            self._shelved[file.bundle_id] = kept
            self._run.note(file.bundle_id)

    def mend(self, step: Mend) -> None:
        file = step.file
        reason = file.damage or "Blocks of it are not where it looks for them; they are copied from where they are."
        actions = [_action("rewrite", file, reason, step.layout.size_bytes)]
        if file.damage:
            actions.insert(0, _action("quarantine", file, "A copy of the damaged file, as it is."))
        self._run.do(
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
            self._run.committing_to_file(),
        ):
            self._guards.require_standing(file)
            self._guards.require_number(manifest, file)
            require_held(self._run.core, manifest, bundle)
            if copy is not None:
                copy.publish()
            index = self._run.core.index
            index.begin_rewrite(file.bundle_id, bundle.refs)
            self._run.core.folder.replace(temp, file.bundle_id, LIVE_SUFFIX)
            self._run.note(file.bundle_id)
            if file.bundle_id in self._run.survey.rows:
                index.finish_rewrite(self._run.core.in_place(bundle))
            else:  # its owner was unknown
                index.reconcile([self._run.core.in_place(bundle)], [file.bundle_id])

    def restore(self, step: Restore) -> None:
        row, size_bytes = step.row, step.layout.size_bytes if step.layout else 0
        path = self._run.core.folder.bundle_path(row.bundle_id)
        reason = "All its blocks are there again, so it is a version again."
        is_back = self._run.do(
            path,
            [Action("restore", path, row.uri, row.version, size_bytes, reason)],
            lambda: self._restore(step),
            layout=step.layout,
            needs=self._needs(step),
            of=row.bundle_id,
        )
        if not is_back:
            self._later.discard(row.bundle_id)  # no version may come back and need it

    def _restore(self, step: Restore) -> None:
        file, manifest, core = step.file, step.file.manifest, self._run.core
        assert manifest is not None
        if step.layout is not None:
            encoded = manifest.encode()
            with (
                self._written(step.layout, encoded, manifest, file.bundle_id) as (temp, bundle),
                self._run.committing_to_file(),
            ):
                self._guards.require_still_aside(step)
                require_held(core, manifest, bundle, but_for=self._later)
                core.index.set_aside({file.bundle_id} & self._run.survey.rows.keys())
                publish(core, temp, bundle)
                self._drop_twin(file.bundle_id)
            return
        name = os.path.basename(file.path)
        with self._run.committing_to_file():
            self._guards.require_still_aside(step)
            if quarantine.stamp_of_name(core.folder, name) != file.stamp:
                raise Changed
            bundle = _as_it_lies(file, manifest)
            require_held(core, manifest, bundle, but_for=self._later)
            quarantine.move_back(core.folder, name, file.bundle_id)
            core.index.reconcile([core.in_place(bundle)], [file.bundle_id])
            self._drop_twin(file.bundle_id)

    def _drop_twin(self, bundle_id: bytes) -> None:
        """The retired file beside the one that came back is not needed any more."""
        duplicate_files.remove_redundant(self._run.core.folder, [bundle_id])
        self._run.note(bundle_id)

    def take_back(self, step: Return) -> None:
        file = step.file
        self._run.do(
            file.path,
            [_action("restore", file, "Its file was put back in its place, so it is a version again.", 0)],
            lambda: self._take_back(step),
            needs=[file.bundle_id],
            of=file.bundle_id,
        )

    def _take_back(self, step: Return) -> None:
        file, manifest, core = step.file, step.file.manifest, self._run.core
        assert manifest is not None
        bundle = _as_it_lies(file, manifest)
        with self._run.committing_to_file():
            self._guards.require_standing(file)
            self._guards.require_number(manifest, file)
            require_held(core, manifest, bundle, but_for=self._later)
            core.index.reconcile([core.in_place(bundle)], [file.bundle_id])

    def salvage(self, step: Salvage) -> None:
        file = step.file
        assert file.manifest is not None
        whole = file.manifest.token_count + unread_of(file.manifest)
        tokens = f"{step.ledger_tokens} of its {format_plural(whole, 'token')}"
        reason = f"The first {tokens} are sound and become a new version."
        action = _action("salvage", file, reason, step.layout.size_bytes)
        self._run.do(
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
        with self._run.core.next_version(lost.uri) as version:
            manifest = step.manifest(version)
            encoded = manifest.encode()
            with (
                self._written(step.layout, encoded, manifest, bundle_id_of(encoded)) as (temp, bundle),
                self._run.committing_to_file(),
            ):
                self._guards.require_standing(step.file)
                self._guards.require_still_lost(step.file)
                self._guards.require_newest(lost.uri, version)
                require_held(self._run.core, manifest, bundle)
                publish(self._run.core, temp, bundle)

    def set_aside(self, step: SetAside) -> None:
        file = step.file
        if file.bundle_id in self._run.held:
            if all(problem.path != file.path for problem in self._run.problems) and not self._run.went(file.bundle_id):
                message = f"{file.path} stays where it is, because what was to be saved from it could not be saved."
                self._run.tell(file.path, CHANGED, message)
            return
        if step.role == "twin" and not file.damage:
            action = _action("remove", file, step.reason)
            if self._run.do(file.path, [action], lambda: self._remove_twin(step), of=file.bundle_id):
                self._run.bytes_freed += file.file_bytes
            return
        kept = " What is sound in it stays for others." if step.kept else ""
        action = _action("quarantine", file, f"{step.reason}{kept}")
        is_done = self._run.do(file.path, [action], lambda: self._set_aside(step), of=file.bundle_id, loss=step.loss)
        if not is_done and file.is_live:
            self._unshelve(file.bundle_id)

    def _unshelve(self, bundle_id: bytes) -> None:
        """A file written beside one that stays after all is not needed."""
        if bundle_id in self._shelved:
            with self._run.committing_to_file():
                duplicate_files.remove_redundant(self._run.core.folder, [bundle_id])
                self._run.note(bundle_id)

    def _remove_twin(self, step: SetAside) -> None:
        with self._run.committing_to_file():
            self._guards.require_still_so(step)
            if not duplicate_files.remove_redundant(self._run.core.folder, [step.file.bundle_id]):
                raise Changed
            self._run.note(step.file.bundle_id)

    def _set_aside(self, step: SetAside) -> None:
        file, core = step.file, self._run.core
        with self._run.committing_to_file():
            if step.role == "twin":
                self._guards.require_still_so(step)
            else:
                self._guards.require_free(file)
                self._guards.require_unneeded(file, self._stays_of(file))
                self._guards.require_still_so(step)
            # Others' blocks lie in the retired file beside it, which counts from the moment that this one leaves. Until
            # then, if this ends here, a row that was given up is read again with its file.
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
            self._run.note(file.bundle_id)

    def _give_up(self, bundle_id: bytes, manifest: Manifest | None) -> None:
        """No version at present: its number and its needs stay."""
        index = self._run.core.index
        stored = index.stored(bundle_id)
        if bundle_id in self._run.survey.rows or (stored and stored.status == UNREADABLE and stored.row):
            index.set_aside([bundle_id])
        elif bundle_id in index.given_up():
            return  # a repair that was cut off here has done it
        elif manifest is not None:
            row = row_of(manifest, bundle_id, 0)
            index.reconcile([IndexedBundle(bundle_id, ASIDE, row, (), ())], [bundle_id])
            index.set_aside([bundle_id])
        else:
            index.drop([bundle_id])

    def give_up(self, step: GiveUp) -> None:
        row, core = step.row, self._run.core
        places = quarantine.places_of(core.folder, row.bundle_id.hex() + LIVE_SUFFIX)
        reason = f"Its file is {places[-1]} now." if places else "Its file is missing."

        def work() -> None:
            with self._run.committing_to_file():
                self._guards.require_row(row.bundle_id)
                if core.folder.stamp_of(row.bundle_id, LIVE_SUFFIX) is not None:
                    raise Changed
                core.index.set_aside([row.bundle_id])

        self._run.do(
            step.path,
            [Action("index", step.path, row.uri, row.version, 0, reason)],
            work,
            of=row.bundle_id,
            loss=step.loss,
        )

    def _stays_of(self, file: FileState) -> frozenset[bytes]:
        """The sound blocks that a bundle still holds once this file of it is gone."""
        twin = self._run.survey.twins.get(file.bundle_id)
        if not file.is_live:
            return frozenset()
        return self._shelved.get(file.bundle_id, frozenset(twin.sound if twin is not None else ()))

    # --- the files that it writes: flushed and read back before any of them has a name

    @contextlib.contextmanager
    def _written(
        self, layout: Layout, encoded: bytes, manifest: Manifest | None, bundle_id: bytes, *, pinning: bool = True
    ) -> Iterator[tuple[TempFile, IndexedBundle]]:
        """A new file with these frames, flushed and read back, and its row for the index."""
        core = self._run.core
        with core.pinning() as pin, contextlib.ExitStack() as stack:
            sources = {self._run.survey.by_key[key].bundle_id for _, key in layout.frames}
            for other in {*layout.holders.values(), *sources} if pinning else ():
                pin(other)
            pool = stack.enter_context(FilePool(self._open_source))
            with core.poisoning():
                temp = core.folder.temps.new()
                stack.callback(temp.close)
                writer = BundleWriter(temp)
                self._copy_frames(writer, pool, layout, manifest)
                blocks = manifest.blocks if manifest else ()
                directory = writer.finish(encoded, blocks, bundle_id, layout.holders)
            self._run.bytes_written += temp.size_bytes
            row = row_of(manifest, bundle_id, temp.size_bytes) if manifest else None
            yield temp, IndexedBundle(bundle_id, LIVE, row, directory.holders, tuple(writer.frames))

    def _copy_frames(self, writer: BundleWriter, pool: FilePool, layout: Layout, manifest: Manifest | None) -> None:
        """Copy frames; each that the manifest lists is checked against it."""
        listed = {entry.id: entry for entry in manifest.blocks} if manifest else {}
        parents = span_parents(manifest.blocks) if manifest else {}

        def frame_bytes(frame: tuple[bytes, bytes]) -> int:
            return self._run.survey.by_key[frame[1]].frame_bytes[frame[0]]

        for block_id, source in writer.each(layout.frames, frame_bytes):
            with pool.holding(source) as file:
                if manifest is not None and block_id in listed:
                    header = file.read_head(block_id)[0]
                    require_promised(header, listed[block_id], parents[block_id], manifest.identity.digest, file.path)
                writer.add_copy(file, block_id)

    def _open_source(self, key: bytes) -> FrameFile:
        return open_source(self._run.core, self._run.survey.by_key[key])

    def _needs(self, step: Mend | Restore | Salvage) -> set[bytes]:
        """The bundles that must stay where they are if a step cannot be done."""
        layout = step.layout
        sources = {self._run.survey.by_key[key].bundle_id for _, key in layout.frames} if layout else set()
        return {step.file.bundle_id, *sources, *(layout.holders.values() if layout else ())}

    @contextlib.contextmanager
    def _copied(self, file: FileState) -> Iterator[quarantine.QuarantineCopy | None]:
        """A copy of a damaged file for the quarantine; None for one that is only written anew."""
        if not file.damage:
            yield None
            return
        with self._run.core.poisoning():
            copy = quarantine.QuarantineCopy(self._run.core.folder, file.bundle_id, file.suffix, self._ending(file))
        with copy:
            self._run.bytes_written += copy.bytes_written
            yield copy

    def _ending(self, file: FileState) -> str:
        """The ending of its copy in quarantine: a version without a row, under another one's name, was deleted, and
        must not come back."""
        is_gone = file.content is not None and not self._run.core.index.knows(file.content)
        return RETIRED_SUFFIX if is_gone else file.suffix


def _as_it_lies(file: FileState, manifest: Manifest) -> IndexedBundle:
    """The row of a file that is moved as it is."""
    places = file.places or {}
    refs = tuple(dict.fromkeys(place for place in places.values() if place != file.bundle_id))
    return IndexedBundle(file.bundle_id, LIVE, row_of(manifest, file.bundle_id, file.file_bytes), refs, file.sound)


def _action(kind: str, file: FileState, reason: str, size_bytes: int | None = None) -> Action:
    manifest = file.manifest
    uri, version = (manifest.uri, manifest.version) if manifest else (None, None)
    return Action(kind, file.path, uri, version, file.file_bytes if size_bytes is None else size_bytes, reason)
