"""Who needs a block, and where the blocks of a version lie, as looking tells it: in which pack, in which condition, in
how many bytes. Changes nothing.

Needs are those of the manifests, never of the index: `unknown` says why some may be missing. The bytes are those of
`usage.py`, so that the figures of a version and of the store agree.

How it scales: the block list of each manifest is read once by an open store. Of packs the directories are read, and the
heads of the version's own blocks; payloads only where that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from ..answers import Condition, Finding, VersionInfo
from ..checking.promised import still_missing
from ..errors import BundleMissing, StoreClosed, StoreError
from ..folder.folder import manifest_name
from ..folder.marks import stripped_in
from ..format.blocks import BlockEntry
from ..format.codecs import PLANES_CODE
from ..format.frames import FrameReader
from ..writing.core import StoreCore
from ..writing.needs import Needed
from ..writing.reader import BundleReader
from ..writing.unreadable import findings_without_manifest
from .repack_plan import PackView, homes_of


@dataclass(slots=True)
class Needers:
    """Which versions need each of some blocks. of: their bundle ids; whole: the blocks of which one needs more than the
    header. unknown: manifests whose needs nothing tells."""

    of: dict[bytes, list[str]]
    rows: Mapping[str, VersionInfo]
    whole: set[bytes] = field(default_factory=set)
    unknown: tuple[Finding, ...] = ()

    def sessions(self, block_id: bytes) -> set[str]:
        """The URIs of the sessions that need a block."""
        return {self.rows[each].session for each in self.of.get(block_id, ()) if each in self.rows}


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """A block of a version: its pack by name, empty where none has it; the bytes that are needed of its frame."""

    entry: BlockEntry
    pack: str
    condition: Condition
    stored_bytes: int
    codec: str


@dataclass(frozen=True, slots=True)
class Places:
    """The blocks of a version, in their order, and who needs them. beside_bytes: of its packs and its manifest what is
    no block; of that, `beside_shared_bytes` stay when its session goes. problems: packs that cannot be read."""

    blocks: tuple[BlockPlace, ...]
    needers: Needers
    beside_bytes: int
    beside_shared_bytes: int
    problems: tuple[Finding, ...]


def needers_of(core: StoreCore, block_ids: Collection[bytes]) -> Needers:
    """The versions that need these blocks. Raises StoreIoError, UnsafePath, StoreClosed."""
    core.require_open()
    core.look_again()
    there, stripped, wanted = core.folder.list_versions(), stripped_in(core.folder) or frozenset(), frozenset(block_ids)
    of: dict[bytes, list[str]] = {each: [] for each in wanted}
    whole, unknown = set[bytes](), list[Finding]()
    for bundle_id in sorted(there):
        named = core.needs.of(bundle_id)
        mine = wanted.intersection(named)
        for block_id in mine:
            of[block_id].append(bundle_id)
        if bundle_id not in stripped:
            whole |= mine
        if (fault := core.needs.fault_of(bundle_id)) is not None and fault.code != BundleMissing.code:
            unknown.append(fault)
    core.require_open()  # else nothing could be read
    whole |= wanted & core.needs.ends()
    missing = still_missing(core, core.index.bundle_ids() - there)
    unknown += findings_without_manifest(core.folder, core.index.rows_of(missing).values())
    rows = core.index.rows_of({each for versions in of.values() for each in versions})
    return Needers(of, rows, whole, tuple(unknown))


def places_of(
    core: StoreCore, reader: BundleReader, at_each_block: Callable[[], object], *, deep: bool = False
) -> Places:
    """Where the blocks of an open version lie. deep: every byte of them is read and compared. Raises as
    `needers_of`."""
    core.require_open()
    core.look_again()
    entries = reader.entries
    named = core.index.packs_with([entry.id for entry in entries], stripped=True)
    problems: dict[str, Finding] = {}
    views = [view for name in named if (view := _view(core, name, problems)) is not None]
    needers = needers_of(core, {entry.id for entry in entries}.union(*(view.blocks for view in views)))
    needed_blocks = frozenset(each for each, versions in needers.of.items() if versions)
    homes = homes_of(views, Needed(needed_blocks, needed_blocks - needers.whole, ()))
    by_name = {view.name: view for view in views}
    told_of = {block_id for name in problems for block_id in named.get(name, ())}
    blocks = []
    for entry in entries:
        at_each_block()
        view = by_name.get(homes.get(entry.id, ""))
        if view is None:
            condition: Condition = "damaged" if entry.id in told_of else "missing"
            blocks.append(BlockPlace(entry, "", condition, 0, ""))
            continue
        blocks.append(_place(core, view, entry, problems, is_whole=entry.id in needers.whole, deep=deep))
    beside, shared = _beside(core, reader, {each.pack for each in blocks} - {""}, by_name, homes, needers)
    return Places(tuple(blocks), needers, beside, shared, tuple(problems.values()))


def view_of(core: StoreCore, name: str) -> PackView:
    """A pack as its directory tells it. Raises as `open_frames`."""
    with core.files.holding(name) as file:
        return PackView(name, file.file_bytes, dict(file.frames), dict(file.heads))


def _view(core: StoreCore, name: str, problems: dict[str, Finding]) -> PackView | None:
    try:
        return view_of(core, name)
    except StoreClosed:
        raise
    except BundleMissing:
        return None
    except StoreError as error:
        problems[name] = Finding.of(core.folder.path_of(name), error)
        return None


def _place(
    core: StoreCore,
    view: PackView,
    entry: BlockEntry,
    problems: dict[str, Finding],
    *,
    is_whole: bool,
    deep: bool,
) -> BlockPlace:
    frame = view.heads.get(entry.id) or view.frames[entry.id]
    size_bytes = frame.frame_bytes if is_whole else frame.head_bytes
    condition: Condition = "whole" if entry.id in view.frames else "stripped"
    try:
        with core.files.holding(view.name) as file:
            codec = _codec(file, entry.id)
            if deep and condition == "whole":
                file.check_block(entry.id)
    except StoreClosed:
        raise
    except StoreError as error:
        path = core.folder.path_of(view.name)
        problems[f"{view.name} {entry.start}"] = Finding.of(path, error)
        return BlockPlace(entry, view.name, "damaged", size_bytes, "")
    return BlockPlace(entry, view.name, condition, size_bytes, codec)


def _codec(file: FrameReader, block_id: bytes) -> str:
    """How its bytes lie there: `planes` if any slot is compressed; empty where there are none."""
    codes = {slot.codec for slot in file.read_head(block_id)[1].stored}
    return "" if not codes else "planes" if PLANES_CODE in codes else "raw"


def _beside(
    core: StoreCore,
    reader: BundleReader,
    names: Collection[str],
    views: Mapping[str, PackView],
    homes: Mapping[bytes, str],
    needers: Needers,
) -> tuple[int, int]:
    """The bytes of manifest and packs that are no block, and those of them that other sessions need too."""
    total, shared = core.folder.bytes_of(manifest_name(reader.bundle_id)), 0
    for name in names:
        view = views[name]
        rest = view.size_bytes - view.frames_bytes
        users = set[str]().union(*(needers.sessions(each) for each in view.blocks if homes.get(each) == name))
        total += rest
        shared += rest if len(users) > 1 else 0
    return total, shared
