"""A service on a tiny model, with eyes and hands inside: what the tests of this folder share.

Run as a script it is the other process of a test: `python tests/daemon/session_rig.py wake '{...}'` (see `main`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import json
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from blake3 import blake3
from torpor.daemon.models import LoadedModel
from torpor.daemon.results import Event
from torpor.daemon.sampling import Sampling
from torpor.daemon.service import Service
from torpor.daemon.sessions import Session
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

MODEL = "tiny"
DEADLINE_S = 30.0
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=120, min_p=0.01, repetition_penalty=1.2, seed=2**63 + 11)


def ignore(_event: Event) -> None:
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

    calls: tokens of each call; before(number, tokens, cache) may raise or wait; after(number, logits) may replace them.
    """

    def __init__(self, network: Any) -> None:
        self.network = network
        self.calls: list[int] = []
        self.before: Callable[[int, Any, Any], None] = lambda *_: None
        self.after: Callable[[int, Any], Any] = lambda _, logits: logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def __call__(self, tokens: Any, cache: Any = None) -> Any:
        self.calls.append(tokens.shape[1])
        number = len(self.calls)
        self.before(number, tokens, cache)
        return self.after(number, self.network(tokens, cache=cache))

    def reset(self) -> None:
        """Count from the start again, and do nothing to calls."""
        self.__init__(self.network)  # type: ignore[misc]

    def fail_at(self, number: int, *, layers_grown: int = 0) -> None:
        """Raise at the call of that number, when the caches of some layers have already grown."""

        def fail(now: int, tokens: Any, cache: Any) -> None:
            if now == number:
                for layer in cache[:layers_grown]:
                    grown = mx.ones((1, 2, tokens.shape[1], 16))
                    layer.update_and_fetch(grown, grown)
                raise RuntimeError("the model broke")

        self.before = fail

    def hold_at(self, number: int) -> Gate:
        """Stop the engine inside the call of that number until the gate is opened."""
        gate = Gate()

        def hold(now: int, *_: Any) -> None:
            if now == number:
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


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        await asyncio.sleep(0.0005)


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
        return self.service._models[MODEL]

    def live(self, name: str) -> Session:
        """The session as it is in memory."""
        return self.service._residency.awake[self.service._resolve(name)]

    def is_awake(self, name: str) -> bool:
        return self.service._resolve(name) in self.service._residency.awake

    async def fingerprint(self, name: str) -> Fingerprint:
        """The model state of a session that is awake, looked at on the engine thread."""
        session = self.live(name)
        return await self.service._engine.call(lambda: fingerprint_of(session.state))

    async def read(self, name: str, tokens: list[int], **create: Any) -> None:
        """A new session that has read the tokens."""
        await self.service.create(session=name, **create)
        await self.service.append(session=name, tokens=tokens, emit=ignore)

    async def write(self, name: str, count: int, **options: Any) -> tuple[tuple[int, ...], tuple[str, ...], str]:
        """What a generation gives: tokens, a digest of the logits of each, and of the logits after the last."""
        result = await self.service.generate(session=name, max_tokens=count, prove=True, emit=ignore, **options)
        assert result.logits_blake3 is not None
        assert result.final_logits_blake3 is not None
        return result.tokens, result.logits_blake3, result.final_logits_blake3

    async def sleep(self, name: str) -> Any:
        return await self.service.sleep(session=name, emit=ignore)

    async def wake(self, name: str, version: int | None = None, **order: Any) -> Any:
        return await self.service.wake(session=name, version=version, emit=ignore, **order)


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


@contextlib.asynccontextmanager
async def open_rigged(
    store: Path, models: dict[str, str], digests: Path, *, endless: bool = True, close: bool = True, **options: Any
) -> AsyncIterator[Rigged]:
    """A service whose networks are watched. endless: no token ends a generation, so that lengths are certain. Prefixes
    are not reused unless a test asks for it: a control that took over what it is compared with would prove nothing."""
    options = {"prefix_reuse": "off", **options}
    service = await Service.open(store_path=store, models=models, digest_cache=digests, **options)
    try:
        watched = {}
        for name, model in service._models.items():
            watched[name] = Watched(model.network)
            ends = frozenset() if endless else model.end_tokens
            service._models[name] = dataclasses.replace(model, network=watched[name], end_tokens=ends)
        yield Rigged(service, watched)
    finally:
        if close:
            await service.close()


def main() -> None:
    """`wake {store, model, digests, session, count}`: wake, go on, say what came of it.
    `sleep {…, tokens, rounds}`: read, sleep, say so, and wait to be killed.
    `quantise {…, at}`: begin to, and at that function say so and wait to be killed. Answers are one JSON line."""
    verb, order = sys.argv[1], json.loads(sys.argv[2])
    asyncio.run({"wake": _wake, "sleep": _sleep, "quantise": _quantise}[verb](order))


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


async def _quantise(order: dict[str, Any]) -> None:
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
        await rig.service.maintain(operation="quantise", session=order["session"], bits=8)


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
