"""What sessions and models look like to those who ask: records made from live objects and from index rows."""

from __future__ import annotations

from collections.abc import Sequence

from ..memvid.store import IndexRow, Receipt, Store
from ..memvid.uri import SessionUri
from ..snapshot.errors import MalformedSnapshot
from ..snapshot.layout import layers_of
from ..snapshot.state import token_array
from .models import LoadedModel
from .results import ModelInfo, SessionDetail, SessionInfo, SleepResult, VersionInfo, WakeResult
from .sampling import Sampling
from .sessions import Durable, Session

# How much of a session's end is shown: enough to recognise it by.
TAIL_TOKENS = 160
TAIL_CHARACTERS = 400


def model_info(model: LoadedModel) -> ModelInfo:
    """A resident model."""
    return ModelInfo(
        name=model.name,
        path=str(model.folder),
        identity=model.identity.digest.hex(),
        compute_dtype=model.compute_dtype,
        parameters=model.parameters,
        resident=True,
        context_tokens=model.context_tokens,
    )


def info_of_awake(live: Session, row: IndexRow | None = None) -> SessionInfo:
    """A session in memory; `row` is its last durable version's."""
    return SessionInfo(
        session=str(live.uri),
        namespace=live.uri.namespace,
        name=live.uri.name,
        state="awake",
        model=live.model.name,
        token_count=len(live.state.tokens),
        version=live.durable.version if live.durable else None,
        bundle_id=live.durable.bundle_id.hex() if live.durable else None,
        resident_bytes=live.resident_bytes,
        stored_bytes=row.bundle_bytes if row else 0,
        dirty=live.dirty,
        labels=live.labels,
        slept_ns=row.created_ns if row else None,
        sampling=live.sampling,
    )


def info_of_asleep(row: IndexRow, sampling: Sampling | None = None) -> SessionInfo:
    """A session on disk, as the index knows it; its sampling parameters are in the bundle, and are
    given only by those who have read it."""
    return SessionInfo(
        session=str(row.uri),
        namespace=row.uri.namespace,
        name=row.uri.name,
        state="asleep",
        model=row.model,
        token_count=row.token_count,
        version=row.version,
        bundle_id=row.bundle_id.hex(),
        resident_bytes=0,
        stored_bytes=row.bundle_bytes,
        dirty=False,
        labels=row.labels,
        slept_ns=row.created_ns,
        sampling=sampling,
    )


def detail_of_awake(live: Session, versions: Sequence[IndexRow]) -> SessionDetail:
    """A session in memory, in full."""
    return SessionDetail(
        info=info_of_awake(live, versions[-1] if versions else None),
        versions=tuple(version_info(row) for row in versions),
        tail_text=_tail(live.model, live.state.tokens),
        layers=tuple(str(layer) for layer in live.model.layout.layers),
        lineage=_lineage(versions),
        identity=dict(live.model.identity.parts),
    )


def detail_of_asleep(
    store: Store, row: IndexRow, versions: Sequence[IndexRow], model: LoadedModel | None
) -> SessionDetail:
    """A session on disk, in full; its text is decoded only when its model is resident."""
    with store.open_session(row.uri) as reader:
        manifest = reader.manifest
        identity = dict(manifest.identity.parts)
        tail = _tail(model, token_array(reader.tokens())) if model is not None else ""
        if not reader.entries or "sampling" not in manifest.session:
            raise MalformedSnapshot(
                f"The snapshot of {row.uri} has no state in it that this version writes.", session=str(row.uri)
            )
        slots = [spec for spec, _ in reader.read_header(reader.entries[0]).slots]
        sampling = Sampling.from_map(manifest.session["sampling"])
    return SessionDetail(
        info=info_of_asleep(row, sampling),
        versions=tuple(version_info(each) for each in versions),
        tail_text=tail,
        layers=tuple(str(layer) for layer in layers_of(slots)),
        lineage=_lineage(versions),
        identity=identity,
    )


def version_info(row: IndexRow) -> VersionInfo:
    """One sleep."""
    return VersionInfo(
        version=row.version,
        bundle_id=row.bundle_id.hex(),
        parent=row.parent.hex() if row.parent else None,
        token_count=row.token_count,
        bundle_bytes=row.bundle_bytes,
        logical_bytes=row.logical_bytes,
        created_ns=row.created_ns,
    )


def receipt_of_sleep(receipt: Receipt, *, seconds: float) -> SleepResult:
    """The receipt of a sleep that wrote."""
    return SleepResult(
        session=str(receipt.uri),
        version=receipt.version,
        bundle_id=receipt.bundle_id.hex(),
        parent=receipt.parent.hex() if receipt.parent else None,
        token_count=receipt.token_count,
        bytes_written=receipt.bytes_written,
        logical_bytes=receipt.logical_bytes,
        blocks_new=receipt.blocks_new,
        blocks_reused=receipt.blocks_reused,
        seconds=seconds,
    )


def receipt_of_clean(durable: Durable, uri: SessionUri) -> SleepResult:
    """The receipt of a sleep for which nothing had to be written: the state is in its last bundle already."""
    return SleepResult(
        session=str(uri),
        version=durable.version,
        bundle_id=durable.bundle_id.hex(),
        parent=durable.parent.hex() if durable.parent else None,
        token_count=durable.token_count,
        bytes_written=0,
        logical_bytes=durable.logical_bytes,
        blocks_new=0,
        blocks_reused=len(durable.entries),
        seconds=0.0,
    )


def receipt_of_asleep(row: IndexRow) -> SleepResult:
    """The receipt of a session that sleeps already (threat 46: asking again is safe)."""
    return SleepResult(
        session=str(row.uri),
        version=row.version,
        bundle_id=row.bundle_id.hex(),
        parent=row.parent.hex() if row.parent else None,
        token_count=row.token_count,
        bytes_written=0,
        logical_bytes=row.logical_bytes,
        blocks_new=0,
        blocks_reused=0,
        seconds=0.0,
    )


def wake_result(
    live: Session, *, bytes_read: int, tokens_prefilled: int, seconds: float, already_awake: bool
) -> WakeResult:
    """The report of a wake; `tokens_prefilled` is what the model computed on the way."""
    return WakeResult(
        session=str(live.uri),
        version=live.durable.version if live.durable else None,
        bundle_id=live.durable.bundle_id.hex() if live.durable else None,
        token_count=len(live.state.tokens),
        tokens_prefilled=tokens_prefilled,
        bytes_read=bytes_read,
        seconds=seconds,
        already_awake=already_awake,
    )


def _tail(model: LoadedModel, tokens: Sequence[int]) -> str:
    return model.decode(tokens[-TAIL_TOKENS:])[-TAIL_CHARACTERS:]


def _lineage(versions: Sequence[IndexRow]) -> tuple[str, ...]:
    """Bundle ids from the newest version back to the first, along the parents."""
    by_id = {row.bundle_id: row for row in versions}
    line, current = [], versions[-1].bundle_id if versions else None
    while current is not None and current in by_id and current.hex() not in line:
        line.append(current.hex())
        current = by_id[current].parent
    return tuple(line)
