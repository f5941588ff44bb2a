"""Operations and marks of a store by name with options, and the calls of `Store` for them. The daemon (from a request)
and the command line (from arguments) use it, so that the same words mean the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .answers import MaintenanceReport, MarkedVersion
from .errors import InvalidPolicy
from .folder.retention import Retention
from .format.records import VersionKey
from .maintenance.repack_plan import RepackPolicy
from .store import Store
from .uri import SessionUri

_DAY_SECONDS: Final = 24 * 3600


@dataclass(frozen=True, slots=True)
class Order:
    """An operation and its options: repack, repair, prune, strip or forget. version: None for all of a session.
    sources: folders that a repair may copy from. A strip without a session has to be a plan: of what goes where a
    store needs room, with the settings of a daemon without options."""

    operation: str
    uri: SessionUri | None = None
    dry_run: bool = False
    keep_last: int | None = None
    keep_days: float | None = None
    cold_after_days: float | None = None
    version: VersionKey | None = None
    sources: tuple[str, ...] = ()


def carry_out(store: Store, order: Order, should_stop: Callable[[], bool] = lambda: False) -> MaintenanceReport:
    """Carry an order out, or with `dry_run` return its plan. Long operations call `should_stop` between steps.

    Raises:
        InvalidPolicy: there is no such operation, or the order lacks an option.
        StoreError: as the operation raises it.
    """
    if order.operation == "repack":
        seconds = None if order.cold_after_days is None else order.cold_after_days * _DAY_SECONDS
        policy = RepackPolicy(cold_after_seconds=seconds)
        return store.repack(order.uri, dry_run=order.dry_run, policy=policy, should_stop=should_stop)
    if order.operation == "repair":
        return store.repair(dry_run=order.dry_run, sources=order.sources)
    if order.operation == "prune":
        return store.prune(Retention(order.keep_last, order.keep_days), order.uri, dry_run=order.dry_run)
    if order.operation == "strip" and order.uri is not None:
        return store.strip(order.uri, order.version, dry_run=order.dry_run)
    if order.operation == "strip" and order.dry_run:
        return store.plan_room()
    if order.operation == "forget" and order.uri is not None:
        return store.forget(order.uri, dry_run=order.dry_run)
    raise InvalidPolicy(f"{order.operation!r} is no operation on a store, or lacks its session.", field="operation")


def set_mark(
    store: Store,
    text: str,
    *,
    tag: str | None = None,
    untag: str | None = None,
    pinned: bool | None = None,
    move: bool = False,
) -> MarkedVersion:
    """Change one mark of the version that `text` means; with `untag`, of the one with the tag. `move` takes a tag from
    another version.

    Raises:
        InvalidUri, AmbiguousVersion, SessionNotFound: which version is meant.
        InvalidTag, TagTaken, MarkNotFound, BundleMissing, CorruptMarks, MarksLost: why it is not marked.
    """
    if untag is not None:
        uri = store.resolve(text)
        named = store.marks(uri).tags.get(untag)
        store.untag(uri, untag)  # raises where there was none
        assert named is not None
        return _marks_of(store, uri, named)
    if pinned is False:
        uri, bundle_id = store.resolve_pinned(text)
        store.unpin(uri, bundle_id)
        return _marks_of(store, uri, bundle_id)
    row = store.resolve_version(text)
    if tag is not None:
        store.tag(row.uri, row.bundle_id, tag, move=move)
    else:
        store.pin(row.uri, row.bundle_id)
    return _marks_of(store, row.uri, row.bundle_id)


def _marks_of(store: Store, uri: SessionUri, bundle_id: str) -> MarkedVersion:
    marks = store.marks(uri).of(bundle_id)
    version = next((row.version for row in store.versions(uri) if row.bundle_id == bundle_id), None)
    return MarkedVersion(str(uri), version, bundle_id, marks.tags, marks.pinned)
