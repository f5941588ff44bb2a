"""What happens to branches where the model fails, a caller leaves, and requests come at once: inside the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from torpor.daemon.api.branching import BranchCommit, BranchInfo, BranchReading
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.errors import BranchNotFound, GenerationFailed
from torpor.daemon.tasks.holding import Holder, holder
from torpor.snapshot.forking import held_bytes
from torpor.tests.daemon.session_rig import Rigged, fingerprint_of, given_up, tokens_of

DRAWN = Sampling(temperature=0.9, seed=3)


@asynccontextmanager
async def planted(opener: Any, count: int, *, past: int = 40) -> AsyncIterator[tuple[Rigged, list[int]]]:
    """A tree with some children of its root."""
    async with opener() as rig:
        await rig.service.create("s", sampling=DRAWN)
        await rig.service.append("s", tokens=tokens_of(1, past))
        root = await rig.service.tree("s")
        children = (
            (await rig.service.branch(root.branch, count=count, seeds=list(range(count)))).branches if count else ()
        )
        yield rig, [each.branch for each in children]


async def seen(rig: Rigged, branches: list[int]) -> tuple[Any, ...]:
    """All that branches are: what is told of them, what they would draw, and the bits of their states; not the memory
    behind their tokens."""
    there = (await rig.service.branches(branches[0])).branches
    told = {each.branch: replace(each, resident_bytes=0) for each in there}
    states = [rig.service._parts.sessions.forest.find(each).live.state for each in branches]
    bits = [await rig.service._parts.models.engine.call(lambda state=state: fingerprint_of(state)) for state in states]
    passes = [state.passes.tobytes() for state in states]
    return [told[each] for each in branches], await rig.service.produce(branches, logprobs=5), bits, passes


async def require_counted(rig: Rigged, branch: int) -> None:
    """What is counted of the one tree is what is there."""
    states = [each.live.state for each in rig.service._parts.sessions.forest.find(branch).tree.root.subtree()]
    caches = await rig.service._parts.models.engine.call(lambda: held_bytes(states))
    logits = sum(each.last_logits.nbytes for each in states if each.last_logits is not None)
    checkpoints = sum(each.checkpoints.resident_bytes for each in states)
    told = rig.service._parts.models.memory.info()
    assert (told.branches_bytes, told.reserved_bytes, told.waiting) == (caches + logits + checkpoints, 0, 0)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["tiny", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("fails_at", [1, 3])
async def test_a_commit_that_fails_for_one_is_none_at_all_and_then_appends_its_token_br2_br3(
    open_rig: Any, open_kind: Any, kind: str, fails_at: int
) -> None:
    """In a batch and alone, with caches that can be cut and those that cannot."""
    opener = open_rig if kind == "tiny" else lambda **options: open_kind(kind, **options)
    async with planted(opener, 4) as (rig, branches):
        for each in branches[:2]:
            await rig.service.guide([each], constraint=None, free=True)
        before = await seen(rig, branches)
        commits = [BranchCommit(each, 7) for each in branches]
        rig.network.reset()
        failing = rig.network.calls

        def fail(now: int, tokens: Any, cache: Any) -> None:
            if len(failing) >= fails_at:
                raise RuntimeError("the model broke")

        rig.network.before = fail
        with pytest.raises(GenerationFailed):
            await rig.service.commit(commits)
        rig.network.reset()
        assert await seen(rig, branches) == before
        after = await rig.service.commit(commits)
        assert {each.position for each in after.branches} == {41}
        assert [rig.service._parts.sessions.forest.find(each).live.state.tokens[-1] for each in branches] == [7] * 4


@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("kind", ["tiny", "gemma3_text", "mamba2"])
async def test_a_reading_that_fails_is_none_for_all_br6(open_rig: Any, open_kind: Any, kind: str) -> None:
    """The second branch fails in its second call, when the first has read all of its text."""
    opener = open_rig if kind == "tiny" else lambda **options: open_kind(kind, **options)
    async with planted(opener, 2, past=100) as (rig, branches):
        before = await seen(rig, branches)
        texts = tokens_of(2, 3), tokens_of(3, 200)
        readings = [BranchReading(each, tokens=text) for each, text in zip(branches, texts, strict=True)]
        rig.network.reset()

        def fail(now: int, tokens: Any, cache: Any) -> None:
            if now == 5:
                raise RuntimeError("the model broke")

        rig.network.before = fail
        with pytest.raises(GenerationFailed):
            await rig.service.prefill(readings)
        rig.network.reset()
        assert await seen(rig, branches) == before
        await require_counted(rig, branches[0])
        assert {each.position for each in (await rig.service.prefill(readings)).branches} == {103, 300}


async def test_a_writer_that_leaves_keeps_what_was_told_br20_br30(open_rig: Any) -> None:
    """Cancelled in its midst: the branches hold the tokens of the events and no others, and go on."""
    async with planted(open_rig, 2) as (rig, branches):
        events: list[TokenEvent] = []
        with pytest.raises(asyncio.CancelledError):
            await given_up(rig, rig.service.advance(branches, max_tokens=50, on_event=events.append), 6)
        rig.network.reset()
        for each in branches:
            told = [event.token for event in events if event.branch == each and event.token is not None]
            state = rig.service._parts.sessions.forest.find(each).live.state
            assert list(state.tokens[40:]) == told
            assert state.is_consistent
        rest = await rig.service.advance(branches, max_tokens=4)
        assert all(len(each.tokens) == 4 for each in rest.written)


async def test_what_branches_share_is_read_once_br33(open_rig: Any) -> None:
    """Of a header and three suffixes the model has read the header for the session, and reads the suffixes alone."""
    async with planted(open_rig, 0, past=600) as (rig, _):
        root = rig.service._parts.sessions.forest.trees()[0].root.number
        rig.network.reset()
        branches = (await rig.service.branch(root, count=3)).branches
        await rig.service.prefill([BranchReading(each.branch, tokens=tokens_of(each.branch, 20)) for each in branches])
        assert sum(rig.network.calls) == 60


async def test_requests_at_once_for_one_tree_take_turns_br25(open_rig: Any) -> None:
    """No two model calls overlap, no token is lost, and the tree ends where it would end one after the other."""
    async with planted(open_rig, 3) as (rig, branches):
        working, most = 0, 0

        def before(*_: Any) -> None:
            nonlocal working, most
            working += 1
            most = max(most, working)

        def after(_: int, logits: Any) -> Any:
            nonlocal working
            working -= 1
            return logits

        rig.network.before, rig.network.after = before, after
        await asyncio.gather(
            *(rig.service.advance([each], max_tokens=5) for each in branches),
            *(rig.service.commit([BranchCommit(each, 9)]) for each in branches),
            rig.service.prefill([BranchReading(branches[0], tokens=(1, 2, 3))]),
            rig.service.generate("s", max_tokens=5),
        )
        assert most == 1
        assert [rig.service._parts.sessions.forest.find(each).position for each in branches] == [49, 46, 46]


async def test_a_holder_that_ends_takes_its_trees_with_it_and_no_others_br30(open_rig: Any) -> None:
    async with planted(open_rig, 1) as (rig, mine):
        theirs = Holder()

        async def plant() -> BranchInfo:
            holder.set(theirs)
            root: BranchInfo = await rig.service.tree("s")
            await rig.service.branch(root.branch, count=2)
            return root

        root = await asyncio.create_task(plant())
        assert theirs
        with pytest.raises(BranchNotFound) as refused:
            await rig.service.produce([root.branch])
        assert refused.value.details["reason"] == "foreign"
        await theirs.end()
        assert not theirs
        assert list(rig.service._parts.models.memory.trees) == [
            rig.service._parts.sessions.forest.find(mine[0]).tree.number
        ]
        assert not [claim for claim in rig.service._parts.models.shelf.places["tiny"].holders if claim.uri is not None]
