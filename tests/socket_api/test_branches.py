"""Branches as clients see them, over a real socket, by the ids of docs/reference/invariants.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.limits import MAX_BRANCHES
from torpor.daemon.api.sampling import Sampling
from torpor.socket_api import Client, ConnectionLost
from torpor.tests.socket_api.branch_rig import DRAWN, PAST, committed, forked, info, next_tokens, planted, refused
from torpor.tests.socket_api.real_daemon import RealDaemon, served, tokens_of, until

pytestmark = pytest.mark.timeout(180)


# --- drawing and committing


@pytest.mark.one_in(1)
def test_to_produce_changes_nothing_br1(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    (bound,) = forked(torpor, root, 5)
    torpor.guide([bound], constraint={"regex": "(123456789 ){3}"})
    before = torpor.branches(root)
    first, second = (torpor.produce([root, bound], logprobs=3) for _ in range(2))
    assert first == second
    assert torpor.branches(root) == before


@pytest.mark.one_in(1)
def test_a_commit_appends_one_token_and_measures_the_logits_before_it_br2(torpor: Any, name: str) -> None:
    """The token that is given, drawn or not."""
    root = planted(torpor, name).branch
    (drawn,) = torpor.produce([root], logprobs=2).produced
    other = next(each for each in drawn.logprob.top if each.token != drawn.token)
    (after,) = torpor.commit([{"branch": root, "token": other.token, "step": drawn.step}]).branches
    assert after.position == len(PAST) + 1
    assert after.measured_tokens == 1
    assert after.mean_logprob == pytest.approx(other.logprob, abs=1e-5)
    assert torpor.keep(root, f"{name}-kept").token_count == len(PAST) + 1
    torpor.append(name, tokens=[other.token])
    assert next_tokens(torpor, root) == torpor.generate(name, max_tokens=6).tokens


@pytest.mark.one_in(1)
def test_what_is_drawn_and_committed_is_what_a_session_writes(torpor: Any, name: str) -> None:
    """A branch draws by seed and place, as a session does."""
    root = planted(torpor, name).branch
    drawn = []
    for _ in range(5):
        (each,) = torpor.produce([root]).produced
        torpor.commit([{"branch": root, "token": each.token, "step": each.step}])
        drawn.append(each.token)
    assert tuple(drawn) == torpor.generate(name, max_tokens=5).tokens


@pytest.mark.one_in(1)
def test_a_prefill_counts_for_no_measure_and_is_read_as_a_session_reads_it_br5(torpor: Any, name: str) -> None:
    """However it is cut: 150 and 90 tokens at once, and in three pieces, give the tokens that a session writes."""
    more = tokens_of(5, 90)
    root = planted(torpor, name).branch
    whole, parted = forked(torpor, root, 7, 7)
    (read,) = torpor.prefill([{"branch": whole, "tokens": more}]).branches
    for start in range(0, 90, 30):
        torpor.prefill([{"branch": parted, "tokens": more[start : start + 30]}])
    assert (read.position, read.measured_tokens, read.mean_logprob) == (240, 0, None)
    texts = torpor.advance([whole, parted], max_tokens=6).written
    torpor.append(name, tokens=more)
    wanted = torpor.generate(name, max_tokens=6, sampling=Sampling(seed=7)).tokens
    assert texts[0].tokens == texts[1].tokens == wanted


def test_texts_and_tokens_of_many_branches_are_read_in_one_request_br32(torpor: Any, name: str) -> None:
    """Its progress is that of all together, and what one of them cannot read none has read."""
    root = planted(torpor, name).branch
    one, other = forked(torpor, root, 1, 2)
    events: list[Any] = []
    readings = [{"branch": one, "text": " and so"}, {"branch": other, "tokens": tokens_of(1, 9)}]
    read = torpor.prefill(readings, on_event=events.append)
    assert [each.branch for each in read.branches] == [one, other]
    assert read.branches[0].position > len(PAST)
    assert read.branches[1].position == len(PAST) + 9
    total = sum(each.position - len(PAST) for each in read.branches)
    told = [(each.done, each.total) for each in events if isinstance(each, ProgressEvent)]
    assert told[-1] == (total, total)
    assert {each for _, each in told} == {total}
    readings = [{"branch": one, "text": " and so"}, {"branch": other, "tokens": [1] * 8100}]
    overflow = refused(lambda: torpor.prefill(readings))
    assert overflow.code == "context_overflow"
    assert "go on from a branch that holds less" in overflow.message, "a branch cannot be folded"
    assert [info(torpor, each.branch) for each in read.branches] == list(read.branches)


@pytest.mark.one_in(1)
def test_each_token_of_a_stream_is_committed_and_names_its_branch_br20(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    two, events = forked(torpor, root, 1, 2), []
    written = torpor.advance(two, max_tokens=10, logprobs=1, on_event=events.append).written
    for each in written:
        told = [event for event in events if isinstance(event, TokenEvent) and event.branch == each.branch]
        assert tuple(event.token for event in told if event.token is not None) == each.tokens
        assert "".join(event.text for event in told) == each.text
        assert each.position == info(torpor, each.branch).position == len(PAST) + len(each.tokens)
        assert [one.token for one in each.logprobs] == list(each.tokens)
        mean = sum(one.logprob for one in each.logprobs) / len(each.tokens)
        assert info(torpor, each.branch).mean_logprob == pytest.approx(mean, abs=1e-5)
        assert [event.logprobs for event in told if event.token is not None] == list(each.logprobs)


def test_a_token_that_ends_an_answer_is_never_committed_br20(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    torpor.guide([root], constraint={"regex": "no"})
    (first,) = torpor.advance([root], max_tokens=20).written
    assert (first.text, first.finish_reason) == ("no", "stop")
    torpor.guide([root], constraint={"regex": "(x)?"}, sampling=Sampling(temperature=0))
    (drawn,) = torpor.produce([root]).produced
    torpor.guide([root], sampling=Sampling(logit_bias=[{"token": drawn.token}]))
    ends = next(each for each in torpor.produce([root], logprobs=0).produced)
    while not ends.ends:
        torpor.guide([root], sampling=Sampling(logit_bias=[{"token": drawn.token}, {"token": ends.token}]))
        (ends,) = torpor.produce([root], logprobs=0).produced
    (nothing,) = torpor.advance([root], max_tokens=20).written
    assert (nothing.tokens, nothing.finish_reason) == ((), "stop")
    assert info(torpor, root).position == first.position


# --- forks


@pytest.mark.one_in(1)
def test_a_fork_stands_where_its_parent_stands_br7(torpor: Any, name: str) -> None:
    root = planted(torpor, name, past=tokens_of(3, 1000)).branch
    committed(torpor, root, 40, 41)
    one = torpor.status().memory.branches_bytes
    children = torpor.branch(root, count=8).branches
    assert torpor.status().memory.branches_bytes < 1.5 * one, "nine branches, one past and nine tails"
    assert {each.position for each in children} == {each.fork_head for each in children} == {1002}
    assert {each.parent for each in children} == {root}
    assert info(torpor, root).children == tuple(each.branch for each in children)
    assert len({next_tokens(torpor, each.branch) for each in children} | {next_tokens(torpor, root)}) == 1


@pytest.mark.one_in(1)
def test_neither_side_of_a_fork_sees_the_others_writes_br8_lv11(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    one, other = forked(torpor, root, 5, 5)
    before = torpor.produce([root, one, other], logprobs=20)
    committed(torpor, one, *tokens_of(3, 5))
    assert torpor.produce([root, other], logprobs=20).produced == (before.produced[0], before.produced[2])
    committed(torpor, root, *tokens_of(4, 70))
    assert torpor.produce([other], logprobs=20).produced == before.produced[2:]
    assert next_tokens(torpor, other) == torpor.generate(name, max_tokens=6).tokens


def test_a_fork_takes_all_but_steer_with_it_br9(torpor: Any, name: str) -> None:
    root = planted(torpor, name, Sampling()).branch
    committed(torpor, root, 40)
    (first,) = torpor.produce([root]).produced
    torpor.guide([root], sampling=Sampling(logit_bias=[{"token": first.token}]))
    (second,) = torpor.produce([root]).produced
    torpor.guide([root], steer=[{"token": second.token}], sampling=Sampling(top_k=9))
    (third,) = torpor.produce([root]).produced
    (child,) = torpor.branch(root).branches
    (of_child,) = torpor.produce([child.branch]).produced
    assert len({first.token, second.token, third.token}) == 3
    assert of_child.token == second.token, "the child obeys only the bias"
    parent = info(torpor, root)
    assert (len(child.sampling.logit_bias), child.steered_tokens) == (1, 0)
    assert (child.sampling, child.mean_logprob, child.step) == (parent.sampling, parent.mean_logprob, parent.step)


@pytest.mark.one_in(1)
def test_a_fork_stands_in_a_constraint_of_its_own_br9(torpor: Any, name: str) -> None:
    """Where its parent stood in it, from which neither moves the other."""
    root = planted(torpor, name).branch
    torpor.guide([root], constraint={"regex": "(123456789 ){3}"})
    begun = torpor.advance([root], max_tokens=2).written[0].text
    one, other = forked(torpor, root, 1, 2)
    torpor.guide([one], free=True)
    (rest,) = torpor.advance([other], max_tokens=60).written
    assert (begun + rest.text, rest.finish_reason) == ("123456789 " * 3, "stop")
    assert not info(torpor, one).constrained
    assert torpor.advance([root], max_tokens=60).written[0].text == rest.text


@pytest.mark.one_in(1)
def test_the_same_seed_draws_the_same_and_another_draws_otherwise_br10(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    seeds = forked(torpor, root, 1, 1, 2)
    same, again, other = (each.tokens for each in torpor.advance(seeds, max_tokens=12).written)
    assert same == again != other
    one, two = forked(torpor, root, 1, 1)
    torpor.guide([two], sampling=Sampling(seed=9))
    assert next_tokens(torpor, one, 12) == same != next_tokens(torpor, two, 12)
    torpor.guide([one, two], sampling=Sampling(temperature=0))
    assert next_tokens(torpor, one) == next_tokens(torpor, two), "greedy does not look at the seed"


@pytest.mark.one_in(1)
def test_a_fork_of_nothing_draws_once_it_has_read_br11(torpor: Any, name: str) -> None:
    root = planted(torpor, name, past=[]).branch
    (child,) = forked(torpor, root, 5)
    for ask in (lambda: torpor.produce([child]), lambda: torpor.advance([child], max_tokens=1)):
        assert refused(ask).code == "empty_context"
    torpor.prefill([{"branch": child, "tokens": PAST}])
    torpor.append(name, tokens=PAST)
    assert next_tokens(torpor, child) == torpor.generate(name, max_tokens=6).tokens


# --- ends


@pytest.mark.one_in(1)
def test_to_prune_one_frees_its_own_and_leaves_its_siblings_br12(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    three = forked(torpor, root, 1, 2, 3)
    torpor.advance(three, max_tokens=4)
    before = torpor.produce([three[0], three[2]], logprobs=20)
    held, whole = torpor.status().memory.branches_bytes, info(torpor, three[1]).resident_bytes
    pruned = torpor.prune([three[1]])
    assert pruned.pruned == (three[1],)
    assert 0 < pruned.bytes_freed < whole / 4, "its tail, and not what the others have, too"
    assert torpor.status().memory.branches_bytes == held - pruned.bytes_freed
    assert torpor.produce([three[0], three[2]], logprobs=20) == before


def test_a_branch_with_children_is_pruned_with_its_subtree_alone_br13(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    one, other = forked(torpor, root, 1, 2)
    (leaf,) = forked(torpor, one, 3)
    before = torpor.branches(root)
    refusal = refused(lambda: torpor.prune([other, one]))
    assert (refusal.code, refusal.details["children"]) == ("branch_has_children", (leaf,))
    assert torpor.branches(root) == before
    assert torpor.prune([one], subtree=True).pruned == (leaf, one)
    assert [each.branch for each in torpor.branches(root).branches] == [root, other]
    assert torpor.prune([root, other]).pruned == (other, root), "its children are named beside it"


@pytest.mark.one_in(1)
def test_a_child_goes_on_when_all_before_it_is_gone_br14(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    (child,) = forked(torpor, root, 5)
    expected = next_tokens(torpor, child)
    torpor.delete(name)
    torpor.retain(child)
    assert next_tokens(torpor, child) == expected


def test_what_is_pruned_is_gone_for_good_br15_br17(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    old, other = forked(torpor, root, 1, 2)
    torpor.guide([old], sampling=Sampling(logit_bias=[{"token": 9}]), steer=[{"token": 8}], constraint={"regex": "x+"})
    torpor.prune([old])
    assert torpor.prune([old]).pruned == (), "twice is nothing to do"
    assert torpor.prune([old, other]).pruned == (other,)
    fresh = torpor.branch(root).branches[0]
    assert fresh.branch > other > old
    assert (fresh.steered_tokens, fresh.constrained, fresh.sampling) == (0, False, DRAWN)
    for ask in (
        lambda: torpor.produce([old]),
        lambda: torpor.commit([{"branch": old, "token": 1}]),
        lambda: torpor.prefill([{"branch": old, "text": "x"}]),
        lambda: torpor.advance([fresh.branch, old], max_tokens=1),
        lambda: torpor.branch(old),
        lambda: torpor.guide([old], free=True),
        lambda: torpor.keep(old, f"{name}-old"),
        lambda: torpor.retain(old),
        lambda: torpor.branches(old),
    ):
        refusal = refused(ask)
        assert (refusal.code, refusal.details["reason"]) == ("branch_not_found", "pruned")
    assert info(torpor, fresh.branch) == fresh


def test_to_retain_one_ends_all_others_and_it_goes_on_as_it_is_br16(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    one, other = forked(torpor, root, 1, 2)
    winner, loser = forked(torpor, one, 3, 4)
    (below,) = forked(torpor, winner, 5)
    expected, before = next_tokens(torpor, winner), torpor.branches(root)
    assert refused(lambda: torpor.retain(2**62)).code == "branch_not_found"
    assert torpor.branches(root) == before
    kept = torpor.retain(winner)
    assert (kept.parent, kept.children) == (None, ())
    assert [each.branch for each in torpor.branches().branches] == [winner]
    assert torpor.status().memory.branches_bytes == kept.resident_bytes
    assert next_tokens(torpor, winner) == expected
    for gone in (root, one, other, loser, below):
        assert refused(lambda gone=gone: torpor.branches(gone)).details["reason"] == "pruned"
    assert torpor.retain(winner) == info(torpor, winner)


@pytest.mark.one_in(1)
def test_a_tree_has_so_many_branches_and_no_more_br18(torpor: Any, name: str) -> None:
    root = planted(torpor, name, past=[]).branch  # without tokens it takes no memory
    children = torpor.branch(root, count=MAX_BRANCHES - 1).branches
    refusal = refused(lambda: torpor.branch(root))
    assert (refusal.code, refusal.details["limit"]) == ("too_many_branches", MAX_BRANCHES)
    torpor.prune([children[3].branch])
    (fresh,) = torpor.branch(root).branches
    assert fresh.position == 0
    assert len(info(torpor, root).children) == MAX_BRANCHES - 1


@pytest.mark.one_in(1)
def test_a_tree_that_is_closed_stays_closed_br19(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    (child,) = forked(torpor, root, 1)
    assert torpor.prune([root], subtree=True).pruned == (child, root)
    assert torpor.prune([root], subtree=True).pruned == ()
    assert refused(lambda: torpor.branch(root)).details["reason"] == "pruned"
    assert torpor.status().memory.branches_bytes == 0


def test_a_connection_that_ends_prunes_what_was_not_kept_br33(daemon: RealDaemon, torpor: Any, name: str) -> None:
    """Also where the body of a `with` raises; the trees of other connections stay."""
    mine, branches = planted(torpor, name).branch, list[int]()
    held = torpor.status().memory.branches_bytes

    def leave_midway() -> None:
        with Client(daemon.socket) as other:
            theirs = other.tree(name).branch
            branches.extend(forked(other, theirs, 1, 2, 3))
            other.keep(branches[0], f"{name}-kept")
            assert refused(lambda: torpor.produce([theirs])).details["reason"] == "foreign"
            raise KeyError

    with pytest.raises(KeyError):
        leave_midway()
    until(lambda: torpor.status().memory.branches_bytes == held)
    assert refused(lambda: torpor.produce(branches[:1])).details["reason"] == "pruned"
    assert info(torpor, mine).position == len(PAST)
    assert torpor.show(f"{name}-kept").info.token_count == len(PAST)


# --- guiding and measuring


def test_a_bias_bans_and_is_replaced_and_cleared_br21(torpor: Any, name: str) -> None:
    root = planted(torpor, name, Sampling()).branch

    def token() -> int:
        (drawn,) = torpor.produce([root]).produced
        found: int = drawn.token
        return found

    first = token()
    torpor.guide([root], sampling=Sampling(logit_bias=[{"token": first}]))
    second = token()
    assert second != first
    torpor.guide([root], sampling=Sampling(logit_bias=[{"token": second}]))
    assert token() == first, "a new one replaces the old"
    torpor.guide([root], sampling=Sampling(logit_bias=[{"token": 77, "bias": 500.0}]))
    assert token() == 77
    torpor.guide([root], steer=[{"token": 77, "bias": -1000.0}])
    assert token() == first
    torpor.guide([root], sampling=Sampling(logit_bias=()), steer=())
    assert token() == first
    assert not info(torpor, root).sampling.logit_bias


@pytest.mark.one_in(1)
def test_equal_parameters_change_nothing_br22(torpor: Any, name: str) -> None:
    root = planted(torpor, name).branch
    one, other = forked(torpor, root, 4, 4)
    for branch in (one, other):
        torpor.advance([branch], max_tokens=4)
    before = info(torpor, other)
    torpor.guide([other], sampling=DRAWN.changed(Sampling(seed=4)))
    assert info(torpor, other) == before
    assert next_tokens(torpor, one) == next_tokens(torpor, other)


def test_measures_begin_at_infinity_and_follow_what_is_committed_br23(torpor: Any, name: str) -> None:
    fresh = planted(torpor, name)
    assert (fresh.mean_logprob, fresh.perplexity) == (None, math.inf)
    (drawn,) = torpor.produce([fresh.branch], logprobs=20).produced
    assert 0 < drawn.entropy < math.log(4096)
    torpor.commit([{"branch": fresh.branch, "token": drawn.token}])
    assert info(torpor, fresh.branch).perplexity == pytest.approx(math.exp(-drawn.logprob.logprob), rel=1e-4)
    only = np.full(4096, -np.inf, "<f4")
    only[5] = 0.0
    torpor.guide([fresh.branch], logits=only.tobytes())
    torpor.commit([{"branch": fresh.branch, "token": 6}])
    assert info(torpor, fresh.branch).perplexity == math.inf, "a token that could not come counts all the same"
    assert info(torpor, fresh.branch).measured_tokens == 2


# --- sessions


@pytest.mark.one_in(1)
def test_a_branch_that_is_kept_is_an_ordinary_session_br26(torpor: Any, name: str) -> None:
    """It sleeps and wakes with the same next tokens, and a tree begins on a version of it."""
    root = planted(torpor, name).branch
    (branch,) = forked(torpor, root, 8)
    torpor.advance([branch], max_tokens=5)
    expected = next_tokens(torpor, branch)
    kept = torpor.keep(branch, f"{name}-kept", labels=["best"])
    assert (kept.token_count, kept.labels, kept.sampling.seed) == (len(PAST) + 5, ("best",), 8)
    assert info(torpor, branch).position == len(PAST) + 5, "the branch stays"
    slept = torpor.sleep(f"{name}-kept")
    of_version = torpor.tree(f"{name}-kept@{slept.version}")
    assert (of_version.position, of_version.parent) == (len(PAST) + 5, None)
    assert next_tokens(torpor, of_version.branch) == expected
    assert torpor.generate(f"{name}-kept", max_tokens=6).tokens == expected
    assert refused(lambda: torpor.keep(branch, f"{name}-kept")).code == "session_exists"


def test_nothing_read_is_nothing_to_keep_br26(torpor: Any, name: str) -> None:
    root = planted(torpor, name, past=[]).branch
    assert refused(lambda: torpor.keep(root, f"{name}-kept")).code == "empty_context"
    assert refused(lambda: torpor.show(f"{name}-kept")).code == "session_not_found"


@pytest.mark.one_in(4)
def test_a_kept_branch_outlives_a_crash_and_no_number_does_br17(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is durable once `keep` is answered; the tree is not, and its numbers mean nothing to the next daemon."""
    folder = tmp_path_factory.mktemp("d")
    with served(folder) as first, Client(first.socket) as torpor:
        root = planted(torpor, "s").branch
        torpor.advance([root], max_tokens=3)
        expected = next_tokens(torpor, root)
        torpor.keep(root, "kept")
        torpor.create("thrown-away", durability="none")
        torpor.append("thrown-away", tokens=PAST)
        assert torpor.keep(torpor.tree("thrown-away").branch, "kept-from-it").durability is None
        torpor.append("kept-from-it", tokens=PAST)
        first.end(kill=True)
        with pytest.raises(ConnectionLost, match="look at the session with show before asking again"):
            torpor.advance([root], max_tokens=3)
    with served(folder) as second, Client(second.socket) as torpor:
        assert torpor.generate("kept", max_tokens=6).tokens == expected
        assert torpor.show("kept-from-it").info.token_count == 2 * len(PAST)
        assert torpor.tree("s").branch > root
        assert refused(lambda: torpor.branches(root)).details["reason"] == "unknown"
