"""What a repack rewrites and removes: a pure plan. Packs and needs are values here: nothing reads or writes.

Purpose: bytes that nothing needs leave the disk, and a wake opens few packs, though a session that sleeps often makes
many.

Rules:
- Each needed block has one home: the pack where its copy stays. Copies in other packs count as not needed.
- A pack of which nothing stays goes. One of which too little stays is written anew, with those of the same session.
- A session's packs beyond `max_packs` are joined, the newest first, and on while the next is not larger than all so
  far: so a block is copied O(log n) times, however often the session sleeps.
- Packs that several sessions need are not joined: a hundred forks, each repacked, still cost one base.
- A new pack has the blocks of its session's newest version first, in chain order, as a wake reads them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..errors import InvalidPolicy
from ..folder.store_file import BUNDLES
from ..format.layout import Frame
from ..format.pack import frames_bytes
from ..limits import MAX_FRAMES, MIB
from ..uri import SessionUri
from ..writing.needs import Needed

_MAX_SECONDS: Final = 100 * 366 * 24 * 60 * 60
_SECOND_NS: Final = 10**9
_MOST_PACKS: Final = 1 << 40
_TOGETHER_BYTES: Final = 256 * MIB
"""Packs of a session that are written anew anyway become one pack of about this size: a step is short, and needs little
room."""


@dataclass(frozen=True, slots=True)
class RepackPolicy:
    """When packs are written anew. Raises InvalidPolicy.

    max_packs: packs of its own that a session may have. Those that other sessions need do not count.
    max_unneeded: the part of a pack that may be unneeded, 0 to below 1.
    cold_after_seconds: packs that only versions slept longer ago need are compressed; None: none are. A wrong clock
        makes it early or late, which costs only time.
    """

    max_packs: int = 24
    max_unneeded: float = 0.25
    cold_after_seconds: float | None = None

    def __post_init__(self) -> None:
        packs, part, seconds = self.max_packs, self.max_unneeded, self.cold_after_seconds
        if type(packs) is not int or not 1 <= packs <= _MOST_PACKS:
            raise InvalidPolicy("max_packs is a whole number, 1 or more.", field="max_packs")
        if type(part) not in (int, float) or not 0 <= part < 1:  # so no NaN
            raise InvalidPolicy("max_unneeded is a number from 0 to below 1.", field="max_unneeded")
        if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= _MAX_SECONDS):
            raise InvalidPolicy("cold_after_seconds is a number of seconds, 0 or more.", field="cold_after_seconds")

    def is_cold(self, slept_ns: int, now_ns: int) -> bool:
        seconds = self.cold_after_seconds
        return seconds is not None and now_ns - slept_ns > seconds * _SECOND_NS


CLEARING: Final = RepackPolicy(max_packs=_MOST_PACKS, max_unneeded=0)
"""Everything that is not needed leaves the disk; packs are not joined."""


@dataclass(frozen=True, slots=True)
class Uses:
    """What is needed, and by whom: the blocks of each session's versions, oldest version first."""

    needed: Needed
    chains: Mapping[SessionUri, Sequence[Sequence[bytes]]]

    def owners(self, of: Collection[bytes]) -> dict[bytes, SessionUri | None]:
        """The one session that needs each of these blocks; None for one that several need."""
        blocks = frozenset(of)
        owners: dict[bytes, SessionUri | None] = {}
        for uri, chains in self.chains.items():
            mine: set[bytes] = set()
            for chain in chains:
                mine.update(blocks.intersection(chain))
            for block in mine:
                owners[block] = uri if owners.get(block, uri) == uri else None
        return owners

    def ages(self, uri: SessionUri) -> dict[bytes, int]:
        """A number for each block of a session, in the order in which versions brought them."""
        blocks = dict.fromkeys(itertools.chain.from_iterable(self.chains[uri]))
        return {block: number for number, block in enumerate(blocks)}

    def in_wake_order(self, uri: SessionUri) -> dict[bytes, None]:
        """The blocks of a session: those of its newest version, then what older ones have besides."""
        return dict.fromkeys(itertools.chain.from_iterable(reversed(self.chains[uri])))


