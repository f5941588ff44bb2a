"""Who gets memory when, under any mixture of requests: what fits alone is served, however many others wait."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from session_rig import Rigged, ignore, tokens_of
from torpor.daemon import errors
from torpor.daemon.models import estimate_bytes
from torpor.daemon.service import Service
from torpor.daemon.shelf import ModelChoice
from torpor.daemon.waiting import to_the_end
from torpor.memvid.errors import SessionNotFound
from torpor.snapshot.errors import NoSuchPosition

ROW = 3 * 2 * 2 * 16 * 4  # bytes of one token of the tiny models
LOGITS = 4 * 259
STEP = 256
LONGEST: Final = 400
"""Tokens of the longest session of a trial."""

ROOM: Final = (LONGEST + STEP - 1) * ROW + LOGITS
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


class Trial:
    """Requests of some clients at once, drawn from a seed, each of which would fit if it were alone."""

    def __init__(self, rig: Rigged, seed: int, *, looks: bool = False) -> None:
        self._rig = rig
        self._looks = looks
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
        some = [self._append, self._generate, self._sleep, self._wake, self._fork, self._show]
        rare = [self._cut_fork, self._fold, self._load, self._unload, self._warm]
        verbs = some * 4 + rare * 2 + [self._create, self._clash] + [self._look] * 12 * self._looks
        if len(self._most) > 7:
            verbs += [self._delete] * 6
        return verbs if len(self._most) > 3 else [self._create]

    async def _ask(self, verb: Callable[[], Awaitable[Any]]) -> None:
        try:
            await verb()
            self.served += 1
        except errors.MemoryBudgetExceeded as error:
            if "stays awake at the earlier token" not in str(error):
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
        await self._rig.service.create(session=name, model=self._draw.choice(("one", "two")))

    async def _append(self) -> None:
        name = self._some()
        if count := self._grow(name):
            await self._rig.service.append(session=name, tokens=tokens_of(count, count), emit=ignore)

    async def _generate(self) -> None:
        name = self._some()
        if count := min(self._grow(name), 8):
            await self._rig.service.generate(session=name, max_tokens=count, emit=ignore)

    async def _sleep(self) -> None:
        await self._rig.sleep(self._some())

    async def _wake(self) -> None:
        await self._rig.wake(self._some())

    async def _look(self) -> None:
        """A session that is woken at an earlier token or version, gone on from at once, and put to sleep."""
        name = self._some()
        order = self._draw.choice(({"at_token": 1 + self._draw.randrange(40)}, {"version": 1}))
        await to_the_end(asyncio.ensure_future(self._look_at(name, order, self._grow(name))))

    async def _look_at(self, name: str, order: dict[str, int], count: int) -> None:
        # One error after the other: while one is on its way, its frames hold the model, which then cannot go.
        await self._ask(partial(self._rig.wake, name, **order))
        if count:
            await self._ask(
                partial(self._rig.service.append, session=name, tokens=tokens_of(count, count), emit=ignore)
            )
        await self._ask(partial(self._rig.sleep, name))

    async def _warm(self) -> None:
        await self._rig.service.warm(sessions=[self._some()], emit=ignore)

    async def _show(self) -> None:
        await self._rig.service.show(session=self._some())

    async def _fork(self, at_token: int | None = None) -> None:
        name, source = next(self._names), self._some()
        with contextlib.suppress(asyncio.CancelledError):
            await self._rig.service.fork(session=source, name=name, at_token=at_token, emit=ignore)
        self._most[name] = self._most.get(source, LONGEST)

    async def _cut_fork(self) -> None:
        await self._fork(at_token=1 + self._draw.randrange(200))

    async def _fold(self) -> None:
        name, source = next(self._names), self._some()
        self._most[name] = LONGEST
        await self._rig.service.fold(session=source, name=name, summary="short", tail=50, emit=ignore)

    async def _clash(self) -> None:
        await self._rig.service.fork(session=self._some(), name=self._some(), emit=ignore)

    async def _delete(self) -> None:
        name = self._some()
        del self._most[name]
        await self._rig.service.delete(session=name)

    async def _load(self) -> None:
        await self._rig.service.load_model(model=self._draw.choice(("one", "two")))

    async def _unload(self) -> None:
        await self._rig.service.unload_model(model=self._draw.choice(("one", "two")))


@pytest.mark.parametrize(("seed", "looks"), [(0, False), (1, False), (2, True), (3, True)])
@pytest.mark.timeout(120)
async def test_what_fits_alone_is_never_refused_for_want_of_memory_qx18(
    store: Path, tiny_model: Path, another_model: Path, digest_cache: Path, seed: int, looks: bool
) -> None:
    """Eight clients, two models of which one fits at a time, and room for one long session. Where some look at earlier
    tokens and versions, a refusal names the look that nobody goes on from."""
    models = {
        "one": ModelChoice(source=str(tiny_model), at_start=False),
        "two": ModelChoice(source=str(another_model), at_start=False),
    }
    budget = estimate_bytes("one", str(tiny_model)) + ROOM
    service = await Service.open(store_path=store, models=models, digest_cache=digest_cache, memory_budget=budget)
    try:
        trial = Trial(Rigged(service, {}), seed, looks=looks)
        await asyncio.gather(*(trial.client(50) for _ in range(8)))
        assert trial.refused == [], f"seed {seed}"
        assert trial.served > 100
    finally:
        await service.close()
