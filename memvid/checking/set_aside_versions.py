"""Versions that repair has set aside and that are not back: the list, the files that each lacks, and the report.

Owns the sentence about a lost version, and the match of files in quarantine to bundles: by the content of a whole file,
for it may have another's name. Changes only the endings that a delete left there (`settle_leaving`).

How it scales: nothing is read while no version is set aside. Otherwise it reads the manifests of these and of their
sessions' versions, the heads of blocks that differ, and the directories of the files that they need; and every byte of
frames that only quarantine holds, for nothing else proves them. For each missing file it reads the directories of all
retired files and of all in quarantine. Memory grows with the blocks of one session's versions that are set aside.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from ..errors import StoreError, StoreIoError, UnsafePath
from ..folder import duplicate_files, quarantine
from ..folder.folder import StoreFolder, list_retired
from ..folder.store_file import QUARANTINE
from ..format.blocks import ID_BYTES
from ..format.bundle import BundleFile, FrameFile
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.ledgers import Common, in_common, most_in_common, reading
from ..format.manifest import Manifest
from ..format.reader import FilePool
from ..format.records import Finding, IndexRow
from ..format.salvage import DamagedFile, NamedFile
from ..format.salvaged import salvaged_from
from ..index.index import Index
from ..units import format_plural
from ..uri import SessionUri

_T = TypeVar("_T")

LOST: Final = "version_lost"
"""The code of a finding about a version that is lost or set aside."""

_NAMED: Final = 3
"""How many missing files a loss names at most."""


def loss_message(
    uri: SessionUri, version: int, token_count: int, missing: Collection[str], held: Common | None, where: str = ""
) -> str:
    """A version's loss, and the files that would bring it back.

    missing: the paths of the files whose blocks are nowhere; none if a repair finds all of them. held: how many of its
    tokens another version begins with, `where`; None if unknown. A version that only its marks tell of counts 0 tokens.
    """
    if held is None:
        tokens = f" with its {format_plural(token_count, 'token')}" if token_count else ""
        gone = f"is lost{tokens}, but for what other versions of it hold,"
    else:
        rest = f"the first {held.least} are in {where}, " if held.least else ""
        if held.least < held.most:
            rest += "up to "
        elif not held.least:
            rest = "no other version has any, "
        gone = f"is lost: of its {format_plural(token_count, 'token')} {rest}{token_count - held.least} are gone"
    paths = list(missing)
    more = f" and {len(paths) - _NAMED} other files" if len(paths) > _NAMED else ""
    # In a backup a version's blocks may lie in files of other names.
    files = (
        f"{', '.join(paths[:_NAMED])}{more} {'is' if len(paths) == 1 else 'are'} put back, or the version is imported"
        " from a backup (`torpor export --store BACKUP`, then `torpor import`), and "
    )
    return (
        f"Version {version} of {uri} {gone} until {files if paths else ''}the store is repaired again (`torpor "
        "repair`). `torpor gc --quarantine` gives up what is set aside."
    )


def list_waiting(folder: StoreFolder) -> list[tuple[bytes, str, str]]:
    """As `quarantine.list_bundles`, but a whole bundle under another one's name counts by its own id. Raises
    UnsafePath, StoreIoError."""
    return [
        (_content_id(folder, bundle_id, name) if suffix != RETIRED_SUFFIX else bundle_id, suffix, name)
        for bundle_id, suffix, name in quarantine.list_bundles(folder)
    ]


def names_of_versions(folder: StoreFolder) -> dict[bytes, list[str]]:
    """For each bundle that lies in quarantine as a version, its names there. Raises UnsafePath, StoreIoError."""
    found: dict[bytes, list[str]] = {}
    for bundle_id, suffix, name in list_waiting(folder):
        if suffix == LIVE_SUFFIX:
            found.setdefault(bundle_id, []).append(name)
    return found


def set_aside_among(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> set[bytes]:
    """Those of the bundles that lie in quarantine as versions, so are set aside and not deleted: a delete changes that
    ending first. All of them if quarantine cannot be opened. Raises StoreIoError."""
    asked = set(bundle_ids)
    try:
        found = names_of_versions(folder) if asked else {}
    except UnsafePath:
        return asked
    return {one for one in asked if any(quarantine.is_own(folder, name) for name in found.get(one, ()))}


def content_of_retired(folder: StoreFolder, bundle_id: bytes) -> bytes | None:
    """The whole bundle in a retired file that is named after another bundle, and is not sound under that name; None for
    any other file. Raises StoreIoError."""
    other = version_in(functools.partial(folder.open_as, bundle_id, RETIRED_SUFFIX))
    if other is None or other == bundle_id:
        return None
    with contextlib.suppress(StoreError), BundleFile(*folder.open_bundle(other), other):
        return None
    return other


def list_leaving(folder: StoreFolder) -> set[bytes]:
    """The bundles that a delete has marked in quarantine, with every file: if their rows are there, the delete was cut
    off. Raises UnsafePath, StoreIoError."""
    found = list_waiting(folder)
    left = {one for one, suffix, _ in found if suffix == LIVE_SUFFIX}
    return {one for one, suffix, _ in found if suffix == quarantine.LEAVING_SUFFIX} - left


def settle_leaving(folder: StoreFolder, index: Index) -> dict[str, StoreError]:
    """Finish a delete of versions set aside. Files of versions that are gone become retired; those of a version still
    listed become its own again. While a note or an index file that is behind tells of a version, only its ending tells
    that it is gone. Returns the files that could not be renamed, by path, with the error.

    Raises:
        UnsafePath, StoreIoError: the quarantine cannot be looked into.
        DurabilityLost
    """
    found = [
        (one, name) for one, suffix, name in quarantine.list_bundles(folder) if suffix == quarantine.LEAVING_SUFFIX
    ]
    leaving = {name: _content_id(folder, one, name) for one, name in found}
    if not leaving:
        return {}
    given_up = index.given_up().keys()
    back = [name for name, one in leaving.items() if one in given_up]
    gone = [name for name, one in leaving.items() if one not in given_up and not _may_be_told(index, one)]
    failed = quarantine.give_ending(folder, back, LIVE_SUFFIX)
    return failed | quarantine.give_ending(folder, gone, RETIRED_SUFFIX)


def _may_be_told(index: Index, bundle_id: bytes) -> bool:
    return index.file_is_behind or (index.notes is not None and index.notes.may_tell_of(bundle_id))


def version_in(open_file: Callable[[], tuple[int, str]]) -> bytes | None:
    """The version that is whole in a file, whatever its name says; None for any other file. Raises StoreIoError: the
    system refused to read it, so that is unknown."""
    return look_into(open_file, lambda file: file.bundle_id if file.manifest is not None else None)


def look_into(open_file: Callable[[], tuple[int, str]], look: Callable[[BundleFile], _T | None]) -> _T | None:
    """The content of a bundle's file, whatever its name says; None if it is not whole. Raises StoreIoError."""
    try:
        with BundleFile(*open_file(), None) as file:
            return look(file)
    except StoreIoError:
        raise
    except StoreError:
        return None


