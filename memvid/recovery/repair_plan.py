"""The plan of a repair: a pure function of a survey.

Decides which version is mended, brought back, saved from or set aside, and the source of each frame of a new file.
Opens files only to count the tokens that a lost version shares with another one.

Rules:
- A block's place is a file under bundles/ that holds it; it is copied only out of quarantine, or within the bundle.
- A file that leaves bundles/ first leaves its needed sound frames in a retired file of the same bundle, before any
  other step: from then on others can refer to it.
- A version that was set aside is one again once each of its blocks is sound somewhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..checking.set_aside_versions import LOST, loss_message
from ..errors import BundleMissing
from ..format.blocks import BlockEntry
from ..format.bundle import FrameFile
from ..format.directory import Frame, file_bytes_with
from ..format.ledgers import Common, in_common, ledger_tokens, most_in_common, reading
from ..format.manifest import Manifest
from ..format.reader import FilePool
from ..format.records import Finding, IndexRow
from ..format.salvaged import salvaged_from
from ..uri import SessionUri
from .plan_steps import GiveUp, Layout, Mend, RepairPlan, Restore, Return, Role, Salvage, SetAside, Shelve, ledger_saved
from .survey import FileState, Judgement, Survey

_WHOSE = "The session of {} is unknown: its manifest is damaged."


def plan_repair(
    survey: Survey, path_of: Callable[[bytes], str], open_frames: Callable[[FileState], FrameFile]
) -> RepairPlan:
    """The steps for a survey. `path_of` gives the place of a bundle's file; `open_frames` opens a file for its heads,
    to read tokens."""
    return _Plan(survey).made(_Losses(survey, path_of, open_frames))


class _Plan:
    """A plan in the making: the files that stay, the files that leave, and the future places of blocks."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        live = [file for file in survey.files.values() if file.is_live]
        self.judged: dict[bytes, Judgement] = {file.bundle_id: survey.judge(file) for file in live}
        self.rivals = [file for file in live if _has_rival(survey, file)]
        others = [file for file in live if file not in self.rivals]
        self.standing = [file for file in others if self.judged[file.bundle_id] != "lost"]
        self.lost = [file for file in others if self.judged[file.bundle_id] == "lost"]
        self.retired = [
            file for file in survey.files.values() if not file.is_live and file.bundle_id not in survey.unjudged
        ]
        self.damaged = [file for file in self.retired if file.damage]
        self.leaving = {file.bundle_id: file for file in (*self.rivals, *self.lost, *self.damaged)}
        self.without_file = [
            row
            for row in survey.rows.values()
            if row.bundle_id not in survey.unjudged and not _is_live(survey.files.get(row.bundle_id))
        ]
        self.back: dict[bytes, FileState] = {}
        self.mended = {file.bundle_id for file in self.standing if self.judged[file.bundle_id] == "mendable"}

    def made(self, losses: _Losses) -> RepairPlan:
        survey = self.survey
        restores = self._restores()
        back = [step.file for step in restores]
        superseded = [file for file in self.standing if self._is_superseded(file, back)]
        self.leaving.update((file.bundle_id, file) for file in superseded)
        self.mended -= self.leaving.keys()
        standing = [file for file in self.standing if file not in superseded] + back
        mends = _in_order([Mend(file, self._mended_layout(file)) for file in standing if file.bundle_id in self.mended])
        salvages = self._salvages(standing)
        writing: list[Mend | Restore | Salvage] = [*mends, *restores, *salvages]
        layouts = [step.layout for step in writing if step.layout is not None]
        needed = self._needed(
            standing, {*self.mended, *(step.file.bundle_id for step in restores if step.layout)}, layouts
        )
        shelves = [step for step in (self._shelved(file, needed) for file in self.leaving.values()) if step]
        kept = {step.file.bundle_id for step in shelves}
        kept |= {one for one in self.leaving if one in needed and one in survey.twins}

        def aside(file: FileState, role: Role, reason: str, loss: str = "") -> SetAside:
            return SetAside(file, role, reason, file.bundle_id in kept, loss)

        alone = self._left_alone(needed)
        return RepairPlan(
            shelves=tuple(shelves),
            mends=tuple(mends),
            restores=tuple(restores),
            returns=tuple(self._returns(superseded)),
            salvages=tuple(salvages),
            aside=(
                *(
                    aside(file, "rival", "Another bundle is the same version of the session, and it is used.")
                    for file in self.rivals
                ),
                *(aside(file, "damaged", file.damage) for file in self.damaged if file.bundle_id not in kept),
                *(aside(file, "unneeded", "Only versions that are lost need it.") for file in alone),
                *self._twins(kept),
                *(
                    aside(file, "superseded", "The version that it was saved from is whole again.")
                    for file in superseded
                ),
                *(
                    aside(file, "lost", _why_lost(survey, file), losses.of(file, standing, salvages))
                    for file in self.lost
                ),
            ),
            rows=tuple(
                GiveUp(row, losses.path_of(row.bundle_id), losses.aside(row, standing, salvages))
                for row in self.without_file
                if row.bundle_id not in self.back
            ),
            problems=(
                *survey.unjudged.values(),
                *self._still_aside(standing, salvages, losses),
                *(_unjudged(file) for file in self.standing if self.judged[file.bundle_id] == "unjudged"),
            ),
        )

    # --- where blocks are to come from

    def _place(self, block_id: bytes, preferred: bytes | None, but_for: bytes) -> bytes | None:
        """Another bundle with a sound frame of a block in its file under bundles/, readable once all is done."""
        found = [
            holder
            for holder in self.survey.holders.get(block_id, ())
            if holder.bundle_id != but_for and self._is_readable(holder)
        ]
        if not found:
            return None
        best = min(found, key=lambda one: (one.bundle_id != preferred, one.bundle_id in self.leaving, not one.is_live))
        return best.bundle_id

    def _is_readable(self, file: FileState) -> bool:
        if file.is_aside:
            return self.back.get(file.bundle_id) is file
        return file.places is not None or file.bundle_id in self.mended or file.bundle_id in self.leaving

    def _layout(
        self,
        manifest: Manifest,
        bundle_id: bytes,
        own: Iterable[FileState],
        places: Mapping[bytes, bytes] | None,
    ) -> Layout:
        """A file with every sound frame of `own`; the rest of the manifest keeps its places."""
        frames = {block_id: file.key for file in reversed(list(own)) for block_id in file.sound}
        holders: dict[bytes, bytes] = {}
        for entry in manifest.blocks:
            if entry.id in frames:
                continue
            place = self._place(entry.id, places[entry.id] if places is not None else None, bundle_id)
            if place is not None:
                holders[entry.id] = place
            else:
                frames[entry.id] = self.survey.holders[entry.id][0].key
        return self._sized(tuple(frames.items()), holders, manifest)

    def _sized(
        self, frames: tuple[tuple[bytes, bytes], ...], holders: Mapping[bytes, bytes], manifest: Manifest | None
    ) -> Layout:
        lines = [Frame(block, 0, self.survey.by_key[key].frame_bytes[block], 0) for block, key in frames]
        blocks, manifest_bytes = (manifest.blocks, len(manifest.encode())) if manifest else ((), 0)
        return Layout(frames, holders, file_bytes_with(lines, blocks, holders, manifest_bytes))

    def _mended_layout(self, file: FileState) -> Layout:
        assert file.manifest is not None
        return self._layout(file.manifest, file.bundle_id, self.survey.of(file.bundle_id), file.places)

    def _needed(
        self, standing: Iterable[FileState], written: set[bytes], layouts: Iterable[Layout]
    ) -> dict[bytes, set[bytes]]:
        """For each bundle the blocks that versions need from its file once all steps are done."""
        needed: dict[bytes, set[bytes]] = {}
        looked_for = [file.places for file in standing if file.places is not None and file.bundle_id not in written]
        for holders in (*looked_for, *(layout.holders for layout in layouts)):
            for block_id, holder in holders.items():
                needed.setdefault(holder, set()).add(block_id)
        return needed

    def _shelved(self, file: FileState, needed: Mapping[bytes, set[bytes]]) -> Shelve | None:
        """The frames that stay of a file that leaves; None if none are to stay, or a sound retired file beside it has
        them."""
        own = self.survey.of(file.bundle_id)
        sound = {block_id: one.key for one in reversed(own) for block_id in one.sound}
        wanted = set(needed.get(file.bundle_id, ()))
        if self.survey.unjudged:  # the needs of an unreadable file are unknown
            wanted |= sound.keys()
        wanted &= sound.keys()
        twin = self.survey.twins.get(file.bundle_id)
        if not wanted or (twin is not None and not twin.damage and wanted.issubset(twin.sound)):
            return None
        if twin is not None:
            wanted = set(sound)  # the replaced file may hold a block that nobody needed yet
        frames = tuple((block_id, key) for block_id, key in sound.items() if block_id in wanted)
        return Shelve(file, self._sized(frames, {}, None))

    # --- versions that come back

    def _restores(self) -> list[Restore]:
        survey = self.survey
        numbers = {(row.uri, row.version): row.bundle_id for row in survey.rows.values()}
        whole: dict[bytes, tuple[IndexRow, FileState, Manifest]] = {}
        for row in (*survey.given_up.values(), *self.without_file):
            file = survey.best_aside(row.bundle_id)
            if file is None or file.manifest is None or row.bundle_id in survey.unjudged:
                continue
            if (
                _is_live(survey.files.get(row.bundle_id))
                or numbers.get((row.uri, row.version), row.bundle_id) != row.bundle_id
            ):
                continue
            if all(survey.is_sound(entry.id) for entry in file.manifest.blocks):
                whole[row.bundle_id] = (row, file, file.manifest)
        sources = {*whole, *(one.bundle_id for one in self.standing if self.judged[one.bundle_id] != "unjudged")}
        chosen = [step for step in whole.values() if salvaged_from(step[1].manifest) not in sources]
        self.back = {row.bundle_id: file for row, file, _ in chosen}
        return _holders_first(
            [Restore(row, file, self._restored_layout(file, manifest)) for row, file, manifest in chosen]
        )

    def _returns(self, superseded: Iterable[FileState]) -> Iterator[Return]:
        """Those that were versions by the index, and the originals of saved parts that give way now. A sleep may be
        about to give any other file its row."""
        survey, sources = self.survey, {salvaged_from(file.manifest) for file in superseded}
        for file in self.standing:
            is_told = survey.row_of(file.bundle_id) is not None or file.bundle_id in sources
            if is_told and file.bundle_id not in survey.rows and self.judged[file.bundle_id] == "intact":
                yield Return(file)

    def _will_hold(self, bundle_id: bytes, block_id: bytes) -> bool:
        back = self.back.get(bundle_id)
        return self.survey.holds(bundle_id, block_id) or (back is not None and block_id in back.frame_bytes)

    def _restored_layout(self, file: FileState, manifest: Manifest) -> Layout | None:
        retired = self.survey.of(file.bundle_id)
        places = file.places
        if (
            not file.damage
            and places is not None
            and all(self._will_hold(place, block) for block, place in places.items())
            and all(not one.damage and set(file.sound).issuperset(one.sound) for one in retired)
        ):
            return None
        return self._layout(manifest, file.bundle_id, [file, *retired], places)

    def _is_superseded(self, file: FileState, back: Iterable[FileState]) -> bool:
        """Whether it is a session's newest version, saved from an earlier one that is whole again, and not marked."""
        manifest, source = file.manifest, salvaged_from(file.manifest)
        marked = self.survey.marked
        if manifest is None or source is None or marked is None or file.bundle_id in marked:
            return False
        newest = max((row.version for row in self.survey.rows.values() if row.uri == manifest.uri), default=0)
        whole = {one.bundle_id for one in back}
        whole |= {one.bundle_id for one in self.standing if self.judged[one.bundle_id] in ("intact", "mendable")}
        return manifest.version == newest and source in whole

    # --- versions that are lost

    def _still_aside(
        self, standing: Sequence[FileState], salvages: Sequence[Salvage], losses: _Losses
    ) -> Iterator[Finding]:
        """The versions that an earlier repair has set aside and that do not come back now; without those that gave way
        to the version they were saved from."""
        whole = {file.bundle_id for file in standing}
        for row in sorted(self.survey.given_up.values(), key=lambda row: (row.uri, row.version)):
            file = self.survey.best_aside(row.bundle_id)
            gave_way = file is not None and salvaged_from(file.manifest) in whole
            if row.bundle_id not in self.back and not _is_live(self.survey.files.get(row.bundle_id)) and not gave_way:
                message = losses.aside(row, standing, salvages)
                yield Finding(losses.path_of(row.bundle_id), LOST, message)

    def _salvages(self, standing: Sequence[FileState]) -> list[Salvage]:
        """At most one for each session: the longest beginning of a lost version that is newer than every standing one,
        unless a standing one begins with it too."""
        survey = self.survey
        newest: dict[SessionUri, int] = {}
        for file in standing:
            if file.manifest is not None:
                newest[file.manifest.uri] = max(file.manifest.version, newest.get(file.manifest.uri, 0))
        for row in survey.rows.values():
            if row.bundle_id in survey.unjudged:
                newest[row.uri] = max(row.version, newest.get(row.uri, 0))
        best: dict[SessionUri, tuple[int, int, FileState, tuple[BlockEntry, ...]]] = {}
        for file in self.lost:
            manifest, blocks = file.manifest, _beginning(survey, file)
            if manifest is None or not blocks or manifest.version < newest.get(manifest.uri, 0):
                continue
            saved = ledger_saved(manifest, blocks[-1].end)
            if any(_in_blocks(one, manifest) >= saved for one in _versions(standing, manifest.uri)):
                continue
            candidate = (saved, manifest.version, file, blocks)
            if manifest.uri not in best or candidate[:2] > best[manifest.uri][:2]:
                best[manifest.uri] = candidate
        return [self._salvage(file, blocks) for _, (*_, file, blocks) in sorted(best.items())]

    def _salvage(self, file: FileState, blocks: tuple[BlockEntry, ...]) -> Salvage:
        assert file.manifest is not None
        step = Salvage(file, blocks, Layout((), {}, 0))
        layout = self._layout(step.manifest(file.manifest.version + 1), b"", (), file.places)
        return dataclasses.replace(step, layout=layout)

    def _left_alone(self, needed: Mapping[bytes, set[bytes]]) -> list[FileState]:
        """The sound retired files that only versions with unreadable files needed: they go with these. The index keeps
        the needs of all others, and an index made anew reads them in quarantine."""
        gone = [file for file in self.lost if file.places is None]
        if any(file.bundle_id not in self.survey.refs for file in gone):
            wanted = set(self.survey.files)  # their needs are unknown
        else:
            wanted = {holder for file in gone for holder in self.survey.refs[file.bundle_id]}
        return [
            file
            for file in self.retired
            if not file.damage and file.bundle_id in wanted and file.bundle_id not in needed
        ]

    def _twins(self, kept: set[bytes]) -> Iterator[SetAside]:
        """The retired files beside live ones whose frames will all be elsewhere."""
        for twin in self.survey.twins.values():
            file = self.survey.files[twin.bundle_id]
            if twin.bundle_id in self.survey.unjudged or self.judged.get(file.bundle_id) == "unjudged":
                continue
            if file.bundle_id not in self.leaving:
                yield SetAside(twin, "twin", "The live file of the bundle holds all that is sound in it.")
            elif file.bundle_id not in kept:
                yield SetAside(twin, "unneeded", "Only versions that are lost need it.")


