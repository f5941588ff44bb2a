"""Trees that grow and shrink at random, with requests that fail, are wrong, or are cancelled in their midst: the memory
that is counted is always what a walk over all branches finds, no number is used twice, and nothing stays at the end."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchCommit, BranchReading
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.limits import MAX_BRANCHES
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.branches.trees import Branch
from torpor.daemon.branches.views import Loan
from torpor.daemon.errors import BranchNotFound
from torpor.daemon.models import attention
from torpor.daemon.models.grammars import Matcher
from torpor.errors import TorporError
from torpor.snapshot.kinds import kind_of, leaves
from torpor.snapshot.runs import SharedKVCache
from torpor.snapshot.state import LiveState
from torpor.tests.daemon.session_rig import Rigged, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

PAST = 250
MOST_BRANCHES = 14
LONGEST = 1200
"""Tokens of the root, after which a new tree begins: well within the context."""

_SMALL_BYTES = 4096
# MLX's allocator for CUDA rounds a small array up to a power of two.
_ROUNDED_UP = 1 if mx.default_device() == mx.Device(mx.cpu) else 2
"""Of keys of random numbers and the like."""

Step = Callable[[], Awaitable[Any]]


class Gardener:
    """Does things to the one tree of a service, and looks at it after each.

    told: how often each thing was done, was refused, failed and was cancelled. most_bytes, most_branches: that there
    were at a time. idle_bytes: of MLX without the tree. shares: whether all its caches are shared.
    """

    def __init__(self, rig: Rigged, kind: str, chance: random.Random) -> None:
        self.rig = rig
        self.service = rig.service
        self.chance = chance
        self.shares = kind == "tiny"
        self.root = 0
        self.seen: set[int] = set()
        self.gone: list[int] = []
        self.told: dict[str, int] = {}
        self.most_bytes = self.most_branches = 0
        self.idle_bytes = 0
        self._names = 0

    # --- what there is

    @property
    def branches(self) -> list[Branch]:
        return list(self.service._parts.sessions.forest.find(self.root).tree.root.subtree())

    def some(self, most: int = 3) -> list[int]:
        there = [each.number for each in self.branches]
        return self.chance.sample(there, min(self.chance.randint(1, most), len(there)))

    async def plant(self) -> None:
        self.root = (await self.service.tree("s")).branch

    # --- what is done

    def step(self) -> tuple[str, Step]:
        """One request, by its name."""
        service, chance, some = self.service, self.chance, self.some()
        of_one = chance.choice(some)
        room = MOST_BRANCHES - len(self.branches)
        seeds = tuple(chance.randrange(9) for _ in range(chance.randint(1, 3)))
        short = chance.randint(1, 5)
        steps: dict[str, Step] = {
            "prefill": partial(service.prefill, [self.reading(each) for each in some]),
            "commit": partial(self.commit, some),
            "advance": partial(service.advance, some, max_tokens=short, logprobs=chance.choice([None, 3])),
            "produce": partial(service.produce, some, logits=True),
            "guide": partial(self.guide, some),
            "keep": partial(self.keep, of_one),
        }
        if room >= len(seeds):
            steps["branch"] = partial(service.branch, of_one, count=len(seeds), seeds=seeds)
            steps["diverge"] = partial(service.diverge, of_one, count=len(seeds), max_tokens=short)
        if len(self.branches) > 1:
            steps["prune"] = partial(service.prune, [each for each in some if each != self.root], subtree=True)
            steps["retain"] = partial(self.retain, of_one)
        often = {"branch": 6, "commit": 3, "prefill": 3, "advance": 3, "prune": 3, "keep": 0.2, "retain": 0.3}
        name = chance.choices(list(steps), [often.get(each, 1) for each in steps])[0]
        return name, steps[name]

    def reading(self, branch: int) -> BranchReading:
        count = self.chance.choice([1, 3, 5, 40, 130])
        return BranchReading(branch, tokens=tuple(tokens_of(self.chance.randrange(99), count)))

    async def commit(self, branches: list[int]) -> None:
        drawn = (await self.service.produce(branches)).produced
        await self.service.commit([BranchCommit(each.branch, each.token, each.step) for each in drawn])

    async def guide(self, branches: list[int]) -> None:
        logits = np.linspace(0, 1, 259, dtype="<f4").tobytes()
        given: dict[str, Any] = self.chance.choice(
            [
                {"sampling": Sampling(logit_bias=[TokenBias(each, 0.5) for each in range(200)], presence_penalty=0.5)},
                {"sampling": Sampling(logit_bias=(), frequency_penalty=1.5), "steer": [TokenBias(7)]},
                {"constraint": Constraint(regex="[a-z ]{1,400}")},
                {"free": True},
                {"logits": logits},
                {"sampling": Sampling(seed=self.chance.randrange(9))},
            ]
        )
        await self.service.guide(branches, **given)

    async def retain(self, branch: int) -> None:
        """What was the root, or is it now, stays known by its place."""
        try:
            await self.service.retain(branch)
        finally:
            self.root = next(each.root.number for each in self.service._parts.sessions.forest.trees())

    async def keep(self, branch: int) -> None:
        self._names += 1
        name, subtree = f"kept-{self._names}", self.chance.random() < 0.3
        try:
            await self.service.keep(branch, name, subtree=subtree)
        finally:
            for each in (await self.service.list_sessions()).sessions:
                if each.name.startswith(name):
                    await self.service.delete(each.session)

    def wrong(self) -> Step:
        """A request that is refused, and changes nothing."""
        service, chance, of_one = self.service, self.chance, self.some()[0]
        parents = [each.number for each in self.branches if each.children]
        unknown = chance.choice([*self.gone[-9:], 1])
        wrong: list[Step] = [
            partial(service.branch, unknown),
            partial(service.commit, [BranchCommit(of_one, 7), BranchCommit(unknown, 7)]),
            partial(service.commit, [BranchCommit(of_one, 259)]),
            partial(service.commit, [BranchCommit(of_one, 7, step=10**6)]),
            partial(service.prefill, [self.reading(of_one), self.reading(of_one)]),
            partial(service.advance, [of_one], max_tokens=10**6),
            partial(service.guide, [of_one], logits=b"1234"),
            partial(service.guide, [of_one], constraint=Constraint(regex="(")),
            partial(service.retain, unknown),
            partial(service.keep, of_one, "s"),
        ]
        if parents:
            wrong.append(partial(service.prune, [chance.choice(parents)]))
            wrong.append(partial(service.branch, of_one, count=MAX_BRANCHES + 1 - len(self.branches)))
        return chance.choice(wrong)

    async def go_on(self) -> None:
        """Do one thing: as it should be, wrong, or ended in its midst."""
        name, step = self.step()
        before = await self.service.branches(self.root)
        match self.chance.randrange(10):
            case 0:
                with pytest.raises(TorporError):
                    await self.wrong()()
                assert await self.service.branches(self.root) == before
                self.tell("refused")
            case 1:
                await self.fail(step)
            case 2:
                await self.cancel(step)
            case _:
                with suppress(TorporError):  # of a constraint that is at its end
                    await step()
                self.tell(name)

    async def fail(self, step: Step) -> None:
        """Let the model break in one of its next calls, if there is one."""
        network = self.rig.network
        network.reset()
        network.fail_at(self.chance.randint(1, 4))
        with suppress(TorporError):
            await step()
            self.told["failed"] = self.told.get("failed", 0) - 1
        network.reset()
        self.tell("failed")

    async def cancel(self, step: Step) -> None:
        """Leave after some turns of the loop, or when the model is called."""
        asked = asyncio.ensure_future(step())
        for _ in range(self.chance.choice([0, 1, 2, 5, 10, 30])):
            await asyncio.sleep(0)
        is_late = asked.done()
        asked.cancel()
        with suppress(TorporError, asyncio.CancelledError):
            await asked
        self.tell("done before it was cancelled" if is_late else "cancelled")

    def tell(self, what: str) -> None:
        self.told[what] = self.told.get(what, 0) + 1

    # --- what must be so

    async def look(self) -> None:
        there = {each.number for each in self.branches}
        assert not there & set(self.gone), "a number is used again"
        new = there - self.seen
        assert not new or not self.seen or min(new) > max(self.seen)
        self.gone += self.seen - there - set(self.gone)
        self.seen |= there
        for number in self.gone[-3:]:
            with pytest.raises(BranchNotFound, match="was pruned"):
                self.service._parts.sessions.forest.find(number)
        wanted = await self.service._parts.models.engine.call(partial(walked, self.branches))
        told = self.service._parts.models.memory.info()
        assert (told.branches_bytes, told.reserved_bytes, told.waiting) == (wanted, 0, 0)
        if self.shares and await self.taken() - self.idle_bytes > wanted * _ROUNDED_UP:
            gc.collect()  # an error keeps what it has passed through
            assert await self.taken() - self.idle_bytes <= wanted * _ROUNDED_UP, "less is counted than is held"
        assert all(each.live.state.is_consistent for each in self.branches)
        self.most_bytes, self.most_branches = max(self.most_bytes, wanted), max(self.most_branches, len(there))

    async def taken(self) -> int:
        """The memory that MLX has given out."""
        return await self.service._parts.models.engine.call(mx.get_active_memory)


def walked(branches: list[Branch]) -> int:
    """The memory of branches: each run, each other cache, each tail, all logits and checkpoints, and once what was
    given to several."""
    found: dict[int, int] = {}
    for branch in branches:
        state = branch.live.state
        for _, cache in leaves(state.caches):
            if isinstance(cache, SharedKVCache):
                for part in cache.parts:
                    found |= part.run.memory
                found |= {id(each): each.nbytes for each in cache.tail()}
            elif not kind_of(cache).is_empty(cache):
                found[id(cache)] = cache.nbytes
        found |= {id(one): one.nbytes for one in branch.guide.given()}
        found[id(state)] = state.checkpoints.resident_bytes + branch.matcher_bytes()
        if state.last_logits is not None:
            found[id(branch)] = state.last_logits.nbytes
    return sum(found.values())


def left_over() -> list[object]:
    """What branches are made of."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, (Branch, Matcher, Loan, LiveState, SharedKVCache))]


