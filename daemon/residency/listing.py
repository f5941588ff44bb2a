"""Records of sessions and models for answers, made from live objects and from index rows.

There may be very many sessions, so they are listed in pieces (`pieces.py`). A listing may or may not show changes made
meanwhile. But a session that is there all the time is listed exactly once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...memvid.answers import Finding, ShownVersion, VersionInfo
from ...memvid.folder.versions import lineage_of
from ...memvid.store import Receipt, Store
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader
from ...snapshot.canary import Verdict
from ...snapshot.errors import MalformedSnapshot, UnsupportedCache
from ...snapshot.layout import described
from ...snapshot.state import token_array
from ..api.process import ModelInfo
from ..api.session import Look, SessionDetail, SessionInfo, SessionState
from ..api.waking import Because, WakeResult
from ..disk.maintenance import MAX_PROBLEMS_TOLD
from ..memory.model_registry import Place
from ..models.models import LoadedModel
from ..sessions.sessions import Session
from ..sessions.unprocessed_tail import unread_in
from ..tasks.pieces import NAMES_AT_ONCE, SESSIONS_AT_ONCE, Pieces
from ..views.stored import detail_of_stored, info_of_stored, written_bytes_of

if TYPE_CHECKING:
    from ..disk.remote import Remote

# The end of a session to show: enough to recognize it.
TAIL_TOKENS = 160
TAIL_CHARACTERS = 400


def model_info(place: Place, last_used: float, sessions_awake: int) -> ModelInfo:
    """A served model. last_used: by the monotonic clock."""
    model = place.model or place.facts
    return ModelInfo(
        name=place.name,
        path=place.choice.source if model is None else str(model.folder),
        identity=None if model is None else model.identity.digest.hex(),
        compute_dtype=None if model is None else model.compute_dtype,
        parameters=None if model is None else model.parameters,
        resident=place.model is not None,
        context_tokens=None if model is None else model.context_tokens,
        adapter=None if model is None else dict(model.identity.parts)["adapter"],
        loading=place.loading is not None,
        pinned=place.choice.pinned,
        ttl_s=place.choice.ttl_s,
        weights_bytes=0 if place.model is None else place.model.weights_bytes,
        sessions_awake=sessions_awake,
        loads=place.loads,
        idle_s=max(0.0, time.monotonic() - last_used),
        problem=_problem_of(place),
        changed=place.changed,
    )


def _problem_of(place: Place) -> str | None:
    if not place.is_to_go:
        return place.problem
    if place.leaving:
        waits = "it is served no more, and goes with its last use"
    else:
        waits = "it is still the model of the earlier configuration, and is loaded anew once it is not in use"
    return waits if place.stays_for is None else f"{waits}; {place.stays_for}"


def info_of_awake(live: Session, newest: VersionInfo | None = None, written_bytes: int = 0) -> SessionInfo:
    """A session in memory. newest: its last durable version; written_bytes: of all versions."""
    return SessionInfo(
        session=str(live.uri),
        namespace=live.uri.namespace,
        name=live.uri.name,
        state="awake",
        model=live.model.name,
        token_count=len(live.state.tokens),
        version=live.durable.version if live.durable else None,
        bundle_id=live.durable.bundle_id if live.durable else None,
        resident_bytes=live.resident_bytes,
        written_bytes=written_bytes,
        dirty=live.dirty,
        labels=live.labels,
        slept_ns=newest.created_ns if newest else None,
        sampling=live.sampling,
        lossy=live.loss,
        look=look_of(live, newest),
        durability=live.durability,
        unnamed=live.unnamed,
        used_ns=live.stay.used_ns,
    )


def detail_of_awake(live: Session, rows: Sequence[VersionInfo], versions: tuple[ShownVersion, ...]) -> SessionDetail:
    """A session in memory, in full. rows, versions: of it, oldest first; of a look, its own is an earlier one."""
    own = next((row for row in rows if live.durable and row.version == live.durable.version), None)
    return SessionDetail(
        info=info_of_awake(live, rows[-1] if rows else None, written_bytes_of(rows)),
        versions=versions,
        tail_text=_tail(live.model, live.state.tokens),
        layers=tuple(entry.described for entry in live.model.layout.entries if entry.in_use),
        lineage=() if own is None else lineage_of(rows, own),
        identity=dict(live.model.identity.parts),
        provenance=live.provenance,
        backend=dict(live.model.backend),
    )


def detail_of_version(store: Store, row: VersionInfo, model: LoadedModel | None, state: SessionState) -> SessionDetail:
    """A session on disk, in full, by a version. What is damaged, missing, or not what the index says is told as a
    problem.

    model: its own, if in memory. The text is given only then: another tokenizer would give another text. What no
    version of this program writes is left out, as by who reads the files: a wake refuses it.

    Raises:
        SessionNotFound: it was deleted meanwhile.
    """

    def told(reader: BundleReader) -> tuple[Sequence[str], str]:
        return _layers(reader), "" if model is None else _tail(model, _ledger_of(row, reader))

    return detail_of_stored(store, row, state, told)


def _ledger_of(row: VersionInfo, reader: BundleReader) -> Sequence[int]:
    ledger = token_array(reader.tokens())
    with contextlib.suppress(MalformedSnapshot):
        if unread := unread_in(reader.manifest.session, row.uri):
            ledger += unread.tokens
    return ledger


def receipt_of_asleep(store: Store, row: VersionInfo) -> Receipt:
    """The receipt of a sleep that has nothing to write, for the session sleeps at this version; reads the disk. Raises
    StoreError: the bundle is missing, damaged, or not what the index says."""
    with store.open_session(row.uri, row.version) as reader:
        return reader.receipt()


def look_of(live: Session, newest: VersionInfo | None) -> Look | None:
    """The look of a session, or None if it is at the end of its newest version."""
    if not live.is_mere_look or live.durable is None or newest is None:
        return None
    return Look(live.durable.version, len(live.state.tokens), newest.version, newest.token_count)


def wake_result(
    live: Session,
    newest: VersionInfo | None,
    *,
    seconds: float,
    bytes_read: int = 0,
    tokens_prefilled: int = 0,
    already_awake: bool = False,
    canary: Verdict = "not_run",
    canary_seconds: float = 0.0,
    unreadable: Sequence[Finding] = (),
    because: Because | None = None,
) -> WakeResult:
    """The report of a wake. tokens_prefilled: tokens that the model computed. newest: the session's newest version.
    unreadable: manifests that cannot be read. One may be a newer version. because: of `Woken`."""
    return WakeResult(
        session=str(live.uri),
        version=live.durable.version if live.durable else None,
        bundle_id=live.durable.bundle_id if live.durable else None,
        token_count=len(live.state.tokens),
        tokens_prefilled=tokens_prefilled,
        bytes_read=bytes_read,
        seconds=seconds,
        already_awake=already_awake,
        provenance=live.provenance,
        canary=canary,
        canary_seconds=canary_seconds,
        lossy=live.loss,
        look=look_of(live, newest),
        unreadable=tuple(unreadable[:MAX_PROBLEMS_TOLD]),
        recomputed_because=because,
    )


def _tail(model: LoadedModel, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""  # its model may have been unloaded
    text = model.decode(tokens[-TAIL_TOKENS:])
    if len(tokens) > TAIL_TOKENS:
        text = text.lstrip("\N{REPLACEMENT CHARACTER}")  # the cut may go through a character of several tokens
    return text[-TAIL_CHARACTERS:]


def _layers(reader: BundleReader) -> tuple[str, ...]:
    """The caches of a bundle, in words; none if its slots are not those of caches."""
    spans = [entry for entry in reader.entries if entry.kind == "span"]
    states = [entry for entry in reader.entries if entry.kind == "state"]
    slots = [
        [spec for spec, _ in reader.read_header(chosen[at]).slots] if chosen else []
        for chosen, at in ((spans, 0), (states, -1))
    ]
    with contextlib.suppress(ValueError, IndexError, UnsupportedCache):
        return described(*slots)
    return ()


class Roll:
    """Lists sessions. awake: those in memory. remote: who has the others."""

    def __init__(self, store: Store, awake: Mapping[SessionUri, Session], remote: Remote | None = None) -> None:
        self._store = store
        self._awake = awake
        self._remote = remote

    def infos(self, namespace: str | None = None) -> Pieces[list[SessionInfo]]:
        """All sessions of a namespace, or all, in the order of their URIs."""
        unlisted = {uri: None for uri in self._awake if namespace in (None, uri.namespace)}
        found: list[SessionInfo] = []
        for number, page in enumerate(self._store.index.iter_listed(namespace, SESSIONS_AT_ONCE)):
            if number:  # between pages alone: most lists have one, and need not wait behind it
                yield
            for row, written_bytes in page:
                live = self._awake.get(uri := row.uri)
                if live is None:
                    found.append(self.placed(uri, info_of_stored(row, written_bytes)))
                else:
                    found.append(self.placed(uri, info_of_awake(live, row, written_bytes)))
                unlisted.pop(uri, None)
        found += (yield from self.of(unlisted)).values()
        return sorted(found, key=lambda info: (info.namespace, info.name))

    def of(self, uris: Iterable[SessionUri]) -> Pieces[dict[SessionUri, SessionInfo]]:
        """The existing ones of these sessions."""
        found = {}
        for looked_at, uri in enumerate(uris, 1):
            if (info := self.find(uri)) is not None:
                found[uri] = info
            if not looked_at % SESSIONS_AT_ONCE:
                yield
        return found

    def find(self, uri: SessionUri) -> SessionInfo | None:
        """One session; None if there is none of that name."""
        versions, live = self._store.versions(uri), self._awake.get(uri)
        newest = versions[-1] if versions else None
        written_bytes = written_bytes_of(versions)
        if live is not None:
            return self.placed(uri, info_of_awake(live, newest, written_bytes))
        return None if newest is None else self.placed(uri, info_of_stored(newest, written_bytes))

    def placed(self, uri: SessionUri, info: SessionInfo) -> SessionInfo:
        """With the machine that has it, if that is another one."""
        return info if (machine := self.machine_of(uri)) is None else replace(info, machine=machine)

    def machine_of(self, uri: SessionUri) -> str | None:
        """As of `Remote.machine_of`; None without a remote."""
        return None if self._remote is None else self._remote.machine_of(uri)

    def count_asleep(self) -> Pieces[int]:
        asleep = 0
        for number, page in enumerate(self._store.index.iter_uris(NAMES_AT_ONCE)):
            if number:
                yield
            asleep += sum(uri not in self._awake for uri in page)
        return asleep