def _in_order(mends: list[Mend]) -> list[Mend]:
    """Files that cannot be read come before the files that will look for blocks in them."""
    steps = {step.file.bundle_id: step for step in mends}
    unreadable = {one for one, step in steps.items() if step.file.places is None}
    needs = {one: unreadable.intersection(step.layout.holders.values()) for one, step in steps.items()}
    return [steps[one] for one in _after_what_they_need(needs)]


def _after_what_they_need(needs: Mapping[bytes, set[bytes]]) -> list[bytes]:
    """Each after those that it needs; of those that need each other in a circle the first comes first."""
    ordered: list[bytes] = []
    waiting = dict(needs)
    while waiting:
        free = [one for one, needed in waiting.items() if needed.isdisjoint(waiting)]
        for one in free or list(waiting)[:1]:
            ordered.append(one)
            del waiting[one]
    return ordered


def _is_live(file: FileState | None) -> bool:
    return file is not None and file.is_live


def _has_rival(survey: Survey, file: FileState) -> bool:
    """Whether another bundle has the same session and version."""
    if file.bundle_id in survey.shadowed:
        return True
    if file.manifest is None or file.bundle_id in survey.rows:
        return False
    own = (file.manifest.uri, file.manifest.version)
    return any((row.uri, row.version) == own for row in survey.rows.values())


