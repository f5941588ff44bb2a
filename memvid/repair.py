"""Repair: from whatever is left of a store to a sound one, deleting nothing.

Owns the plan (a pure function of a survey) and the order of its steps.

What is done, in this order; each step is durable before the next begins, and each may be the last:
1. mend: a version all of whose blocks are sound somewhere gets a new file under its own bundle id.
2. salvage: of the newest version that is lost, the longest beginning that is sound becomes a new version.
3. set aside: damaged retired files, those that only lost versions need, and last the lost versions' files go to
   quarantine. What is sound in one and needed by others is put in its place, as a retired file of the same bundle, so
   that nobody else loses anything by it. Then a lost version's row goes.
4. rows of versions whose files are nowhere go.
5. marks that cannot be read go to quarantine; an index that says something else than the bundles is made anew.

Rules:
- What takes a damaged file's place is written, flushed and read back before the damaged one leaves its name, and the
  damaged bytes are in quarantine before anything takes their name.
- A sound version is never written to, and keeps every block that it looks for elsewhere.
- Each step asks again, under the lock, for what its plan rests on: the file as it was looked at, the version's row, the
  version that it yields to, the blocks that were nowhere. Somebody may have deleted, slept or imported meanwhile.
- A second run finishes what was begun; after that there is nothing to do.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from . import opening, quarantine
from .blocks import BlockEntry, span_parents
from .bundle import FilePool, FrameFile, require_promised
from .core import StoreCore
from .durable import TempFile
from .errors import BundleMissing, Corruption, CorruptMarks, StoreError
from .folder import LIVE_SUFFIX, RETIRED_SUFFIX
from .index import LIVE, Index, IndexedBundle, IndexUnusable, row_of
from .manifest import Manifest, bundle_id_of
from .marks import MARKS_FILE, Marks
from .records import Action, Finding, IndexRow, MaintenanceReport
from .sleeping import environment, publish
from .survey import FileState, Survey, open_source, take_survey
from .uri import SessionUri
from .writer import BundleWriter

SALVAGED_FROM: Final = "salvaged_from"
"""The entry of a salvaged version's environment that names the bundle it was saved from."""

LOST: Final = "version_lost"
CHANGED: Final = "changed_meanwhile"
STRANGER: Final = "unknown_file"


# --- the plan


@dataclass(frozen=True, slots=True)
class Layout:
    """What a new file is to hold: frames in order, each with the bundle it is copied from; and who holds the rest."""

    frames: tuple[tuple[bytes, bytes], ...]
    holders: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Mend:
    """A new file for a version that is whole but for its file, or for where its file looks for blocks."""

    file: FileState
    layout: Layout


@dataclass(frozen=True, slots=True)
class Salvage:
    """A new version of a session out of the beginning of a lost one."""

    file: FileState
    blocks: tuple[BlockEntry, ...]
    layout: Layout

    @property
    def token_count(self) -> int:
        return self.blocks[-1].end


@dataclass(frozen=True, slots=True)
class SetAside:
    """A file that goes to quarantine. `keep` says whether its sound frames stay, as a retired file; `rival`, that it is
    one because another bundle is used as the same version."""

    file: FileState
    keep: bool
    reason: str
    loss: str = ""
    rival: bool = False


@dataclass(frozen=True, slots=True)
class DropRow:
    """A version whose file is nowhere."""

    row: IndexRow
    path: str
    loss: str


@dataclass(frozen=True, slots=True)
class RepairPlan:
    mends: tuple[Mend, ...] = ()
    salvages: tuple[Salvage, ...] = ()
    aside: tuple[SetAside, ...] = ()
    rows: tuple[DropRow, ...] = ()
    problems: tuple[Finding, ...] = ()

    @property
    def bundle_ids(self) -> set[bytes]:
        """The bundles that it is about."""
        files = [*(step.file for step in self.mends), *(step.file for step in self.aside)]
        return {*(file.bundle_id for file in files), *(step.row.bundle_id for step in self.rows)}


