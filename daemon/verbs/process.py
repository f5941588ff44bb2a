"""Handlers for the daemon as a whole: its status and its models."""

from __future__ import annotations

import asyncio
import os
import time

from ... import __version__
from ...memvid.disk.room import Room, room_at
from ...memvid.store import Store
from ...snapshot.blas import library_in_use
from ..api.events import ProgressEvent
from ..api.process import (
    DiskInfo,
    LoadModelRequest,
    ModelInfo,
    StatusRequest,
    StatusResult,
    StoreCoins,
    UnloadModelRequest,
)
from ..disk.maintenance import MAX_PROBLEMS_TOLD
from ..events.events import Event, ModelDownloadProgress
from ..memory.model_registry import Place
from ..parts.parts import Parts
from ..residency import listing
from ..tasks.pieces import in_pieces
from .answering import answers


@answers(StatusRequest, told=False)
async def status(parts: Parts, request: StatusRequest) -> StatusResult:
    parts.door.require_open()
    asleep = await in_pieces(parts.sessions.roll.count_asleep())
    room = await asyncio.to_thread(room_at, parts.store.disk.path)
    unreadable = await asyncio.to_thread(parts.store.disk.unreadable)
    return StatusResult(
        version=__version__,
        pid=os.getpid(),
        store=str(parts.store.disk.path),
        models=tuple(_info_of(parts, place) for place in parts.models.places()),
        sessions_awake=len(parts.sessions.awake),
        sessions_asleep=asleep,
        memory=parts.models.memory.info(),
        blas=library_in_use() or "the BLAS that MLX ships",
        uptime_s=time.monotonic() - parts.started,
        queue=parts.queue.info(),
        prefix_hits=parts.sessions.reuse.hits,
        prefix_misses=parts.sessions.reuse.misses,
        cached_tokens=parts.sessions.reuse.cached_tokens,
        batched_tokens=parts.models.engine.batched_tokens,
        scrub=parts.upkeep.scrub_info(),
        config=None if parts.config is None else parts.config.info(),
        aliases=parts.options.aliases,
        disk=None if room is None else _disk_of(parts.store.disk, room, parts.upkeep.measuring.coins()),
        unreadable=tuple(unreadable[:MAX_PROBLEMS_TOLD]),
        http=parts.http,
        remote=None if parts.upkeep.uploading is None else parts.upkeep.uploading.use_today(),
    )


@answers(LoadModelRequest, queued=True)
async def load_model(parts: Parts, request: LoadModelRequest) -> ModelInfo:
    """Raises UnknownModel, MemoryBudgetExceeded, and the errors of a load."""

    def tell(event: Event) -> None:
        if isinstance(event, ModelDownloadProgress) and event.model == request.model:
            request.emit(ProgressEvent("download", event.done_bytes, event.total_bytes))

    try:
        async with parts.bus.telling(ModelDownloadProgress.name, tell):
            await parts.models.weights.load(request.model)
    except asyncio.CancelledError:
        if parts.models.shelf.place(request.model).model is None:
            raise  # else the load ran to its end
    return _info_of(parts, parts.models.shelf.place(request.model))


@answers(UnloadModelRequest)
async def unload_model(parts: Parts, request: UnloadModelRequest) -> ModelInfo:
    """Raises UnknownModel, and the errors of a sleep. ModelInUse: a request needs it."""
    await parts.models.weights.unload(request.model)
    return _info_of(parts, parts.models.shelf.place(request.model))


def _disk_of(store: Store, room: Room, coins: StoreCoins | None) -> DiskInfo:
    most = store.budget
    return DiskInfo(
        free_bytes=room.free_bytes,
        total_bytes=room.total_bytes,
        held_bytes=None if most.max_store_bytes is None else store.held_bytes,
        store_budget_bytes=most.max_store_bytes,
        daily_write_budget_bytes=most.max_bytes_per_day,
        keep_free_bytes=most.min_free_bytes,
        coins=coins,
    )


def _info_of(parts: Parts, place: Place) -> ModelInfo:
    name = place.name
    return listing.model_info(place, parts.models.weights.last_use(name), len(parts.sessions.awake.on(name)))
