"""Repack: bytes that nothing needs leave the disk, and a session's blocks come to lie in few packs.

Looks at packs and takes the steps of a plan; `repack_plan` decides on the steps and their order.

Rules:
- Nothing waits for a repack: blocks are read and written outside `committing`.
- A block is read and checked, copied, flushed and read back; then the new pack gets its name, and only then the old
  ones go. After a crash between, a block lies in two packs: the next run proves one copy and lets the other go.
- Just before a pack goes, under the lock, manifests are asked again. Each block of it that is needed then is in the new
  pack, or was proven in another one; else it stays, and the next run sees to it.
- A new pack gets its name only if every block in it is still needed: no deleted block comes back with it.
- Small new packs are written and get their names together: to ask all manifests and marks takes longer than each.
- A pack that cannot be read is told and left, and so is one whose needed blocks are damaged. A full disk ends the run;
  its finished steps stay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..answers import Action, MaintenanceReport
from ..disk import durable
from ..disk.budget import STORE_BYTES, Meter
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.paths import Stamp, list_names, opened_folder, stamp_of, stat_name
from ..errors import (
    BudgetExceeded,
    BundleMissing,
    DurabilityLost,
    LockLost,
    NoSpace,
    ReadOnlyStore,
    StoreClosed,
    StoreError,
)
from ..exchange.incoming import SUFFIX
from ..folder.marks import MARKS_FILE, Marks
from ..folder.store_file import BUNDLES, INCOMING
from ..format.codecs import RAW_CODE, encode_slot
from ..format.frames import FrameReader
from ..format.pack_writer import PackWriter
from ..limits import MIB
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.frame_files import open_frames
from ..writing.maintenance_run import MaintenanceRun
from ..writing.needs import Needed
from ..writing.removal import needed_now, packs_with
from .repack_plan import PackView, RepackPolicy, Step, Uses, plan_repack

_FATAL: Final = (DurabilityLost, LockLost, StoreClosed, ReadOnlyStore)
_AT_ONCE: Final = 256
"""Packs that go under one lock."""

_STEPS_AT_ONCE: Final = 32
_BYTES_AT_ONCE: Final = 4 * MIB
"""New packs that get their names under one lock, and are on the disk beside those that they replace."""

INCOMING_HOURS: Final = 24
_HOUR_NS: Final = 60 * 60 * 10**9
_HANDED_OVER: Final = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}|{durable.TEMP_NAME.pattern}", re.ASCII)


def repack(
    core: StoreCore,
    uri: SessionUri | None,
    policy: RepackPolicy,
    *,
    dry_run: bool,
    should_stop: Callable[[], bool] = lambda: False,
) -> MaintenanceReport:
    """Repack the packs with blocks of one session, or all. See `Store.repack`."""
    core.begin_upkeep(dry_run=dry_run)
    run = MaintenanceRun(core, "repack", dry_run)
    if uri is not None:
        mine = packs_with(core, [row.bundle_id for row in core.index.versions(uri)])
        repack_packs(run, mine, policy, should_stop=should_stop)
        return run.report()
    core.look_again()
    remove_leftovers(run)
    repack_packs(run, None, policy, should_stop=should_stop)
    if not dry_run:
        with core.committing():
            if core.folder.remove_old_folder():
                run.did("remove", f"{core.path}/{BUNDLES}", 0, "No pack is left in it.")
    return run.report()


def repack_packs(
    run: MaintenanceRun,
    names: Collection[str] | None,
    policy: RepackPolicy,
    *,
    should_stop: Callable[[], bool] = lambda: False,
    strips: Collection[str] = (),
    deletes: Collection[str] = (),
    must_go: Collection[str] = (),
) -> bool:
    """Repack these packs, or (None) all, and tell `run`. For a dry run: as if the versions `strips` were stripped, and
    `deletes` deleted. must_go: packs that are written anew in any case. Whether another one could go on: needs are
    known, there was room, and nothing told it to stop.

    Raises:
        DurabilityLost, LockLost, ReadOnlyStore, StoreClosed
    """
    core = run.core
    needed = needed_now(core, strips=strips, deletes=deletes)
    run.problems += needed.unknown
    if needed.unknown:
        return False
    look = _Look(run, policy, needed, frozenset(deletes))
    views = look.views(names, must_go)
    steps = plan_repack(views.values(), look.uses, policy)
    if run.dry_run:
        for step in steps:
            _tell(run, step, core.folder.path_of(step.olds[0].name), step.before_bytes, step.after_bytes)
        return True
    repack = _Repack(run, needed, should_stop)
    repack.take(steps)
    if names is None:
        _unmark_dangling(run)
    return not repack.stopped


def remove_leftovers(run: MaintenanceRun) -> None:
    """Remove what unfinished writes left."""
    core = run.core
    if not core.has_lock:
        return  # a daemon beside us may be writing some
    with run.committing():
        for name, size_bytes in core.folder.remove_leftovers(dry_run=run.dry_run).items():
            run.freed("remove", core.folder.path_of(name), size_bytes, "An unfinished write left it.")
    try:
        _remove_untaken(run)
    except FileNotFoundError:
        pass
    except _FATAL:
        raise
    except StoreError as error:
        run.fail(core.folder.path_of(INCOMING), error)


def _remove_untaken(run: MaintenanceRun) -> None:
    """What a client handed over, and no daemon has taken for a day. Raises FileNotFoundError: there is no folder."""
    path = run.core.folder.path_of(INCOMING)
    youngest = now_ns() - INCOMING_HOURS * _HOUR_NS
    with opened_folder(run.core.folder.root_fd, INCOMING, path) as fd, run.committing():
        for name in filter(_HANDED_OVER.fullmatch, list_names(fd, path)):
            with contextlib.suppress(FileNotFoundError):
                status = stat_name(fd, name, f"{path}/{name}")
                if stat.S_ISREG(status.st_mode) and status.st_mtime_ns < youngest:
                    if not run.dry_run:
                        durable.remove(fd, name, path)
                    reason = f"It was not taken for {INCOMING_HOURS} hours."
                    run.freed("remove", f"{path}/{name}", status.st_size, reason)


def _tell(run: MaintenanceRun, step: Step, path: str, before: int, after: int) -> None:
    run.bytes_freed += before
    run.bytes_written += after
    run.did(step.kind, path, before - after if before > after else after, step.reason)


def _unmark_dangling(run: MaintenanceRun) -> None:
    """The strips of versions that are gone go: no version is missing, as needs are known."""
    core = run.core
    try:
        with core.committing():
            if needed_now(core).unknown:
                return
            marks = Marks.load(core.folder)
            there = core.folder.list_versions()
            dangling = [(uri, each) for uri, of in marks.sessions.items() for each in sorted(of.stripped - there)]
            if dangling:
                run.bytes_written += marks.without_bundles([each for _, each in dangling]).save(core.folder)
    except _FATAL:
        raise
    except StoreError as error:
        run.fail(f"{core.path}/{MARKS_FILE}", error)
        return
    for uri, bundle_id in dangling:
        reason = f"The version that it marked ({bundle_id[:12]}) is gone."
        run.actions.append(Action("unmark", f"{core.path}/{MARKS_FILE}", str(uri), None, 0, reason))


# --- looking


class _Look:
    """The packs that a repack may change, as values."""

    def __init__(self, run: MaintenanceRun, policy: RepackPolicy, needed: Needed, deletes: frozenset[str]) -> None:
        self._run = run
        self._core = run.core
        self._policy = policy
        self._rows = [row for row in run.core.index.all_rows() if row.bundle_id not in deletes]
        chains: dict[SessionUri, list[tuple[bytes, ...]]] = {}
        for row in self._rows:
            chains.setdefault(row.uri, []).append(run.core.needs.of(row.bundle_id))
        self.uses = Uses(needed, chains)
        self._now_ns = now_ns()
        self._dates: dict[bytes, int] = {}
        if policy.cold_after_seconds is not None:
            for row in sorted(self._rows, key=lambda row: row.created_ns):
                self._dates.update(dict.fromkeys(run.core.needs.of(row.bundle_id), row.created_ns))

    def views(self, names: Collection[str] | None, must_go: Collection[str]) -> dict[str, PackView]:
        """These packs, or all: those that can be read."""
        everywhere = names is None
        packs = self._core.folder.list_packs() if names is None else set(names)
        views = {}
        for name in sorted(packs.union(must_go)):
            is_bundle = everywhere and name.startswith(f"{BUNDLES}/")
            view = self._view(name, must_go=is_bundle or name in must_go)
            if view is not None:
                views[name] = view
        return views

    def _is_cold(self, dates: Iterable[int]) -> bool:
        """Whether no version younger than the policy says needs a block of a pack."""
        return self._policy.cold_after_seconds is not None and self._policy.is_cold(max(dates, default=0), self._now_ns)

    def _view(self, name: str, *, must_go: bool) -> PackView | None:
        core = self._core
        try:
            with open_frames(core.folder, name) as file:
                raw = self._compressible(file)
                return PackView(name, file.file_bytes, dict(file.frames), dict(file.heads), raw, must_go)
        except _FATAL:
            raise
        except BundleMissing:
            return None  # it went meanwhile
        except StoreError as error:
            self._run.fail(core.folder.path_of(name), error)
            return None

    def _compressible(self, file: FrameReader) -> frozenset[bytes]:
        """The raw frames of a cold pack, if compression makes the largest of them smaller."""
        if not self._is_cold(self._dates.get(block, 0) for block in file.frames):
            return frozenset()
        raw = [frame for frame in file.frames.values() if _is_raw(file, frame.id)]
        largest = max(raw, key=lambda frame: frame.frame_bytes, default=None)
        if largest is None or not _shrinks(file, largest.id):
            return frozenset()
        return frozenset(frame.id for frame in raw)


def _is_raw(file: FrameReader, block: bytes) -> bool:
    _, head = file.read_head(block)
    return all(stored.codec == RAW_CODE for stored in head.stored)


def _shrinks(file: FrameReader, block: bytes) -> bool:
    header, head = file.read_head(block)
    for number, (spec, _) in enumerate(header.slots):
        data = memoryview(bytearray(spec.size_bytes))
        file.read_slots_into(block, header, head, [(number, [data])])
        if encode_slot([data], spec) is not None:
            return True
    return False


# --- doing


class _Repack:
    """Takes the steps of a plan. needed: as of the look."""

    def __init__(self, run: MaintenanceRun, needed: Needed, should_stop: Callable[[], bool]) -> None:
        self._run = run
        self._core = run.core
        self._needed = needed
        self._should_stop = should_stop
        self._is_full = False
        self._told: set[tuple[str, str]] = set()

    def take(self, steps: Sequence[Step]) -> None:
        plain = [step for step in steps if step.kind == "remove" and not step.elsewhere]
        for some in _batches(plain, _AT_ONCE):
            if self.stopped:
                return
            with self._telling(some[0]):
                self._remove_dead(some)
        for some in _groups([step for step in steps if step.kind != "remove" or step.elsewhere]):
            rest = list(some)
            if len(some) > 1 and not self.stopped:
                with self._telling(some[0]), contextlib.suppress(NoSpace, BudgetExceeded):  # one alone may have it
                    self._take_together(rest)
            for step in rest:
                if self.stopped:
                    return
                with self._telling(step):
                    self._take(step)

    @property
    def stopped(self) -> bool:
        """Whether no step may follow."""
        return self._is_full or self._should_stop()

    @contextlib.contextmanager
    def _telling(self, step: Step) -> Iterator[None]:
        """A step that fails is told; the others go on, unless there is no room."""
        path = self._core.folder.path_of(step.olds[0].name)
        try:
            with self._core.poisoning():
                yield
        except _FATAL:
            raise
        except (NoSpace, BudgetExceeded) as error:
            # A step that the store's budget has no room for may be larger than another one, which makes some.
            self._is_full = error.details.get("which") != STORE_BYTES
            self._tell(path, error)
        except StoreError as error:
            self._tell(path, error)

    def _tell(self, path: str, error: StoreError) -> None:
        if (path, error.code) not in self._told:
            self._told.add((path, error.code))
            self._run.fail(path, error)

    def _remove_dead(self, steps: Sequence[Step]) -> None:
        with self._core.committing():
            needed = self._needed_now()
            dead = [step for step in steps if needed is not None and _is_free(step.olds[0], needed, {})]
            removed = self._core.remove_packs(step.olds[0].name for step in dead)
        for step in dead:
            name = step.olds[0].name
            self._run.freed("remove", self._core.folder.path_of(name), removed[name], step.reason)

    def _take_together(self, steps: list[Step]) -> None:
        """Take steps without copies elsewhere. In the list stay those of which a pack turns out to be damaged, and,
        where the room ends, all that follow. Raises NoSpace, BudgetExceeded."""
        core, swaps = self._core, list[tuple[Step, PackWriter, tuple[TempFile, bytes]]]()
        with core.metering(replacing=True) as room, contextlib.ExitStack() as stack:
            temps = [stack.enter_context(core.folder.new_temp()) for _ in steps]
            room(0)
            needed = self._needed_now(pins=False)  # as of `_try`
            for step, temp in zip(list(steps), temps, strict=True):
                if swaps and self.stopped:
                    break
                if needed is None or not needed.blocks.issuperset(step.blocks):
                    steps.remove(step)
                elif not self._frees_nothing(step, step.blocks):
                    writer = PackWriter(temp, room)
                    try:
                        if self._write(writer, step, [*step.blocks]) is None:
                            swaps.append((step, writer, (temp, writer.finish())))
                    except (NoSpace, BudgetExceeded):
                        break  # what the others free is room
            with core.committing():
                room.require(0)  # as of `_commit`
                needed = self._needed_now()
                for step, writer, fresh in swaps:
                    steps.remove(step)
                    self._swap(step, writer, fresh, {}, needed)

    def _take(self, step: Step) -> None:
        """Without the packs that turn out to be damaged, which stay as they are."""
        bad: set[str] = set()
        while True:
            olds = tuple(pack for pack in step.olds if pack.name not in bad)
            if not olds:
                return
            faulty = self._try(_part(step, olds))
            if not faulty:
                return
            bad |= faulty

    def _try(self, step: Step) -> set[str]:
        """Take a step; or the packs of it that have a needed block which is nowhere as it was written."""
        core = self._core
        proven = self._prove(step)
        blocks = [*step.blocks, *(block for block in step.elsewhere if block not in proven)]
        if not blocks:
            self._commit(step, None, None, proven)
            return set()
        if self._frees_nothing(step, blocks):
            return set()
        with core.metering(replacing=True) as room, core.folder.new_temp() as temp:
            room(0)
            needed = self._needed_now(pins=False)  # asked once the file is there: a forget knows of it, or it gets
            if needed is None or not needed.blocks.issuperset(blocks):  # nothing of what that one has deleted
                return set()
            writer = PackWriter(temp, room)
            damaged = self._write(writer, step, blocks)
            if damaged is not None:
                return {pack.name for pack in step.olds if pack.has(damaged)}
            pack_id = writer.finish()
            self._commit(step, writer, (temp, pack_id), proven, room)
        return set()

    def _write(self, writer: PackWriter, step: Step, blocks: Sequence[bytes]) -> bytes | None:
        """Copy blocks; the first one that no pack has as it was written."""
        sizes, stripped = {block: pack for pack in step.olds for block in pack.blocks}, self._needed.stripped
        for block in writer.each(blocks, lambda one: sizes[one].bytes_of(one, stripped=one in stripped)):
            if not self._copy(writer, step, block):
                return block
        return None

    def _frees_nothing(self, step: Step, wanted: Collection[bytes]) -> bool:
        """Whether a new pack would have all that the old one has, since copies elsewhere, or the packs to join it with,
        turned out to be damaged."""
        (first, *others) = step.olds
        if others or step.compress or first.must_go or not self._needed.stripped.isdisjoint(first.frames):
            return False
        return first.frames.keys() | first.heads.keys() == set(wanted)

    def _prove(self, step: Step) -> dict[bytes, tuple[tuple[str, Stamp], bool]]:
        """Of the blocks with their home elsewhere those that were read there and are right: the pack (as of
        `find_sound`), and whether its header alone was read."""
        own = {pack.name for pack in step.olds}
        proven = {}
        for block in step.elsewhere:
            only_head = self._only_head(step, block)
            place = self._core.find_sound(block, head=only_head, but_for=own, tell=self._tell)
            if place is not None:
                proven[block] = place, only_head
        return proven

    def _copy(self, writer: PackWriter, step: Step, block: bytes) -> bool:
        """Add a block, from a pack that has it as it was written; whether there is one."""
        only_head = self._only_head(step, block)
        place = self._core.find_sound(block, head=only_head, tell=self._tell)
        if place is None:
            return False
        with self._core.files.holding(place[0]) as file:
            if only_head:
                writer.add_stripped(file, block)
            else:
                writer.add_copy(file, block, compressing=block in step.compress)
        return True

    def _only_head(self, step: Step, block: bytes) -> bool:
        """Whether a block's header is enough, or is all that there is in the old packs."""
        return block in self._needed.stripped or not any(block in pack.frames for pack in step.olds)

    def _commit(
        self,
        step: Step,
        writer: PackWriter | None,
        fresh: tuple[TempFile, bytes] | None,
        proven: Mapping[bytes, tuple[tuple[str, Stamp], bool]],
        room: Meter | None = None,
    ) -> None:
        """The new pack gets its name, then the old ones go, as far as they are still not needed."""
        core = self._core
        with core.committing():
            if room is not None:
                room.require(0)  # for a moment both are there, and others have written meanwhile
            self._swap(step, writer, fresh, proven, self._needed_now())

    def _swap(
        self,
        step: Step,
        writer: PackWriter | None,
        fresh: tuple[TempFile, bytes] | None,
        proven: Mapping[bytes, tuple[tuple[str, Stamp], bool]],
        needed: Needed | None,
    ) -> None:
        core = self._core
        copies = {each.id: each.is_stripped for each in writer.frames.values()} if writer is not None else {}
        if needed is None or not needed.blocks.issuperset(copies):
            return
        new = core.publish_pack(*fresh) if fresh is not None else None
        still = {pack for pack in {found for found, _ in proven.values()} if _is_still(core, *pack)}
        there = {block: is_head for block, (found, is_head) in proven.items() if found in still}
        free = [pack for pack in step.olds if pack.name != new and _is_free(pack, needed, there | copies)]
        removed: dict[str, int] = {}
        try:
            removed = core.remove_packs(pack.name for pack in free)
        finally:
            path = core.folder.path_of(new or step.olds[0].name)
            _tell(self._run, step, path, sum(removed.values()), fresh[0].size_bytes if fresh is not None else 0)

    def _needed_now(self, *, pins: bool = True) -> Needed | None:
        """None while needs are unknown, which is told. pins: as of `needed_now`."""
        needed = needed_now(self._core, pins=pins)
        for finding in needed.unknown:
            if (finding.path, finding.code) not in self._told:
                self._told.add((finding.path, finding.code))
                self._run.problems.append(finding)
        return None if needed.unknown else needed