def plan_repair(survey: Survey, path_of: Callable[[bytes], str]) -> RepairPlan:
    """What is to be done for what a survey found. `path_of` says where a bundle's file belongs."""
    live = [file for file in survey.files.values() if file.is_live]
    judged = {file.bundle_id: survey.judge(file) for file in live}
    rivals = [file for file in live if _has_rival(survey, file)]
    standing = [file for file in live if judged[file.bundle_id] != "lost" and file not in rivals]
    lost = [file for file in live if judged[file.bundle_id] == "lost" and file not in rivals]
    damaged = [file for file in survey.files.values() if not file.is_live and file.damage]
    with_file = {file.bundle_id for file in live}
    staying = {file.bundle_id for file in standing}
    staying |= {file.bundle_id for file in survey.files.values() if not file.is_live and not file.damage}
    mends = [Mend(file, _layout_of(survey, file, staying)) for file in standing if judged[file.bundle_id] == "mendable"]
    salvages = _plan_salvages(survey, lost, standing, staying)
    needed = _needed(standing, mends, salvages)

    def aside(file: FileState, reason: str, loss: str = "") -> SetAside:
        # what is needed by a file that cannot be read is unknown
        keep = bool(file.sound) and (bool(survey.unjudged) or file.bundle_id in needed)
        return SetAside(file, keep, reason, loss, file in rivals)

    return RepairPlan(
        mends=tuple(mends),
        salvages=tuple(salvages),
        aside=(
            *(aside(file, "Another bundle is the same version of the session, and it is used.") for file in rivals),
            *(aside(file, file.damage) for file in damaged),
            *(aside(file, "Only versions that are lost need it.") for file in _left_alone(survey, lost, needed)),
            *(aside(file, _why_lost(survey, file), _loss(survey, file, standing, salvages)) for file in lost),
        ),
        rows=tuple(
            DropRow(row, path_of(row.bundle_id), _loss_of_row(row))
            for row in survey.rows.values()
            if row.bundle_id not in survey.unjudged and row.bundle_id not in with_file
        ),
        problems=(
            *survey.unjudged.values(),
            *(_unjudged(file) for file in standing if judged[file.bundle_id] == "unjudged"),
        ),
    )


def _has_rival(survey: Survey, file: FileState) -> bool:
    """Whether another bundle is the version that this one says it is."""
    if file.bundle_id in survey.shadowed:
        return True
    if file.manifest is None or file.bundle_id in survey.rows:
        return False
    own = (file.manifest.uri, file.manifest.version)
    return any((row.uri, row.version) == own for row in survey.rows.values())


def _layout_of(survey: Survey, file: FileState, staying: set[bytes]) -> Layout:
    """The file that a mendable version gets: every sound frame that it has, blocks that stand elsewhere where they
    stand, and copies of the rest."""
    assert file.manifest is not None
    frames = [(block_id, file.bundle_id) for block_id in file.sound]
    return _completed(survey, file, file.manifest.blocks, frames, staying)


def _completed(
    survey: Survey,
    file: FileState,
    blocks: Sequence[BlockEntry],
    frames: list[tuple[bytes, bytes]],
    staying: set[bytes],
) -> Layout:
    here = {block_id for block_id, _ in frames}
    holders: dict[bytes, bytes] = {}
    for entry in blocks:
        if entry.id in here:
            continue
        place = file.places[entry.id] if file.places is not None else None
        if place is not None and place != file.bundle_id and place in staying and survey.holds(place, entry.id):
            holders[entry.id] = place
        else:
            frames.append((entry.id, survey.holders[entry.id][0]))
            here.add(entry.id)
    return Layout(tuple(frames), holders)


