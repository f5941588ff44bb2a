"""What `bench/wake.py` measures in a process of its own: one way to wake, or the ways to sleep. Prints JSON.

`wake FOLDER SHAPE WAY`: the session in FOLDER into fresh memory, and once more into memory that this process has used
before; with the most memory that was resident in between.
`sleep FOLDER SHAPE MIB ROUNDS`: makes a state, sleeps it in each way in turn, and leaves one session to be woken.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import plain
from model_states import IDENTITY, SHAPES, ModelShape, arrays_in, grow, layout, other_tokens, random_state
from parts import timed_parts
from torpor.memvid.disk.durable import sync_file
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.snapshot import restore
from torpor.snapshot.capture import cut
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache  # isort: skip

URI = SessionUri("bench", "sleeper")
PEER_FILE = "peer.safetensors"
NEW_TOKENS = 200
THREADS = 2
_MIB = 2**20
_CONTEXT = 1 << 30


# --- memory


def resident_bytes() -> int:
    """What this process has in memory now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def peak_noted(into: dict[str, Any], name: str) -> Iterator[None]:
    """Note by how much the most resident memory in between was more than what was resident before; not where the
    system does not say."""
    watched = Path("/proc/self/clear_refs")
    if not watched.exists():
        yield
        return
    watched.write_text("5", encoding="ascii")  # the highest mark begins anew
    before = resident_bytes()
    yield
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    highest = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    into[name] = highest - before


# --- wake


class Wake:
    """One session, and the ways to get it back."""

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        self._folder = folder
        self._shape = shape
        self._layout = layout(shape)
        self.stages: dict[str, float] = {}
        (self._pack,) = folder.glob("store/packs/*")
        with Store.open(folder / "store", writable=False) as store, store.open_session(URI) as reader:
            plan = self._planned(reader)
            self.state_bytes, self.memory_bytes, self.tokens = plan.read_bytes, plan.memory_bytes, plan.target_tokens
        self._buffers: list[memoryview] = []
        self._store: Store | None = None

    def verified(self) -> object:
        """Torpor, every byte hashed."""
        return self._torpor()

    def mlx_lm(self) -> object:
        """What mlx-lm offers: nothing is verified."""
        caches = load_prompt_cache(str(self._folder / PEER_FILE))
        mx.eval(arrays_in(caches))
        return caches

    def plain(self) -> object:
        """`preadv` of as many bytes of the pack into memory from the system, on as many threads."""
        if not self._buffers:
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._buffers = [memoryview(mmap.mmap(-1, self.state_bytes, flags=private))]
        fd = os.open(self._pack, os.O_RDONLY)
        whole = self._buffers[0]
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                pieces = range(0, len(whole), _MIB)
                list(pool.map(lambda at: plain.read_at(fd, at, [whole[at : at + _MIB]]), pieces))
        finally:
            os.close(fd)
        return whole

    def _torpor(self) -> LiveState:
        clock = [time.perf_counter()]
        if self._store is None:  # once in a process, as the daemon does
            self._store = Store.open(self._folder / "store", writable=False)
        with ThreadPoolExecutor(THREADS) as pool, self._store.open_session(URI) as reader:
            clock.append(time.perf_counter())
            plan = self._planned(reader)
            clock.append(time.perf_counter())
            filling = restore.allocate(plan)
            clock.append(time.perf_counter())
            filling.run(reader, pool)
            clock.append(time.perf_counter())
            state = filling.assemble(self._shape.caches(), mx.random.key(0))
            clock.append(time.perf_counter())
        names = ("open", "headers and plan", "take memory", "read and hash", "assemble")
        self.stages = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
        return state

    def _planned(self, reader: Any) -> restore.WakePlan:
        return restore.plan_wake(reader, IDENTITY, self._layout, model="bench", context_tokens=_CONTEXT)


def measure_wake(folder: Path, shape: ModelShape, way: str) -> dict[str, Any]:
    """Into fresh memory first, then again into what MLX kept of it."""
    wake = Wake(folder, shape)
    found: dict[str, Any] = {"tokens": wake.tokens, "state_bytes": wake.state_bytes, "memory_bytes": wake.memory_bytes}
    mx.set_cache_limit(2 * wake.memory_bytes)  # so that what is let go is there to be taken again, warm
    call: Callable[[], object] = getattr(wake, way)
    with peak_noted(found, "peak_bytes"):
        started, cpu = time.perf_counter(), time.process_time()
        held = call()
        found["fresh"], found["fresh_processor"] = time.perf_counter() - started, time.process_time() - cpu
    found["fresh_stages"] = dict(wake.stages)
    del held
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    held = call()
    found["warm"], found["warm_processor"] = time.perf_counter() - started, time.process_time() - cpu
    found["warm_stages"] = dict(wake.stages)
    if way == "verified":
        del held
        with timed_parts() as parts:
            call()
        found["parts"] = parts.as_data()
    return found


