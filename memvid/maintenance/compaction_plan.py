"""The plan of a compaction for the files of one session: a pure function.

Decides which holders are folded together, which files versions look into, which frames go, and the order. Files are
values here: nothing reads or writes.

Purpose: a session that sleeps often has its blocks in the files of many versions, and a wake opens each. The newest
version's file takes over (adopts) the frames of its newest holders, and all versions that need those look there from
then on, so that no byte lies twice.

Rules:
- A holder is adopted while it is not larger than all adopted before it: a copied frame then lies in a file at least
  twice as large, so it is copied O(log n) times however often the session sleeps.
- Files that other sessions use stay where they are: a hundred forks, each compacted, still cost one base.
- A frame is copied first, then all users are led to the copy, then the frame goes. Each step alone leaves a sound
  store; after a crash a new plan finishes the rest.
- The needs of an unreadable bundle are unknown: files that it may use lose nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import InvalidPolicy
from ..format.records import IndexRow
from ..limits import MAX_HOLDERS

_MAX_SECONDS: Final = 100 * 366 * 24 * 60 * 60
_SECOND_NS: Final = 10**9


@dataclass(frozen=True, slots=True)
class CompactionPolicy:
    """When to write a session's files anew. Raises InvalidPolicy.

    max_holders: other files of its own that the newest version may need. Those that other sessions use do not count.
    min_dead_ratio: the unneeded part of a file at which the file is written anew without it.
    cold_after_seconds: files slept longer ago, and needed by no younger version, are compressed;
        None: none are. A wrong clock makes it early or late, which costs only time.
    """

    max_holders: int = 24
    min_dead_ratio: float = 0.25
    cold_after_seconds: float | None = None

    def __post_init__(self) -> None:
        holders, ratio, seconds = self.max_holders, self.min_dead_ratio, self.cold_after_seconds
        if type(holders) is not int or not 1 <= holders <= MAX_HOLDERS:
            raise InvalidPolicy(f"max_holders is a whole number from 1 to {MAX_HOLDERS}.", field="max_holders")
        if type(ratio) not in (int, float) or not 0 <= ratio < 1:  # so no NaN
            raise InvalidPolicy("min_dead_ratio is a number from 0 to below 1.", field="min_dead_ratio")
        if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= _MAX_SECONDS):
            raise InvalidPolicy("cold_after_seconds is a number of seconds, 0 or more.", field="cold_after_seconds")

    def is_cold(self, slept_ns: int, now_ns: int) -> bool:
        seconds = self.cold_after_seconds
        return seconds is not None and now_ns - slept_ns > seconds * _SECOND_NS


@dataclass(frozen=True, slots=True)
class FileView:
    """One bundle's file. `row` is None if it is no version of a session.

    frames: the blocks in it, in file order, with the bytes of each frame.
    places: for each block of its manifest the bundle that holds it, itself included; empty for a retired file, whose
        manifest needs nothing any more.
    other_bytes: the bytes of the file beside frames.
    exclusive: it belongs to the session, or to none, and only versions of the session use it.
    users_known: every user of it is in the plan's files, so its unneeded frames are known.
    raw: frames that may be compressed and are not; only looked up for a cold file.
    """

    bundle_id: bytes
    path: str
    row: IndexRow | None
    retired: bool
    frames: Mapping[bytes, int]
    places: Mapping[bytes, bytes]
    other_bytes: int
    has_manifest: bool = True
    exclusive: bool = False
    users_known: bool = False
    raw: frozenset[bytes] = frozenset()

    @property
    def file_bytes(self) -> int:
        return self.other_bytes + sum(self.frames.values())


@dataclass(frozen=True, slots=True)
class Step:
    """One file to be written anew, or (`remove`) to go. `after_bytes` is the file's size then, as far as it is known.

    frames: in file order, each block with the bundle whose file has its frame at that moment.
    holders: for each other block of the manifest the bundle that holds it.
    recompress: those of the frames that are encoded anew.
    """

    kind: str
    file: FileView
    reason: str
    frames: tuple[tuple[bytes, bytes], ...] = ()
    holders: Mapping[bytes, bytes] = field(default_factory=dict)
    recompress: frozenset[bytes] = frozenset()
    after_bytes: int = 0

    @property
    def adopts(self) -> bool:
        return any(source != self.file.bundle_id for _, source in self.frames)

    @property
    def with_manifest(self) -> bool:
        return self.kind in ("rewrite", "recompress") and self.file.has_manifest


@dataclass(frozen=True, slots=True)
class Targets:
    """The future places of the newest version's blocks, and the holders whose frames its file takes over."""

    places: Mapping[bytes, bytes]
    adopted: tuple[bytes, ...]

    def moved(self, file: FileView) -> list[bytes]:
        """The blocks in a file that will have their place in another one."""
        return [block for block in file.frames if self.places.get(block, file.bundle_id) != file.bundle_id]


