"""Versions leave a store as one file each, and come into one.

Owns the exported file (a bundle of the same id that needs no other file), its place, and the version that it becomes.
`import_checks` checks a file first.

Rules:
- An export is flushed and read back before it gets its name, and replaces no file. Nothing in the store is written.
- Nothing of a file is believed before every byte of it was checked: bundle id, directory, each block's id and bytes,
  its place in the chain, the identity. Any fault is an error, and nothing was written.
- Importing a file under its own name is the same as importing it without a name.
- An import overwrites nothing, and adds to no session: its name is free, or the store knows its bundle id (it is there,
  or missed, or was set aside, and comes back). It keeps its bundle id and version if a store counts that far and no
  unreadable bundle may have the number; else, and under another name, it becomes the first version, with the imported
  bundle as parent.
- A second import of the same file finds the first one's version, under its own id or as that first version, and does
  nothing.
- Blocks in the store are referred to and not written, once every byte is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Final

from ..disk.budget import Meter
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.targets import new_file
from ..errors import (
    BundleMissing,
    CorruptBundle,
    Corruption,
    IndexMismatch,
    NameTaken,
    ReadBackFailed,
    StoreBusy,
    StoreIoError,
    Truncated,
)
from ..format.blocks import BlockEntry
from ..format.bundle import BundleFile, FrameFile
from ..format.directory import file_bytes_with
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.ledger_tail import unread_of
from ..format.manifest import Manifest, bundle_id_of
from ..format.reader import BundleReader, FilePool
from ..format.records import ExportReport, IndexRow, Progress, Receipt
from ..format.writer import BundleWriter
from ..index.rows import LIVE, IndexedBundle, row_of
from ..limits import MAX_IMPORTED_VERSION
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.sleeping import Holdings, environment, moved_blocks, publish, receipt_of, with_name_of_its_own
from .import_checks import open_exported, require_manifest, require_whole
from .incoming import open_waiting, remove_taken

_TRIES: Final = 8
"""How often an import writes its file: again each time its references moved meanwhile. The last time it refers to
nothing and copies every block, so only the file that it replaces can still stop it."""


# --- export


def export_version(
    core: StoreCore,
    reader: BundleReader,
    target: str | os.PathLike[str],
    on_progress: Progress | None = None,
    *,
    replacing: bool = False,
) -> ExportReport:
    """Write an open version with all its blocks to one file. See `Store.export_session`."""
    with new_file(core.folder.root_fd, target, replacing=replacing) as temp:
        _write_whole(temp, reader, on_progress)
    manifest = reader.manifest
    return ExportReport(
        uri=manifest.uri,
        version=manifest.version,
        bundle_id=reader.bundle_id,
        path=os.path.abspath(os.fspath(target)),
        token_count=manifest.token_count + unread_of(manifest),
        blocks=len(manifest.blocks),
        logical_bytes=manifest.logical_bytes,
        file_bytes=temp.size_bytes,
    )


def _write_whole(temp: TempFile, reader: BundleReader, on_progress: Progress | None) -> None:
    manifest = reader.manifest
    writer = BundleWriter(temp)
    done = 0

    def frame_bytes(entry: BlockEntry) -> int:
        with reader.holding(entry) as file:
            return file.frame_of(entry.id).frame_bytes

    for entry in writer.each(reader.entries, frame_bytes):
        with reader.holding(entry) as file:
            writer.add_copy(file, entry.id)
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, manifest.logical_bytes)
    try:
        writer.finish(manifest.encode(), manifest.blocks, reader.bundle_id, {})
    except ReadBackFailed as error:
        for entry in reader.entries:  # a damaged original does not read back either
            with reader.holding(entry) as file:
                file.check_block(entry.id)
        raise _bad_copy(error, "Nothing was exported") from error


# --- import


def import_file(
    core: StoreCore,
    source: str | os.PathLike[str],
    as_uri: SessionUri | None = None,
    on_progress: Progress | None = None,
) -> Receipt:
    """Let an exported file become a version. See `Store.import_file`."""
    core.begin_upkeep(dry_run=False)
    path = os.path.abspath(os.fspath(source))
    with BundleFile(open_exported(path), path, None) as file:
        return _import(core, file, as_uri, on_progress)


def adopt_incoming(
    core: StoreCore,
    bundle_id: bytes,
    as_uri: SessionUri | None = None,
    on_progress: Progress | None = None,
) -> Receipt:
    """Let a bundle in STORE/incoming become a version. See `Store.adopt_incoming`."""
    core.begin_upkeep(dry_run=False)
    fd, path = open_waiting(core.folder, bundle_id)
    with BundleFile(fd, path, bundle_id) as file:
        receipt = _import(core, file, as_uri, on_progress)
    with contextlib.suppress(StoreIoError), core.poisoning():  # gc removes what is left
        remove_taken(core.folder, bundle_id)
    return receipt


def _import(core: StoreCore, file: BundleFile, as_uri: SessionUri | None, on_progress: Progress | None) -> Receipt:
    manifest = require_whole(file, on_progress)
    uri = as_uri or manifest.uri
    with core.importing:  # two imports of one bundle at once make one version
        if uri == manifest.uri:
            present = core.index.find(manifest.uri, manifest.version)
            if present is not None and present.bundle_id == file.bundle_id:
                return _receipt_of_present(core, present)
            _require_unknown(core, file.bundle_id)
            with core.this_version(uri, manifest.version, file.bundle_id) as is_free:
                may_come = core.index.knows(file.bundle_id) or not core.index.bundles_of(uri)
                if is_free and may_come and manifest.version <= MAX_IMPORTED_VERSION:
                    return _import_as_it_is(core, file, manifest)
        earlier = _earlier_import(core, file.bundle_id, manifest, uri)
        if earlier is not None:
            return earlier
        _require_free(core, manifest, uri)
        return _import_as_next(core, file, manifest, uri)


def _require_free(core: StoreCore, imported: Manifest, uri: SessionUri) -> None:
    """Refuse a name of which the store has a version, even one that is set aside or cannot be read: the file would hide
    its tokens, or mix two histories."""
    if core.index.bundles_of(uri):
        raise NameTaken(
            f"The store has {uri} already, and an import adds to no session. Import the file under a name that is "
            f"free (`--as NAME`), or remove that session first (`torpor rm {uri}`).",
            session=str(uri),
            imported=str(imported.uri),
        )


def _receipt_of_present(core: StoreCore, row: IndexRow) -> Receipt:
    """The receipt of a version that is there already, if it is as sound as the import would be."""
    try:
        file, release = core.open_pinned(row.bundle_id)
        with contextlib.ExitStack() as stack:
            stack.callback(release)
            stack.enter_context(file)
            pool = stack.enter_context(FilePool(core.open_frames))
            places = {entry.id: entry.bundle_id or row.bundle_id for entry in file.entries}
            for block_id, place in places.items():
                with pool.holding(place) as holder:
                    holder.check_block(block_id)
    except Corruption as error:
        raise type(error)(
            f"The store has this version already, but not whole: {error.message} Import it under another name, then "
            "run `torpor repair`, which takes what is missing from there.",
            **error.details,
        ) from error
    return receipt_of(require_manifest(file), row.bundle_id, 0, 0, places)


def _earlier_import(core: StoreCore, bundle_id: bytes, imported: Manifest, uri: SessionUri) -> Receipt | None:
    """The receipt of an earlier import of the same bundle under this name, if its version is sound."""
    for row in reversed(core.index.versions(uri)):
        if (row.parent, row.token_count, row.logical_bytes) != (
            bundle_id,
            imported.token_count,
            imported.logical_bytes,
        ):
            continue
        with contextlib.suppress(Corruption), core.open_bundle(row.bundle_id) as file:
            if file.manifest is not None and _same_state(file.manifest, imported):
                return _receipt_of_present(core, row)
    return None


def _same_state(one: Manifest, other: Manifest) -> bool:
    return (one.identity, one.blocks, one.session) == (other.identity, other.blocks, other.session)


def _require_unknown(core: StoreCore, bundle_id: bytes) -> None:
    """Refuse a bundle in the index that is not its own version there: it cannot be read at present, or another bundle
    has its number. One that is missed, or that repair has set aside, comes back by the import."""
    if core.index.knows(bundle_id) and bundle_id not in {*core.index.missed(), *core.index.given_up()}:
        raise _unusable(core, bundle_id)


def _unusable(core: StoreCore, bundle_id: bytes) -> CorruptBundle:
    path = core.folder.bundle_path(bundle_id)
    return CorruptBundle(
        f"The store has {path} already, but cannot use it as it is. Import the file under another name, or run "
        "`torpor repair` first.",
        path=path,
        part="file",
    )


class _Intake:
    """An import under way: the blocks of an imported file on their way into a file of the store."""

    def __init__(self, core: StoreCore, source: BundleFile, holdings: Holdings, temp: TempFile, room: Meter) -> None:
        self._core = core
        self._source = source
        self._holdings = holdings
        self._temp = temp
        self._room = room
        self._writer = BundleWriter(temp, room)
        self._places: dict[bytes, bytes] = {}

    def take(self, manifest: Manifest, also: FrameFile | None = None, *, alone: bool = False) -> None:
        """Copy the blocks that the store holds nowhere else (`alone`: every block), and those that `also` holds.

        Raises:
            BudgetExceeded: there is no room for them; nothing was written.
        """
        copied = dict.fromkeys(also.frames, also) if also is not None else {}
        for entry in manifest.blocks:
            holder = None if alone or entry.id in copied else self._holdings.find_sound(entry.id)
            if holder is None:
                copied[entry.id] = self._source
            else:
                self._places[entry.id] = holder
        frames = [file.frame_of(block_id) for block_id, file in copied.items()]
        self._room.require(file_bytes_with(frames, manifest.blocks, self._places, len(manifest.encode())))
        for block_id, file in self._writer.each(copied.items(), lambda one: one[1].frame_of(one[0]).frame_bytes):
            self._writer.add_copy(file, block_id)

    def is_led_right(self) -> bool:
        """Whether every block that was not copied is still in its place. Call it while committing."""
        return not moved_blocks(self._core, self._places)

    def publish(self, bundle: IndexedBundle) -> None:
        publish(self._core, self._temp, bundle, self._room)

    def finish(self, manifest: Manifest, also: FrameFile | None = None) -> tuple[IndexedBundle, Receipt]:
        encoded = manifest.encode()
        bundle_id = bundle_id_of(encoded)
        try:
            directory = self._writer.finish(encoded, manifest.blocks, bundle_id, self._places)
        except ReadBackFailed as error:
            for file in filter(None, (self._source, also)):
                for block_id in file.frames:
                    file.check_block(block_id)
            raise _bad_copy(error, "Nothing was imported") from error
        frames = tuple(self._writer.frames)
        row = row_of(manifest, bundle_id, self._temp.size_bytes)
        new = sum(entry.id in self._writer.frames for entry in manifest.blocks)
        receipt = receipt_of(manifest, bundle_id, self._temp.size_bytes, new, self._places)
        return IndexedBundle(bundle_id, LIVE, row, directory.holders, frames), receipt


@contextlib.contextmanager
def _intake(core: StoreCore, source: BundleFile) -> Iterator[tuple[_Intake, Callable[[bytes], None]]]:
    with contextlib.ExitStack() as stack:
        pin = stack.enter_context(core.pinning())
        holdings = stack.enter_context(Holdings(core, pin))
        room = stack.enter_context(core.metering())
        room(0)  # before any temporary file, in case nothing may be written any more
        stack.enter_context(core.poisoning())
        temp = stack.enter_context(core.folder.temps.new())
        yield _Intake(core, source, holdings, temp, room), pin


def _import_as_next(core: StoreCore, source: BundleFile, imported: Manifest, uri: SessionUri) -> Receipt:
    """A new version of a session, with the blocks of the imported bundle, which becomes its parent."""
    with core.next_version(uri) as version:
        manifest = dataclasses.replace(
            imported,
            uri=uri,
            version=version,
            parent=source.bundle_id,
            created_ns=now_ns(),
            environment=environment(),
        )
        manifest = with_name_of_its_own(core, manifest)
        for attempt in range(1, _TRIES + 1):
            with _intake(core, source) as (intake, _):
                intake.take(manifest, alone=attempt == _TRIES)
                bundle, receipt = intake.finish(manifest)
                with core.committing():
                    if intake.is_led_right():
                        intake.publish(bundle)
                        return receipt
        raise AssertionError("a file that leads nowhere is led right")


def _import_as_it_is(core: StoreCore, source: BundleFile, manifest: Manifest) -> Receipt:
    """The imported bundle itself becomes a version. If a retired file holds its blocks for others, the new file has
    those blocks too and takes its place under the same name.

    Raises:
        IndexMismatch: a live file of the bundle lies in the store, and the index does not know it.
        CorruptBundle: the same, for a version that was set aside or is missed.
        StoreBusy: the retired file was written anew each time.
    """
    for attempt in range(1, _TRIES + 1):
        with _intake(core, source) as (intake, pin), contextlib.ExitStack() as stack:
            pin(source.bundle_id)  # from here on its file loses no frame
            _require_no_stranger(core, source.bundle_id)
            retired = _open_retired(core, source.bundle_id)
            if retired is not None:
                stack.enter_context(retired)
            intake.take(manifest, retired, alone=attempt == _TRIES)
            bundle, receipt = intake.finish(manifest, retired)
            with core.committing():
                if intake.is_led_right() and _is_same(core, source.bundle_id, retired):
                    intake.publish(bundle)
                    with contextlib.suppress(StoreIoError):  # no reader looks into it beside the live one
                        core.folder.remove(source.bundle_id, RETIRED_SUFFIX)
                    return receipt
    path = core.folder.bundle_path(source.bundle_id, RETIRED_SUFFIX)
    raise StoreBusy(f"{path} was written anew each time the import was about to replace it. Try again.", path=path)


def _require_no_stranger(core: StoreCore, bundle_id: bytes) -> None:
    """Refuse to replace a live file that somebody put there: the index does not know it, or knows it as gone."""
    if core.folder.suffix_of(bundle_id) == LIVE_SUFFIX:
        if core.index.knows(bundle_id):  # back, and perhaps damaged: a repair sees to either
            raise _unusable(core, bundle_id)
        path = core.folder.bundle_path(bundle_id)
        raise IndexMismatch(
            f"{path} lies in the store already, but its index does not know it: the file was put there past Torpor. "
            "Run `torpor rebuild-index`, which takes it in; then import again if the session is not there.",
            path=path,
            field="bundle_id",
        )


def _open_retired(core: StoreCore, bundle_id: bytes) -> FrameFile | None:
    """The retired file of a bundle; None if there is none, or only its name."""
    try:
        return core.open_frames(bundle_id)
    except BundleMissing:
        return None
    except Truncated:
        if core.folder.is_emptied(bundle_id):
            return None
        raise


def _is_same(core: StoreCore, bundle_id: bytes, retired: FrameFile | None) -> bool:
    if retired is None:
        return core.folder.is_gone(bundle_id)
    return core.folder.suffix_of(bundle_id) == RETIRED_SUFFIX and core.folder.is_current(bundle_id, retired.stamp())


def _bad_copy(error: ReadBackFailed, consequence: str) -> ReadBackFailed:
    return ReadBackFailed(
        f"What was written did not read back as it should. {consequence}. Check memory and disk.", **error.details
    )
