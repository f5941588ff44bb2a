"""Views of logits: lent for one step, read-only, and dead before anything overwrites them. LV1 to LV12."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchCommit, BranchReading
from torpor.daemon.api.sampling import TokenBias
from torpor.daemon.branches.trees import Branch
from torpor.daemon.branches.views import Lending, LogitsView
from torpor.daemon.errors import BranchNotFound, EmptyContext, InvalidLogits, LogitsLent, StaleLogits
from torpor.tests.daemon.session_rig import Rigged, broken_at, held_at, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@asynccontextmanager
async def planted(open_rig: Any, count: int = 30) -> AsyncIterator[tuple[Rigged, Branch]]:
    """A tree of one branch."""
    async with open_rig() as rig:
        await rig.service.create("s")
        if count:
            await rig.service.append("s", tokens=tokens_of(1, count))
        root = await rig.service.tree("s")
        yield rig, rig.service._parts.sessions.forest.find(root.branch)


def is_stale(view: LogitsView) -> bool:
    """Whether every way to read a view raises."""
    reads: list[Callable[[LogitsView], object]] = [
        lambda it: it[0],
        lambda it: it[:5],
        lambda it: it.tobytes(),
        lambda it: it.to_send(),
        len,
        list,
        np.array,
    ]
    for read in reads:
        with pytest.raises(StaleLogits):
            read(view)
    return True


GOES_ON: dict[str, Callable[[Any, int], Awaitable[Any]]] = {
    "commit": lambda service, branch: service.commit([BranchCommit(branch, 7)]),
    "prefill": lambda service, branch: service.prefill([BranchReading(branch, tokens=(1, 2))]),
    "advance": lambda service, branch: service.advance([branch], max_tokens=2),
    "set logits": lambda service, branch: service.guide([branch], logits=np.zeros(259, "<f4").tobytes()),
    "prune": lambda service, branch: service.prune([branch]),
    "close": lambda service, branch: service.close(),
}


@pytest.mark.parametrize("what", GOES_ON)
async def test_whatever_goes_on_takes_the_views_back_lv1_lv7(open_rig: Any, what: str) -> None:
    async with planted(open_rig) as (rig, branch):
        kept = branch.logits()
        await GOES_ON[what](rig.service, branch.number)
        assert is_stale(kept)


async def test_a_step_has_one_view_lv2(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        first = branch.logits()
        assert branch.logits() is first
        await rig.service.produce([branch.number])
        assert branch.logits() is first, "to produce changes nothing"
        await rig.service.commit([BranchCommit(branch.number, 7)])
        assert branch.logits() is not first
        assert branch.logits().step == first.step + 1 == 1


async def test_a_view_shows_what_is_drawn_from_lv3(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        for _ in range(4):
            view = branch.logits()
            assert len(view) == rig.model.layout.vocabulary
            assert np.isfinite(np.array(view)).all()
            (drawn,) = (await rig.service.produce([branch.number])).produced
            assert drawn.token == int(np.argmax(view))
            assert view[drawn.token] == max(view)
            await rig.service.commit([BranchCommit(branch.number, drawn.token)])


async def test_nothing_read_has_no_logits_lv4(open_rig: Any) -> None:
    async with planted(open_rig, count=0) as (_, branch):
        with pytest.raises(EmptyContext, match="prefill it first"):
            branch.logits()


async def later(view: LogitsView) -> float:
    return view[0]


def pieces(view: LogitsView) -> Iterator[float]:
    yield view[0]


async def async_pieces(view: LogitsView) -> AsyncIterator[float]:
    yield view[0]


@pytest.mark.parametrize("look", [later, pieces, async_pieces, lambda view: later(view), lambda view: pieces(view)])
async def test_what_would_look_later_borrows_nothing_lv5(open_rig: Any, look: Any) -> None:
    """Coroutines and generators, and plain functions that give one: a coroutine is closed, so nobody warns of it."""
    async with planted(open_rig) as (rig, branch):
        with pytest.raises(TypeError, match=r"later|waits"):
            await rig.service.with_logits(branch.number, look)
        assert await rig.service.with_logits(branch.number, len) == 259


async def test_a_branch_does_not_go_on_while_its_logits_are_borrowed_lv6(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        before = branch.position

        def look(view: LogitsView) -> float:
            with pytest.raises(LogitsLent):
                branch.revoke()
            return view[3]

        assert await rig.service.with_logits(branch.number, look) == branch.logits()[3]
        assert branch.position == before
        await rig.service.commit([BranchCommit(branch.number, 7)])
        assert branch.position == before + 1


async def test_a_slice_is_stale_with_its_view_and_an_export_is_a_copy_lv8(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        view = branch.logits()
        parts = [view[:5], view[10:2:-2], view[::7][1:3], view[-3:]]
        whole = np.array(view)
        assert [list(part) for part in parts] == [
            whole[:5].tolist(),
            whole[10:2:-2].tolist(),
            whole[::7][1:3].tolist(),
            whole[-3:].tolist(),
        ]
        exported, as_bytes = np.asarray(view), view.tobytes()
        await rig.service.commit([BranchCommit(branch.number, 7)])
        assert all(is_stale(part) for part in parts)
        assert exported.tobytes() == as_bytes == whole.tobytes(), "a copy stays what it was"


async def test_a_view_is_read_only_and_set_logits_leaves_the_keys_alone_lv9(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        view, live = branch.logits(), branch.live.state
        with pytest.raises(TypeError):
            view[0] = 1.0  # type: ignore[index]
        np.asarray(view)[:] = 0.0
        assert view.tobytes() != bytes(4 * 259), "what was written to is a copy"
        before = await rig.service.keep(branch.number, "before")
        with pytest.raises(InvalidLogits):
            await rig.service.guide([branch.number], logits=np.zeros(258, "<f4").tobytes())
        wanted = np.zeros(259, "<f4")
        wanted[42] = 9.0
        await rig.service.guide([branch.number], logits=wanted.tobytes())
        (drawn,) = (await rig.service.produce([branch.number], logprobs=0, logits=True)).produced
        assert (drawn.token, drawn.logits) == (42, wanted.tobytes())
        await rig.service.keep(branch.number, "after")
        assert await rig.fingerprint("before") == await rig.fingerprint("after")
        assert before.token_count == len(live.tokens)
        await rig.service.commit([BranchCommit(branch.number, 42)])
        assert np.array(branch.logits()).tobytes() != wanted.tobytes(), "they hold for one step"


async def test_an_answer_has_the_memory_itself_which_stays_what_it_is(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        head, kept = branch.head(), branch.logits()
        (drawn,) = (await rig.service.produce([branch.number], logits=True)).produced
        sent = drawn.logits
        assert isinstance(sent, memoryview)
        assert sent.readonly
        assert np.frombuffer(sent, np.uint8).ctypes.data == np.asarray(head).ctypes.data, "no copy was made"
        del head
        before = bytes(sent)
        await rig.service.advance([branch.number], max_tokens=3)
        assert is_stale(kept)
        assert bytes(sent) == before, "the answer tells of its step, whenever it is sent"


async def test_a_function_of_the_service_waits_for_the_step_that_is_being_made(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        going, gate = await held_at(rig, 1, GOES_ON["commit"](rig.service, branch.number))
        views: list[LogitsView] = []
        looking = asyncio.ensure_future(rig.service.with_logits(branch.number, views.append))
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(going, looking)
        assert views[0].step == 1
        assert views[0].tobytes() == np.asarray(branch.head()).tobytes()
        with pytest.raises(BranchNotFound):
            await rig.service.with_logits(branch.number + 1, len)


def test_ten_thousand_steps_keep_one_loan_lv10() -> None:
    lending, alive = Lending(), []
    for step in range(10_000):
        logits = mx.array([float(step), 1.0])
        mx.eval(logits)
        view = lending.view(1, step, logits)
        if not step % 100:
            alive.append(weakref.ref(view._loan))
        del view, logits
        gc.collect(0)
        assert lending.view(1, step, mx.zeros(2))[0] == step, "the owner keeps it, though nobody else does"
        lending.revoke(1)
    gc.collect()
    assert not any(each() for each in alive)


async def test_a_siblings_steps_change_no_view_lv11(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        (child,) = (await rig.service.branch(branch.number)).branches
        view, other = branch.logits(), rig.service._parts.sessions.forest.find(child.branch).logits()
        before = view.tobytes(), other.tobytes()
        (third,) = (await rig.service.branch(branch.number)).branches
        await rig.service.advance([third.branch], max_tokens=5)
        assert (view.tobytes(), other.tobytes()) == before


@pytest.mark.parametrize("what", ["commit", "prefill", "advance"])
async def test_a_view_is_taken_back_before_the_model_is_called_lv12(open_rig: Any, what: str) -> None:
    async with planted(open_rig) as (rig, branch):
        view = branch.logits()
        await broken_at(rig, 1, GOES_ON[what](rig.service, branch.number))
        assert is_stale(view)
        rig.network.reset()
        assert branch.logits().step == view.step, "the branch stands where it stood"


async def test_banned_tokens_are_never_drawn_from_logits_that_were_set(open_rig: Any) -> None:
    async with planted(open_rig) as (rig, branch):
        wanted = np.full(259, -np.inf, "<f4")
        wanted[[5, 6]] = 1.0
        await rig.service.guide([branch.number], logits=wanted.tobytes(), steer=[TokenBias(5)])
        (drawn,) = (await rig.service.produce([branch.number])).produced
        assert drawn.token == 6
