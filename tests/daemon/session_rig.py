"""A service on a tiny model, with eyes and hands inside: what the tests of this folder share.

Run as a script it is the other process of a test: `python tests/daemon/session_rig.py wake '{...}'` (see `main`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import importlib
import json
import math
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from torpor.daemon.api.events import WorkEvent
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.errors import GenerationFailed
from torpor.daemon.events.events import Notice
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models.models import LoadedModel
from torpor.daemon.options.serve_options import SERVE_OPTIONS, ServeOptions
from torpor.daemon.service import Service
from torpor.daemon.sessions.sessions import MAX_WAITING, Session
from torpor.memvid.errors import NoSpace
from torpor.memvid.store import Store
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

MODEL = "tiny"
END = 258  # <|im_end|>
DEADLINE_S = 30.0
ROW = 2 * 2 * 2 * 24 * 4
"""Bytes of one token of the tiny model."""
STEP = 256
"""A session's memory grows by the rows of so many tokens."""
LOGITS = 4 * 259
HELD = STEP * ROW + LOGITS
"""One session of up to 256 tokens."""
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=120, min_p=0.01, repetition_penalty=1.2, seed=2**63 + 11)


def ignore(_event: WorkEvent) -> None:
    """For events that a test does not look at."""


def tokens_of(seed: int, count: int) -> list[int]:
    """Plain tokens of the tiny model, the same for the same seed."""
    return random.Random(seed).choices(range(256), k=count)


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that a session's model state consists of; two that are equal are bit-equal.

    kv: BLAKE3 of the live bytes of each array of each cache; offsets: how long each cache is, and what else it counts.
    """

    tokens: tuple[int, ...]
    offsets: tuple[int, ...]
    kv: tuple[str, ...]
    logits: str | None
    random_key: tuple[int, ...]


class Watched:
    """A network that counts what it is asked for, and does to a call what a test wants.

    calls: tokens of each call, and rows: of how many sessions; before(number, tokens, cache) may raise or wait;
    after(number, logits) may replace them.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.calls: list[int] = []
        self.rows: list[int] = []
        self.before: Callable[[int, Any, Any], None] = lambda *_: None
        self.after: Callable[[int, Any], Any] = lambda _, logits: logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        self.calls.append(tokens.shape[1])
        self.rows.append(tokens.shape[0])
        number = len(self.calls)
        self.before(number, tokens, cache)
        return self.after(number, self.network(tokens, cache=cache))

    def reset(self) -> None:
        """Count from the start again, and do nothing to calls."""
        self.__init__(self.network)  # type: ignore[misc]

    def fail_at(self, number: int, *, layers_grown: int = 0) -> None:
        """Raise at the call of that number from now, when the caches of some layers have already grown."""
        at = len(self.calls) + number

        def fail(now: int, tokens: Any, cache: Any) -> None:
            if now == at:
                for layer in cache[:layers_grown]:
                    grown = mx.ones((1, 2, tokens.shape[1], 24))
                    layer.update_and_fetch(grown, grown)
                raise RuntimeError("the model broke")

        self.before = fail

    def hold_at(self, number: int) -> Gate:
        """Stop the engine inside the call of that number from now until the gate is opened."""
        gate, at = Gate(), len(self.calls) + number

        def hold(now: int, *_: Any) -> None:
            if now == at:
                gate.pass_through()

        self.before = hold
        return gate


class Gate:
    """Holds a thread up, and lets a test know that it has come there."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._open = threading.Event()

    def pass_through(self) -> None:
        self._arrived.set()
        assert self._open.wait(DEADLINE_S), "nobody opened the gate"

    @property
    def is_reached(self) -> bool:
        return self._arrived.is_set()

    async def reached(self) -> None:
        await until(self._arrived.is_set)

    def open(self) -> None:
        self._open.set()


def hold_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Gate:
    """The gate at which each call of that function waits from now on."""
    gate, real = Gate(), getattr(owner, name)

    def held(*args: Any, **options: Any) -> Any:
        gate.pass_through()
        return real(*args, **options)

    monkeypatch.setattr(owner, name, held)
    return gate


def manifest_of(store: Path, bundle_id: str) -> Path:
    """The file that a version is there with."""
    return store / "versions" / f"{bundle_id}.mvm"


def manifests(store: Path) -> list[Path]:
    """The files of all versions."""
    return sorted(store.glob("versions/*.mvm"))


def packs(store: Path) -> list[Path]:
    """The files with the blocks of all sessions."""
    return sorted(store.glob("packs/*.mvp"))


def flip(path: Path, at: int, mask: int = 1) -> None:
    """Change a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= mask
    path.chmod(0o600)
    path.write_bytes(data)