def _is_still(core: StoreCore, name: str, stamp: Stamp) -> bool:
    """Whether the name is still that of the file that was read, and nobody has written to it since."""
    status = core.folder.status_of(name)
    return status is not None and stamp_of(status) == stamp


def _is_free(pack: PackView, needed: Needed, copies: Mapping[bytes, bool]) -> bool:
    """Whether a pack may go: each block of it that is needed has a copy, with keys and values where they are needed and
    this pack has them: what is needed may have changed since the copy was made. copies: whether of the copy the header
    alone is there, or was read."""
    return all(
        block in copies and not (copies[block] and block in pack.frames and block not in needed.stripped)
        for block in pack.blocks
        if block in needed.blocks
    )


def _part(step: Step, olds: tuple[PackView, ...]) -> Step:
    """A step for some of its packs."""
    if len(olds) == len(step.olds):
        return step
    names = {pack.name for pack in olds}
    blocks = {block: name for block, name in step.blocks.items() if name in names}
    others = (block for block in (*step.blocks, *step.elsewhere) if block not in blocks)
    elsewhere = tuple(block for block in others if any(pack.has(block) for pack in olds))
    return dataclasses.replace(step, olds=olds, blocks=blocks, elsewhere=elsewhere)


def _groups(steps: Sequence[Step]) -> Iterator[Sequence[Step]]:
    """Steps that are taken together, in order."""
    group, size_bytes = list[Step](), 0
    for step in steps:
        size_bytes += step.after_bytes
        if group and (step.elsewhere or size_bytes > _BYTES_AT_ONCE or len(group) == _STEPS_AT_ONCE):
            yield group
            group, size_bytes = [], step.after_bytes
        group.append(step)
        if step.elsewhere:
            yield group
            group, size_bytes = [], 0
    if group:
        yield group


def _batches(steps: Sequence[Step], count: int) -> Iterator[Sequence[Step]]:
    for start in range(0, len(steps), count):
        yield steps[start : start + count]