@dataclass(frozen=True, slots=True)
class PackView:
    """A pack: its name, the bytes of its file, and its frames in file order, as its directory tells them. heads: those
    with a header alone. raw: frames that may be compressed and are not; only looked up for a cold pack. must_go: it is
    written anew or removed in any case."""

    name: str
    size_bytes: int
    frames: Mapping[bytes, Frame]
    heads: Mapping[bytes, Frame] = field(default_factory=dict)
    raw: frozenset[bytes] = frozenset()
    must_go: bool = False

    @property
    def blocks(self) -> Iterator[bytes]:
        yield from self.frames
        yield from self.heads

    @property
    def frames_bytes(self) -> int:
        return frames_bytes(self.frames.values()) + frames_bytes(self.heads.values())

    def has(self, block: bytes) -> bool:
        return block in self.frames or block in self.heads

    def bytes_of(self, block: bytes, *, stripped: bool) -> int:
        """The bytes of a block's frame, or of what stays of it."""
        frame = self.heads.get(block) or self.frames[block]
        return frame.head_bytes if stripped else frame.frame_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """Packs that go, and one new pack with what stays of them.

    blocks: what the new pack gets, in order, each with the pack that has it; nothing: there is no new pack. elsewhere:
    the needed blocks in these packs that have their home in another one. compress: those of the blocks that are
    compressed. after_bytes: of the new pack, as far as it is known.
    """

    kind: str
    olds: tuple[PackView, ...]
    reason: str
    blocks: Mapping[bytes, str] = field(default_factory=dict)
    elsewhere: tuple[bytes, ...] = ()
    compress: frozenset[bytes] = frozenset()
    after_bytes: int = 0

    @property
    def before_bytes(self) -> int:
        return sum(pack.size_bytes for pack in self.olds)


def plan_repack(packs: Iterable[PackView], uses: Uses, policy: RepackPolicy) -> tuple[Step, ...]:
    """All steps for these packs, in order: first those that only remove."""
    return _Plan(packs, uses, policy).steps()


def packs_to_join(sizes: Sequence[int], max_packs: int) -> int:
    """How many of a session's packs are joined, counted from the newest. sizes: the needed bytes of each, oldest first.
    0 if they are few enough; else so many that few enough are left, and on while the next is not larger than all so
    far."""
    too_many, total, count = len(sizes) - max_packs, 0, 0
    if too_many > 0:
        for size_bytes in reversed(sizes):
            if count > too_many and size_bytes > total:
                break
            total += size_bytes
            count += 1
    return count


def homes_of(packs: Iterable[PackView], needed: Needed) -> dict[bytes, str]:
    """Where each needed block stays. Of several packs that with the larger needed part, then the larger one: what an
    earlier repack wrote before it was cut off, and not what it was made of."""
    best: dict[bytes, tuple[tuple[bool, bool, float, int, str], str]] = {}
    for pack in packs:
        mine = [block for block in pack.blocks if block in needed.blocks]
        part = _bytes_of(pack, mine, needed) / max(1, pack.frames_bytes)
        for block in mine:
            fits = block in (pack.heads if block in needed.stripped else pack.frames)
            rank = (fits, not pack.must_go, part, pack.size_bytes, pack.name)
            if block not in best or rank > best[block][0]:
                best[block] = rank, pack.name
    return {block: name for block, (_, name) in best.items()}


def _bytes_of(pack: PackView, blocks: Iterable[bytes], needed: Needed) -> int:
    """The bytes of these blocks' frames in a pack, or of what stays of them."""
    return sum(pack.bytes_of(block, stripped=block in needed.stripped) for block in blocks)


