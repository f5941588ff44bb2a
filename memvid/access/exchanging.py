"""Export, import and backup."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..answers import ExportReport, TensorReport
from ..format.records import Progress, Receipt, VersionKey
from ..uri import SessionUri
from .sessions import Sessions

if TYPE_CHECKING:
    from ..remote.sessions import RemoteSessions


class Exchanging(Sessions):
    """An open store, asked to export and to import."""

    def export_session(
        self,
        uri: SessionUri,
        version: VersionKey | None,
        target: str | os.PathLike[str],
        *,
        replacing: bool = False,
        on_progress: Progress | None = None,
    ) -> ExportReport:
        """Write a version, the latest if none is named, with all its blocks to one file outside the store.

        Every byte is checked on the way, and the file is flushed before it gets its name. Works in a store that was
        opened for reading, beside a live daemon. replacing: replace an existing file; after a failure it stays as it
        is. `on_progress` is told (raw bytes copied, raw bytes in all).

        Raises:
            SessionNotFound
            TargetExists, UnsafePath: the file exists already, or would be in the store; nothing was written.
            NoSpace, StoreIoError, DurabilityLost, ReadBackFailed: nothing is left of it.
            Corruption: as a wake raises it; nothing is left of the file.
        """
        from ..exchange import transfer

        with self.open_session(uri, version) as reader:
            return transfer.export_version(self._core, reader, target, on_progress, replacing=replacing)

    def export_tensors(
        self,
        uri: SessionUri,
        version: VersionKey | None,
        target: str | os.PathLike[str],
        *,
        kind: str | None = None,
        labels: Sequence[str] | None = None,
        replacing: bool = False,
        on_progress: Progress | None = None,
    ) -> TensorReport:
        """As `export_session`, but the arrays as one `.safetensors` file, for other tools; it cannot be imported.

        labels: the session's, the model's name and the version, unless given. Raises also NotTensors, LimitExceeded: it
        has slots that do not become tensors.
        """
        from ..exchange import tensor_file

        with self.open_session(uri, version) as reader:
            return tensor_file.export_tensors(
                self._core,
                reader,
                target,
                kind=kind or tensor_file.DEFAULT_KIND,
                labels=labels,
                replacing=replacing,
                on_progress=on_progress,
            )

    def import_file(
        self,
        source: str | os.PathLike[str],
        *,
        as_uri: SessionUri | None = None,
        on_progress: Progress | None = None,
    ) -> Receipt:
        """Let an exported file become a version; the file is only read, and blocks that the store has are not copied.

        The name must be free, unless the store has this very bundle: then nothing is written but what it lacks of it
        (`bytes_written` 0 if that is nothing). Under its own name it keeps its bundle id; under another one it becomes
        a first version, with the imported bundle as parent.

        Raises:
            NameTaken: the store has other versions of that session, even if none of them can be read, or its first one
                is being written.
            CorruptMarks, MarksLost: the store has this version; it may be stripped by marks that cannot be read.
            StoreIoError: the file cannot be read, or is no file.
            Corruption, LimitExceeded, UnsupportedFormat: it is no bundle, damaged, not whole, or of a later version.
            NoSpace, BudgetExceeded, ReadBackFailed: the store is as it was before.
            ReadOnlyStore, LockLost, DurabilityLost, StoreClosed
        """
        from ..exchange import transfer

        return transfer.import_file(self._core, source, as_uri, on_progress)

    def open_remote(self, url: str, key: bytes | None = None) -> RemoteSessions:
        """The sessions of a remote, for this store, until it is closed. key: 32 bytes, if the remote is to be sealed.
        Whether it is, and whether the object store holds to its conditions, is tried now; of one that does not answer,
        before it is used.

        Raises:
            InvalidRemote, RemoteUnfit, RemoteRefused
            RemoteKeyWrong: it is sealed otherwise. CorruptObject: what tells that is damaged.
        """
        from ..remote.counting import CountedObjects
        from ..remote.opening import open_objects
        from ..remote.sessions import RemoteSessions

        core = self._core
        return RemoteSessions.open(core, CountedObjects(open_objects(url, core.folder.path), core.used_days), key)

    def why_alone(self) -> str | None:
        """What to tell where no remote is opened, and the store has had one; else None."""
        return self._core.seen_heads.why_alone()

    def adopt_incoming(self, bundle_id: str, *, as_uri: SessionUri | None = None) -> Receipt:
        """Import the file with this id in STORE/incoming, and remove it from there; for a client of a daemon.

        Raises:
            BundleMissing, UnsafePath: there is none, or it is not ours alone.
            As `import_file`; the file stays where it is.
        """
        from ..exchange import transfer

        return transfer.adopt_incoming(self._core, bundle_id, as_uri)
