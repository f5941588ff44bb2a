"""Sleep and wake of one session: which thread does what, in the order that `design.md` gives.

The engine thread cuts and assembles, because that is MLX; everything that waits for the disk or hashes runs on
threads of its own, so that other sessions go on. Callers hold the session alone (`sessions.Turns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from ..memvid.bundle import BundleReader
from ..memvid.store import Receipt, Store
from ..memvid.uri import SessionUri
from ..snapshot import restore
from ..snapshot.capture import cut
from .engine import Engine
from .models import LoadedModel
from .results import Emit, Progress, Stage
from .sessions import Durable, Session

# Snapshots written or read at the same time; each may use the threads below.
IO_THREADS = 2
# Threads that fill and hash slots during wakes. Hashing and reading release the GIL; two keep two cores busy.
FILL_THREADS = 2

Result = TypeVar("Result")
ModelNamed = Callable[[str], LoadedModel]


@dataclass(frozen=True, slots=True)
class Woken:
    """A session that was read back, and how many bytes of state that took."""

    session: Session
    bytes_read: int


class Hibernation:
    """Puts sessions to sleep in a store and wakes them from it."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self._store = store
        self._engine = engine
        self._io = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="torpor-io")
        self._fill = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="torpor-fill")

    async def sleep(self, session: Session, emit: Emit) -> Receipt:
        """Make the session's state durable; it stays in memory, clean. On failure it is as it was.

        Raises:
            SnapshotError: the state cannot be kept.
            StoreError: it could not be made durable, for example for want of room.
        """
        durable = session.durable
        snapshot = await self._engine.call(
            lambda: cut(
                session.state,
                session.model.layout,
                durable=durable.entries if durable else (),
                unchanged_tokens=session.unchanged_tokens,
            )
        )
        on_progress = _reporter("sleep", emit)
        receipt = await self.on_io(
            lambda: self._store.write_bundle(
                uri=session.uri,
                identity=session.model.identity,
                parent=durable.bundle_id if durable else None,
                reused=snapshot.reused,
                blocks=snapshot.drafts(),
                session=session.to_map(),
                token_count=snapshot.token_count,
                on_progress=on_progress,
            )
        )
        session.durable = Durable(
            receipt.version,
            receipt.bundle_id,
            receipt.parent,
            receipt.token_count,
            receipt.logical_bytes,
            receipt.entries,
        )
        session.unchanged_tokens = snapshot.token_count
        session.dirty = session.rewound = False
        return receipt

    async def wake(self, uri: SessionUri, version: int | None, model_named: ModelNamed, emit: Emit) -> Woken:
        """Read a session back. All of it is verified before a session exists; nothing live is touched.

        Raises:
            StoreError: it is not in the store, or not what the index says, or damaged.
            SnapshotError: it belongs to another model, or to none that this version can restore.
            UnknownModel: the model that it was slept with is not loaded.
        """
        reader = await self.on_io(lambda: self._store.open_session(uri, version))
        try:
            kept = reader.manifest.session
            model = model_named(str(kept.get("model")))
            plan = await self.on_io(lambda: restore.plan_wake(reader, model.identity, model.layout, model=model.name))
            filling = await self._engine.call(lambda: restore.allocate(plan))
            on_progress = _reporter("wake", emit)
            await self.on_io(lambda: filling.run(reader, self._fill, on_progress))
            state = await self._engine.call(filling.assemble)
            session = Session.woken(uri, model, state, _durable_of(reader, plan.read_bytes), kept)
            return Woken(session, plan.read_bytes)
        finally:
            reader.close()

    async def on_io(self, work: Callable[[], Result]) -> Result:
        """Run store work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._io, work)

    def close(self) -> None:
        """Wait for what is being written, and end the threads."""
        self._io.shutdown()
        self._fill.shutdown()


def _durable_of(reader: BundleReader, logical_bytes: int) -> Durable:
    manifest = reader.manifest
    return Durable(
        manifest.version, reader.bundle_id, manifest.parent, manifest.token_count, logical_bytes, reader.entries
    )


def _reporter(stage: Stage, emit: Emit) -> Callable[[int, int], None]:
    """Progress from any thread, delivered on the event loop."""
    loop = asyncio.get_running_loop()

    def report(done: int, total: int) -> None:
        loop.call_soon_threadsafe(emit, Progress(stage, done, total))

    return report
