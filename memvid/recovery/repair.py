"""Repair: copies sound frames out of damaged packs, and takes what versions lack from other files. Gives nothing up.

The steps, in this order; each is durable before the next begins, and each may be the last:
1. store.json and marks.json: a damaged one moves to `damaged`, and is made anew; the marks from a source that has them.
2. Manifests that are missing or damaged are copied from the sources, if their digest is right.
3. A block of which several packs have a damaged frame is put together, if each slot is sound in one of them: a wake
   reads it so, and the damaged files move away.
4. Damaged packs: their sound frames that are sound nowhere else and needed go into a new pack, then the damaged file
   moves to `damaged`. Of a block with damaged keys and values the header is kept, for it has the tokens.
5. Blocks that versions lack are copied from the sources into new packs, or put together from several.

Rules:
- The folders that are named are sources, and so are `damaged`, for what had to give way to a file with its name
  (`StoreCore.publish`), and for manifests those that lie under another's name.
- A damaged manifest stays in its place until a sound one replaces it. So the needs of its version stay unknown, and no
  pack is removed, also after the index is lost.
- While needs are unknown, every sound frame counts as needed.
- Under the lock, before a damaged pack moves, each block that is needed then is looked up once more in another pack.
- What the system refuses to read is no damage: the file stays where it is, and is told.
- No budget refuses a repair's writes, for they keep sessions from being lost; they count for the day.
- A second run finishes what was begun; after that there is nothing to do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from ..answers import MaintenanceReport
from ..checking.check import Check, exhausted
from ..checking.findings import find_strangers, findings_of_pack, findings_of_rivals, findings_of_waiting, is_damage
from ..disk.budget import utc_day
from ..disk.clock import now_ns
from ..disk.paths import closing_fd, open_foreign_file, opened_folder, read_up_to, whole_path
from ..errors import (
    Corruption,
    CorruptMarks,
    CorruptStoreFile,
    LimitExceeded,
    MarksLost,
    StoreError,
    StoreIoError,
    UnsafePath,
    UnsupportedFormat,
)
from ..folder.damaged import move_aside
from ..folder.folder import manifest_name
from ..folder.marks import MARKS_FILE, Marks, decode_marks, findings_of_missing
from ..folder.store_file import DAMAGED, PACKS, STORE_FILE, VERSIONS, require_store_file, write_store_file
from ..format.frames import FrameReader
from ..format.manifest import bundle_id_of, decode_manifest, encode_manifest_file
from ..format.pack_writer import PackWriter, joined_block
from ..limits import MAX_MARKS_BYTES
from ..units import format_plural
from ..writing.core import StoreCore
from ..writing.maintenance_run import MaintenanceRun
from ..writing.removal import needed_now, told_versions
from .mending import Mending
from .sources import is_manifest, list_sources, manifest_in, open_source

_MARKS_PUT_BACK: Final = (
    f"A {MARKS_FILE} of a backup that is put in its place counts again; without one, set the tags and pins anew."
)


def repair(core: StoreCore, *, dry_run: bool, sources: Sequence[str | os.PathLike[str]]) -> MaintenanceReport:
    """See `Store.repair`."""
    core.begin_upkeep(dry_run=dry_run)
    files = list_sources(sources)
    run = MaintenanceRun(core, "repair", dry_run)
    try:
        _mend_store_file(run)
        core.look_again()
        _mend_marks(run, sources)
        check = Check(core, deep=True)
        _take_manifests(run, check, files)
        exhausted(check.read_packs(core.folder.list_packs()))
        _mend_packs(run, check, _join_torn(run, check))
        _read_versions(run, check)
        _take_blocks(run, check, files)
        _tell_the_rest(run, check)
    finally:
        if run.bytes_written:
            core.count_written(utc_day(now_ns()), run.bytes_written)
    return run.report()


# --- the store's own files


def _mend_store_file(run: MaintenanceRun) -> None:
    """A store.json that was lost or damaged since the store was opened: without it none opens again."""
    core = run.core
    path = f"{core.path}/{STORE_FILE}"
    try:
        require_store_file(core.folder.root_fd, core.path, core.folder.uuid)
    except CorruptStoreFile as error:
        if not run.dry_run:
            with core.committing():
                _move_aside(core, STORE_FILE)
                write_store_file(core.folder.root_fd, core.path, core.folder.uuid)
        run.did("rewrite", path, 0, f"{str(error.details['reason']).capitalize()}. It is made again.")
    except StoreError as error:
        run.fail(path, error)


def _mend_marks(run: MaintenanceRun, sources: Sequence[str | os.PathLike[str]]) -> None:
    core, path = run.core, f"{run.core.path}/{MARKS_FILE}"
    with run.committing():
        try:
            Marks.load(core.folder)
            return
        except (CorruptMarks, MarksLost) as error:
            what, code = "damaged" if isinstance(error, CorruptMarks) else "missing", error.code
        except StoreError as error:
            run.fail(path, error)
            return
        folders = map(whole_path, sources)
        source, marks = next(
            ((each, marks) for each in folders if (marks := _marks_at(core, each)) is not None),
            ("", Marks(core.folder.uuid)),
        )
        place = None
        if not run.dry_run:
            marks = _usable_marks(core, marks)
            place = _move_aside(core, MARKS_FILE)
            marks.save(core.folder)
    if source:
        run.did("rewrite", path, 0, f"It was {what}. Tags, pins and strips of what the store has come from {source}.")
        return
    run.did("rewrite", path, 0, f"It was {what}. An empty one takes its place.")
    kept = f"; the damaged one is {place}" if place else ""
    run.tell(
        path,
        code,
        f"{path} was {what}, and the tags, pins and strips in it are lost{kept}. {_MARKS_PUT_BACK}",
        lost=True,
    )


def _marks_at(core: StoreCore, folder: str) -> Marks | None:
    """The marks of this store that a source has, as a backup."""
    path = f"{folder}/{MARKS_FILE}"
    with contextlib.suppress(StoreError), closing_fd(open_foreign_file(path)) as fd:
        return decode_marks(read_up_to(fd, MAX_MARKS_BYTES + 1, path), core.folder.uuid, path)
    return None


def _usable_marks(core: StoreCore, marks: Marks) -> Marks:
    """Those of a backup's marks that hold here. Others would bring back what was deleted since, or let the keys and
    values go of a version that is whole again."""
    marks = marks.without_bundles(marks.bundle_ids - told_versions(core))
    whole = {each for each in marks.stripped if not core.missing_of(core.needs.of(each))}
    return marks.without_bundles(whole, names=False)


def _move_aside(core: StoreCore, name: str) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return move_aside(core.folder.root_fd, core.path, core.folder.root_fd, name, core.path)
    return None


# --- manifests


def _take_manifests(run: MaintenanceRun, check: Check, files: Sequence[str]) -> None:
    """Copy the manifests that are missing or damaged, as far as the sources have them. In a dry run they are checked as
    if they were there."""
    wanted = _unreadable_manifests(run.core)
    for path in _places_of(run, frozenset(wanted), files):
        if not wanted:
            break
        with _telling(run, path):
            bundle_id = bundle_id_of(encoded := manifest_in(path))
            if bundle_id in wanted:
                manifest = decode_manifest(encoded, path)
                if run.dry_run:
                    check.planned[bundle_id] = manifest
                if run.dry_run or _put_manifest(run.core, bundle_id, encoded):
                    _tell_taken(run, bundle_id, path, len(encode_manifest_file(encoded)))
                wanted.discard(bundle_id)


def _places_of(run: MaintenanceRun, wanted: frozenset[str], files: Sequence[str]) -> Iterator[str]:
    """Where the manifests may be: under each other's names, in the sources, in `damaged`; what moved there on the way
    is listed too."""
    folder = run.core.folder
    yield from (folder.manifest_path(each) for each in sorted(wanted) if folder.has_manifest(each))
    yield from files
    yield from _in_damaged(run)


def _in_damaged(run: MaintenanceRun) -> list[str]:
    folder, path = run.core.folder, run.core.folder.path_of(DAMAGED)
    with _telling(run, path), contextlib.suppress(FileNotFoundError), opened_folder(folder.root_fd, DAMAGED, path):
        return list_sources([path])
    return []


@contextlib.contextmanager
def _telling(run: MaintenanceRun, path: str) -> Iterator[None]:
    """A source that cannot be used is told; the store's own failures are raised."""
    try:
        yield
    except (Corruption, LimitExceeded, UnsupportedFormat, UnsafePath) as error:
        run.fail(path, error)
    except StoreIoError as error:
        if error.details.get("path") != path:
            raise
        run.fail(path, error)