STEPS = [
    ("tiny", 200),
    ("gemma3_text", 40),
    ("mamba2", 40),
    pytest.param("tiny", 10_000, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)]),
    pytest.param("gemma3_text", 1000, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)]),
    pytest.param("mamba2", 1000, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)]),
]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("kind", "steps"), STEPS)
async def test_memory_is_counted_exactly_and_ends_at_zero_br24(
    open_rig: Any, open_kind: Any, kind: str, steps: int
) -> None:
    async with (open_rig if kind == "tiny" else partial(open_kind, kind))() as rig:
        service, memory = rig.service, rig.service._parts.models.memory
        await service.create("s", sampling=Sampling(temperature=0.9, seed=3))
        await service.append("s", tokens=tokens_of(1, PAST))
        tree = Gardener(rig, kind, random.Random(steps))
        for _ in range(2):
            await tree.plant()  # with the first one, what branches share is tried
            await service.prune([tree.root], subtree=True)
            await service.generate("s", max_tokens=2)  # where memory is shared with a session, one writes on
        there = {id(each) for each in left_over()}
        tree.idle_bytes = await tree.taken()
        holders = len(service._parts.models.shelf.places["tiny"].holders)
        await tree.plant()
        for _ in range(steps):
            await tree.go_on()
            await tree.look()
            if max(each.position for each in tree.branches) > LONGEST:
                await service.prune([tree.root], subtree=True)
                tree.seen.clear()
                tree.gone.clear()
                await tree.plant()
        await service.prune([tree.root], subtree=True)
        assert not service._parts.sessions.forest.trees()
        assert (memory.info().branches_bytes, memory.info().reserved_bytes, memory.trees) == (0, 0, {})
        assert len(service._parts.models.shelf.places["tiny"].holders) == holders
        assert not [each for each in left_over() if id(each) not in there]
        attention._is_there.cache_clear()
        assert await tree.taken() - tree.idle_bytes <= _SMALL_BYTES
        print(f"{steps} requests: {tree.told}. At most {tree.most_bytes} bytes of {tree.most_branches} branches.")
