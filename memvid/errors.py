"""Every way the store refuses, one class and one stable `code` each.

The text is written where an error is raised: only that place knows what is wrong and what helps. `Corruption` groups
the errors for bytes that are not as they were written. A cache miss raises none of these.
"""

from __future__ import annotations

from typing import ClassVar, Final

from ..errors import TorporError

PUT_BACK: Final = "Put the file back, or let `torpor repair --from FOLDER` take what is missing from a backup."
"""The advice for a damaged or missing file of the store, the same everywhere."""


class StoreError(TorporError):
    """Root of all errors of the store."""


# --- names


class InvalidUri(StoreError):
    """A name that is no session's name by the grammar of `uri.py`."""


class SessionNotFound(StoreError):
    """No such session or version. `suggestions` lists close names, `begun` those that begin so."""


class NothingNamed(StoreError):
    """No block, version or pack of the store has that id or path."""


class AmbiguousVersion(StoreError):
    """A text after the `@`, or digits of an id, that mean more than one thing; `candidates` lists them."""


class InvalidTag(StoreError):
    """Not a tag by the grammar of `uri.py`."""


class TagTaken(StoreError):
    """The tag names another version of the session, `bundle_id`, and was not told to move."""


class MarkNotFound(StoreError):
    """No such tag, or the version is not pinned: nothing to take away."""


# --- the store as a whole


class NoStore(StoreError):
    """There is no store at that path."""


class NotAStore(StoreError):
    """The folder holds something else; nothing in it is touched."""


class UnsupportedFormat(StoreError):
    """Written by a newer format version; the file stays untouched."""


class UnsafePath(StoreError):
    """A link, a device, a FIFO, a second hard link, a foreign owner, or a folder that others may write."""


class StoreLocked(StoreError):
    """Another process writes this store; `holder_pid` is information only, the flock decides."""


class LockLost(StoreError):
    """The lock file was replaced under us; this store object writes no more."""


class ReadOnlyStore(StoreError):
    """The store was opened for reading only."""

    code: ClassVar[str] = "store_read_only"


class StoreClosed(StoreError):
    """The store was closed, or is being closed."""


class NoSpace(StoreError):
    """Disk, quota or file size limit reached; the store is as it was before."""


class BudgetExceeded(StoreError):
    """A write would go past a budget that the user set: `which` budget, its `limit`, and how much is `needed`.

    The store is as it was before. Nothing that frees space is ever refused this way.
    """


class StoreBusy(StoreError):
    """Other operations changed what each try needed, or are under way. The store is as it was. Try again."""


class DurabilityLost(StoreError):
    """A flush failed. What the kernel kept is unknown, so nothing is written until the store is opened again."""


class StoreIoError(StoreError):
    """Any other failure of the operating system; `errno`, `action` and `path` say which."""

    code: ClassVar[str] = "store_io"


class IndexFailed(StoreIoError):
    """The index does not answer, or takes no change; `reason` says why. Nothing is lost: it is made anew from
    manifests and packs."""


# --- invalid input of callers


class TargetExists(StoreError):
    """Something is already where an export was to be written; it was left as it is."""


class NoTargetFolder(StoreError):
    """The folder of an export is not there; none is made."""


class TargetInStore(UnsafePath):
    """An export or a backup was to be written into the store itself."""


class NotTensors(StoreError):
    """A version to be written as tensors has slots that cannot become tensors; `slot` is the first."""


class NameTaken(StoreError):
    """An import found a session under the name, or a backup another session."""


class JournalWaits(StoreError):
    """The journal has acknowledged turns of the session that could not be made a version yet; `reason` says why. Until
    that is put right the session is not used: its newest version lacks them."""


class InvalidDraft(StoreError):
    """A version to be written contradicts itself; nothing was written."""


class InvalidPolicy(StoreError):
    """A retention, a budget or another setting of maintenance that means nothing; `field` says which part."""


