"""Publishes the beginning and the end of each stage of a request. Owns the clocks of the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ...memvid.store import Receipt
from ...memvid.uri import SessionUri
from ..events.bus import Bus, code_of
from ..events.events import (
    DecodeEnded,
    FirstToken,
    ModelLoadBegan,
    ModelLoaded,
    ModelLoadFailed,
    PrefillBegan,
    PrefillEnded,
    PrefillProgress,
    SleepBegan,
    SleepCause,
    SleepEnded,
    SleepFailed,
    WakeBegan,
    WakeCause,
    WakeEnded,
    WakeFailed,
)
from ..models.rates import Measured
from .sessions import Durable, Session


@contextmanager
def tell_prefill(bus: Bus, measured: Measured, live: Session, count: int) -> Iterator[Callable[[int, int], None]]:
    """Around the reading of tokens. Gives a function to call, from any thread, with the tokens read and all."""
    begun, held, tell = time.monotonic(), len(live.state.tokens), bus.from_any_thread()
    bus.publish(PrefillBegan(live.uri, count))
    try:
        yield lambda done, total: tell(PrefillProgress(live.uri, done, total))
    finally:
        read, seconds = len(live.state.tokens) - held, time.monotonic() - begun
        measured.add(live.model, "prefill", read, seconds)
        bus.publish(PrefillEnded(live.uri, read, seconds))


@contextmanager
def tell_decode(bus: Bus, measured: Measured, live: Session) -> Iterator[Callable[[float], None]]:
    """Around the writing of tokens. Gives a function to call, from any thread, with the seconds to the first token."""
    begun, held, tell = time.monotonic(), len(live.state.tokens), bus.from_any_thread()
    try:
        yield lambda seconds: tell(FirstToken(live.uri, seconds))
    finally:
        written, seconds = len(live.state.tokens) - held, time.monotonic() - begun
        measured.add(live.model, "decode", written, seconds)
        bus.publish(DecodeEnded(live.uri, written, seconds))


@contextmanager
def tell_sleep(bus: Bus, live: Session, cause: SleepCause) -> Iterator[Callable[[Receipt | Durable], None]]:
    """Around a sleep. Gives a function to call with its result: a new version, or the one there was."""
    begun, count = time.monotonic(), len(live.state.tokens)
    bus.publish(SleepBegan(live.uri, cause, count))
    ended: list[Receipt | Durable] = []
    try:
        yield ended.append
    except BaseException as error:
        bus.publish(SleepFailed(live.uri, cause, code_of(error), time.monotonic() - begun))
        raise
    kept = ended[0]
    written = (kept.bytes_written, kept.blocks_new, kept.blocks_reused) if isinstance(kept, Receipt) else None
    bytes_written, new, reused = written or (0, 0, len(kept.entries))
    bus.publish(
        SleepEnded(
            live.uri,
            cause,
            version=kept.version,
            tokens=kept.token_count,
            bytes_written=bytes_written,
            logical_bytes=kept.logical_bytes,
            blocks_new=new,
            blocks_reused=reused,
            seconds=time.monotonic() - begun,
        )
    )


@contextmanager
def tell_wake(
    bus: Bus, uri: SessionUri, cause: WakeCause, version: int | None
) -> Iterator[Callable[[Callable[[float], WakeEnded]], None]]:
    """Around a wake. Gives a function to call with the maker of its end event, which takes the wake's seconds."""
    begun = time.monotonic()
    bus.publish(WakeBegan(uri, cause, version))
    ended: list[Callable[[float], WakeEnded]] = []
    try:
        yield ended.append
    except BaseException as error:
        bus.publish(WakeFailed(uri, cause, code_of(error), time.monotonic() - begun))
        raise
    bus.publish(ended[0](time.monotonic() - begun))


@contextmanager
def tell_load(bus: Bus, model: str, wanted: int) -> Iterator[Callable[[int], None]]:
    """Around the load of a model. wanted: the reserved bytes. Gives a function to call with the bytes that it takes."""
    begun = time.monotonic()
    bus.publish(ModelLoadBegan(None, model, wanted))
    taken: list[int] = []
    try:
        yield taken.append
    except BaseException as error:
        bus.publish(ModelLoadFailed(None, model, code_of(error), time.monotonic() - begun))
        raise
    bus.publish(ModelLoaded(None, model, taken[0], time.monotonic() - begun))