def most(tokens: int) -> int:
    """Bytes that a state of so many tokens of the tiny model may take at most."""
    return (tokens + STEP - 1) * ROW + LOGITS


def as_killed(store: Path, name: str = "killed") -> Path:
    """The store as a SIGKILL leaves it now."""
    return Path(shutil.copytree(store, store.parent / name, ignore=shutil.ignore_patterns("lock")))


class FullDisk:
    """A disk without room for new versions of the sessions of those names, of any if there are none, until `free`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.is_full, self.refused = True, 0
        write = Store.write_bundle

        def put(store: Store, draft: Any) -> Any:
            if self.is_full and (not names or draft.uri.name in names):
                self.refused += 1
                raise NoSpace("The disk is full.")
            return write(store, draft)

        monkeypatch.setattr(Store, "write_bundle", put)

    def free(self) -> None:
        self.is_full = False


def make_unreadable(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Have the system or the store refuse to open a file whose bytes are sound; what is returned undoes it. how: what
    `cp -al` of the store makes of it, or a link in its place, or a disk that cannot read it."""
    other = path.with_suffix(".kept")
    if how == "hard link":
        os.link(path, other)
        return other.unlink
    if how == "symlink":
        path.rename(other)
        path.symlink_to(other)
        return lambda: os.replace(other, path)
    open_as_before = os.open

    def refuse(name: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(name).endswith(path.name) and not flags & os.O_WRONLY:
            raise OSError(errno.EIO, "bad sector")
        return open_as_before(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", refuse)
    return lambda: monkeypatch.setattr(os, "open", open_as_before)


UNREADABLE = ("hard link", "symlink", "bad sector")
"""Of `make_unreadable`."""


class Writing:
    """What is written, in this order, and a gate that holds the first of a session until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
        self.begun: list[str] = []
        self.gate = Gate()
        put = Store.write_bundle

        def write(store: Store, draft: Any) -> Any:
            name = draft.uri.name
            first = name not in self.begun
            self.begun.append(name)

            def waiting() -> Any:
                if name == held and first:
                    self.gate.pass_through()
                yield from draft.blocks

            return put(store, dataclasses.replace(draft, blocks=waiting()))

        monkeypatch.setattr(Store, "write_bundle", write)

    async def meets_a_stop(self, rig: Rigged) -> asyncio.Task[None]:
        """Let what is held go on once a stop has begun, which is given back."""
        await self.gate.reached()
        beginning = asyncio.ensure_future(rig.service.begin_close())
        await asyncio.sleep(0)
        self.gate.open()
        return beginning


@contextlib.asynccontextmanager
async def crowded(rig: Rigged, name: str) -> AsyncIterator[None]:
    """So many hold the session's turn, or wait for it, that the next one is refused."""
    left = asyncio.Event()

    async def hold() -> None:
        async with rig.service._parts.sessions.residency.turns.take(
            rig.service._parts.sessions.resolve(name), always=True
        ):  # upkeep may be there, too
            await left.wait()

    holding = [asyncio.ensure_future(hold()) for _ in range(MAX_WAITING + 1)]
    await asyncio.sleep(0)
    try:
        yield
    finally:
        left.set()
        await asyncio.gather(*holding)


async def lose_state(rig: Rigged, name: str) -> None:
    """As a batch that finds no memory to take its sessions out does."""
    live = rig.live(name)
    async with rig.service._parts.sessions.residency.turn(live.uri):
        live.state.caches, live.state.is_lost = [], True
    assert not rig.is_awake(name)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.0005)


def wait_for(should_stop: Callable[[], bool]) -> None:
    """On a thread, poll until the work there is told to stop."""
    deadline = time.monotonic() + DEADLINE_S
    while not should_stop():
        assert time.monotonic() < deadline, "nobody told it to stop"
        time.sleep(0.001)


def reply_with(rig: Rigged, reply: str, *, end: bool = True) -> None:
    """Make the model's next turn this text, closed by the end token unless `end` is False.

    A turn is read in chunks with its last token alone, and then written token by token, so every call of one token
    gives the logits of the next one that is drawn.
    """
    script = [*rig.model.encode(reply, opening=False), *([END] if end else [])]
    rig.network.reset()
    drawn = 0

    def next_logits(_number: int, logits: mx.array) -> mx.array:
        nonlocal drawn
        if logits.shape[1] != 1:
            return logits
        token = script[min(drawn, len(script) - 1)]
        drawn += 1
        return mx.broadcast_to((mx.arange(logits.shape[-1]) == token) * 50.0, logits.shape)

    rig.network.after = next_logits


class Rigged:
    """An open service with the doors that tests need."""

    def __init__(self, service: Service, watched: dict[str, Watched]) -> None:
        self.service = service
        self.networks = watched

    @property
    def network(self) -> Watched:
        return self.networks[MODEL]

    @property
    def model(self) -> LoadedModel:
        model = self.service._parts.models.shelf.places[MODEL].model
        assert model is not None
        return model

    @model.setter
    def model(self, model: LoadedModel) -> None:
        self.service._parts.models.shelf.places[MODEL].model = model

    def live(self, name: str) -> Session:
        """The session as it is in memory."""
        return self.service._parts.sessions.residency.awake[self.service._parts.sessions.resolve(name)]

    def is_awake(self, name: str) -> bool:
        return self.service._parts.sessions.resolve(name) in self.service._parts.sessions.residency.awake

    async def fingerprint(self, name: str) -> Fingerprint:
        """The model state of a session that is awake, looked at on the engine thread."""
        session = self.live(name)
        return await self.service._parts.models.engine.call(lambda: fingerprint_of(session.state))

    async def woken_fingerprint(self, name: str, version: int | None = None, **order: Any) -> Fingerprint:
        """The model state of a session as a wake gives it back."""
        await self.wake(name, version, **order)
        return await self.fingerprint(name)

    async def read(self, name: str, tokens: list[int], **create: Any) -> None:
        """A new session that has read the tokens."""
        await self.service.create(name, **create)
        await self.service.append(name, tokens=tokens)

    async def read_each(self, names: Iterable[str], tokens: list[int], **create: Any) -> None:
        """New sessions that have read the same tokens."""
        for name in names:
            await self.read(name, tokens, **create)

    async def read_own(self, names: Iterable[str], count: int, **create: Any) -> None:
        """New sessions that have read so many tokens each, and no two the same."""
        for at, name in enumerate(names):
            await self.read(name, tokens_of(at, count), **create)

    async def write(self, name: str, count: int, **options: Any) -> tuple[tuple[int, ...], tuple[str, ...], str]:
        """What a generation gives: tokens, a digest of the logits of each, and of the logits after the last."""
        result = await self.service.generate(name, max_tokens=count, prove=True, **options)
        assert result.logits_blake3 is not None
        assert result.final_logits_blake3 is not None
        return result.tokens, result.logits_blake3, result.final_logits_blake3

    async def sleep(self, name: str) -> Any:
        return await self.service.sleep(name)

    async def asleep(self, name: str, tokens: list[int], **create: Any) -> Any:
        """A new session that has read the tokens, and sleeps; the receipt."""
        await self.read(name, tokens, **create)
        return await self.sleep(name)

    async def woken(self, name: str, tokens: list[int], **create: Any) -> Any:
        """A new session that has read the tokens, slept and woken; the report of the wake."""
        await self.asleep(name, tokens, **create)
        return await self.wake(name)

    async def wake(self, name: str, version: int | None = None, **order: Any) -> Any:
        return await self.service.wake(name, version=version, **order)

    async def sleep_and_wake(self, name: str) -> Any:
        await self.sleep(name)
        return await self.wake(name)


def fingerprint_of(state: LiveState) -> Fingerprint:
    """The model state as digests; on the engine thread."""
    kv, numbers = [], []
    for _, cache in leaves(state.caches):
        kind = kind_of(cache)
        if kind.is_empty(cache):
            continue
        offset = kind.offset(cache)
        numbers.append(-1 if offset is None else offset)
        kv += [_digest(array[..., :offset, :]) for array in kind.spans(cache).values()]
        record = None if kind.by_token else kind.record(cache)
        if record is not None:
            numbers += record.numbers
            kv += [_digest(array) for array in record.arrays.values()]
    return Fingerprint(
        tokens=tuple(state.tokens),
        offsets=tuple(numbers),
        kv=tuple(kv),
        logits=None if state.last_logits is None else _digest(state.last_logits),
        random_key=tuple(state.random_key.tolist()),
    )


def _digest(values: mx.array) -> str:
    if not values.size:
        return blake3(repr(values.shape).encode()).hexdigest()
    plain = mx.contiguous(values)
    mx.eval(plain)
    return blake3(bytes(memoryview(plain.view(mx.uint8)))).hexdigest()


async def open_service(store: Path, **given: Any) -> Service:
    """A service with what is given, options of a daemon or else; adapters by the names of models, and `kv` of all.
    Options that are not given are as most tests want them: each request is computed by itself, nothing is read again,
    and a stop takes what it takes."""
    kept = {"prefix_reuse": "off", "batch": 1, "scrub_rate": 0, "stop_within": math.inf}
    adapters, kv = given.pop("adapters", {}), given.pop("kv", None)
    if adapters or kv:
        given["models"] = {name: ModelChoice(path, adapters.get(name), kv) for name, path in given["models"].items()}
    options = kept | {name: given.pop(name) for name in list(given) if name in SERVE_OPTIONS}
    return await Service.open(ServeOptions(store=store, **options), **given)


@contextlib.asynccontextmanager
async def open_rigged(
    store: Path, models: dict[str, str], digests: Path, *, endless: bool = True, close: bool = True, **options: Any
) -> AsyncIterator[Rigged]:
    """A service whose networks are watched. endless: no token ends a generation, so that lengths are certain. Prefixes
    are not reused unless a test asks for it: a control that took over what it is compared with would prove nothing. Nor
    are sessions decoded in batches, whose numbers may differ in the last bits."""
    service = await open_service(store, models=models, digest_cache=digests, **options)
    try:
        watched = {}
        for name, place in service._parts.models.shelf.places.items():
            if place.model is not None:
                watched[name] = Watched(place.model.network)
                ends = frozenset() if endless else place.model.end_tokens
                place.model = dataclasses.replace(place.model, network=watched[name], end_tokens=ends)
        yield Rigged(service, watched)
    finally:
        if close:
            await service.close()


@contextlib.asynccontextmanager
async def begun_together(rig: Rigged, work: Sequence[Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests that the engine takes up at the same moment: at the end of the block. Their first job there must be to
    read or to write: other sampling settings are a job of their own, behind which they would come one by one."""
    gate = Gate()
    holding = asyncio.ensure_future(rig.service._parts.models.engine.call(gate.pass_through))
    await gate.reached()
    tasks = [asyncio.ensure_future(each) for each in work]
    await until(lambda: rig.service._parts.models.engine._inbox.qsize() >= len(tasks))
    yield tasks
    gate.open()
    await holding


async def all_begun(rig: Rigged, work: Sequence[Any]) -> list[asyncio.Task[Any]]:
    """As `begun_together`, and nothing happens before they are taken up."""
    async with begun_together(rig, work) as tasks:
        pass
    return tasks


async def cancelled(task: asyncio.Future[Any]) -> None:
    """The end of what was cancelled, and says so."""
    with pytest.raises(asyncio.CancelledError):
        await task


async def given_up(rig: Rigged, work: Any, call: int = 1) -> Any:
    """The result of work that is cancelled while the engine is inside the model call of that number from now, and of
    which nothing is left. It may be done before."""
    gate = rig.network.hold_at(call)
    task = asyncio.ensure_future(work)
    await until(lambda: gate.is_reached or task.done())
    task.cancel()
    await asyncio.sleep(0)
    gate.open()
    try:
        return await task
    finally:
        await until(lambda: not rig.service._parts.sessions.residency.turns.in_use())


async def held_at(rig: Rigged, call: int, work: Any) -> tuple[asyncio.Future[Any], Gate]:
    """Work that stands inside the model call of that number from now, and the gate that lets it go on."""
    gate = rig.network.hold_at(call)
    task = asyncio.ensure_future(work)
    await gate.reached()
    return task, gate


async def broken_at(rig: Rigged, call: int, work: Any) -> None:
    """Work that fails, as the model does in its call of that number from now."""
    rig.network.fail_at(call)
    with pytest.raises(GenerationFailed):
        await work


@contextlib.asynccontextmanager
async def held_up(rig: Rigged, name: str, **options: Any) -> AsyncIterator[asyncio.Task[Any]]:
    """A generation of that session that stands inside its model call until the block ends, and writes 256 tokens."""
    task, gate = await held_at(rig, 1, rig.write(name, STEP, **options))
    try:
        yield task
    finally:
        gate.open()
        await task


def writing(rig: Rigged, name: str, count: int, **options: Any) -> Any:
    """A generation of that session, begun when it is awaited."""
    return rig.service.generate(name, max_tokens=count, **options)


class Heard(list[Notice]):
    """All that was told so far."""

    def of(self, name: str, session: str | None = None) -> list[dict[str, Any]]:
        return [
            notice.event.facts()
            for notice in self
            if notice.event.name == name and (session is None or str(notice.event.session).endswith(f"/{session}"))
        ]

    def names(self, session: str) -> list[str]:
        return [notice.event.name for notice in self if str(notice.event.session).endswith(f"/{session}")]


@contextlib.asynccontextmanager
async def listening(rig: Rigged, **wanted: Any) -> AsyncIterator[Heard]:
    """Hears everything; on leaving, waits until what was told has been heard."""
    heard = Heard()

    async def listen() -> None:
        with rig.service.subscribe(**wanted) as events:
            async for notice in events:
                heard.append(notice)

    task = asyncio.create_task(listen())
    await until(lambda: bool(heard))
    try:
        yield heard
        await asyncio.sleep(0)
        await until(lambda: all(not each._waiting for each in rig.service._parts.bus._subscriptions))
    finally:
        task.cancel()
        await asyncio.wait({task})


def main() -> None:
    """`wake {store, model, digests, session, count}`: wake, go on, say what came of it.
    `sleep {…, tokens, rounds}`: read, sleep, say so, and wait to be killed.
    `quantize {…, at}`: begin to, and at that function say so and wait to be killed. Answers are one JSON line."""
    verb, order = sys.argv[1], json.loads(sys.argv[2])
    asyncio.run({"wake": _wake, "sleep": _sleep, "quantize": _quantize}[verb](order))


async def _wake(order: dict[str, Any]) -> None:
    async with open_rigged(Path(order["store"]), {MODEL: order["model"]}, Path(order["digests"])) as rig:
        report = await rig.wake(order["session"])
        calls = list(rig.network.calls)
        woken = await rig.fingerprint(order["session"])
        tokens, proofs, final = await rig.write(order["session"], order["count"])
        _say(
            woken=dataclasses.asdict(woken),
            tokens_prefilled=report.tokens_prefilled,
            calls=calls,
            tokens=tokens,
            proofs=proofs,
            final=final,
        )


async def _sleep(order: dict[str, Any]) -> None:
    async with open_rigged(Path(order["store"]), {MODEL: order["model"]}, Path(order["digests"])) as rig:
        await rig.read(order["session"], order["tokens"], sampling=Sampling(**order["sampling"]))
        await rig.write(order["session"], order["count"])
        receipt = await rig.sleep(order["session"])
        _say(bundle_id=receipt.bundle_id)
        await asyncio.to_thread(sys.stdin.read)  # the test ends this process by SIGKILL


async def _quantize(order: dict[str, Any]) -> None:
    def hold(*_args: Any, **_options: Any) -> None:
        _say(reached=order["at"])
        sys.stdin.read()

    async with open_rigged(Path(order["store"]), {MODEL: order["model"]}, Path(order["digests"])) as rig:
        module, path = order["at"].split(":")
        owner = importlib.import_module(module)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, hold)
        await rig.service.maintain(operation="quantize", session=order["session"], bits=8)


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