def _beginning(survey: Survey, file: FileState) -> tuple[BlockEntry, ...]:
    """A version's leading spans up to the first that is nowhere, with the state records between them that are
    somewhere: from the last of these nothing must be computed again."""
    found = []
    for entry in file.manifest.blocks if file.manifest else ():
        if survey.is_sound(entry.id):
            found.append(entry)
        elif entry.kind == "span":
            break
    return tuple(found)


def _in_blocks(one: Manifest, other: Manifest) -> int:
    """How many first tokens two ledgers share by equal blocks, or by no blocks in both."""
    return in_common(one, lambda _: None, other, lambda _: None).least


def _versions(files: Iterable[FileState], uri: SessionUri) -> Iterator[Manifest]:
    for file in files:
        if file.manifest is not None and file.manifest.uri == uri:
            yield file.manifest


def _why_lost(survey: Survey, file: FileState) -> str:
    if file.damage or file.manifest is None:
        return file.damage
    missing = [entry for entry in file.manifest.blocks if not survey.is_sound(entry.id)]
    return f"{len(missing)} of its blocks are nowhere any more, the first at token {missing[0].start}."


class _Losses:
    """The findings for lost versions: each one's loss, and the files that would bring it back."""

    def __init__(
        self, survey: Survey, path_of: Callable[[bytes], str], open_frames: Callable[[FileState], FrameFile]
    ) -> None:
        self._survey = survey
        self.path_of = path_of
        self._open_frames = open_frames

    def of(self, file: FileState, standing: Sequence[FileState], salvages: Sequence[Salvage]) -> str:
        manifest = file.manifest
        if manifest is None:
            waiting, row = self._survey.best_aside(file.bundle_id), self._survey.row_of(file.bundle_id)
            if waiting is not None:
                return self.of(waiting, standing, salvages)
            return self._of_row(row) if row else _loss_of_nobody(self._survey, file)
        saves = ((one.manifest(manifest.version), one.file) for one in salvages)
        saved = most_in_common(self._in_common(manifest, file, one, its) for one, its in saves)
        stands = ((its.manifest, its) for its in standing)
        kept = most_in_common(
            self._in_common(manifest, file, one, its)
            for one, its in stands
            if one is not None and one.uri == manifest.uri
        )
        where = "a new version" if saved.least > kept.least else "another version"
        places = file.places or {}
        missing = (places.get(one.id, file.bundle_id) for one in manifest.blocks if not self._survey.is_sound(one.id))
        paths = list(dict.fromkeys(map(self.path_of, missing)))
        held = most_in_common((saved, kept))
        return loss_message(manifest.uri, manifest.version, ledger_tokens(manifest), paths, held, where)

    def aside(self, row: IndexRow, standing: Sequence[FileState], salvages: Sequence[Salvage]) -> str:
        """For a version without a file under bundles/."""
        file = self._survey.best_aside(row.bundle_id)
        return self._of_row(row) if file is None else self.of(file, standing, salvages)

    def _of_row(self, row: IndexRow) -> str:
        """For a version of which every file tells only that it is lost."""
        missing = [] if row.bundle_id in self._survey.misnamed else [self.path_of(row.bundle_id)]
        return loss_message(row.uri, row.version, row.ledger_tokens, missing, None)

    def _in_common(self, lost: Manifest, file: FileState, other: Manifest, its: FileState) -> Common:
        with FilePool(self._open) as pool:
            read_lost, read_other = (reading(pool, one.places or {}, self._files_of) for one in (file, its))
            return in_common(lost, read_lost, other, read_other)

    def _files_of(self, bundle_id: bytes) -> list[bytes]:
        return [file.key for file in (*self._survey.of(bundle_id), *self._survey.aside.get(bundle_id, ()))]

    def _open(self, key: bytes) -> FrameFile:
        return self._open_frames(self._survey.by_key[key])


def _loss_of_nobody(survey: Survey, file: FileState) -> str:
    if file.content is None:
        return _WHOSE.format(file.path)
    row = survey.row_of(file.content)
    whose = f"version {row.version} of {row.uri}" if row else f"a version that was deleted ({file.content.hex()[:12]})"
    found = survey.files.get(file.content)
    is_there = _is_live(found) and found is not None and survey.judge(found) != "lost"
    back = " The next repair (`torpor repair`) gives it its own." if row and not is_there else ""
    return f"{file.path} is {whose}, whole, under the name of a bundle of unknown owner.{back}"


def _holders_first(restores: Iterable[Restore]) -> list[Restore]:
    """A version that stays away, because the system refuses it or the repair is cut off, then keeps its users from
    coming back without it."""
    steps = {step.file.bundle_id: step for step in restores}
    needs = {one: step.holders() & steps.keys() for one, step in steps.items()}
    return [steps[one] for one in _after_what_they_need(needs)]


def _unjudged(file: FileState) -> Finding:
    message = f"{file.path} needs blocks of a file that could not be read; it was left as it is."
    return Finding(file.path, BundleMissing.code, message)
