"""Publishes the beginning and the end of each stage of a request. Owns the clocks of the stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from ...memvid.store import Receipt
from ...memvid.uri import SessionUri
from ..events import events
from ..events.bus import Bus, code_of
from .sessions import Session

Result = TypeVar("Result")


@contextmanager
def tell_prefill(bus: Bus, live: Session, count: int) -> Iterator[Callable[[int, int], None]]:
    """Around the reading of tokens. Gives a function to call, from any thread, with the tokens read and all."""
    start, before, tell = time.monotonic(), len(live.state.tokens), bus.from_any_thread()
    bus.publish(events.PrefillBegan(live.uri, count))
    try:
        yield lambda done, total: tell(events.PrefillProgress(live.uri, done, total))
    finally:
        read, seconds = len(live.state.tokens) - before, time.monotonic() - start
        bus.publish(events.PrefillEnded(live.uri, read, seconds))


@contextmanager
def tell_decode(bus: Bus, live: Session) -> Iterator[Callable[[float], None]]:
    """Around the writing of tokens. Gives a function to call, from any thread, with the seconds to the first token."""
    start, before, tell = time.monotonic(), len(live.state.tokens), bus.from_any_thread()
    try:
        yield lambda seconds: tell(events.FirstToken(live.uri, seconds))
    finally:
        written, seconds = len(live.state.tokens) - before, time.monotonic() - start
        bus.publish(events.DecodeEnded(live.uri, written, seconds))


@contextmanager
def _tell_stage(
    bus: Bus,
    began: events.Event,
    failed: Callable[[str, float], events.Event],
    ended: Callable[[Result, float], events.Event],
) -> Iterator[Callable[[Result], None]]:
    """Around a stage. Gives a function to call with its result. failed, ended: make the event of the end, from the code
    of an error or from the result, and the seconds."""
    start = time.monotonic()
    bus.publish(began)
    results: list[Result] = []
    try:
        yield results.append
    except BaseException as error:
        bus.publish(failed(code_of(error), time.monotonic() - start))
        raise
    bus.publish(ended(results[0], time.monotonic() - start))


def tell_sleep(bus: Bus, live: Session, cause: events.SleepCause) -> AbstractContextManager[Callable[[Receipt], None]]:
    """Around a sleep. Gives a function to call with its receipt."""
    uri = live.uri

    def ended(receipt: Receipt, seconds: float) -> events.SleepEnded:
        return events.SleepEnded(
            uri,
            cause,
            version=receipt.version,
            tokens=receipt.token_count,
            bytes_written=receipt.bytes_written,
            logical_bytes=receipt.logical_bytes,
            blocks_new=receipt.blocks_new,
            blocks_reused=receipt.blocks_reused,
            seconds=seconds,
        )

    began = events.SleepBegan(uri, cause, len(live.state.tokens))
    return _tell_stage(bus, began, partial(events.SleepFailed, uri, cause), ended)


def tell_wake(
    bus: Bus,
    uri: SessionUri,
    cause: events.WakeCause,
    version: int | None,
    ended: Callable[[Result, float], events.WakeEnded],
) -> AbstractContextManager[Callable[[Result], None]]:
    """Around a wake. Gives a function to call with its result. ended: makes the event of its end, from that and the
    seconds."""
    return _tell_stage(bus, events.WakeBegan(uri, cause, version), partial(events.WakeFailed, uri, cause), ended)


def tell_load(bus: Bus, model: str, wanted: int) -> AbstractContextManager[Callable[[int], None]]:
    """Around the load of a model. wanted: the reserved bytes. Gives a function to call with the bytes that it takes."""
    began = events.ModelLoadBegan(None, model, wanted)
    return _tell_stage(
        bus, began, partial(events.ModelLoadFailed, None, model), partial(events.ModelLoaded, None, model)
    )