def _plan_salvages(
    survey: Survey, lost: Sequence[FileState], standing: Sequence[FileState], staying: set[bytes]
) -> list[Salvage]:
    """At most one for each session: the longest beginning of a lost version that is newer than every one that stands,
    unless one that stands begins with it too."""
    newest: dict[SessionUri, int] = {}
    for row in survey.rows.values():
        if row.bundle_id in staying or row.bundle_id in survey.unjudged:
            newest[row.uri] = max(row.version, newest.get(row.uri, 0))
    best: dict[SessionUri, tuple[int, int, FileState, tuple[BlockEntry, ...]]] = {}
    for file in lost:
        manifest, blocks = file.manifest, _beginning(survey, file)
        if manifest is None or not blocks or manifest.version < newest.get(manifest.uri, 0):
            continue
        if any(_in_common(chain, blocks) == blocks[-1].end for chain in _chains(standing, manifest.uri)):
            continue
        candidate = (blocks[-1].end, manifest.version, file, blocks)
        if manifest.uri not in best or candidate[:2] > best[manifest.uri][:2]:
            best[manifest.uri] = candidate
    return [
        Salvage(file, blocks, _completed(survey, file, blocks, [], staying))
        for _, (*_, file, blocks) in sorted(best.items())
    ]


def _beginning(survey: Survey, file: FileState) -> tuple[BlockEntry, ...]:
    """The spans of a version, in order, up to the first that is nowhere."""
    found = []
    for entry in file.manifest.blocks if file.manifest else ():
        if entry.kind == "span":
            if not survey.is_sound(entry.id):
                break
            found.append(entry)
    return tuple(found)


def _in_common(chain: Sequence[BlockEntry], spans: Sequence[BlockEntry]) -> int:
    """How many tokens two chains of spans begin with together."""
    same = 0
    for one, two in zip(chain, spans, strict=False):
        if one.id != two.id:
            break
        same = one.end
    return same


def _chains(files: Iterable[FileState], uri: SessionUri) -> Iterator[list[BlockEntry]]:
    """The spans of each of a session's versions."""
    for file in files:
        if file.manifest is not None and file.manifest.uri == uri:
            yield _spans(file.manifest)


def _spans(manifest: Manifest) -> list[BlockEntry]:
    return [entry for entry in manifest.blocks if entry.kind == "span"]


def _needed(
    standing: Sequence[FileState], mends: Sequence[Mend], salvages: Sequence[Salvage]
) -> dict[bytes, set[bytes]]:
    """For each bundle the blocks that versions look for in its file once all steps are done."""
    needed: dict[bytes, set[bytes]] = {}
    mended = {mend.file.bundle_id for mend in mends}
    looked_for = [file.places for file in standing if file.places is not None and file.bundle_id not in mended]
    layouts = [*(step.layout for step in mends), *(step.layout for step in salvages)]
    for holders in (*looked_for, *(layout.holders for layout in layouts)):
        for block_id, holder in holders.items():
            needed.setdefault(holder, set()).add(block_id)
    return needed


def _left_alone(survey: Survey, lost: Sequence[FileState], needed: Mapping[bytes, set[bytes]]) -> list[FileState]:
    """The sound retired files that only versions needed which go: they go with them, for the next opening would remove
    them for good, and with them what somebody may still want to make of the quarantined ones."""
    gone = [file.bundle_id for file in lost] + [one for one in survey.rows if one not in survey.files]
    if any(survey.files[one].places is None and one not in survey.refs for one in gone if one in survey.files):
        wanted = set(survey.files)  # nobody knows what those needed
    else:
        wanted = {holder for one in gone for holder in _needs_of(survey, one)}
    return [
        file
        for file in survey.files.values()
        if not file.is_live and not file.damage and file.bundle_id in wanted and file.bundle_id not in needed
    ]


def _needs_of(survey: Survey, bundle_id: bytes) -> Iterable[bytes]:
    file = survey.files.get(bundle_id)
    return survey.refs[bundle_id] if file is None or file.places is None else file.places.values()


def _why_lost(survey: Survey, file: FileState) -> str:
    if file.damage or file.manifest is None:
        return file.damage
    missing = [entry for entry in file.manifest.blocks if not survey.is_sound(entry.id)]
    return f"{len(missing)} of its blocks are nowhere any more, the first at token {missing[0].start}."


