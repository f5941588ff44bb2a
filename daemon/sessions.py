"""A session that is awake, and the turn-taking of requests for one session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from ..memvid.blocks import BlockEntry
from ..memvid.uri import SessionUri
from ..snapshot.errors import MalformedSnapshot
from ..snapshot.kinds import resident_bytes
from ..snapshot.state import LiveState
from .errors import SessionBusy
from .models import LoadedModel
from .sampling import Sampling

# Requests that may wait for one session. The next is told that it is busy, and nothing has happened (QX18).
MAX_WAITING = 16


@dataclass(frozen=True, slots=True)
class Durable:
    """The last snapshot of a session: what a sleep made, or what a wake read.

    entries: its chain of blocks, for the next sleep to refer to.
    """

    version: int
    bundle_id: bytes
    parent: bytes | None
    token_count: int
    logical_bytes: int
    entries: tuple[BlockEntry, ...]


@dataclass(slots=True)
class Session:
    """A session with its state in memory.

    unchanged_tokens: leading tokens whose KV is still what the durable snapshot holds.
    system: the text that will open its chat; None once it has been read, or if there is none.
    turn_open: whether the ledger ends inside an assistant's turn of a chat.
    dirty: whether anything has changed since the durable snapshot.
    rewound: whether it was woken at an earlier version than the last; it then sleeps as a new version even when
        nothing has changed, so that what was woken is what the next wake gives.
    """

    uri: SessionUri
    model: LoadedModel
    state: LiveState
    sampling: Sampling
    labels: tuple[str, ...] = ()
    system: str | None = None
    turn_open: bool = False
    created_ns: int = field(default_factory=time.time_ns)
    durable: Durable | None = None
    unchanged_tokens: int = 0
    dirty: bool = True
    rewound: bool = False

    @property
    def needs_sleep(self) -> bool:
        """Whether the last durable version is not what a wake should give back."""
        return self.dirty or self.rewound

    @property
    def resident_bytes(self) -> int:
        """Memory that the state takes."""
        return resident_bytes(self.state.caches)

    def to_map(self) -> dict[str, Any]:
        """What a snapshot keeps of the session beside its model state."""
        return {
            "model": self.model.name,
            "labels": list(self.labels),
            "sampling": self.sampling.to_map(),
            "system": self.system,
            "turn_open": self.turn_open,
            "created_ns": self.created_ns,
        }

    @classmethod
    def woken(
        cls, uri: SessionUri, model: LoadedModel, state: LiveState, durable: Durable, kept: Mapping[str, Any]
    ) -> Session:
        """A session from its restored state and what `to_map` kept.

        Raises:
            MalformedSnapshot: the map is not one that `to_map` makes.
            InvalidSampling: its sampling parameters are out of range.
        """
        try:
            return cls(
                uri=uri,
                model=model,
                state=state,
                sampling=Sampling.from_map(kept["sampling"]),
                labels=tuple(str(label) for label in kept["labels"]),
                system=None if kept["system"] is None else str(kept["system"]),
                turn_open=bool(kept["turn_open"]),
                created_ns=int(kept["created_ns"]),
                durable=durable,
                unchanged_tokens=durable.token_count,
                dirty=False,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedSnapshot(
                f"The snapshot of {uri} lacks what a session needs ({type(error).__name__}: {error}).", session=str(uri)
            ) from error


class Turns:
    """Lets requests for one session through one after the other, in the order in which they came."""

    def __init__(self) -> None:
        self._locks: dict[SessionUri, tuple[asyncio.Lock, int]] = {}

    def in_use(self) -> set[SessionUri]:
        """The sessions that somebody holds or waits for."""
        return set(self._locks)

    @asynccontextmanager
    async def take(self, uri: SessionUri, *, always: bool = False) -> AsyncIterator[None]:
        """Hold the session alone. always: wait however many wait already.

        Raises:
            SessionBusy: too many requests wait for it already; nothing has happened.
        """
        lock, users = self._locks.get(uri, (asyncio.Lock(), 0))
        if users > MAX_WAITING and not always:
            raise SessionBusy(
                f"{MAX_WAITING} requests already wait for {uri}; send this one again later.", session=str(uri)
            )
        self._locks[uri] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[uri]
            if users == 1:
                del self._locks[uri]
            else:
                self._locks[uri] = (lock, users - 1)