class LimitExceeded(StoreError):
    """A size above a named limit of `limits.py`; refused before anything is allocated."""


# --- damaged bytes


class Corruption(StoreError):
    """Root of all findings of damage."""


class Truncated(Corruption):
    """A file is shorter than its header says."""


class TrailingData(Corruption):
    """A file is longer than its header says."""


class CorruptBundle(Corruption):
    """Damage in a bundle's header, frame heads, manifest or trailer; `part` says where."""


class CorruptBlock(Corruption):
    """Damage in a block's payload; `block_id`, `slot` and `path` say where."""


class CorruptJournal(Corruption):
    """Bytes of the journal are not what was written there. What they said of a session is lost; other records count."""


class CorruptStoreFile(Corruption):
    """store.json is damaged, or another store's. The store stays shut until it is put back or made again."""


class CorruptMarks(Corruption):
    """The file of tags, pins and strips is damaged. No rule removes a version until it is repaired."""


class MarksLost(Corruption):
    """The file of tags, pins and strips is missing. No rule removes a version until it is back."""


class ReadBackFailed(Corruption):
    """What was written did not read back the same; it was not published."""


class BundleMissing(Corruption):
    """A manifest or a pack is not in the store."""


class BlockMissing(Corruption):
    """No pack has a block that a manifest or a caller names; `whole_up_to`: the tokens of its version before it."""


# --- an object store that holds versions


class RemoteError(StoreError):
    """Root of what an object store, or what lies in it, refuses. The store on this disk is as it was."""


class RemoteUnreachable(RemoteError):
    """No answer in time, or one that says to try again later."""


class RemoteRefused(RemoteError):
    """The object store takes no such request: no credentials, no right, no such bucket."""


class RemoteUnclear(RemoteError):
    """A write may have landed or not: its answer was lost, or may be wrong. Read back what is there."""


class RemoteUnfit(RemoteError):
    """The object store lets a conditional write through that it must refuse; `check` says which. Two owners of one
    session could not be told apart there."""


class RemoteTooLarge(RemoteError):
    """An object is larger than anything that Torpor writes under such a key, or a listing than any; `limit`."""


class RemoteKeyWrong(RemoteError):
    """The remote is sealed by another key than is given, or by one where none is given, or by none."""


class CorruptObject(RemoteError, Corruption):
    """An object of a sealed remote, or its remote.json, is not what was written under its name; `path`, and `name`, as
    it is called there."""


class CorruptHead(RemoteError, Corruption):
    """The head of a session in a remote is not what was written there, or another session's; `path`, `reason`."""


class HeadReplayed(RemoteError):
    """The head of a session is older than one that this store has seen, or gone: revision `found`, `seen` before."""


class LeaseHeld(RemoteError):
    """Another machine has the session: `machine`, its store's uuid `store`. `wait_s`: after so many seconds without a
    sign of life of it the session may be taken. `is_asked`: our request waits for an answer."""


class LeaseLost(RemoteError):
    """The session is not ours: the lease ran out before it was renewed, or another machine has taken the session.
    Nothing is acknowledged any more. `machine`: who has it, if known."""


class Diverged(RemoteError):
    """A session has gone on here, and otherwise in the remote. Both are as they were."""


class InvalidRemote(RemoteError):
    """A URL of a remote that means nothing here, `url`, without credentials; or a key of one that cannot be had: `path`
    of its file, if it is to be in one."""


# --- a sound bundle that is not the one that was promised


class BundleMismatch(Corruption):
    """A file's content has another bundle id than its name."""


class OwnerMismatch(Corruption):
    """A bundle says another session than its row in the index."""


class VersionMismatch(Corruption):
    """A bundle says another version than its row in the index."""


class ParentMismatch(Corruption):
    """A bundle says another parent than its row in the index."""


class IndexMismatch(Corruption):
    """Another fact of the index (identity, token count, …) differs from the bundle; `field` says which."""