# --- sleep


class Sleep:
    """One state, and the ways to keep it. The store and the peer's file are in the folder; a third is removed."""

    def __init__(self, folder: Path, shape: ModelShape, tokens: int) -> None:
        self.shape = shape
        self.store = Store.open(folder / "store", writable=True)
        self._peer_file = folder / PEER_FILE
        self._layout = layout(shape)
        self.state = random_state(shape, tokens)
        self.durable: tuple[Any, ...] = ()
        self._parent: bytes | None = None
        self._unchanged = 0
        self.written_bytes = 0

    def torpor(self) -> None:
        """Until the receipt: hashed, written, flushed, read back and verified, published, indexed."""
        snapshot = cut(self.state, self._layout, durable=self.durable, unchanged_tokens=self._unchanged)
        receipt = self.store.write_bundle(
            VersionDraft(
                uri=URI,
                identity=IDENTITY,
                parent=self._parent,
                reused=snapshot.reused,
                blocks=snapshot.drafts(),
                session={},
                block_tokens=snapshot.token_count,
            )
        )
        self.durable, self._parent, self._unchanged = receipt.entries, receipt.bundle_id, receipt.block_tokens
        self.written_bytes = receipt.bytes_written

    def mlx_lm(self) -> None:
        """What mlx-lm offers: written, neither flushed nor read back."""
        save_prompt_cache(str(self._peer_file), self.state.caches)

    def mlx_lm_flushed(self) -> None:
        """The same, and a flush."""
        self.mlx_lm()
        fd = os.open(self._peer_file, os.O_RDWR)
        try:
            sync_file(fd, str(self._peer_file))
        finally:
            os.close(fd)

    def forget(self) -> None:
        """As if nothing had been kept; for the next the tokens are others, so that no block is known."""
        if self.durable:
            self.store.delete_session(URI)
        self.durable, self._parent, self._unchanged = (), None, 0
        self._peer_file.unlink(missing_ok=True)

    def forget_peer(self) -> None:
        """No file to be written over: that is another thing than writing a new one."""
        self._peer_file.unlink(missing_ok=True)


def measure_sleep(folder: Path, shape: ModelShape, mib: float, rounds: int) -> dict[str, Any]:
    """Each way in each round, first of the whole state and then of the state with NEW_TOKENS more."""
    sleep = Sleep(folder, shape, shape.tokens_for(int(mib * _MIB)))
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    found: dict[str, Any] = {"seconds": seconds, "written_bytes": {}}
    ways = ("torpor", "mlx_lm", "mlx_lm_flushed")
    for number in range(rounds):
        sleep.forget()
        other_tokens(sleep.state, shape, number)
        for which in ("first", "second"):
            if which == "second":
                grow(sleep.state, shape, NEW_TOKENS, number + 1)
            for way in ways if number % 2 else reversed(ways):
                sleep.forget_peer()
                plain.settle()
                with peak_noted(found, f"peak_bytes_{which}_{way}"):
                    started = time.perf_counter()
                    getattr(sleep, way)()
                    seconds[f"{which}_{way}"].append(time.perf_counter() - started)
            found["written_bytes"][which] = sleep.written_bytes
    sleep.forget()
    other_tokens(sleep.state, shape, rounds)
    with timed_parts() as parts:
        sleep.torpor()
    sleep.mlx_lm_flushed()
    found["parts"] = parts.as_data()
    found["tokens"] = len(sleep.state.tokens)
    sleep.store.close()
    return found


def main() -> None:
    """Measure what the arguments say."""
    what, folder, shape = sys.argv[1], Path(sys.argv[2]), SHAPES[sys.argv[3]]
    if what == "wake":
        found = measure_wake(folder, shape, sys.argv[4])
    else:
        found = measure_sleep(folder, shape, float(sys.argv[4]), int(sys.argv[5]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