def _content_id(folder: StoreFolder, bundle_id: bytes, name: str) -> bytes:
    return version_in(functools.partial(quarantine.open_name, folder, name)) or bundle_id


def find_losses(folder: StoreFolder, index: Index, uri: SessionUri | None = None) -> Iterator[Finding]:
    """The versions set aside, of one session or of all, and the files that would bring each back. Leaves out a version
    that gave way to the one it was saved from, and one whose file is back. If quarantine cannot be opened, that is the
    only finding."""
    rows = [
        row
        for row in index.given_up().values()
        if uri in (None, row.uri) and folder.suffix_of(row.bundle_id) != LIVE_SUFFIX
    ]
    if not rows:
        return
    waiting: dict[bytes, list[tuple[str, str]]] = {}
    try:
        for bundle_id, suffix, name in list_waiting(folder):
            waiting.setdefault(bundle_id, []).append((suffix, name))
    except StoreError as error:
        yield _untold(folder, len(rows), error)
        return
    rows.sort(key=lambda row: (row.uri, row.version))
    for _, its in itertools.groupby(rows, lambda row: row.uri):
        search = _Search(folder, index, waiting)
        for row in its:
            yield from search.find(row)


def _untold(folder: StoreFolder, count: int, error: StoreError) -> Finding:
    message = f"Repair has set {format_plural(count, 'version')} aside, and the loss is unknown. {error.message}"
    return Finding(f"{folder.path}/{QUARANTINE}", error.code, message)


def gave_way_to(folder: StoreFolder, index: Index, bundle_ids: Collection[bytes]) -> dict[bytes, bytes]:
    """The versions set aside that were saved from one of these bundles, each with that bundle; none if quarantine
    cannot be opened."""
    uris = {row.uri for row in index.rows_of(bundle_ids).values()}
    given_up = {one for one, row in index.given_up().items() if row.uri in uris}
    found: dict[bytes, bytes] = {}
    with contextlib.suppress(StoreError):
        for bundle_id, suffix, name in list_waiting(folder) if given_up else ():
            if suffix != LIVE_SUFFIX or bundle_id not in given_up or bundle_id in found:
                continue
            with contextlib.suppress(StoreError):
                with NamedFile(*quarantine.open_name(folder, name), bundle_id) as file:
                    source = salvaged_from(file.manifest)
                if source is not None and source in bundle_ids and folder.suffix_of(bundle_id) != LIVE_SUFFIX:
                    found[bundle_id] = source
    return found


def open_for_frames(folder: StoreFolder, name: str, bundle_id: bytes) -> FrameFile:
    """Open a file in quarantine for its frames, also if it is damaged. Raises StoreError."""
    try:
        return FrameFile(*quarantine.open_name(folder, name), bundle_id)
    except StoreError:
        return DamagedFile(*quarantine.open_name(folder, name), bundle_id)