def choose_targets(newest: FileView, files: Mapping[bytes, FileView], policy: CompactionPolicy) -> Targets:
    """Decide the places of the newest version's blocks. Only `exclusive` files give frames away or get users.

    If several files of the session hold a block (a compaction was cut off, or a sleep came between), the youngest
    counts: it was to adopt the block.
    """
    places = _without_duplicates(newest, files)
    held: dict[bytes, int] = {}
    damaged: set[bytes] = set()
    own_bytes = 0
    for block, place in places.items():
        if place == newest.bundle_id:
            own_bytes += newest.frames[block]
        elif place in files and files[place].exclusive:
            held[place] = held.get(place, 0) + files[place].frames.get(block, 0)
            if block not in files[place].frames:
                damaged.add(place)
    for place in damaged:  # it lacks what it should hold
        del held[place]
    adopted = choose_holders(own_bytes, list(held.items()), policy.max_holders)
    for block, place in places.items():
        if place in adopted:
            places[block] = newest.bundle_id
    return Targets(places, adopted)


def choose_holders(own_bytes: int, held: Sequence[tuple[bytes, int]], max_holders: int) -> tuple[bytes, ...]:
    """The holders that a file adopts. `held`: holders, oldest first, with the bytes it needs of each. None if they are
    few enough; else the newest ones beyond that number, and on while the next is not larger than all so far."""
    too_many = len(held) - max_holders
    adopted: list[bytes] = []
    if too_many > 0:
        total = own_bytes
        for holder, size_bytes in reversed(held):
            if len(adopted) >= too_many and size_bytes > total:
                break
            adopted.append(holder)
            total += size_bytes
    return tuple(adopted)


def _without_duplicates(newest: FileView, files: Mapping[bytes, FileView]) -> dict[bytes, bytes]:
    places = dict(newest.places)
    own = [file for file in files.values() if file.exclusive and file.row is not None]
    for file in sorted(own, key=_version):  # the last one that holds a block has it
        for block in file.frames:
            place = files.get(places.get(block, b""))
            if place is not None and place.exclusive:
                places[block] = file.bundle_id
    return places


def plan_compaction(newest: FileView, files: Mapping[bytes, FileView], policy: CompactionPolicy) -> tuple[Step, ...]:
    """All steps for one session, in order.

    `newest` is the file of its newest version. `files`, by bundle id, are all that matter: the session's files that may
    be written anew, their users, and the retired files that it uses.
    """
    targets = choose_targets(newest, files, policy)
    return _Plan(newest, files, targets, policy).steps()


