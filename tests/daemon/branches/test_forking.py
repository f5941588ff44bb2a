"""Forks that are cancelled or fail on their way leave no branch and no byte behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from torpor.daemon.api.branching import BranchCommit, BranchReading
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.errors import ServiceClosed
from torpor.memvid.errors import SessionNotFound, StoreIoError
from torpor.snapshot.forking import held_bytes
from torpor.snapshot.kinds import holds_shared
from torpor.tests.daemon.session_rig import Rigged, cancelled, tokens_of

DRAWN = Sampling(temperature=0.9, seed=3)


@asynccontextmanager
async def planted(opener: Any) -> AsyncIterator[tuple[Rigged, int]]:
    """A tree of a root alone."""
    async with opener() as rig:
        await rig.service.create("s", sampling=DRAWN)
        await rig.service.append("s", tokens=tokens_of(1, 40))
        yield rig, (await rig.service.tree("s")).branch


async def seen(rig: Rigged) -> tuple[Any, ...]:
    """The branches that there are, and what is counted of them."""
    memory = rig.service._parts.models.memory
    return await rig.service.branches(), memory.trees.copy(), memory.info()


def before_settling(rig: Rigged, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object], at: int) -> None:
    """Do something when memory is about to be counted for the time of this number, and not again."""
    forest, counted = rig.service._parts.sessions.forest, 0
    settle = forest.settle

    async def acting(*changed: Any) -> None:
        nonlocal counted
        counted += 1
        if counted == at:
            act(counted)
        await settle(*changed)

    monkeypatch.setattr(forest, "settle", acting)


def broken(_: int) -> None:
    raise RuntimeError("the engine broke")


@pytest.mark.parametrize("how", ["cancelled", "broken"])
@pytest.mark.parametrize("verb", ["branch", "diverge"])
async def test_a_fork_that_ends_before_its_answer_leaves_no_branch_gm7(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, how: str, verb: str
) -> None:
    """As the answer to a cancellation says. Its children are there by then, and their memory is being counted."""
    async with planted(open_rig) as (rig, root):
        before = await seen(rig)
        options = {} if verb == "branch" else {"max_tokens": 2}
        asked = asyncio.ensure_future(getattr(rig.service, verb)(root, count=5, **options))
        before_settling(rig, monkeypatch, broken if how == "broken" else lambda _: asked.cancel(), at=1)
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else RuntimeError):
            await asked
        assert await seen(rig) == before


async def test_a_cancel_behind_the_last_token_of_attempts_leaves_none_gm7(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with planted(open_rig) as (rig, root):
        before = await seen(rig)
        asked = asyncio.ensure_future(rig.service.diverge(root, count=3, max_tokens=2))
        before_settling(rig, monkeypatch, lambda _: asked.cancel(), at=2)
        await cancelled(asked)
        assert await seen(rig) == before


async def test_a_cancel_while_losers_are_pruned_is_too_late_gm7(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The winner is told, and it alone is there."""
    async with planted(open_rig) as (rig, root):
        asked = asyncio.ensure_future(rig.service.diverge(root, count=3, max_tokens=2))
        before_settling(rig, monkeypatch, lambda _: asked.cancel(), at=3)
        winner = (await asked).attempts[0]
        there = (await rig.service.branches(root)).branches
        assert [each.branch for each in there] == [root, winner.branch]


async def test_a_tree_that_cannot_be_counted_is_none(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with planted(open_rig) as (rig, _):
        before = await seen(rig)
        before_settling(rig, monkeypatch, broken, at=1)
        with pytest.raises(RuntimeError, match="the engine broke"):
            await rig.service.tree("s")
        assert await seen(rig) == before
        assert len(rig.service._parts.models.shelf.places["tiny"].holders) == 1, "of the other tree"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["tiny", "gemma3_text", "mamba2"])
async def test_a_fork_takes_a_tail_and_no_more_than_was_reserved_br7(
    open_rig: Any, open_kind: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whatever cannot be shared is copied: windows and recurrences."""
    async with planted(open_rig if kind == "tiny" else partial(open_kind, kind)) as (rig, root):
        forest, trees = rig.service._parts.sessions.forest, rig.service._parts.models.memory.trees
        wanted: list[int] = []
        room = forest.room
        monkeypatch.setattr(forest, "room", lambda more: (wanted.append(more), room(more))[1])
        for past in (0, 100, 27):  # 40, 140, 167 tokens: a tail alone, a tail of two segments, and one of whole ones
            for token in tokens_of(3, past):
                await rig.service.commit([BranchCommit(root, token)])
            (before,) = trees.values()
            wanted.clear()
            await rig.service.branch(root, count=5)
            assert sum(trees.values()) - before <= wanted[0]
        assert (wanted[0] < 3 * forest.find(root).live.resident_bytes) is (kind != "mamba2")


async def test_a_tree_that_wakes_has_the_form_of_branches_and_what_is_kept_that_of_its_history(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, root):
        await rig.service.keep(root, "kept")
        assert not holds_shared(rig.live("kept").state.caches), "not one token was read as branches read"
        await rig.service.keep(root, "tree", subtree=True)
        woken = await rig.service.tree("tree")
        assert holds_shared(rig.service._parts.sessions.forest.find(woken.branch).live.state.caches)


@pytest.mark.one_in(1)
async def test_a_tree_that_wakes_takes_the_memory_that_it_took_before_br7(open_rig: Any) -> None:
    """Its versions are read one by one, and what they have in common is kept once."""
    async with planted(open_rig) as (rig, root):
        trees = rig.service._parts.models.memory.trees
        for token in tokens_of(3, 300):
            await rig.service.commit([BranchCommit(root, token)])
        below = (await rig.service.branch(root, count=6)).branches
        (deep,) = (await rig.service.branch(below[0].branch)).branches
        for each in (*below, deep):
            await rig.service.prefill([BranchReading(each.branch, tokens=tokens_of(each.branch % 97, 80))])
        before = sum(trees.values())
        await rig.service.keep(root, "tree", subtree=True)
        await rig.service.prune([root], subtree=True)
        assert sum(trees.values()) == 0
        woken = await rig.service.tree("tree")
        states = [each.live.state for each in rig.service._parts.sessions.forest.find(woken.branch).subtree()]
        assert len(states) == 8
        assert sum(trees.values()) <= 1.1 * before
        assert sum(trees.values()) >= held_bytes(states)


@pytest.mark.parametrize("error", [ServiceClosed("stopping"), StoreIoError("a bad disk", path="x")])
async def test_a_keep_that_cannot_be_made_durable_leaves_no_session(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Asked again it found its own name taken."""
    async with planted(open_rig) as (rig, root):

        async def refuse(_: Any) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(rig.service._parts.store.journal, "acknowledge", refuse)
            with pytest.raises(type(error)):
                await rig.service.keep(root, "kept")
        with pytest.raises(SessionNotFound):
            await rig.service.show("kept")
        assert (await rig.service.keep(root, "kept")).token_count == 40