def _loss(survey: Survey, file: FileState, standing: Sequence[FileState], salvages: Sequence[Salvage]) -> str:
    """What of a lost version is gone for good, as a sentence."""
    manifest = file.manifest
    if manifest is None:
        row = survey.rows.get(file.bundle_id)
        return _loss_of_row(row) if row else f"Whose {file.path} was cannot be told: its manifest is damaged."
    spans = _spans(manifest)
    saved = max((_in_common(one.blocks, spans) for one in salvages), default=0)
    kept = max((_in_common(chain, spans) for chain in _chains(standing, manifest.uri)), default=0)
    where = "a new version" if saved > kept else "another version"
    rest = f"the first {max(saved, kept)} are in {where}" if saved or kept else "no other version has any"
    return (
        f"Version {manifest.version} of {manifest.uri} is lost: of its {manifest.token_count} tokens {rest}, "
        f"{manifest.token_count - max(saved, kept)} are gone."
    )


def _loss_of_row(row: IndexRow) -> str:
    return (
        f"Version {row.version} of {row.uri} is lost with its {row.token_count} tokens, but for what other versions of "
        "it hold."
    )


def _unjudged(file: FileState) -> Finding:
    message = f"{file.path} needs blocks of a file that could not be read; it was left as it is."
    return Finding(file.path, BundleMissing.code, message)


# --- the run


