"""Sessions as the files of a store tell of them: for the daemon's listing of those that sleep, and for commands that
read a store themselves.

Knows neither MLX nor pydantic, for which a command that reads files should not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from ..errors import TorporError
from ..memvid.folder.versions import lineage_of
from ..memvid.format.manifest import Manifest
from ..memvid.limits import MAX_ENVIRONMENT_CHARS, MAX_ENVIRONMENT_ENTRIES, MAX_TOKENS, MAX_VERSION
from ..memvid.store import IndexRow, Store
from .api.sampling import Sampling
from .api.session import Origin, SessionDetail, SessionInfo

FORKED_FROM: Final = "forked_from"
"""The key of a fork's origin in its session map."""

FOLDED_FROM: Final = "folded_from"
"""The key of a fold's origin."""

BACKEND: Final = "backend"
"""The key of what computed a snapshot: part to value."""

SAMPLING: Final = "sampling"
"""The key of how the session draws its tokens."""


def stored_bytes_of(versions: Sequence[IndexRow]) -> int:
    """The bytes of all versions of a session: each row tells of the new part of its version alone."""
    return sum(row.bundle_bytes for row in versions)


def info_of_stored(row: IndexRow, stored_bytes: int, sampling: Sampling | None = None) -> SessionInfo:
    """A session on disk, by the row of a version, the last one as a rule. stored_bytes: of all versions. sampling: from
    its manifest, if that was read."""
    return SessionInfo(
        session=str(row.uri),
        namespace=row.uri.namespace,
        name=row.uri.name,
        state="asleep",
        model=row.model,
        token_count=row.ledger_tokens,
        version=row.version,
        bundle_id=row.bundle_id.hex(),
        resident_bytes=0,
        stored_bytes=stored_bytes,
        dirty=False,
        labels=row.labels,
        slept_ns=row.created_ns,
        sampling=sampling,
        unread_tokens=row.unread_tokens,
        lossy=row.lossy,
    )


def detail_of_stored(
    store: Store, row: IndexRow, manifest: Manifest, *, layers: Sequence[str], tail_text: str = ""
) -> SessionDetail:
    """A session on disk, in full, by a version and its manifest. What no version of this program writes into a session
    map is left out: a wake refuses it."""
    versions = store.versions(row.uri)
    return SessionDetail(
        info=info_of_stored(row, stored_bytes_of(versions), _sampling_in(manifest)),
        versions=store.versions_to_show(row.uri),
        tail_text=tail_text,
        layers=tuple(layers),
        lineage=lineage_of(versions, row),
        identity=dict(manifest.identity.parts),
        backend=_backend_in(manifest),
        lossy=row.lossy,
        forked_from=_origin_or_none(manifest, FORKED_FROM),
        folded_from=_origin_or_none(manifest, FOLDED_FROM),
    )


def origin_in(stored: object) -> Origin | None:
    """Read an origin from a session map (`asdict` of it), or None. Raises ValueError: it is no such map."""
    if stored is None:
        return None
    kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError("it has not the fields of an origin")
    if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
        raise ValueError("the origin has a version or a number of tokens that cannot be")
    return Origin(**stored)


def _origin_or_none(manifest: Manifest, name: str) -> Origin | None:
    with contextlib.suppress(ValueError):
        return origin_in(manifest.session.get(name))
    return None


def _sampling_in(manifest: Manifest) -> Sampling | None:
    stored = manifest.session.get(SAMPLING)
    with contextlib.suppress(TorporError):
        return Sampling.from_map(stored) if isinstance(stored, dict) else None
    return None


def _backend_in(manifest: Manifest) -> dict[str, str]:
    """The parts with short text; anybody may have written the others."""
    stored = manifest.session.get(BACKEND)
    if not isinstance(stored, dict) or len(stored) > MAX_ENVIRONMENT_ENTRIES:
        return {}
    return {
        name: value
        for name, value in stored.items()
        if isinstance(name, str) and isinstance(value, str) and max(len(name), len(value)) <= MAX_ENVIRONMENT_CHARS
    }
