"""Sessions as the files of a store tell of them: for the daemon's listing of those that sleep, and for commands that
read a store themselves.

Knows neither MLX nor pydantic, for which a command that reads files should not wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

from ...errors import TorporError
from ...memvid.answers import Finding, VersionInfo
from ...memvid.errors import Corruption
from ...memvid.folder.versions import lineage_of
from ...memvid.format.manifest import ELSEWHERE, Manifest
from ...memvid.limits import MAX_ENVIRONMENT_CHARS, MAX_ENVIRONMENT_ENTRIES, MAX_TOKENS, MAX_VERSION
from ...memvid.store import Store
from ...memvid.uri import SCHEME
from ...memvid.writing.reader import BundleReader
from ..api.sampling import Sampling
from ..api.session import Origin, Provenance, Recomputed, SessionDetail, SessionInfo, SessionState

FORKED_FROM: Final = "forked_from"
"""The key of a fork's origin in its session map."""

FOLDED_FROM: Final = "folded_from"
"""The key of a fold's origin."""

RECOMPUTED: Final = "recomputed"
"""The key of the recomputed part, in its version and all that go on from it."""

_DAMAGED: Final = "damaged"
"""An entry of the recomputed part that is written only if it is false."""

BACKEND: Final = "backend"
"""The key of what computed a snapshot: part to value."""

SAMPLING: Final = "sampling"
"""The key of how the session draws its tokens."""


def written_bytes_of(versions: Sequence[VersionInfo]) -> int:
    """The bytes of all versions of a session: each row tells of the new part of its version alone."""
    return sum(row.bundle_bytes for row in versions)


def info_of_stored(
    row: VersionInfo, written_bytes: int, sampling: Sampling | None = None, state: SessionState = "asleep"
) -> SessionInfo:
    """A session on disk, by the row of a version, the last one as a rule. written_bytes: of all versions. sampling:
    from its manifest, if that was read."""
    namespace, _, name = row.session.removeprefix(SCHEME).partition("/")
    return SessionInfo(
        session=row.session,
        namespace=namespace,
        name=name,
        state=state,
        model=row.model,
        token_count=row.token_count,
        version=row.version,
        bundle_id=row.bundle_id,
        resident_bytes=0,
        written_bytes=written_bytes,
        dirty=False,
        labels=row.labels,
        slept_ns=row.created_ns,
        sampling=sampling,
        unread_tokens=row.unread_tokens,
        lossy=row.lossy,
        unnamed=row.unnamed,
    )


def detail_of_stored(
    store: Store,
    row: VersionInfo,
    state: SessionState,
    told: Callable[[BundleReader], tuple[Sequence[str], str]],
) -> SessionDetail:
    """A session on disk, in full, by a version. told: its layers and the end of its text. What is damaged or missing is
    told as a problem. What no version of this program writes into a session map is left out: a wake refuses it. Raises
    SessionNotFound, and what `told` raises but for damage."""
    versions = store.versions(row.uri)
    detail = SessionDetail(
        info=info_of_stored(row, written_bytes_of(versions), state=state),
        versions=store.versions_to_show(row.uri),
        tail_text="",
        layers=(),
        lineage=lineage_of(versions, row),
        identity={},
        provenance=Provenance(),
    )
    try:
        with store.open_session(row.uri, row.bundle_id) as reader:
            detail = _with_manifest(detail, reader.manifest)
            layers, tail_text = told(reader)
            return replace(detail, layers=tuple(layers), tail_text=tail_text)
    except Corruption as error:
        problem = Finding.of(str(error.details.get("path", store.path)), error)
        return replace(detail, damaged=True, problems=(problem,))


def _with_manifest(detail: SessionDetail, manifest: Manifest) -> SessionDetail:
    provenance = detail.provenance
    with contextlib.suppress(ValueError):
        provenance = provenance_in(manifest.session)
    return replace(
        detail,
        info=replace(detail.info, sampling=_sampling_in(manifest)),
        identity=dict(manifest.identity.parts),
        provenance=provenance,
        backend=_backend_in(manifest.session),
        environment=dict(manifest.environment),
    )


# --- provenance in a session map


def origin_of(row: VersionInfo, tokens: int) -> Origin:
    """The origin at a token of a stored version."""
    return Origin(row.session, row.version, row.bundle_id, tokens)


def map_of_provenance(provenance: Provenance) -> dict[str, Any]:
    """The entries of a session map; the backend has one of its own."""
    origins = {FORKED_FROM: provenance.forked_from, FOLDED_FROM: provenance.folded_from}
    entries: dict[str, Any] = {name: asdict(origin) for name, origin in origins.items() if origin is not None}
    if provenance.elsewhere_tokens:
        entries[ELSEWHERE] = provenance.elsewhere_tokens
    if (part := provenance.recomputed) is not None:
        entries[RECOMPUTED] = {name: value for name, value in asdict(part).items() if name != _DAMAGED or not value}
    return entries


def provenance_in(session: Mapping[str, Any]) -> Provenance:
    """The provenance of a version, from its session map. Raises ValueError: `map_of_provenance` does not make these
    entries."""
    elsewhere = session.get(ELSEWHERE, 0)
    if type(elsewhere) is not int or not 0 <= elsewhere <= MAX_TOKENS:
        raise ValueError(f"{ELSEWHERE} is no number of tokens")
    return Provenance(
        forked_from=_origin_in(session.get(FORKED_FROM)),
        folded_from=_origin_in(session.get(FOLDED_FROM)),
        recomputed=_recomputed_in(session.get(RECOMPUTED)),
        elsewhere_tokens=elsewhere,
        slept_by=_backend_in(session),
    )


def _origin_in(stored: object) -> Origin | None:
    if stored is None:
        return None
    kinds = {"session": str, "version": int, "bundle_id": str, "tokens": int}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError("it has not the fields of an origin")
    if not (1 <= stored["version"] <= MAX_VERSION and 1 <= stored["tokens"] <= MAX_TOKENS):
        raise ValueError("the origin has a version or a number of tokens that cannot be")
    return Origin(**stored)


def _recomputed_in(stored: object) -> Recomputed | None:
    if stored is None:
        return None
    kinds: dict[str, type] = {"version": int, "start": int, "tokens": int, "same_logits": bool}
    if type(stored) is dict and _DAMAGED in stored:
        kinds |= {_DAMAGED: bool}
    if type(stored) is not dict or {name: type(value) for name, value in stored.items()} != kinds:
        raise ValueError(f"{RECOMPUTED} is not what was computed again")
    if not (1 <= stored["version"] <= MAX_VERSION and 0 <= stored["start"] < MAX_TOKENS):
        raise ValueError(f"{RECOMPUTED} has a version or a position that cannot be")
    if not 1 <= stored["tokens"] <= MAX_TOKENS - stored["start"]:
        raise ValueError(f"{RECOMPUTED} has a number of tokens that cannot be")
    return Recomputed(**stored)


def _sampling_in(manifest: Manifest) -> Sampling | None:
    stored = manifest.session.get(SAMPLING)
    with contextlib.suppress(TorporError):
        return Sampling.from_map(stored) if isinstance(stored, dict) else None
    return None


def _backend_in(session: Mapping[str, Any]) -> dict[str, str]:
    """The parts with short text; anybody may have written the others."""
    stored = session.get(BACKEND)
    if not isinstance(stored, dict) or len(stored) > MAX_ENVIRONMENT_ENTRIES:
        return {}
    return {
        name: value
        for name, value in stored.items()
        if isinstance(name, str) and isinstance(value, str) and max(len(name), len(value)) <= MAX_ENVIRONMENT_CHARS
    }