class _Plan:
    def __init__(self, packs: Iterable[PackView], uses: Uses, policy: RepackPolicy) -> None:
        self._packs = sorted(packs, key=lambda pack: pack.name)
        self._uses = uses
        self._needed = uses.needed
        self._policy = policy
        self._homes = homes_of(self._packs, self._needed)
        self._kept = {
            pack.name: [block for block in pack.blocks if self._homes.get(block) == pack.name] for pack in self._packs
        }
        self._kept_bytes = {pack.name: _bytes_of(pack, self._kept[pack.name], self._needed) for pack in self._packs}
        self._owners = uses.owners(set().union(*self._kept.values()))

    def steps(self) -> tuple[Step, ...]:
        steps = [self._removal(pack) for pack in self._packs if not self._kept[pack.name]]
        of_sessions: dict[SessionUri, list[PackView]] = {}
        for pack in self._packs:
            if not self._kept[pack.name]:
                continue
            uri = self._owner(pack)
            if uri is not None:
                of_sessions.setdefault(uri, []).append(pack)
            elif self._changes(pack):
                steps.append(self._rewrite([pack], self._kept[pack.name]))
        for uri, packs in sorted(of_sessions.items()):
            steps += self._of_session(uri, packs)
        return tuple(steps)

    def _owner(self, pack: PackView) -> SessionUri | None:
        """The one session that needs what stays of a pack."""
        owners = {self._owners.get(block) for block in self._kept[pack.name]}
        return owners.pop() if len(owners) == 1 else None

    def _changes(self, pack: PackView) -> bool:
        unneeded = pack.frames_bytes - self._kept_bytes[pack.name]
        too_much = unneeded > self._policy.max_unneeded * pack.frames_bytes
        return pack.must_go or too_much or not pack.raw.isdisjoint(self._kept[pack.name])

    def _of_session(self, uri: SessionUri, packs: list[PackView]) -> Iterator[Step]:
        ages = self._uses.ages(uri)
        packs.sort(key=lambda pack: min(ages[block] for block in self._kept[pack.name]))
        count = packs_to_join([self._kept_bytes[pack.name] for pack in packs], self._policy.max_packs)
        changing = [pack for pack in packs[: len(packs) - count] if self._changes(pack)]
        if not (count or changing):
            return
        order = self._uses.in_wake_order(uri)
        for together in self._in_parts(changing, _TOGETHER_BYTES):
            yield self._rewrite(together, order)
        for together in self._in_parts(packs[len(packs) - count :], None):
            if len(together) > 1 or self._changes(together[0]):
                yield self._rewrite(together, order, joining=uri)

    def _in_parts(self, packs: Sequence[PackView], most_bytes: int | None) -> Iterator[list[PackView]]:
        """Packs whose blocks one pack can hold."""
        part: list[PackView] = []
        size_bytes = frames = 0
        for pack in packs:
            size_bytes += self._kept_bytes[pack.name]
            frames += len(self._kept[pack.name])
            if part and (frames > MAX_FRAMES or (most_bytes is not None and size_bytes > most_bytes)):
                yield part
                part, size_bytes, frames = [], self._kept_bytes[pack.name], len(self._kept[pack.name])
            part.append(pack)
        if part:
            yield part

    def _removal(self, pack: PackView) -> Step:
        elsewhere = self._elsewhere([pack])
        reason = "Its needed blocks lie in other packs too." if elsewhere else "Nothing needs a block of it."
        return Step("remove", (pack,), reason, elsewhere=elsewhere)

    def _elsewhere(self, packs: Iterable[PackView]) -> tuple[bytes, ...]:
        olds = list(packs)
        names = {pack.name for pack in olds}
        blocks = dict.fromkeys(block for pack in olds for block in pack.blocks)
        return tuple(block for block in blocks if self._homes.get(block, olds[0].name) not in names)

    def _rewrite(self, packs: Sequence[PackView], order: Iterable[bytes], joining: SessionUri | None = None) -> Step:
        kept = {block: pack.name for pack in packs for block in self._kept[pack.name]}
        blocks = {block: kept[block] for block in order if block in kept}
        compress = frozenset().union(*(pack.raw for pack in packs)).intersection(blocks)
        joins = joining is not None and len(packs) > 1
        rewritten = joins or any(pack.must_go or pack.frames_bytes > self._kept_bytes[pack.name] for pack in packs)
        return Step(
            "rewrite" if rewritten else "recompress",
            tuple(packs),
            f"They are {len(packs)} packs of {joining}." if joins else self._reason(packs, blocks),
            blocks,
            self._elsewhere(packs),
            compress,
            sum(self._kept_bytes[pack.name] for pack in packs),
        )

    def _reason(self, packs: Sequence[PackView], blocks: Collection[bytes]) -> str:
        if any(pack.name.startswith(f"{BUNDLES}/") for pack in packs):
            return "Its blocks move out of the folder of the earlier format."
        total = sum(len(pack.frames) + len(pack.heads) for pack in packs)
        if len(blocks) == total and any(pack.raw for pack in packs):
            return "Only versions that were slept long ago need it."
        if len(blocks) == total:
            return "It has keys and values that nothing needs any more."
        return f"{len(blocks)} of its {total} blocks are still needed."
