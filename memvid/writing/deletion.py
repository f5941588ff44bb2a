"""Removing versions: the order of steps in a delete, a prune or a forget, and which files may go.

Owns the steps that remove a version, and the check whether any bundle still needs a retired file. Takes no lock: the
caller holds it. The caller chooses the versions.

Rules:
- A file is retired (renamed) before its row goes, and removed after: no crash leaves a row that looks like a loss.
  Marks must not look like a loss either: they go before the file is removed, or, without a file, before the row.
  Neither must turns in the journal: their record goes once the files are retired, and before any is removed.
- Oldest versions first. If the newest version is retired, the session is deleted; if it stands, the session has lost
  only the versions with retired files.
- Versions that repair has set aside go after that, so a delete that fails earlier has not touched them; if it is cut
  off, the next opening removes them. They have the ending .mvd until their rows are gone: without a standing version
  nothing else says that the session was deleted. The content of a file in quarantine tells its owner.
- Files in quarantine of a standing version are retired just before its own file: a retired file beside a version in
  quarantine means that repair has set it aside.
- A file that holds the only copy of another version than its name says goes to quarantine instead.
- A bundle of unknown needs may need any file: while there is one, no file is removed, and a delete says so.
- A delete considers the files of its session and of the bundles that held blocks for it: no other file can lose its
  last user by it. Leftovers of an earlier delete are found at the next open or gc, which consider all files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..checking import set_aside_versions
from ..errors import (
    BundleMismatch,
    CorruptMarks,
    CorruptStoreFile,
    DurabilityLost,
    IndexFailed,
    MarksLost,
    NoSpace,
    StoreError,
    StoreIoError,
    UnsafePath,
    UnsupportedFormat,
)
from ..folder import duplicate_files, quarantine
from ..folder.folder import StoreFolder
from ..folder.marks import MARKS_FILE, Marks
from ..folder.pins import Pins
from ..folder.store_file import QUARANTINE
from ..format.layout import LIVE_SUFFIX, RETIRED_SUFFIX
from ..format.records import DeleteReport, Finding
from ..index.index import Index
from ..index.rows import ASIDE, UNREADABLE
from ..index.unknown_references import find_unknown_needs
from ..uri import SessionUri

_MARKS_STAY: Final = (NoSpace, CorruptMarks, CorruptStoreFile, MarksLost, UnsupportedFormat, UnsafePath, StoreIoError)
"""Marks cannot be changed: a delete goes on all the same."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """The result of a step that removed versions.

    freed: bytes freed early: a full disk has no room to drop rows, and must not stop a delete.
    problems: files in quarantine that it could not mark as deleted, and notes that it could not remove.
    """

    freed: int
    problems: tuple[Finding, ...]


def delete_session(
    folder: StoreFolder, index: Index, pins: Pins, uri: SessionUri, drop_turns: Callable[[], None]
) -> DeleteReport:
    """Retire all bundles of a session in any status, drop its turns and their rows, and remove unneeded files."""
    versions = len(index.numbers_of(uri))
    bundle_ids = index.bundles_of(uri)
    holders = {holder for bundle_id in bundle_ids for holder in index.refs_of(bundle_id)}
    retirement = retire(folder, index, pins, bundle_ids, drop_turns)
    others = _other_versions(folder, index, bundle_ids)
    unmark(folder, uri)  # while the retired files still say that the versions were deleted, and none is missing
    holders = {one for one in holders if folder.has_bundle(one)}
    asked = {bundle_id: folder.suffix_of(bundle_id) or LIVE_SUFFIX for bundle_id in {*bundle_ids, *holders}}
    freed = retirement.freed + sum(remove_unneeded(folder, index, pins, asked).values())
    stays = unmark(folder, uri)  # again: there may be room now
    kept = sum(folder.has_bundle(bundle_id) for bundle_id in bundle_ids)
    gone = sum(not folder.has_bundle(one) for one in asked)
    newest = bundle_ids[-1]  # where its file is retired, all others are deleted with it
    unreadable = tuple(
        folder.bundle_path(bundle_id) for bundle_id in index.with_status(UNREADABLE) if folder.has_bundle(bundle_id)
    )
    problems = (
        *retirement.problems,
        *(_still_marked(folder, uri, bundle_ids, stays) if stays is not None else ()),
        *(_misnamed(folder, one, other) for one, other in others.items()),
        *(() if folder.suffix_of(newest) == RETIRED_SUFFIX else only_in_memory(folder, index, bundle_ids)),
        *(find_unknown_needs(folder, index) if _waits(folder, index, asked) else ()),
    )
    return DeleteReport(uri, versions, gone, kept, freed, unreadable, problems)


def _still_marked(
    folder: StoreFolder, uri: SessionUri, bundle_ids: Iterable[bytes], why: StoreError
) -> Iterator[Finding]:
    """The problem for marks that stay without a file to show that their version was deleted."""
    if any(folder.suffix_of(one) is None for one in bundle_ids):
        path = f"{folder.path}/{MARKS_FILE}"
        message = (
            f"{path} could not be changed, and may name versions of {uri} that have no file. An opening would take "
            f"them for missing ones: put that right, and run `torpor gc` before. {why.message}"
        )
        yield Finding(path, why.code, message)


def only_in_memory(folder: StoreFolder, index: Index, bundle_ids: Iterable[bytes]) -> Iterator[Finding]:
    """The problem for an index file that takes no change, where no file says that one of these versions is deleted."""
    if not index.file_is_behind:
        return
    leaving: set[bytes] = set()
    with contextlib.suppress(UnsafePath, StoreIoError):
        leaving = set_aside_versions.list_leaving(folder)
    for bundle_id in [one for one in bundle_ids if folder.suffix_of(one) is None and one not in leaving][:1]:
        path = folder.bundle_path(bundle_id, RETIRED_SUFFIX)
        message = (
            f"{index.path} takes no change, and there is no {path} to say that its version was deleted: that is listed "
            "again, as missing, where the index cannot be written before this store is closed. Free some space, and "
            "delete it again then."
        )
        yield Finding(index.path, IndexFailed.code, message)


def _waits(folder: StoreFolder, index: Index, bundle_ids: Iterable[bytes]) -> bool:
    """Whether one of the bundles has a file that only stays because a bundle of unknown needs may need it."""
    if not index.needs_unknown():
        return False
    return any(folder.suffix_of(one) == RETIRED_SUFFIX for one in unneeded(index, bundle_ids))


def _misnamed(folder: StoreFolder, bundle_id: bytes, other: bytes) -> Finding:
    """The problem for a retired (and maybe removed) file with another version than its name says."""
    path = folder.bundle_path(bundle_id, RETIRED_SUFFIX)
    if folder.suffix_of(bundle_id) == RETIRED_SUFFIX:
        kept = "it is kept, under that name. `torpor repair`, run twice, brings that one back."
    else:
        kept = "it is kept, in quarantine. `torpor repair` brings that one back."
    message = (
        f"{path} has the name of a version that was deleted, but it is another one ({other.hex()[:12]}), which has no "
        f"other file: {kept}"
    )
    return Finding(path, BundleMismatch.code, message)


def _version_in(folder: StoreFolder, index: Index, bundle_id: bytes) -> bytes | None:
    """The version whose only copy is a retired file named after another one (two files were swapped); None for any
    other. Raises StoreIoError."""
    other = set_aside_versions.content_of_retired(folder, bundle_id)
    return other if other is not None and index.knows(other) else None


def _other_versions(folder: StoreFolder, index: Index, bundle_ids: Iterable[bytes]) -> dict[bytes, bytes]:
    """For each file, by its name, the result of `_version_in`; an unreadable file stays, and has None."""
    found: dict[bytes, bytes] = {}
    for bundle_id in bundle_ids:
        with contextlib.suppress(StoreIoError):
            other = _version_in(folder, index, bundle_id)
            if other is not None:
                found[bundle_id] = other
    return found


def _may_be_another(folder: StoreFolder, index: Index, bundle_id: bytes) -> bool:
    try:
        return _version_in(folder, index, bundle_id) is not None
    except StoreIoError:
        return True


def retire(
    folder: StoreFolder,
    index: Index,
    pins: Pins,
    bundle_ids: Sequence[bytes],
    drop_turns: Callable[[], None] = lambda: None,
) -> Retirement:
    """Make versions mere holders of blocks: rename their files in this order, drop the turns of their session if it is
    to go, then remove the set-aside versions, then drop all rows at once.

    Raises:
        StoreIoError, NoSpace: a file could not be renamed, or the turns still count. The files before it are retired,
            and their rows are gone.
        UnsafePath, StoreIoError, NoSpace: all versions were set aside, and not all could be removed.
        DurabilityLost: rows of retired files could not be dropped, or a folder could not be flushed.
    """
    copies, failed = _in_quarantine(folder)
    aside = frozenset(index.with_status(ASIDE))
    standing = [one for one in bundle_ids if one not in aside or folder.suffix_of(one) == LIVE_SUFFIX]
    retired: list[bytes] = []
    try:
        for bundle_id in standing:
            failed |= quarantine.give_ending(folder, copies.get(bundle_id, ()), RETIRED_SUFFIX)
            duplicate_files.retire(folder, bundle_id)
            retired.append(bundle_id)
        drop_turns()
    except (StoreIoError, NoSpace):
        _drop(folder, index, pins, retired)
        _end_leaving(folder, index)
        raise
    set_aside = [one for one in bundle_ids if one in aside and one not in retired]
    failed |= quarantine.give_ending(folder, _names(copies, set_aside), quarantine.LEAVING_SUFFIX)
    if set_aside and failed and not standing:
        _end_leaving(folder, index)
        raise next(iter(failed.values()))  # nothing else says that they were deleted
    freed = _drop(folder, index, pins, [*retired, *set_aside])
    if aside:
        _end_leaving(folder, index)
    problems = (_not_let_go(folder, path, error) for path, error in failed.items())
    return Retirement(freed, (*problems, *still_noted(index, bundle_ids)))


def _names(copies: Mapping[bytes, Sequence[str]], bundle_ids: Iterable[bytes]) -> list[str]:
    return [name for bundle_id in bundle_ids for name in copies.get(bundle_id, ())]


def _end_leaving(folder: StoreFolder, index: Index) -> None:
    """The next opening, or repair, does the steps that fail here."""
    with contextlib.suppress(UnsafePath, StoreIoError):
        set_aside_versions.settle_leaving(folder, index)


def give_ending(folder: StoreFolder, bundle_ids: Iterable[bytes], suffix: str) -> list[Finding]:
    """Give the files of versions in quarantine an ending: that of a deleted version, or LEAVING_SUFFIX before `retire`,
    which removes them, or gives them back after a failure; if it is cut off, the next opening finishes. Returns the
    files that could not be marked. Raises DurabilityLost."""
    copies, failed = _in_quarantine(folder)
    failed |= quarantine.give_ending(folder, _names(copies, bundle_ids), suffix)
    return [_not_let_go(folder, path, error) for path, error in failed.items()]


def _in_quarantine(folder: StoreFolder) -> tuple[dict[bytes, list[str]], dict[str, StoreError]]:
    """The versions in quarantine, by bundle, or why they are unknown: an error here must not stop a delete."""
    try:
        return set_aside_versions.names_of_versions(folder), {}
    except (UnsafePath, StoreIoError) as error:
        return {}, {f"{folder.path}/{QUARANTINE}": error}


def _not_let_go(folder: StoreFolder, path: str, error: StoreError) -> Finding:
    """The problem for a file in quarantine that could not be marked as deleted, or for the whole quarantine."""
    if path == f"{folder.path}/{QUARANTINE}":
        message = (
            f"Whether {path} still holds something of the versions that were deleted cannot be told; an index made "
            "anew would take it for versions that repair has set aside. Put that right, and let `torpor forget` or "
            f"`torpor gc --quarantine` take it away. {error.message}"
        )
    else:
        message = (
            f"{path} is of a version that was deleted, and could not be marked so; an index made anew would take it "
            "for a version that repair has set aside. Remove it, or let `torpor forget` or `torpor gc --quarantine` do "
            f"so. {error.message}"
        )
    return Finding(path, error.code, message)


def still_noted(index: Index, bundle_ids: Iterable[bytes]) -> Iterator[Finding]:
    for error in [index.notes_left[one] for one in bundle_ids if one in index.notes_left][:1]:
        message = (
            f"The note of a version that was deleted may be left. {error.message} While it is there, an opening may "
            "list that version again, as missing or set aside: put that right, and let `torpor forget` take it away."
        )
        yield Finding(str(error.details.get("path", index.path)), error.code, message)


def _drop(folder: StoreFolder, index: Index, pins: Pins, retired: Sequence[bytes]) -> int:
    """Drop the rows of retired files; the bytes that this had to free.

    The files' names already say that these versions are gone, and the next opening believes them. So if the index file
    takes no change, for want of room or otherwise, only the file stays behind, and the rows in memory go: no version
    may be woken here that the next opening does not have.
    """
    freed = 0
    unmark_without_files(folder, retired)
    try:
        index.drop(retired)
        return freed
    except NoSpace:
        freed = _make_room(folder, index, pins, retired)
        with contextlib.suppress(NoSpace, StoreIoError):
            index.drop(retired)
            return freed
    except StoreIoError:
        pass
    try:
        index.go_on_in_memory()
        index.drop(retired)
    except StoreIoError as error:
        raise DurabilityLost(
            f"Versions were deleted whose rows could not be taken out of {index.path}: {error.message} They are gone "
            "when the store is opened again; until then nothing more is written.",
            path=index.path,
        ) from error
    return freed


def remove_unneeded(
    folder: StoreFolder, index: Index, pins: Pins, files: Mapping[bytes, str] | None = None
) -> dict[bytes, int]:
    """Remove all retired files that no other bundle needs; those that are open wait for their last reader.

    Returns the bytes that each frees. `files`: the folder's listing, if there is one already, or only the files that
    may have lost their last user.
    """
    if index.needs_unknown():
        return {}
    listed = folder.list_bundles() if files is None else files
    retired = [bundle_id for bundle_id, suffix in listed.items() if suffix == RETIRED_SUFFIX]
    return remove_retired(folder, index, pins, retired)


def remove_retired(folder: StoreFolder, index: Index, pins: Pins, retired: Iterable[bytes]) -> dict[bytes, int]:
    """Remove the retired bundles' files that no other bundle needs; open files wait for their last reader. Returns the
    bytes that each frees. Call it only if the needs of every bundle are known."""
    free = pins.wait_or_free(unneeded(index, retired))
    return _remove(folder, index, unneeded(index, free))


def remove_waiting(folder: StoreFolder, index: Index, pins: Pins) -> dict[bytes, int]:
    """Remove the retired files whose last reader has closed; a file needed after all goes with a later delete.

    Removes none beside an unreadable or missed bundle: that may have been found since they began to wait.
    """
    if index.needs_unknown():
        return {}
    return _remove(folder, index, unneeded(index, pins.wait_or_free(())))


def unneeded(index: Index, bundle_ids: Iterable[bytes], but_for: Iterable[bytes] = ()) -> list[bytes]:
    """Those of the bundles that no other one needs; the needs of `but_for` do not count."""
    others = frozenset(but_for)
    return [bundle_id for bundle_id in bundle_ids if others.issuperset(index.users_of(bundle_id))]


def _remove(folder: StoreFolder, index: Index, bundle_ids: Sequence[bytes]) -> dict[bytes, int]:
    """If the index file could not be changed, the files are only emptied, as in `_make_room`: their rows stand. The
    same for files that still have marks."""
    if not bundle_ids:
        return {}
    named = set(bundle_ids) if index.file_is_behind else unmark_deleted(folder, index, bundle_ids)
    return {one: freed for one in bundle_ids if (freed := _freed(folder, index, one, one in named)) is not None}


def _freed(folder: StoreFolder, index: Index, bundle_id: bytes, is_named: bool) -> int | None:
    """The bytes that removing a retired file frees, or emptying one that keeps its name. None if it is empty already,
    holds another version (it goes to quarantine, or stays), or cannot be read now."""
    try:
        other = _version_in(folder, index, bundle_id)
    except StoreIoError:
        return None  # it stays for the next gc, or the next opening
    if other is None:
        return folder.empty_retired(bundle_id) or None if is_named else folder.remove(bundle_id, RETIRED_SUFFIX)
    if not is_named:
        with contextlib.suppress(NoSpace, StoreIoError, UnsafePath):
            quarantine.move_bundle(folder, bundle_id, RETIRED_SUFFIX, as_version=other)
            folder.recount()
    return None


def unmark_deleted(folder: StoreFolder, index: Index, bundle_ids: Iterable[bytes]) -> set[bytes]:
    """Remove the marks of deleted versions before their files go; returns the versions that keep theirs, for want of
    room. Marks without a file look like a loss to an index made anew."""
    try:
        marks = Marks.load(folder)
    except StoreIoError:
        return set(bundle_ids)
    except StoreError:
        return set()  # the marked versions are unknown, and their marks cannot be removed
    gone = {one for one in bundle_ids if marks.of(one) and not index.knows(one)}
    try:
        if gone:
            marks.without_bundles(gone).save(folder)
    except (NoSpace, StoreIoError, CorruptStoreFile, UnsupportedFormat, UnsafePath):
        return gone
    return set()


def _make_room(folder: StoreFolder, index: Index, pins: Pins, bundle_ids: Sequence[bytes]) -> int:
    """Free versions' bytes while their rows still stand. The files are only emptied: a row beside a retired file's name
    means a delete that was cut off, not a loss."""
    if index.needs_unknown():
        return 0
    leaving = set(bundle_ids)
    free = leaving.intersection(pins.wait_or_free(unneeded(index, bundle_ids, but_for=leaving)))
    return sum(folder.empty_retired(one) for one in free if not _may_be_another(folder, index, one))


def unmark(folder: StoreFolder, uri: SessionUri) -> StoreError | None:
    """Remove the marks of a deleted session; returns why they stay, if they do. A full disk or damaged marks must not
    stop a delete: if marks stay, so do the names of the retired files (`unmark_deleted`)."""
    try:
        marks = Marks.load(folder)
        if marks.session(uri):
            marks.without(uri).save(folder)
    except _MARKS_STAY as error:
        return error
    return None


def unmark_without_files(folder: StoreFolder, bundle_ids: Iterable[bytes]) -> tuple[list[bytes], int]:
    """Remove the marks of those of the versions without a file, before their rows go: marks without a row look like a
    loss to an opening, also if they cannot be changed now.

    Returns the versions whose marks went, and the bytes that this wrote. Raises DurabilityLost.
    """
    asked = [one for one in bundle_ids if folder.suffix_of(one) is None]
    with contextlib.suppress(*_MARKS_STAY):
        marks = Marks.load(folder) if asked else None
        if marks is not None and (gone := [one for one in asked if marks.of(one)]):
            return gone, marks.without_bundles(gone).save(folder)
    return [], 0