def _unreadable_manifests(core: StoreCore) -> set[str]:
    there = core.folder.list_versions()
    wanted = set(told_versions(core) - there)
    for bundle_id in there:
        try:
            core.read_manifest(bundle_id)
        except StoreError as error:
            if is_damage(error):
                wanted.add(bundle_id)
    return wanted


def _put_manifest(core: StoreCore, bundle_id: str, encoded: bytes) -> bool:
    """False if the version was deleted meanwhile."""
    with core.poisoning(), core.folder.new_temp(VERSIONS) as temp:
        temp.append([encode_manifest_file(encoded)])
        temp.sync()
        with core.committing():
            if bundle_id not in told_versions(core) and not core.folder.has_manifest(bundle_id):
                return False
            core.publish(temp, manifest_name(bundle_id))
            core.enter_version(bundle_id)
    return True


def _tell_taken(run: MaintenanceRun, bundle_id: str, source: str, size_bytes: int) -> None:
    row = run.core.index.rows_of([bundle_id]).get(bundle_id)
    what = row or run.core.folder.manifest_path(bundle_id)
    run.did("copy", what, size_bytes, f"Its manifest is taken from {os.path.dirname(source)}.")
    run.bytes_written += size_bytes


# --- packs


def _mend_packs(run: MaintenanceRun, check: Check, made: set[str]) -> None:
    mending = Mending(run, check.found, made)
    for name, pack in sorted(check.faulty.items()):
        if all(map(is_damage, pack.faults)):
            mending.mend(name)
        else:  # a read that failed proves nothing
            run.problems += findings_of_pack(run.core, pack)