class _Plan:
    """A plan in the making: first the end state of each file, then an order that leads there."""

    def __init__(
        self, newest: FileView, files: Mapping[bytes, FileView], targets: Targets, policy: CompactionPolicy
    ) -> None:
        self._newest = newest
        self._files = files
        self._targets = targets
        self._policy = policy
        self._places = {file.bundle_id: self._led(file) for file in files.values() if not file.retired}
        self._needed = _needed_of(self._places)
        self._frames = {file.bundle_id: self._kept(file) for file in files.values()}

    def steps(self) -> tuple[Step, ...]:
        steps = [self._fold()] if self._targets.adopted else []
        steps += self._in_order([file for file in self._files.values() if self._changes(file)])
        return tuple(steps)

    def _led(self, file: FileView) -> Mapping[bytes, bytes]:
        """A live file's places in the end: a version of the session looks where the newest one does."""
        if not self._is_own(file):
            return file.places
        targets = self._targets.places
        moved = {
            block: targets[block]
            for block, place in file.places.items()
            if targets.get(block, place) != place and self._may_leave(place) and self._will_hold(targets[block], block)
        }
        return {**file.places, **moved} if moved else file.places

    def _will_hold(self, place: bytes, block: bytes) -> bool:
        """Whether the newest version looks for a block there, now or in the end: its file was read before the others,
        so a block may have moved between."""
        return place == self._newest.bundle_id or place not in self._files or block in self._files[place].frames

    def _may_leave(self, place: bytes) -> bool:
        return place in self._files and self._files[place].exclusive

    def _is_own(self, file: FileView) -> bool:
        return file.row is not None and self._newest.row is not None and file.row.uri == self._newest.row.uri

    def _kept(self, file: FileView) -> tuple[bytes, ...]:
        """A file's frames in the end, of its present ones."""
        if not file.users_known or not (file.retired or self._is_own(file)):
            return tuple(file.frames)
        needed = self._needed.get(file.bundle_id, set())
        return tuple(block for block in file.frames if block in needed)

    def _changes(self, file: FileView) -> bool:
        kept = self._frames[file.bundle_id]
        dead_bytes = file.file_bytes - file.other_bytes - sum(file.frames[block] for block in kept)
        if file.retired:
            dead_bytes += file.other_bytes if file.has_manifest else 0
            return file.users_known and (dead_bytes > self._policy.min_dead_ratio * file.file_bytes or bool(file.raw))
        if not self._is_own(file) or (self._targets.adopted and file is self._newest):
            return False
        if self._places[file.bundle_id] is not file.places:
            return True
        return dead_bytes > self._policy.min_dead_ratio * file.file_bytes or bool(file.raw.intersection(kept))

    def _fold(self) -> Step:
        """The newest file takes over the adopted frames and loses nothing: in chain order, then the others."""
        newest = self._newest
        sources = dict.fromkeys(newest.frames, newest.bundle_id)
        for block, place in newest.places.items():
            if self._targets.places[block] == newest.bundle_id:
                sources.setdefault(block, place)
        order = [block for block in newest.places if block in sources]
        order += [block for block in sources if block not in newest.places]
        frames = tuple((block, sources[block]) for block in order)
        holders = {b: p for b, p in self._places[newest.bundle_id].items() if b not in sources}
        adopted_bytes = sum(self._files[source].frames[block] for block, source in frames if source != newest.bundle_id)
        return Step(
            "rewrite",
            newest,
            f"takes over the blocks of {len(self._targets.adopted)} other files",
            frames,
            holders,
            after_bytes=newest.file_bytes + adopted_bytes,
        )

    def _in_order(self, changing: Iterable[FileView]) -> list[Step]:
        """A file loses its frames after all its users have been led elsewhere. If files wait for each other in a
        circle, one is led first and loses its frames later."""
        waiting = {file.bundle_id: file for file in sorted(changing, key=_version, reverse=True)}
        blockers = self._blockers(waiting)
        frees: defaultdict[bytes, list[bytes]] = defaultdict(list)
        for bundle_id, others in blockers.items():
            for other in others:
                frees[other].append(bundle_id)
        led: set[bytes] = set()
        steps: list[Step] = []
        ready = deque(bundle_id for bundle_id in waiting if not blockers[bundle_id])
        while waiting:
            if ready:
                bundle_id = ready.popleft()
                steps.append(self._step(waiting.pop(bundle_id), self._frames[bundle_id]))
            else:
                bundle_id = next(iter(sorted(blockers[next(iter(waiting))])))
                steps.append(self._step(waiting[bundle_id], tuple(waiting[bundle_id].frames)))
            if bundle_id in led:
                continue
            led.add(bundle_id)
            for other in frees[bundle_id]:
                blockers[other].discard(bundle_id)
                if not blockers[other] and other in waiting:
                    ready.append(other)
        return steps

    def _blockers(self, waiting: Mapping[bytes, FileView]) -> dict[bytes, set[bytes]]:
        """For each file that loses frames, the other files that need some of them now."""
        lost = {one: set(file.frames).difference(self._frames[one]) for one, file in waiting.items()}
        blockers: dict[bytes, set[bytes]] = {one: set() for one in waiting}
        for file in self._files.values():
            if file is self._newest and self._targets.adopted:
                continue  # its step comes first
            for block, place in file.places.items():
                if place != file.bundle_id and block in lost.get(place, ()):
                    blockers[place].add(file.bundle_id)
        return blockers

    def _step(self, file: FileView, kept: Sequence[bytes]) -> Step:
        here = set(kept)
        places = self._places.get(file.bundle_id, {})
        kept_bytes = sum(file.frames[block] for block in kept)
        if file.retired and not kept:
            return Step("remove", file, "nothing needs what is in it any more")
        recompress = file.raw.intersection(kept)
        kind, reason = self._why(file, len(file.frames) - len(kept), bool(recompress))
        return Step(
            kind,
            file,
            reason,
            tuple((block, file.bundle_id) for block in kept),
            {block: place for block, place in places.items() if block not in here},
            recompress,
            kept_bytes + (0 if file.retired else file.other_bytes),
        )

    def _why(self, file: FileView, lost: int, recompressed: bool) -> tuple[str, str]:
        if file.retired and (lost or file.has_manifest):
            return "strip", "its version is gone; only what others need stays"
        if not file.retired and self._places[file.bundle_id] is not file.places:
            return "rewrite", "blocks that it holds or needs lie in another file of the session now"
        if lost:
            return "rewrite", f"{lost} blocks in it are needed by nothing"
        assert recompressed
        return "recompress", "it was slept longer ago than was asked for"


def _needed_of(places: Mapping[bytes, Mapping[bytes, bytes]]) -> dict[bytes, set[bytes]]:
    """For each holder the blocks that live versions look for in it."""
    needed: defaultdict[bytes, set[bytes]] = defaultdict(set)
    for of_one in places.values():
        for block, place in of_one.items():
            needed[place].add(block)
    return needed


def _version(file: FileView) -> int:
    return file.row.version if file.row is not None else 0
