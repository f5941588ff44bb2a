"""Who gets memory when, under any mixture of requests: what fits alone is served, however many others wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from torpor.daemon import errors
from torpor.daemon.api.session import Look
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.memory.model_registry import ModelChoice
from torpor.daemon.models.models import estimate_bytes
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.memvid.errors import SessionNotFound
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.session_rig import Rigged, Writing, held_at, most, tokens_of, until

LONGEST: Final = 400
"""Tokens of the longest session of a trial."""

ROOM: Final = most(LONGEST)
"""For sessions: the longest one at most, alone."""

REFUSED_RIGHTLY: Final = (
    errors.EmptyContext,
    errors.InvalidFold,
    errors.ModelInUse,
    NoSuchPosition,
    SessionNotFound,
    errors.SessionAwake,
    errors.SessionBusy,
    errors.SessionExists,
)


# --- whatever else is in memory


@asynccontextmanager
async def held_up(rig: Rigged, working: Awaitable[Any]) -> AsyncIterator[None]:
    """Something under way that stands inside its next model call until the others wait for memory."""
    task, gate = await held_at(rig, 1, working)
    yield
    await until(lambda: rig.service._parts.models.memory.info().waiting > 0)
    gate.open()
    await task


@asynccontextmanager
async def idle(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def look(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    await rig.wake("a", at_token=100)
    yield


@asynccontextmanager
async def look_of_which_a_new_session_takes_the_prefix(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    await rig.wake("a", at_token=290)
    await rig.service.append("prefix", tokens=[*tokens_of(1, 300), 7])
    yield


@asynccontextmanager
async def look_that_is_put_to_sleep(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """It is looked at whether its version is there, while others ask."""
    await rig.sleep("a")
    await rig.wake("a", at_token=100)
    kept, begun = rig.service._parts.store.versions.require_kept, asyncio.Event()

    async def slowly(session: Any) -> None:
        begun.set()
        await until(lambda: rig.service._parts.models.memory.info().waiting > 0)
        await kept(session)

    monkeypatch.setattr(rig.service._parts.store.versions, "require_kept", slowly)
    away = asyncio.ensure_future(rig.service._parts.models.idle_sleeps.put_away_idle(rig.live("a").uri))
    await begun.wait()
    yield
    await away


@asynccontextmanager
async def busy(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async with held_up(rig, rig.write("a", 5)):
        yield


@asynccontextmanager
async def busy_from_a_look(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    await rig.wake("a", at_token=100)
    async with held_up(rig, rig.write("a", 5)):
        yield


@asynccontextmanager
async def waiting(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """One that has memory waits for more, behind another that is at work."""
    await rig.read("b", tokens_of(2, 200))
    async with held_up(rig, rig.write("a", 5)):
        growing = asyncio.ensure_future(rig.service.append("b", tokens=tokens_of(3, 400)))
        await until(lambda: rig.service._parts.models.memory.info().waiting == 1)
        yield
    assert (await growing).token_count == 600


@asynccontextmanager
async def waiting_with_a_look(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """As `waiting`; what the one that waits has is a look."""
    await rig.asleep("b", tokens_of(2, 200))
    await rig.wake("b", at_token=100)
    async with held_up(rig, rig.write("a", 5)):
        growing = asyncio.ensure_future(rig.service.append("b", tokens=tokens_of(3, 500)))
        await until(lambda: rig.service._parts.models.memory.info().waiting == 1)
        yield
    read = await growing
    assert (read.token_count, read.branched) == (600, Look(1, 100, 1, 200))


@asynccontextmanager
async def put_to_sleep(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    writes = Writing(monkeypatch, "a")
    sleeping = asyncio.ensure_future(rig.sleep("a"))
    await writes.gate.reached()
    yield
    await until(lambda: rig.service._parts.models.memory.info().waiting > 0)
    writes.gate.open()
    await sleeping


@asynccontextmanager
async def woken(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    async with held_up(rig, rig.wake("a")):
        yield


@asynccontextmanager
async def forked(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    async with held_up(rig, rig.service.fork("a", name="f", at_token=100)):
        yield


@asynccontextmanager
async def forked_from_a_look(rig: Rigged, _: pytest.MonkeyPatch) -> AsyncIterator[None]:
    await rig.sleep("a")
    await rig.wake("a", at_token=100)
    async with held_up(rig, rig.service.fork("a", name="f", at_token=50)):
        yield


RESIDENTS = (
    *(idle, look, look_of_which_a_new_session_takes_the_prefix, look_that_is_put_to_sleep, busy, busy_from_a_look),
    *(waiting, waiting_with_a_look, put_to_sleep, woken, forked, forked_from_a_look),
)
"""What a session in memory may be. That of models: a load that is under way, in `test_loading.py`."""


@pytest.mark.one_in(6)
@pytest.mark.parametrize("resident", RESIDENTS, ids=lambda each: each.__name__)
async def test_a_request_that_fits_alone_waits_for_whatever_is_in_memory_and_is_served_qx18(
    open_rig: Any, resident: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(prefix_reuse="exact") as rig:
        for name in ("asked", "prefix"):
            await rig.service.create(name)
        needed = rig.live("asked").growth_of(PREFILL_CHUNK_TOKENS)(700)
        await rig.service._parts.models.memory.resize(rig.model.weights_bytes + needed)
        await rig.read("a", tokens_of(1, 300))
        async with resident(rig, monkeypatch):
            asked = asyncio.ensure_future(rig.service.append("asked", tokens=tokens_of(4, 700)))
            await asyncio.sleep(0)
        assert (await asked).token_count == 700
        assert not rig.is_awake("a")


async def test_a_smaller_budget_that_comes_while_a_session_leaves_is_kept_to_afterwards(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session leaves for a request that is given up meanwhile."""
    await rig.read_own("abc", 500)
    memory, left = rig.service._parts.models.memory, asyncio.Event()
    put_away, full = memory._put_away, memory.info().weights_bytes + memory.info().sessions_bytes

    async def slowly(uri: Any) -> None:
        await left.wait()
        await put_away(uri)

    monkeypatch.setattr(memory, "_put_away", slowly)
    await rig.service._parts.models.memory.resize(full + 1000)
    asked = asyncio.ensure_future(rig.read("d", tokens_of(1, 100)))
    await until(lambda: memory._evicting is not None)
    await rig.service._parts.models.memory.resize(rig.model.weights_bytes + memory.info().sessions_bytes // 2)
    asked.cancel()
    await asyncio.wait([asked])
    left.set()
    await until(lambda: memory._evicting is None)
    assert [rig.is_awake(name) for name in "abc"] == [False, False, True]


# --- any mixture


class Trial:
    """Requests of some clients at once, drawn from a seed, each of which would fit if it were alone."""

    def __init__(self, rig: Rigged, seed: int) -> None:
        self._rig = rig
        self._draw = random.Random(seed)
        self._names = (f"s{number}" for number in itertools.count())
        self._most: dict[str, int] = {}
        self.refused: list[str] = []
        self.served = 0

    async def client(self, requests: int) -> None:
        for _ in range(requests):
            verb = self._draw.choice(self._verbs())
            task = asyncio.ensure_future(self._ask(verb))
            if self._draw.random() < 0.15:
                for _ in range(self._draw.randrange(60)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def _verbs(self) -> list[Callable[[], Awaitable[Any]]]:
        some = [self._append, self._generate, self._sleep, self._wake, self._look, self._fork, self._show]
        rare = [self._cut_fork, self._fold, self._load, self._unload, self._warm]
        verbs = some * 4 + rare * 2 + [self._create, self._clash]
        if len(self._most) > 7:
            verbs += [self._delete] * 6
        return verbs if len(self._most) > 3 else [self._create]

    async def _ask(self, verb: Callable[[], Awaitable[Any]]) -> None:
        try:
            await verb()
            self.served += 1
        except errors.MemoryBudgetExceeded as error:
            self.refused.append(f"{verb}: {error}")
        except REFUSED_RIGHTLY:
            pass

    def _some(self) -> str:
        return self._draw.choice(list(self._most))

    def _grow(self, name: str) -> int:
        count = self._draw.choice((1, 5, 60, 150))
        if self._most[name] + count > LONGEST:
            return 0
        self._most[name] += count
        return count

    async def _create(self) -> None:
        name = next(self._names)
        self._most[name] = 0
        await self._rig.service.create(name, model=self._draw.choice(("one", "two")))

    async def _append(self) -> None:
        name = self._some()
        if count := self._grow(name):
            await self._rig.service.append(name, tokens=tokens_of(count, count))

    async def _generate(self) -> None:
        name = self._some()
        if count := min(self._grow(name), 8):
            await self._rig.service.generate(name, max_tokens=count)

    async def _sleep(self) -> None:
        await self._rig.sleep(self._some())

    async def _wake(self) -> None:
        await self._rig.wake(self._some())

    async def _look(self) -> None:
        """A session that is woken at an earlier token or version; most looks stay until others need their memory."""
        name = self._some()
        await self._rig.sleep(name)
        await self._rig.wake(name, **self._draw.choice(({"at_token": 1 + self._draw.randrange(40)}, {"version": 1})))

    async def _warm(self) -> None:
        await self._rig.service.warm(sessions=[self._some()])

    async def _show(self) -> None:
        await self._rig.service.show(self._some())

    async def _fork(self, at_token: int | None = None) -> None:
        name, source = next(self._names), self._some()
        with contextlib.suppress(asyncio.CancelledError):
            await self._rig.service.fork(source, name=name, at_token=at_token)
        self._most[name] = self._most.get(source, LONGEST)

    async def _cut_fork(self) -> None:
        await self._fork(at_token=1 + self._draw.randrange(200))

    async def _fold(self) -> None:
        name, source = next(self._names), self._some()
        self._most[name] = LONGEST
        await self._rig.service.fold(source, name=name, summary="short", tail=50)

    async def _clash(self) -> None:
        await self._rig.service.fork(self._some(), name=self._some())

    async def _delete(self) -> None:
        name = self._some()
        del self._most[name]
        await self._rig.service.delete(name)

    async def _load(self) -> None:
        await self._rig.service.load_model(model=self._draw.choice(("one", "two")))

    async def _unload(self) -> None:
        await self._rig.service.unload_model(model=self._draw.choice(("one", "two")))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(120)
async def test_what_fits_alone_is_never_refused_for_want_of_memory_qx18(
    store: Path, tiny_model: Path, another_model: Path, digest_cache: Path, seed: int
) -> None:
    """Eight clients, two models of which one fits at a time, and room for one long session."""
    models = {
        "one": ModelChoice(source=str(tiny_model), at_start=False),
        "two": ModelChoice(source=str(another_model), at_start=False),
    }
    budget = estimate_bytes("one", str(tiny_model)) + ROOM
    service = await Service.open(
        ServeOptions(store=store, memory_budget=budget), models=models, digest_cache=digest_cache
    )
    try:
        trial = Trial(Rigged(service, {}), seed)
        await asyncio.gather(*(trial.client(50) for _ in range(8)))
        assert trial.refused == [], f"seed {seed}"
        assert trial.served > 100
    finally:
        await service.close()