def _read_versions(run: MaintenanceRun, check: Check) -> None:
    core = run.core
    rows = core.index.rows_of(core.index.bundle_ids())
    check.read_versions(rows.values(), core.folder.list_versions().union(check.planned) - rows.keys())
    exhausted(check.look_for_blocks())


def _join_torn(run: MaintenanceRun, check: Check) -> set[str]:
    """Put together the needed blocks of which packs have damaged frames alone. The names of the new packs."""
    needed = needed_now(run.core)
    torn: dict[bytes, list[str]] = {}
    for name, pack in sorted(check.faulty.items()):
        for block_id in pack.heads.keys() - check.found.full.keys():
            if needed.unknown or block_id in needed.blocks:
                torn.setdefault(block_id, []).append(run.core.folder.path_of(name))
    return _join(run, check, torn)


def _take_blocks(run: MaintenanceRun, check: Check, files: Sequence[str]) -> None:
    """Copy what versions lack from the sources: whole blocks first, then such as can be put together, then headers of
    those that no file has whole."""
    lacking = check.lacking()
    places = [path for path in (*files, *_in_damaged(run)) if not is_manifest(path)] if lacking else []
    torn: dict[bytes, list[str]] = {}
    for path in places:
        with _telling(run, path), open_source(path) as file:
            _take_from(run, check, file, lacking, whole=True)
            for block_id in lacking & (file.frames.keys() | file.torn.keys()):
                torn.setdefault(block_id, []).append(path)
    _join(run, check, {block_id: paths for block_id, paths in torn.items() if block_id in lacking})
    lacking = {each for each in check.lacking() if check.found.head_of(each) is None}
    for path in places if lacking else ():
        with _telling(run, path), open_source(path) as file:
            _take_from(run, check, file, lacking, whole=False)


def _take_from(run: MaintenanceRun, check: Check, file: FrameReader, lacking: set[bytes], *, whole: bool) -> None:
    kinds = (file.frames,) if whole else (file.frames, file.heads, file.torn)
    block_ids = [block_id for kind in kinds for block_id in kind if block_id in lacking]
    sound = {}
    for block_id in block_ids:
        try:
            sound[block_id] = file.check_payloads(block_id)[0] if whole else file.read_head(block_id)[0]
        except StoreIoError:
            raise
        except StoreError:
            continue  # damaged there too
    if not sound:
        return
    there = check.found.full if whole else check.found.heads
    there.update((block_id, hash(sound[block_id].said)) for block_id in _copy(run, file, sound, whole=whole))
    lacking.difference_update(sound)


