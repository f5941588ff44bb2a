"""Requests and their stages, told on the bus as they pass: what begins is told, and how it ended.

Owns the clocks of the stages. Does not know what a stage does.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

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

P = ParamSpec("P")
Result = TypeVar("Result")


class Teller(Protocol):
    """Whose verbs are told. about: the session that a client's word for it means, as far as one can tell."""

    @property
    def bus(self) -> Bus: ...

    def about(self, name: object) -> SessionUri | None: ...


Telling = TypeVar("Telling", bound=Teller)


def told(
    verb: Callable[Concatenate[Telling, P], Awaitable[Result]],
) -> Callable[Concatenate[Telling, P], Coroutine[Any, Any, Result]]:
    """A verb: the bus is told that it was asked for, and how it ended."""

    @functools.wraps(verb)
    async def carry_out(teller: Telling, /, *args: P.args, **asked: P.kwargs) -> Result:
        with teller.bus.request(verb.__name__, lambda: teller.about(asked.get("session"))):
            return await verb(teller, *args, **asked)

    return carry_out


@contextmanager
def tell_prefill(bus: Bus, measured: Measured, live: Session, count: int) -> Iterator[Callable[[int, int], None]]:
    """Around the reading of tokens. Gives what is to be called, from any thread, when some of so many are read."""
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
    """Around the writing of tokens. Gives what is to be called, from any thread, when the first is there: after so
    many seconds."""
    begun, held, tell = time.monotonic(), len(live.state.tokens), bus.from_any_thread()
    try:
        yield lambda seconds: tell(FirstToken(live.uri, seconds))
    finally:
        written, seconds = len(live.state.tokens) - held, time.monotonic() - begun
        measured.add(live.model, "decode", written, seconds)
        bus.publish(DecodeEnded(live.uri, written, seconds))


@contextmanager
def tell_sleep(bus: Bus, live: Session, cause: SleepCause) -> Iterator[Callable[[Receipt | Durable], None]]:
    """Around a sleep. Gives what is to be called with what it came to: a version that is new, or one that there was."""
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
    """Around a wake. Gives what is to be called with a function that makes its end out of the seconds that it took."""
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
    """Around the load of a model, for which so many bytes are reserved. Gives what is to be called with those that it
    takes."""
    begun = time.monotonic()
    bus.publish(ModelLoadBegan(None, model, wanted))
    taken: list[int] = []
    try:
        yield taken.append
    except BaseException as error:
        bus.publish(ModelLoadFailed(None, model, code_of(error), time.monotonic() - begun))
        raise
    bus.publish(ModelLoaded(None, model, taken[0], time.monotonic() - begun))
