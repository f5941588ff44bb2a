"""What of a session comes here from a remote: versions, and the turns behind the newest one.

Rules:
- A version comes here only if it follows what is here, by its name or by its tokens. Where both have gone on by
  themselves, both stay as they are.
- What is here makes way only once what takes its place has come, and was proven: the remote may not have it whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Literal

from ..errors import Diverged, OwnerMismatch, StoreBusy, StoreError
from ..folder.marks import stripped_in
from ..format.blocks import TOKEN_BYTES
from ..format.journal import JournalRecord
from ..format.manifest import Manifest, tail_in
from ..format.records import Receipt
from ..recovery.replaying import replay_session
from ..uri import SessionUri
from ..writing.core import StoreCore
from .beyond import Beyond, tokens_of_version
from .fetching import fetch
from .heads import Head, Party
from .places import manifest_key
from .tails import is_of, record_of
from .versions import RemoteVersions


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came of a session: the newest version now, and the bytes that were written."""

    version: int
    bytes_written: int


class Pulling:
    """Takes what comes, one session after the other: for one thread at a time."""

    def __init__(self, core: StoreCore, versions: RemoteVersions, me: Party) -> None:
        self._core = core
        self._versions = versions
        self._me = me
        self._url = versions.objects.url

    def pull(self, head: Head, *, turns: bool = True) -> Pulled | None:
        """Let what the remote has of a session be in the store: its newest version, with all its blocks, and the turns
        behind it as one more version. None: it is already, or the remote has nothing. turns: only who holds the session
        may make that version: its holder makes another one of them. One that is stripped here stays so for him, until
        it is to be read (`fetch_back`).

        What is here and not there stays if it goes on from what is there. If it is a beginning of that, token for
        token, it goes.

        Raises:
            Diverged: the session has gone on here by itself.
            As `fetching.fetch`, and `write_bundle`.
        """
        self._core.read_again()
        old = self._old(head, turns=turns)
        record = None
        if turns and old != "ahead" and head.tail:
            record = record_of(self._versions.objects, head.tail[-1], head.uri)  # before anything goes
        receipt = None
        if head.newest is not None and not (turns and head.newest in (stripped_in(self._core.folder) or ())):
            receipt = self._pull_newest(head, head.newest, old)
        replayed = record is not None and old != "ahead" and self._pull_turns(head, record, old)
        if receipt is None and not replayed:
            return None
        row = self._core.index.find(head.uri)
        assert row is not None
        return Pulled(row.version, 0 if receipt is None else receipt.bytes_written)

    def fetch_back(self, uri: SessionUri, bundle_id: str) -> int:
        """Let a version here have its keys and values again; the bytes that were written. Raises as `fetching.fetch`,
        OwnerMismatch, and as `RemoteVersions.require_manifest`."""
        self._core.read_again()
        receipt = fetch(self._core, self._versions, self._manifest_of(uri, bundle_id), bundle_id)
        return 0 if receipt is None else receipt.bytes_written

    def _old(self, head: Head, *, turns: bool) -> Beyond | Literal["ahead"] | None:
        """What is here and a beginning of what the remote has, which makes way for that; None: nothing is. ahead: the
        session has gone on here from what the remote has. Raises Diverged; StoreBusy: a version is being written
        here."""
        beyond = Beyond.of(self._core, head)
        if beyond is None:
            return None
        if not (turns and self.has_turns_of_others(head)):
            if head.newest is None or self._core.folder.has_manifest(head.newest):
                return "ahead"
            head = dataclasses.replace(head, tail=())
        place = beyond.beside(self._core, self._tokens_there(head))
        if place == "ahead":
            return "ahead"
        if place == "diverged":
            if Beyond.of(self._core, head) != beyond:  # a version was written or removed meanwhile: look again
                return self._old(head, turns=turns)
            raise self._diverged(head.uri)
        self._require_idle(head.uri)
        return beyond

    def _make_way(self, head: Head, old: Beyond | None) -> None:
        """Let go of what is a beginning of what has come; nothing happens if it has gone. Raises StoreBusy: it has
        grown meanwhile."""
        there = Beyond.of(self._core, head)
        if old is None or there is None:
            return
        if there != old:
            raise StoreBusy(f"{head.uri} has gone on here while it was fetched. Try again.", session=str(head.uri))
        old.let_go(self._core)

    def beside(self, head: Head) -> Literal["ahead", "behind", "diverged"] | None:
        """What is here of a session and not named there, beside what the remote has, by their tokens; as of
        `Beyond.beside`, and None: there is nothing. The remote has a version, or turns of others. Raises as
        `_tokens_of`, and `tails.record_of`."""
        beyond = Beyond.of(self._core, head)
        return None if beyond is None else beyond.beside(self._core, self._tokens_there(head))

    def has_turns_of_others(self, head: Head) -> bool:
        """Turns that this store sent are in its journal, or were, before it went on: by a rewind, perhaps."""
        return bool(head.tail) and not is_of(head.tail[-1], self._me.store)

    def _tokens_there(self, head: Head) -> bytes:
        """All tokens of a session, with the turns of others behind its newest version. Raises as `record_of` and
        `_tokens_of`."""
        if not self.has_turns_of_others(head):
            assert head.newest is not None, "the remote has something of it"
            return self._tokens_of(head.uri, head.newest)
        record = record_of(self._versions.objects, head.tail[-1], head.uri)
        held = b"" if record.base is None else self._tokens_of(head.uri, record.base)[: TOKEN_BYTES * record.held]
        return held + tail_in(record.session)

    def _tokens_of(self, uri: SessionUri, bundle_id: str) -> bytes:
        """Raises as `_manifest_of`, and `tokens_of_version`."""
        manifest = self._manifest_of(uri, bundle_id)
        return tokens_of_version(self._core, self._versions, manifest, bundle_id)

    def _pull_newest(self, head: Head, newest: str, old: Beyond | Literal["ahead"] | None) -> Receipt | None:
        is_here = self._core.folder.has_manifest(newest)
        if is_here and self._is_whole_here(head.uri, newest):
            return None
        if is_here:
            return fetch(self._core, self._versions, self._manifest_of(head.uri, newest), newest)
        if old == "ahead":
            return None
        manifest = self._manifest_of(head.uri, newest)
        with self._core.importing, self._core.next_version(head.uri, least=manifest.version):
            self._require_idle(head.uri, own=1)
            gone = () if old is None else old.rows
            if any(row.version >= manifest.version for row in self._core.index.versions(head.uri) if row not in gone):
                raise self._diverged(head.uri)
            return fetch(self._core, self._versions, manifest, newest, lambda: self._make_way(head, old))

    def _is_whole_here(self, uri: SessionUri, bundle_id: str) -> bool:
        """Whether a session has a version here with all its blocks. Then the remote is not asked for it: what is
        missing or damaged there keeps nobody from what is here, nor from sending it again."""
        if bundle_id in (stripped_in(self._core.folder) or ()):
            return False
        try:
            manifest = self._core.read_manifest(bundle_id)
        except StoreError:
            return False
        return manifest.uri == uri and not self._core.missing_of({entry.id for entry in manifest.blocks})

    def _manifest_of(self, uri: SessionUri, bundle_id: str) -> Manifest:
        """Of a version that the head or the turns of a session name: anybody may have written these. Raises
        OwnerMismatch: it is another session's; and as `RemoteVersions.require_manifest`."""
        manifest = self._versions.require_manifest(bundle_id)
        if manifest.uri != uri:
            raise OwnerMismatch(
                f"What {self._url} has of {uri} names a version of {manifest.uri}. Nothing was taken over.",
                path=self._versions.path_of(manifest_key(bundle_id)),
            )
        return manifest

    def _pull_turns(self, head: Head, record: JournalRecord, old: Beyond | None) -> bool:
        """Make a version of the turns behind the newest one. Raises InvalidDraft: no version can have such turns."""
        if record.base is not None:
            base = self._manifest_of(head.uri, record.base)
            if not self._core.folder.has_manifest(record.base):
                fetch(self._core, self._versions, base, record.base, lambda: self._make_way(head, old))
        self._make_way(head, old)
        with self._core.poisoning():
            with self._core.journaling():
                self._core.journal.append([record])
            try:
                return replay_session(self._core, head.uri)
            except StoreError:  # the remote has it still; here it would keep the session from use for good
                with contextlib.suppress(StoreError), self._core.journaling():
                    self._core.journal.drop(head.uri)
                raise

    def _require_idle(self, uri: SessionUri, *, own: int = 0) -> None:
        """own: as many of the versions that are being written are of this pull. Raises StoreBusy: another one is."""
        if len(self._core.being_written(uri)) > own:
            raise StoreBusy(f"{uri} is being put to sleep here. Try again.", session=str(uri))

    def _diverged(self, uri: SessionUri) -> Diverged:
        return Diverged(
            f"{uri} has gone on here, and otherwise in {self._url}. Both stay as they are. Keep what is here under "
            f"another name (`torpor fork {uri} NAME`), remove it (`torpor rm {uri}`; the remote keeps its own), and "
            "pull again.",
            session=str(uri),
        )