class _Search:
    """The blocks that one session's versions lack, of those set aside."""

    def __init__(self, folder: StoreFolder, index: Index, waiting: Mapping[bytes, Sequence[tuple[str, str]]]) -> None:
        self._folder = folder
        self._index = index
        self._waiting = waiting
        self._sound: set[bytes] = set()
        self._nowhere: set[bytes] = set()

    def find(self, row: IndexRow) -> Iterator[Finding]:
        path = self._folder.bundle_path(row.bundle_id)
        manifest, places = self._read(row.bundle_id)
        if manifest is None:
            message = loss_message(row.uri, row.version, row.ledger_tokens, [path], None)
        elif (source := salvaged_from(manifest)) is not None and self._index.rows_of([source]):
            return
        else:
            lacking = self._lacking(row.bundle_id, manifest, places)
            held = self._held(row.uri, manifest, places)
            missing = [self._folder.bundle_path(place) for place in lacking]
            message = loss_message(row.uri, row.version, row.ledger_tokens, missing, held, "another version")
        yield Finding(path, LOST, message)

    def _read(self, bundle_id: bytes) -> tuple[Manifest | None, Mapping[bytes, bytes]]:
        """A version's manifest and the places of its blocks, from the file in quarantine that tells most. As in a
        repair, a retired file there is no version; it only has blocks."""
        found: Manifest | None = None
        for name in [name for suffix, name in self._waiting.get(bundle_id, ()) if suffix == LIVE_SUFFIX]:
            with contextlib.suppress(StoreError):
                with BundleFile(*quarantine.open_name(self._folder, name), bundle_id) as file:
                    if file.manifest is not None:
                        return file.manifest, {entry.id: entry.bundle_id or bundle_id for entry in file.entries}
                continue
            with contextlib.suppress(StoreError):
                opened = quarantine.open_name(self._folder, name)
                with NamedFile(*opened, bundle_id) as damaged:
                    found = found or damaged.manifest
        return found, {}

    def _lacking(self, bundle_id: bytes, manifest: Manifest, places: Mapping[bytes, bytes]) -> list[bytes]:
        """The bundles that a version needs and whose blocks are nowhere, in the order of first use."""
        wanted: dict[bytes, set[bytes]] = {}
        for entry in manifest.blocks:
            wanted.setdefault(places.get(entry.id, bundle_id), set()).add(entry.id)
        return [place for place, blocks in wanted.items() if not self._all_there(place, blocks)]

    def _all_there(self, place: bytes, blocks: set[bytes]) -> bool:
        left = blocks - self._sound
        if left & self._nowhere:
            return False
        with (
            contextlib.suppress(StoreError),
            duplicate_files.open_frames(self._folder, place) as file,
        ):
            left -= file.frames.keys()
        left = {block for block in left if not any(self._holds(one, block) for one in self._index.holders_of(block))}
        for open_file in self._no_versions(place) if left else ():
            left -= self._sound_in(open_file, left)
            if not left:
                break
        self._sound |= blocks - left
        self._nowhere |= left
        return not left

    def _no_versions(self, first: bytes) -> Iterator[Callable[[], FrameFile]]:
        """The other files that a repair searches for blocks: those in quarantine, a bundle's own first, and retired
        ones."""
        for place, names in sorted(self._waiting.items(), key=lambda one: one[0] != first):
            yield from (functools.partial(open_for_frames, self._folder, name, place) for _, name in names)
        for place in list_retired(self._folder):
            yield functools.partial(duplicate_files.open_frames, self._folder, place)

    def _sound_in(self, open_file: Callable[[], FrameFile], blocks: set[bytes]) -> set[bytes]:
        found: set[bytes] = set()
        with contextlib.suppress(StoreError), open_file() as file:
            for block in blocks & file.frames.keys():
                with contextlib.suppress(StoreError):
                    file.check_payloads(block)
                    found.add(block)
        return found

    def _holds(self, bundle_id: bytes, block: bytes) -> bool:
        with (
            contextlib.suppress(StoreError),
            duplicate_files.open_frames(self._folder, bundle_id) as file,
        ):
            return block in file.frames
        return False

    def _held(self, uri: SessionUri, version: Manifest, places: Mapping[bytes, bytes]) -> Common:
        return most_in_common(self._in_common(row.bundle_id, version, places) for row in self._index.versions(uri))

    def _in_common(self, other: bytes, version: Manifest, places: Mapping[bytes, bytes]) -> Common:
        with contextlib.suppress(StoreError), FilePool(self._open_named) as pool:
            fd, path = self._folder.open_bundle(other)
            with BundleFile(fd, path, other) as file:
                if file.manifest is not None:
                    theirs = {entry.id: entry.bundle_id or other for entry in file.entries}
                    read_own, read_other = (reading(pool, one, self._files_of) for one in (places, theirs))
                    return in_common(version, read_own, file.manifest, read_other)
        return Common(0, 0)

    def _files_of(self, place: bytes) -> list[bytes]:
        """A bundle's file under bundles/, by its id, and those in quarantine, by their names."""
        return [place, *(name.encode() for suffix, name in self._waiting.get(place, ()) if suffix == LIVE_SUFFIX)]

    def _open_named(self, name: bytes) -> FrameFile:
        if len(name) == ID_BYTES:
            return duplicate_files.open_frames(self._folder, name)
        return FrameFile(*quarantine.open_name(self._folder, name.decode()), None)