def _copy(run: MaintenanceRun, file: FrameReader, block_ids: Iterable[bytes], *, whole: bool) -> Sequence[bytes]:
    """Write these blocks of a file, or their headers, as a new pack, and tell it. Those that were needed still."""

    def add(writer: PackWriter, block_id: bytes) -> None:
        (writer.add_copy if whole else writer.add_stripped)(file, block_id)

    sizes = {each: file.frames[each].frame_bytes if whole else 0 for each in block_ids}
    return _write_pack(run, sizes, add, f"that versions lack, from {os.path.dirname(file.path)}.", whole=whole)[1]


def _join(run: MaintenanceRun, check: Check, torn: Mapping[bytes, Sequence[str]]) -> set[str]:
    """Put blocks together, as far as each slot is sound in one file. torn: the files with a damaged frame of each. The
    names of the new packs."""
    groups: dict[tuple[str, ...], list[bytes]] = {}
    for block_id, paths in torn.items():
        if len(paths) > 1:
            groups.setdefault(tuple(paths), []).append(block_id)
    names = set()
    for paths, block_ids in groups.items():
        with contextlib.ExitStack() as stack:
            files = []
            for path in paths:
                with _telling(run, path):
                    files.append(stack.enter_context(open_source(path)))
            names.add(_join_from(run, check, files, block_ids))
    return names


def _join_from(run: MaintenanceRun, check: Check, files: Sequence[FrameReader], block_ids: Sequence[bytes]) -> str:
    blocks = (joined_block(files, block_id) for block_id in block_ids)
    joined = {block.id: block.header for block in blocks if block is not None}
    if not joined:
        return ""

    def add(writer: PackWriter, block_id: bytes) -> None:
        if block := joined_block(files, block_id):
            writer.add(block)

    sizes = {block_id: header.raw_bytes for block_id, header in joined.items()}
    name, written = _write_pack(run, sizes, add, f"put together from {len(files)} files with damaged ones.", whole=True)
    check.found.full.update((block_id, hash(joined[block_id].said)) for block_id in written)
    return name


def _write_pack(
    run: MaintenanceRun,
    sizes: Mapping[bytes, int],
    add: Callable[[PackWriter, bytes], None],
    how: str,
    *,
    whole: bool,
) -> tuple[str, Sequence[bytes]]:
    """A new pack with what `add` puts into it of each block, or (not whole) header, that is still needed: its name, and
    the blocks; "" and none. A dry run only plans it. sizes: the blocks, and about how many bytes each takes."""
    core, name = run.core, PACKS
    blocks = _still_needed(core, sizes, whole=whole)
    size_bytes = sum(sizes[each] for each in blocks)
    while blocks and not run.dry_run:
        with core.poisoning(), core.folder.new_temp() as temp:
            blocks = _still_needed(core, blocks, whole=whole)  # asked once the file is there: a forget knows of it, or
            if not blocks:  # it gets nothing of what that one has deleted
                break
            writer = PackWriter(temp)
            for block_id in blocks:
                add(writer, block_id)
            pack_id = writer.finish()
            size_bytes = temp.size_bytes
            with core.committing():
                if _still_needed(core, blocks, whole=whole) == blocks:
                    name = core.publish_pack(temp, pack_id)
                    break
    if not blocks:
        return "", ()
    what = format_plural(len(blocks), "block" if whole else "header")
    run.did("copy", core.folder.path_of(name), size_bytes, f"{what} {how}")
    run.bytes_written += size_bytes
    return name, blocks


def _still_needed(core: StoreCore, block_ids: Iterable[bytes], *, whole: bool) -> list[bytes]:
    """By versions: what is only in use is not needed."""
    needed = needed_now(core, pins=False)
    is_needed = needed.has_whole if whole else needed.blocks.__contains__
    return [each for each in block_ids if needed.unknown or is_needed(each)]


# --- what is left


def _tell_the_rest(run: MaintenanceRun, check: Check) -> None:
    core = run.core
    findings, _ = check.tell()
    findings += findings_of_missing(core.folder, lambda each: each in check.planned or core.index.knows(each))
    findings += findings_of_waiting(core, core.bases(), check.planned)
    findings += findings_of_rivals(core, core.index.all_rows())
    run.problems += [*findings, *find_strangers(core)]
