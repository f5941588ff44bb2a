"""Versions leave a store as one file each, and come into one.

Owns the exported file (a version's manifest with all its frames), its place, and the version that it becomes.
`import_checks` checks a file first; `intake` copies what the store lacks.

Rules:
- An export is flushed and read back before it gets its name, and replaces no file. Nothing in the store is written.
- Nothing of a file is believed before every byte of it was checked: bundle id, directory, each block's id and bytes,
  its place in the chain, the identity. Any fault is an error, and nothing was written.
- Importing a file under its own name is the same as importing it without a name.
- An import overwrites nothing, and adds to no session: its name is free, or the store has this very version, or knows
  it as missing. It keeps its bundle id and number if a store counts that far; else, and under another name, it becomes
  the first version, with the imported bundle as parent.
- A second import of the same file finds the first one's version, and writes only what that lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable

from ..answers import ExportReport
from ..disk.clock import now_ns
from ..disk.durable import TempFile
from ..disk.paths import whole_path
from ..disk.targets import new_file
from ..errors import BlockMissing, CorruptMarks, MarksLost, NameTaken, StoreError, StoreIoError
from ..folder.marks import Marks, stripped_in
from ..format.blocks import BlockEntry
from ..format.manifest import UNNAMED, Manifest
from ..format.pack_writer import PackWriter
from ..format.records import Progress, Receipt
from ..index.index import WRITTEN_BYTES
from ..limits import MAX_IMPORTED_VERSION
from ..uri import SessionUri
from ..writing.core import StoreCore
from ..writing.reader import BundleReader
from ..writing.removal import told_versions
from ..writing.sleeping import environment
from .import_checks import ExportedFile, open_exported, require_whole
from .incoming import open_waiting, remove_taken
from .intake import Intake, Source

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
    manifest = reader.manifest
    try:
        with new_file(core.folder.root_fd, target, replacing=replacing) as temp:
            _write_whole(temp, reader, on_progress)
    except BlockMissing as error:
        if reader.bundle_id in (stripped_in(core.folder) or ()):
            raise BlockMissing(
                f"Version {manifest.version} of {manifest.uri} is stripped: it has no keys and values to export. Use "
                "the session, put it to sleep, and export the version that comes of it.",
                **error.details,
            ) from error
        raise
    return ExportReport(
        session=str(manifest.uri),
        version=manifest.version,
        bundle_id=reader.bundle_id,
        path=whole_path(target),
        token_count=manifest.token_count,
        blocks=len(manifest.blocks),
        logical_bytes=manifest.logical_bytes,
        file_bytes=temp.size_bytes,
    )


def _write_whole(temp: TempFile, reader: BundleReader, on_progress: Progress | None) -> None:
    manifest = reader.manifest
    writer = PackWriter(temp)
    done = 0

    def frame_bytes(entry: BlockEntry) -> int:
        with reader.holding(entry) as file:
            return file.frame_of(entry.id).frame_bytes

    for entry in writer.each(reader.entries, frame_bytes):
        with reader.holding(entry, checked=True) as file:
            writer.add_copy(file, entry.id)
        done += entry.raw_bytes
        if on_progress is not None:
            on_progress(done, manifest.logical_bytes)
    writer.finish(manifest.encode())


# --- import


def import_file(
    core: StoreCore, source: str | os.PathLike[str], as_uri: SessionUri | None, on_progress: Progress | None
) -> Receipt:
    """Let an exported file become a version. See `Store.import_file`."""
    core.begin_upkeep(dry_run=False)
    path = whole_path(source)
    with ExportedFile(open_exported(path), path) as file:
        return _import(core, file, as_uri, on_progress)


def adopt_incoming(core: StoreCore, bundle_id: str, as_uri: SessionUri | None) -> Receipt:
    """Let a file in STORE/incoming become a version. See `Store.adopt_incoming`."""
    core.begin_upkeep(dry_run=False)
    fd, path = open_waiting(core.folder, bundle_id)
    with ExportedFile(fd, path, bundle_id) as file:
        receipt = _import(core, file, as_uri, None)
    with contextlib.suppress(StoreIoError), core.poisoning():  # a later import, or somebody, removes what is left
        remove_taken(core.folder, bundle_id)
    return receipt


def _import(core: StoreCore, file: ExportedFile, as_uri: SessionUri | None, on_progress: Progress | None) -> Receipt:
    require_whole(file, on_progress)
    manifest = file.manifest
    uri = as_uri or manifest.uri
    core.read_again()
    with core.importing:  # two imports of one bundle at once make one version
        is_own = uri == manifest.uri
        if is_own and (core.folder.has_manifest(file.bundle_id) or file.bundle_id in told_versions(core)):
            return take(core, manifest, file.holding)
        earlier = _earlier_import(core, file, uri)
        if earlier is not None:
            return take(core, earlier, file.holding)
        _require_free(core, manifest, uri)
        keeps_number = is_own and manifest.version <= MAX_IMPORTED_VERSION
        with core.next_version(uri, least=manifest.version if keeps_number else 1) as version:
            if keeps_number and version == manifest.version:
                return take(core, manifest, file.holding)
            return _import_as_next(core, file, uri, version)


def take(
    core: StoreCore, manifest: Manifest, source: Source, before_commit: Callable[[], None] = lambda: None
) -> Receipt:
    """Let a version be one of the store, under its own name and number, or get what it lacks; it is stripped no more.
    before_commit: as of `Intake.take`. Raises as that. CorruptMarks, MarksLost: it is there, and may be stripped by
    marks that cannot be read."""
    with core.pinning() as pin:
        core.pins.extend(pin, (entry.id for entry in manifest.blocks))
        stripped = _stripped(core, manifest)  # before the commit: nothing fails behind it
        receipt = Intake(core).take(manifest.blocks, lambda _: manifest, source, before_commit)
        if receipt.bundle_id in stripped:
            _end_strip(core, receipt)
    return receipt


def _stripped(core: StoreCore, manifest: Manifest) -> frozenset[str]:
    """The stripped versions. Marks that cannot be read refuse the import of a version that is there: it may be stripped
    by them, and would be again once they are put back. Raises CorruptMarks, MarksLost."""
    try:
        return Marks.load(core.folder).stripped
    except (CorruptMarks, MarksLost):
        if core.index.find(manifest.uri, manifest.version) is not None:
            raise
        return frozenset()


def _end_strip(core: StoreCore, receipt: Receipt) -> None:
    """The keys and values of a stripped version have come back: it needs them from now on."""
    with core.committing(), contextlib.suppress(CorruptMarks, MarksLost):
        marks = Marks.load(core.folder)
        if receipt.bundle_id in marks.stripped:
            marks.without_bundles([receipt.bundle_id], names=False).save(core.folder)


def _import_as_next(core: StoreCore, file: ExportedFile, uri: SessionUri, version: int) -> Receipt:
    """A new version of a session, with the blocks of the imported bundle, which becomes its parent."""

    def manifest_for(pack_bytes: int) -> Manifest:
        return dataclasses.replace(
            _named(file.manifest, uri),
            version=version,
            parent=file.bundle_id,
            created_ns=now_ns(),
            environment={**environment(), WRITTEN_BYTES: str(pack_bytes)},
        )

    return Intake(core).take(file.manifest.blocks, manifest_for, file.holding)


def _require_free(core: StoreCore, imported: Manifest, uri: SessionUri) -> None:
    """Refuse a name of which the store has a version, even one that cannot be read: the file would hide its tokens, or
    mix two histories."""
    if core.index.find(uri) is not None or core.journal.has(uri) or core.being_written(uri):
        raise NameTaken(
            f"The store has {uri} already, and an import adds to no session. Import the file under a name that is "
            f"free (`--as NAME`), or remove that session first (`torpor rm {uri}`).",
            session=str(uri),
            imported=str(imported.uri),
        )


def _named(imported: Manifest, uri: SessionUri) -> Manifest:
    """An imported manifest under a name: another one than its own was chosen."""
    if uri == imported.uri:
        return imported
    session = {key: value for key, value in imported.session.items() if key != UNNAMED}
    return dataclasses.replace(imported, uri=uri, session=session)


def _earlier_import(core: StoreCore, file: ExportedFile, uri: SessionUri) -> Manifest | None:
    """The manifest of an earlier import of the same bundle under this name."""
    imported = _named(file.manifest, uri)
    facts = (file.bundle_id, imported.token_count, imported.logical_bytes)
    for row in reversed(core.index.versions(uri)):
        if (row.parent, row.token_count, row.logical_bytes) != facts:
            continue
        with contextlib.suppress(StoreError):
            manifest = core.read_manifest(row.bundle_id)
            if _same_state(manifest, imported):
                return manifest
    return None


def _same_state(one: Manifest, other: Manifest) -> bool:
    """By their bytes: a map may have a number that is not itself."""
    return (
        dataclasses.replace(other, session=one.session, blocks=one.blocks, identity=one.identity).encode()
        == other.encode()
    )
