"""The memory and the room of what a client gives to branches, and of what it asks of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchesResult, BranchInfo
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.limits import MAX_BRANCHES, MAX_LOGIT_BIASES, MAX_STEERED
from torpor.daemon.api.sampling import Sampling, TokenBias
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.branches.trees import BIAS_BYTES
from torpor.daemon.errors import InvalidBranches, MemoryBudgetExceeded
from torpor.daemon.tasks.pieces import in_pieces
from torpor.daemon.verbs import branching
from torpor.socket_api import limits
from torpor.socket_api.server.wire_map import wire_map
from torpor.socket_api.wire.framing import encode_in_pieces
from torpor.tests.daemon.session_rig import Rigged, tokens_of

VOCABULARY = 259
LOGITS = np.zeros(VOCABULARY, "<f4").tobytes()
BIASES = tuple(TokenBias(token, 1.0) for token in range(100))


@asynccontextmanager
async def planted(opener: Any, count: int) -> AsyncIterator[tuple[Rigged, int, list[int]]]:
    """A root and some children of it."""
    async with opener() as rig:
        await rig.service.create("s", sampling=Sampling())
        await rig.service.append("s", tokens=tokens_of(1, 40))
        root = (await rig.service.tree("s")).branch
        children = (await rig.service.branch(root, count=count)).branches
        yield rig, root, [each.branch for each in children]


def counted(rig: Rigged) -> int:
    told = rig.service._parts.models.memory.info()
    assert told.reserved_bytes == 0
    return told.branches_bytes


async def test_all_that_is_given_to_branches_is_counted_once(open_rig: Any) -> None:
    """What one request gives to many is in memory once, and what a fork inherits; the rest each time."""
    async with planted(open_rig, 6) as (rig, root, children):
        before = counted(rig)
        await rig.service.guide(children, sampling=Sampling(logit_bias=BIASES))
        bias = counted(rig) - before
        assert bias == BIAS_BYTES * len(BIASES)
        for each in children:
            await rig.service.guide([each], sampling=Sampling(logit_bias=list(BIASES)), steer=BIASES[:50])
        assert counted(rig) - before == 6 * bias + 6 * 12 * 50
        await rig.service.guide(children, sampling=Sampling(logit_bias=[]), steer=[], logits=LOGITS)
        assert counted(rig) - before == len(LOGITS)
        for each in children:
            await rig.service.guide([each], logits=LOGITS)
        assert counted(rig) - before == 6 * len(LOGITS)
        await rig.service.prune(children[1:])
        alone = counted(rig)
        await rig.service.branch(children[0])
        forked = counted(rig)
        await rig.service.guide([children[0]], logits=LOGITS)
        assert counted(rig) == forked + len(LOGITS), "the fork has the old ones alone now"
        assert alone < forked
        await rig.service.prune([root], subtree=True)
        assert counted(rig) == 0


async def test_a_place_in_a_constraint_is_counted_for_each_branch_and_token(open_rig: Any) -> None:
    async with planted(open_rig, 2) as (rig, root, children):
        before = counted(rig)
        await rig.service.guide(children, constraint=Constraint(regex="[a-z]{3,9}"))
        held = counted(rig)
        each = (held - before) // 2
        assert 4096 < each < 16_384
        await rig.service.advance(children[:1], max_tokens=3)
        assert counted(rig) - held == 3 * 400, "its tail had room for the tokens"
        await rig.service.guide(children, free=True)
        assert counted(rig) == before
        await rig.service.guide(children, constraint=Constraint(regex="[a-z]{3,9}"))
        held = counted(rig)
        await rig.service.prune(children[1:])
        assert held - counted(rig) > each
        await rig.service.prune([root], subtree=True)
        assert counted(rig) == 0


async def test_what_has_no_room_is_not_given(open_rig: Any) -> None:
    async with planted(open_rig, 2) as (rig, root, children):
        await rig.service.delete("s")
        memory = rig.service._parts.models.memory
        before, budget = await rig.service.branches(root), memory.budget
        await memory.resize(memory.info().weights_bytes + counted(rig) + len(LOGITS) - 1)
        with pytest.raises(MemoryBudgetExceeded):
            await rig.service.guide(children, logits=LOGITS, sampling=Sampling(seed=9))
        assert await rig.service.branches(root) == before
        await memory.resize(budget)
        assert (await rig.service.guide(children, logits=LOGITS)).branches[0].step == 1


async def test_more_logits_than_an_answer_holds_are_refused_before_any_is_made(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with planted(open_rig, 4) as (rig, _, children):
        monkeypatch.setattr(branching, "MAX_LOGITS_BYTES", 3 * len(LOGITS) + 1)
        assert len((await rig.service.produce(children[:3], logits=True)).produced) == 3
        assert len((await rig.service.produce(children)).produced) == 4
        with monkeypatch.context() as patched:
            patched.setattr(rig.service._parts.sessions.stepping, "produce", None)
            with pytest.raises(InvalidBranches, match="at most 3 at a time") as refused:
                await rig.service.produce(children, logits=True)
        assert refused.value.details["limit"] == 3


@pytest.mark.one_in(1)
async def test_the_fullest_tree_is_told_in_one_answer(open_rig: Any) -> None:
    """With as many biases as a branch may have, and a steer and a constraint, which are told by their number."""
    async with planted(open_rig, 1) as (rig, _, (child,)):
        many = [TokenBias(token % VOCABULARY, -0.1) for token in range(MAX_STEERED)]
        few = Sampling(logit_bias=many[:MAX_LOGIT_BIASES])
        (guided,) = (
            await rig.service.guide([child], sampling=few, steer=many, constraint=Constraint(regex="[a-z]{99}"))
        ).branches
        assert (guided.steered_tokens, guided.constrained) == (VOCABULARY, True)
        worst = BranchInfo(2**62, 2**62, (2**62,), *[2**62] * 3, guided.sampling, 4096, True, 2**62, -0.1, 2**62)
        told = await in_pieces(wire_map(VERBS["branches"], BranchesResult((worst,) * MAX_BRANCHES)))
        frame = await in_pieces(encode_in_pieces(told, max_frame_bytes=limits.MAX_REPLY_FRAME_BYTES))
        assert len(frame) < limits.MAX_REPLY_FRAME_BYTES // 4
