"""A stored tree in memory again: where it stands, what it was, and who may look at it meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchReading
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.branches.trees import Branch
from torpor.daemon.engine.guiding import Guide
from torpor.daemon.errors import BranchNotFound
from torpor.daemon.views.trees import BRANCH
from torpor.memvid.store import Store, VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import MalformedSnapshot
from torpor.tests.daemon.session_rig import Rigged, cancelled, flip, tokens_of

DRAWN = Sampling(temperature=0.9, seed=3)
ROOT = SessionUri("default", "tree")


@asynccontextmanager
async def kept(opener: Any, count: int = 3, **options: Any) -> AsyncIterator[Rigged]:
    """A session `tree` with a stored tree of a root of 604 tokens, and children of 606; no tree is in memory."""
    async with opener(**options) as rig:
        await rig.service.create("s", sampling=DRAWN)
        await rig.service.append("s", tokens=tokens_of(1, 600))
        root = (await rig.service.tree("s")).branch
        await rig.service.advance([root], max_tokens=4)
        children = await rig.service.branch(root, count=count, seeds=list(range(count)))
        numbers = [each.branch for each in children.branches]
        await rig.service.prefill([BranchReading(each, tokens=tokens_of(each, 2)) for each in numbers])
        await rig.service.keep(root, "tree", subtree=True)
        await rig.service.prune([root], subtree=True)
        await rig.service.delete("s")
        yield rig


def trees_of(rig: Rigged) -> int:
    return rig.service._parts.models.memory.info().branches_bytes


def changed(store: Path, name: str, more: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> None:
    """Write another version of the root, as a session of another name, with changes in what it says of its branch and
    of the first child. more: what it says of its branch beside."""
    with Store.open(store, writable=True) as opened, opened.open_session(ROOT) as reader:
        told = dict(reader.manifest.session)
        first, *others = told["tree"]
        told["tree"] = [{**first, **{key: value for key, value in changes.items() if key in first}}, *others]
        told[BRANCH] = {**told[BRANCH], **{key: value for key, value in changes.items() if key in told[BRANCH]}, **more}
        opened.write_bundle(
            VersionDraft(
                uri=SessionUri("default", name),
                identity=reader.manifest.identity,
                parent=reader.bundle_id,
                reused=reader.entries,
                blocks=(),
                session=told,
                block_tokens=reader.manifest.block_tokens,
            )
        )


async def test_a_tree_is_the_whole_one_once_a_look_has_left_memory(open_rig: Any) -> None:
    async with kept(open_rig, idle_sleep=0.01) as rig:
        await rig.service.wake("tree", at_token=300)
        while ROOT in rig.service._parts.sessions.residency.awake:
            await asyncio.sleep(0)
        assert len((await rig.service.tree("tree")).children) == 3


@pytest.mark.one_in(1)
@pytest.mark.parametrize("awake", [False, True])
async def test_a_root_that_was_healed_is_a_tree_all_the_same(open_rig: Any, store: Path, awake: bool) -> None:
    async with kept(open_rig):
        pass
    if not awake:
        damage_last_span(store)
    async with open_rig() as rig:
        if awake:
            await rig.service.wake("tree")
            damage_last_span(store, writable=False)
        await rig.service.maintain(operation="repair")
        assert rig.service._parts.store.disk.find_session(ROOT).version == 2
        root = await rig.service.tree("tree")
        assert (root.position, root.step, root.measured_tokens, len(root.children)) == (604, 4, 4, 3)
        await rig.service.append("tree", tokens=tokens_of(5, 3))
        await rig.service.sleep("tree")
        assert (await rig.service.tree("tree")).children == ()


def damage_last_span(store: Path, *, writable: bool = True) -> None:
    """Flip a bit in what the root alone has."""
    with Store.open(store, writable=writable) as opened, opened.open_session(ROOT) as reader:
        span = next(each for each in reversed(reader.entries) if each.kind == "span")
        with reader.holding(span) as file:
            frame, path = file.frame_of(span.id), Path(file.path)
    flip(path, frame.offset + frame.frame_bytes - 80)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("verb", ["branch", "advance"])
async def test_a_request_that_waits_for_a_tree_that_does_not_come_to_be_finds_none(open_rig: Any, verb: str) -> None:
    """It used to find the tree, and its children were held for ever."""
    async with kept(open_rig, 20) as rig:
        waking = asyncio.ensure_future(rig.service.tree("tree"))
        forest = rig.service._parts.sessions.forest
        while not forest.trees():
            await asyncio.sleep(0)
        (root,) = [each.root.number for each in forest.trees()]
        service = rig.service
        asking: Any = service.branch(root, count=5) if verb == "branch" else service.advance([root], max_tokens=5)
        waiting = asyncio.ensure_future(asking)
        while len(forest.find(root).children) < 3:
            await asyncio.sleep(0)
        waking.cancel()
        await cancelled(waking)
        with pytest.raises(BranchNotFound):
            await waiting
        assert (trees_of(rig), rig.service._parts.models.memory.trees, forest.trees()) == (0, {}, [])


async def test_a_request_sees_a_tree_that_wakes_once_it_is_whole(open_rig: Any) -> None:
    async with kept(open_rig, 5) as rig:
        waking = asyncio.ensure_future(rig.service.tree("tree"))
        while not rig.service._parts.sessions.forest.trees():
            await asyncio.sleep(0)
        (root,) = [each.root.number for each in rig.service._parts.sessions.forest.trees()]
        await rig.service.prefill([BranchReading(root, tokens=tokens_of(9, 3))])
        assert waking.done(), "it had to wait"
        there = {each.branch: each for each in (await rig.service.branches(root)).branches}
        assert (there[root].position, there[root].step, len(there)) == (607, 5, 6)


@pytest.mark.one_in(1)
async def test_more_than_one_session_map_holds_of_constraints_can_sleep(rig: Rigged) -> None:
    await rig.service.create("s", sampling=DRAWN)
    await rig.service.append("s", tokens=tokens_of(1, 40))
    root = (await rig.service.tree("s")).branch
    schema = json.dumps({"type": "integer", "description": "x" * 65_000})
    await rig.service.guide([root], constraint=Constraint(json_schema=schema))
    await rig.service.branch(root, count=70)
    await rig.service.keep(root, "tree", subtree=True)
    woken = (await rig.service.tree("tree")).branch
    assert [each.constrained for each in (await rig.service.branches(woken)).branches] == [True] * 71


WRONG: tuple[dict[str, Any], ...] = (
    {"bundle": 2**62},
    {"bundle": 2**33},
    {"parent": 0.0},
    {"parent": 1},
    {"version": True},
    {"session": "torpor://x/../y"},
    {"step": 2**64 - 1},
    {"fork_head": 605},
    {"position": 603, "fork_head": 0},
    {"logprob_sum": float("nan"), "measured": 3},
    {"logprob_sum": "1"},
    {"logits": b"\xff" * 4 * 4096},
    {"logits": b"\0" * 8},
    {"constraint": [None, 5, None]},
    {"constraint": [None, None, None]},
    {"constraint": [None, "a" * 70_000, None]},
    {"accepted": b"\1\0\0\0" * 100_000},
    {"accepted": b"\xff" * 4},
    {"accepted": b"\1"},
    {"answer_at": 605},
    {"steer": [b"\1\0\0\0" * 2, b"\0" * 8]},
    {"steer": [b"\1\0\0\0", b"\xff" * 4]},
    {"steer": 5},
)


@pytest.mark.one_in(1)
async def test_a_tree_that_nobody_kept_so_is_refused_by_name(open_rig: Any, store: Path) -> None:
    """An imported bundle may say anything. A number for a bundle id took as many bytes of memory."""
    async with kept(open_rig, 1):
        pass
    for at, changes in enumerate(WRONG):
        changed(store, f"wrong-{at}", **changes)
    async with open_rig() as rig:
        for at, changes in enumerate(WRONG):
            with pytest.raises(MalformedSnapshot):
                await rig.service.tree(f"wrong-{at}")
            assert (trees_of(rig), rig.service._parts.sessions.forest.trees()) == (0, []), changes


async def test_a_tree_of_before_has_the_bias_that_its_guide_had(open_rig: Any, store: Path) -> None:
    async with kept(open_rig, 1):
        pass
    packed = [np.array([9, 10], "<u4").tobytes(), np.array([-np.inf, 2.5], "<f4").tobytes()]
    changed(store, "before", more={"bias": packed})
    changed(store, "wrong", more={"bias": [np.arange(301, dtype="<u4").tobytes(), bytes(4 * 301)]})
    async with open_rig() as rig:
        assert (await rig.service.tree("before")).sampling.logit_bias == (TokenBias(9), TokenBias(10, 2.5))
        with pytest.raises(MalformedSnapshot):
            await rig.service.tree("wrong")


def test_a_chain_of_branches_is_walked_however_deep_it_is() -> None:
    live: Any = SimpleNamespace(state=SimpleNamespace(tokens=[]))
    tree: Any = None
    make = partial(Branch, tree=tree, live=live, guide=Guide())
    chain = [make(number=0, parent=None)]
    for number in range(1, 5000):
        chain.append(make(number=number, parent=chain[-1]))
        chain[-2].children.append(chain[-1])
    chain[1].children.append(beside := make(number=9999, parent=chain[1]))
    found = chain[0].subtree()
    assert (len(found), found[-2:]) == (5001, [chain[1], chain[0]])
    assert found.index(beside) < found.index(chain[1])
