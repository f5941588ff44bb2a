"""Many attempts and the best of them, and the logits that a client draws from itself, over a real socket."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.logprobs import LOWEST_LOGPROB
from torpor.daemon.api.sampling import Sampling
from torpor.tests.socket_api.branch_rig import DRAWN, PAST, forked, info, next_tokens, planted

pytestmark = pytest.mark.timeout(180)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("by", ["mean_logprob", "perplexity"])
def test_the_best_of_many_stays_and_the_parent_is_what_it_was_br29(torpor: Any, name: str, by: str) -> None:
    root = planted(torpor, name).branch
    torpor.commit([{"branch": root, "token": 40}])
    before, expected = info(torpor, root), next_tokens(torpor, root)
    attempts = torpor.diverge(root, count=6, max_tokens=5, by=by, logprobs=0).attempts
    assert [each.kept for each in attempts] == [True, *[False] * 5]
    assert len({each.tokens for each in attempts}) > 1, "each draws by a seed of its own"
    (winner,) = info(torpor, root).children
    assert winner == attempts[0].branch
    assert next_tokens(torpor, root) == expected
    assert info(torpor, root).position == before.position
    own = [sum(one.logprob for one in each.logprobs) for each in attempts]
    if by == "mean_logprob":
        measures = [each / 5 for each in own]
        assert measures == sorted(measures, reverse=True)
    else:
        measures = [math.exp(-(each + before.mean_logprob) / 6) for each in own]
        assert measures == sorted(measures)
        assert info(torpor, winner).perplexity == pytest.approx(attempts[0].measure)
    assert [each.measure for each in attempts] == pytest.approx(measures, rel=1e-4)


@pytest.mark.one_in(1)
def test_what_was_cut_off_ranks_last_br29(torpor: Any, name: str) -> None:
    """An answer that ends beats all that were cut off, however likely they are."""
    root = planted(torpor, name).branch
    torpor.guide([root], constraint={"regex": "a|(zz){40}"}, sampling=Sampling(temperature=30.0, top_p=1.0))
    attempts = torpor.diverge(root, count=12, max_tokens=4, by="client").attempts
    reasons = [each.finish_reason for each in attempts]
    assert set(reasons) == {"stop", "length"}, "the seeds give both"
    assert reasons == sorted(reasons, reverse=True)
    assert len(info(torpor, root).children) == 12, "a client prunes by its own measure"
    torpor.prune([each.branch for each in attempts[1:]])
    assert info(torpor, root).children == (attempts[0].branch,)


@pytest.mark.one_in(1)
def test_seeds_that_are_given_are_used_and_a_fork_with_one_writes_the_same_br10(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    attempts = torpor.diverge(root, count=3, max_tokens=6, seeds=[70, 71, 72], by="client").attempts
    seeds = {info(torpor, each.branch).sampling.seed: each.tokens for each in attempts}
    for seed, tokens in seeds.items():
        (child,) = forked(torpor, root, seed)
        assert torpor.advance([child], max_tokens=6).written[0].tokens == tokens
    without = torpor.diverge(root, count=2, max_tokens=1, by="client").attempts
    assert {info(torpor, each.branch).sampling.seed for each in without} == {DRAWN.seed + 1, DRAWN.seed + 2}


def test_logits_cross_the_socket_as_float32_with_their_step_lv3(torpor: Any, name: str) -> None:
    """A client may draw by itself: greedy is the argmax, and the log-probabilities are those that are told."""
    root = planted(torpor, name, Sampling()).branch
    for step in range(3):
        (drawn,) = torpor.produce([root], logprobs=3, logits=True).produced
        logits = np.frombuffer(drawn.logits, "<f4")
        assert (drawn.step, len(logits), int(logits.argmax())) == (step, 4096, drawn.token)
        wide = logits.astype(np.float64)
        logprobs = wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))
        assert drawn.logprob.logprob == pytest.approx(logprobs[drawn.token])
        assert drawn.entropy == pytest.approx(-(np.exp(logprobs) * logprobs).sum())
        torpor.commit([{"branch": root, "token": drawn.token, "step": step}])


def test_logits_that_are_set_hold_for_one_step_and_leave_the_keys_alone_lv9(torpor: Any, name: str) -> None:
    root = planted(torpor, name, Sampling()).branch
    one, other = forked(torpor, root, 1, 2)
    uniform = np.zeros(4096, "<f4")
    (set_,) = torpor.guide([one], logits=uniform.tobytes()).branches
    assert (set_.step, set_.position) == (1, len(PAST))
    (drawn,) = torpor.produce([one], logprobs=0, logits=True).produced
    assert drawn.logits == uniform.tobytes()
    assert drawn.entropy == pytest.approx(math.log(4096)), "br23: of a uniform one it is ln V"
    wanted = uniform.copy()
    wanted[777] = 1.0
    torpor.guide([one], logits=wanted.tobytes())
    assert torpor.produce([one]).produced[0].token == 777
    for branch in (one, other):
        torpor.commit([{"branch": branch, "token": 777}])
    (mine, its) = torpor.produce([one, other], logits=True).produced
    assert mine.logits == its.logits, "the same token was read behind the same keys"
    assert info(torpor, one).mean_logprob == pytest.approx(1.0 - math.log(4095 + math.e), abs=1e-4)


def test_the_likeliest_of_any_logits_come_in_order_as_numbers_of_json_lp3_lp5_lp6_lp8(torpor: Any, name: str) -> None:
    """Equal ones by the lower id, the drawn one with the number that it has alone, no infinity."""
    root = planted(torpor, name, Sampling()).branch
    given = np.full(4096, -np.inf, "<f4")
    given[[900, 30, 77, 5]] = 2.0, 2.0, 3.0, -3e38
    torpor.guide([root], logits=given.tobytes())
    (alone,), (among,) = (torpor.produce([root], logprobs=count).produced for count in (0, 6))
    top = among.logprob.top
    assert [each.token for each in top] == [77, 30, 900, 5, 0, 1]
    assert (alone.token, alone.logprob.logprob, alone.logprob.top) == (77, top[0].logprob, ())
    assert among.logprob.logprob == top[0].logprob == pytest.approx(-math.log1p(2 / math.e))
    assert [each.logprob for each in top[3:]] == [LOWEST_LOGPROB] * 3


@pytest.mark.one_in(1)
def test_log_probabilities_change_no_token_lp7(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    told, untold = forked(torpor, root, 3, 3)
    (with_them,) = torpor.advance([told], max_tokens=12, logprobs=20).written
    (without,) = torpor.advance([untold], max_tokens=12).written
    assert (with_them.tokens, without.logprobs) == (without.tokens, None)
    (mine, its) = torpor.produce([told, untold], logits=True).produced
    assert mine.logits == its.logits


def test_a_fork_draws_from_the_logits_that_were_set_br9(torpor: Any, name: str) -> None:
    root = planted(torpor, name, Sampling()).branch
    wanted = np.full(4096, -np.inf, "<f4")
    wanted[[5, 6]] = 1.0, 0.5
    torpor.guide([root], logits=wanted.tobytes(), sampling=Sampling(logit_bias=[{"token": 5}]))
    (child,) = forked(torpor, root, 3)
    assert [each.token for each in torpor.produce([root, child]).produced] == [6, 6]