def repair(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make a store sound again from what is left of it, or say what that would do.

    Raises:
        NoSpace, StoreIoError: what was done so far is whole; run it again.
        DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    if dry_run:
        core.require_open()
    else:
        core.require_writable()
    run = _Run(core, dry_run)
    if not _is_readable(core.index):
        run.mend_index(set())
        if dry_run:  # whose the bundles are is not known before that
            return run.report()
    run.survey = take_survey(core)
    plan = plan_repair(run.survey, core.folder.bundle_path)
    run.problems += plan.problems
    for mend in plan.mends:
        run.mend(mend)
    for salvage in plan.salvages:
        run.salvage(salvage)
    for step in plan.aside:
        run.set_aside(step)
    for row in plan.rows:
        run.drop_row(row)
    run.mend_marks()
    run.mend_index(plan.bundle_ids)
    run.problems += _strangers(core)
    if not dry_run:
        core.folder.recount()  # files have moved past it
    return run.report()


def _is_readable(index: Index) -> bool:
    try:
        index.all_rows()
    except StoreError:
        return False
    return True


def _strangers(core: StoreCore) -> list[Finding]:
    message = "This does not belong in a store; move it away."
    return [Finding(path, STRANGER, message) for path in core.folder.list_strangers()]


class _Changed(Exception):  # the store is not any more as the survey found it; never leaves this module
    pass


@dataclass(slots=True)
class _Run:
    """A repair under way, or only thought through. `_held` are bundles that a step which failed still needs."""

    core: StoreCore
    dry_run: bool
    survey: Survey = field(default_factory=lambda: Survey({}, frozenset()))
    actions: list[Action] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    bytes_written: int = 0
    _held: set[bytes] = field(default_factory=set)

    def report(self) -> MaintenanceReport:
        return MaintenanceReport(
            "repair", self.dry_run, tuple(self.actions), 0, self.bytes_written, tuple(self.problems)
        )

    def _do(
        self,
        path: str,
        actions: Sequence[Action],
        work: Callable[[], None],
        *,
        needs: Iterable[bytes] = (),
        loss: str = "",
    ) -> None:
        """Do a step, or note what it would do. One that fails stops none but those that would take away what it needs.

        Raises:
            NoSpace, StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
        """
        if self.dry_run or self._succeeds(path, work, needs):
            self.actions += actions
            if loss:
                self._report(path, LOST, loss)

    def _succeeds(self, path: str, work: Callable[[], None], needs: Iterable[bytes]) -> bool:
        try:
            work()
            return True
        except _Changed:
            message = f"{path} is in use or has changed since it was looked at; it was left. Run it again."
            self._report(path, CHANGED, message)
        except Corruption as error:
            self._report(path, error.code, f"{path} was left as it is: {error.message}")
        except IndexUnusable as error:
            self._report(path, CHANGED, f"{path} was left as it is: {error}. Run it again.")
        self._held.update(needs)
        return False

    def _report(self, path: str, code: str, message: str) -> None:
        self.problems.append(Finding(path, code, message))

    # --- steps

    def mend(self, step: Mend) -> None:
        file = step.file
        reason = file.damage or "Blocks of it are not where it looks for them; they are copied from where they are."
        actions = [_action("rewrite", file, reason)]
        if file.damage:
            actions.insert(0, _action("quarantine", file, "A copy of the damaged file, as it is."))
        self._do(file.path, actions, lambda: self._mend(step), needs=_sources(step.layout, file))

    def _mend(self, step: Mend) -> None:
        file, manifest = step.file, step.file.manifest
        assert manifest is not None
        with (
            self._written(step.layout, manifest.encode(), manifest, file.bundle_id) as (temp, bundle),
            self._copied(file) as copy,
            self.core.committing(),
        ):
            self._require_standing(file)
            self._require_number(manifest, file)
            _require_held(self.core, manifest, bundle)
            if copy is not None:
                copy.publish()
            index = self.core.index
            index.begin_rewrite(file.bundle_id, bundle.refs)
            self.core.folder.replace(temp, file.bundle_id, LIVE_SUFFIX)
            if file.bundle_id in self.survey.rows:
                index.finish_rewrite(bundle)
            else:  # nobody could tell whose it was
                index.reconcile([bundle], [file.bundle_id])

    def salvage(self, step: Salvage) -> None:
        file = step.file
        assert file.manifest is not None
        tokens = f"{step.token_count} of its {file.manifest.token_count} tokens"
        action = _action("salvage", file, f"The first {tokens} are sound and become a new version.")
        action = dataclasses.replace(action, size_bytes=sum(entry.raw_bytes for entry in step.blocks))
        self._do(file.path, [action], lambda: self._salvage(step), needs=_sources(step.layout, file))

    def _salvage(self, step: Salvage) -> None:
        lost = step.file.manifest
        assert lost is not None
        with self.core.next_version(lost.uri) as version:
            manifest = dataclasses.replace(
                lost,
                version=version,
                parent=step.file.bundle_id,
                token_count=step.token_count,
                blocks=step.blocks,
                environment={**environment(), SALVAGED_FROM: step.file.bundle_id.hex()},
            )
            encoded = manifest.encode()
            with (
                self._written(step.layout, encoded, manifest, bundle_id_of(encoded)) as (temp, bundle),
                self.core.committing(),
            ):
                self._require_standing(step.file)
                self._require_newest(lost.uri, version)
                _require_held(self.core, manifest, bundle)
                publish(self.core, temp, bundle)

    def set_aside(self, step: SetAside) -> None:
        file = step.file
        if file.bundle_id in self._held:
            message = f"{file.path} stays where it is, because what was to be saved from it could not be saved."
            self._report(file.path, CHANGED, message)
            return
        kept = " What is sound in it stays for others." if step.keep else ""
        self._do(
            file.path,
            [_action("quarantine", file, f"{step.reason}{kept}")],
            lambda: self._set_aside(step),
            loss=step.loss,
        )

    def _set_aside(self, step: SetAside) -> None:
        file, core = step.file, self.core
        if not step.keep:
            with core.committing():
                self._require_free(file, and_unneeded=True)
                self._require_still_so(step)
                self._move_away(file)
            return
        layout = Layout(tuple((block_id, file.bundle_id) for block_id in file.sound), {})
        with contextlib.ExitStack() as stack:
            copy = None if file.is_live else stack.enter_context(self._copied(file))
            temp, _ = stack.enter_context(self._written(layout, b"", None, file.bundle_id, pinning=False))
            stack.enter_context(core.committing())
            self._require_free(file)
            self._require_still_so(step)
            if copy is not None:
                copy.publish()
            # From the moment that the live file leaves, its retired twin is found: nobody misses a block.
            core.folder.put_beside(temp, file.bundle_id)
            if file.is_live:
                self._move_away(file)

    def _move_away(self, file: FileState) -> None:
        quarantine.move_bundle(self.core.folder, file.bundle_id, file.suffix)
        if file.is_live:
            self.core.index.drop([file.bundle_id])

    def drop_row(self, step: DropRow) -> None:
        row, core = step.row, self.core
        places = quarantine.places_of(core.folder, row.bundle_id.hex() + LIVE_SUFFIX)
        reason = f"Its file is {places[-1]} now." if places else "Its file is missing."

        def work() -> None:
            with core.committing():
                self._require_row(row.bundle_id)
                if core.folder.suffix_of(row.bundle_id) == LIVE_SUFFIX:
                    raise _Changed
                core.index.drop([row.bundle_id])

        self._do(step.path, [Action("index", step.path, row.uri, row.version, 0, reason)], work, loss=step.loss)

    def mend_marks(self) -> None:
        core = self.core
        path = f"{core.path}/{MARKS_FILE}"
        try:
            Marks.load(core.folder)
        except CorruptMarks as error:
            self._do(path, [Action("quarantine", path, None, None, 0, error.message)], self._set_marks_aside)
        except StoreError as error:
            self._report(path, error.code, error.message)

    def _set_marks_aside(self) -> None:
        with self.core.committing():
            try:
                Marks.load(self.core.folder)
            except CorruptMarks:
                quarantine.move_file(self.core.folder, MARKS_FILE)

    def mend_index(self, done: set[bytes]) -> None:
        """Make the index anew where it says something else than the bundles; `done` were seen to one by one."""
        core = self.core
        ahead = opening.read_ahead(core.folder)
        actions, _ = opening.plan_rebuild(core.folder, core.index, ahead)
        if self.dry_run:
            paths = {core.folder.bundle_path(one, suffix) for one in done for suffix in (LIVE_SUFFIX, RETIRED_SUFFIX)}
            actions = [action for action in actions if action.path not in paths]
        if actions:
            self._do(core.index.path, actions, lambda: self._rebuild_index(ahead))

    def _rebuild_index(self, ahead: opening.Readings) -> None:
        with self.core.committing():
            opening.rebuild(self.core.folder, self.core.index, ahead)

    # --- how a step is done

    @contextlib.contextmanager
    def _written(
        self, layout: Layout, encoded: bytes, manifest: Manifest | None, bundle_id: bytes, *, pinning: bool = True
    ) -> Iterator[tuple[TempFile, IndexedBundle]]:
        """A new file with these frames, flushed and read back, and what the index is to be told of it."""
        core = self.core
        with core.pinning() as pin, contextlib.ExitStack() as stack:
            for other in {*layout.holders.values(), *(source for _, source in layout.frames)} if pinning else ():
                pin(other)
            pool = stack.enter_context(contextlib.closing(FilePool(self._open_source)))
            with core.poisoning():
                temp = core.new_temp()
                stack.callback(temp.close)
                writer = BundleWriter(temp)
                _copy_frames(writer, pool, layout, manifest)
                blocks = manifest.blocks if manifest else ()
                directory = writer.finish(encoded, blocks, bundle_id, layout.holders)
            self.bytes_written += temp.size_bytes
            row = row_of(manifest, bundle_id, temp.size_bytes) if manifest else None
            yield temp, IndexedBundle(bundle_id, LIVE, row, directory.holders, tuple(writer.frames))

    def _open_source(self, bundle_id: bytes) -> FrameFile:
        return open_source(self.core, self.survey.files[bundle_id])

    @contextlib.contextmanager
    def _copied(self, file: FileState) -> Iterator[quarantine.QuarantineCopy | None]:
        """A copy of a damaged file for the quarantine; None for one that is only written anew."""
        if not file.damage:
            yield None
            return
        with self.core.poisoning():
            copy = quarantine.QuarantineCopy(self.core.folder, file.bundle_id, file.suffix)
        with contextlib.closing(copy):
            self.bytes_written += copy.bytes_written
            yield copy

    def _require_unchanged(self, file: FileState) -> None:
        core = self.core
        same = core.folder.suffix_of(file.bundle_id) == file.suffix
        if not same or core.folder.stamp_of(file.bundle_id, file.suffix) != file.stamp:
            raise _Changed

    def _require_row(self, bundle_id: bytes) -> None:
        """Raise unless a bundle is still the version that it was, or still none."""
        if self.core.index.rows_of([bundle_id]).get(bundle_id) != self.survey.rows.get(bundle_id):
            raise _Changed

    def _require_standing(self, file: FileState) -> None:
        """Raise unless a version is as it was looked at: its session may have been deleted or forgotten since."""
        self._require_unchanged(file)
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
        """Raise unless what a file is set aside for is still so: the other bundle that is used as its version, or that
        nothing holds the blocks which it lacks. A sleep or an import may have written them since."""
        manifest = step.file.manifest
        if not step.file.is_live or manifest is None:
            return
        if step.rival:
            row = self.core.index.find(manifest.uri, manifest.version)
            if row is None or row.bundle_id == step.file.bundle_id:
                raise _Changed
            return
        for entry in manifest.blocks:
            if not self.survey.is_sound(entry.id) and any(map(self._is_new, self.core.index.holders_of(entry.id))):
                raise _Changed

    def _is_new(self, bundle_id: bytes) -> bool:
        return bundle_id not in self.survey.files and self.core.folder.has_bundle(bundle_id)

    def _require_free(self, file: FileState, *, and_unneeded: bool = False) -> None:
        """Raise unless the file is as it was, nobody has it open, and, if asked for, no version looks into it."""
        self._require_standing(file)
        if self.core.pins.count(file.bundle_id):
            raise _Changed
        if and_unneeded and any(self._looks_into(user, file) for user in self.core.index.users_of(file.bundle_id)):
            raise _Changed

    def _looks_into(self, user: bytes, file: FileState) -> bool:
        """Whether a version that is to stay needs a file; what a lost one needs is lost with it."""
        known = self.survey.files.get(user)
        if known is not None and self.survey.judge(known) == "lost":
            return False
        try:
            with contextlib.closing(self.core.open_bundle(user)) as opened:
                return any(entry.bundle_id == file.bundle_id for entry in opened.entries)
        except BundleMissing:
            return False


def _copy_frames(writer: BundleWriter, pool: FilePool, layout: Layout, manifest: Manifest | None) -> None:
    """Copy frames, each proven to be what the manifest says, if it lists it."""
    listed = {entry.id: entry for entry in manifest.blocks} if manifest else {}
    parents = span_parents(manifest.blocks) if manifest else {}
    for block_id, source in layout.frames:
        with pool.holding(source) as file:
            if manifest is not None and block_id in listed:
                header = file.read_head(block_id)[0]
                require_promised(header, listed[block_id], parents[block_id], manifest.identity.digest, file.path)
            writer.add_copy(file, block_id)


def _require_held(core: StoreCore, manifest: Manifest, bundle: IndexedBundle) -> None:
    """Raise unless every block that has no frame in the new file is where it says, at this moment."""
    here = set(bundle.blocks)
    elsewhere = {entry.id for entry in manifest.blocks} - here
    for holder in bundle.refs:
        try:
            with contextlib.closing(core.open_frames(holder)) as file:
                elsewhere -= file.frames.keys()
        except StoreError as error:
            raise _Changed from error
    if elsewhere:
        raise _Changed


def _sources(layout: Layout, file: FileState) -> set[bytes]:
    return {file.bundle_id, *(source for _, source in layout.frames)}


def _action(kind: str, file: FileState, reason: str) -> Action:
    manifest = file.manifest
    uri, version = (manifest.uri, manifest.version) if manifest else (None, None)
    return Action(kind, file.path, uri, version, file.file_bytes, reason)


# --- the index alone


def rebuild_index(core: StoreCore, *, dry_run: bool = False) -> MaintenanceReport:
    """Make the index anew from the bundles, or say in what it differs from them.

    Raises:
        StoreIoError, DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    if dry_run:
        core.require_open()
        actions, problems = opening.plan_rebuild(core.folder, core.index)
        return MaintenanceReport("rebuild_index", True, tuple(actions), 0, 0, tuple(problems))
    core.require_writable()
    ahead = opening.read_ahead(core.folder)
    with core.committing():
        actions, _ = opening.plan_rebuild(core.folder, core.index, ahead)
        report = opening.rebuild(core.folder, core.index, ahead)
    return MaintenanceReport("rebuild_index", False, tuple(actions), 0, 0, report.unreadable)
