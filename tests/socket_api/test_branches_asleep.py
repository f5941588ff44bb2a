"""A tree that sleeps: all of it comes back in another process, or none of it was there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.branching import BranchInfo
from torpor.daemon.api.sampling import Sampling
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.socket_api import Client
from torpor.tests.socket_api.branch_rig import committed, forked, next_tokens, planted, refused
from torpor.tests.socket_api.real_daemon import RealDaemon, served, tokens_of, until

pytestmark = pytest.mark.timeout(180)


def grown(torpor: Client, name: str) -> int:
    """A tree of five branches that differ in all that a branch has; gives its root."""
    root = planted(torpor, name).branch
    committed(torpor, root, *tokens_of(1, 3))
    one, other = forked(torpor, root, 1, 2)
    bias = Sampling(logit_bias=[{"token": 9}, {"token": 10, "bias": 2.5}])
    torpor.guide([one], constraint={"regex": "(ab){2}[0-9]{30}"}, sampling=bias)
    torpor.advance([one], max_tokens=3)
    torpor.prefill([{"branch": other, "tokens": tokens_of(2, 90)}])
    torpor.guide([other], steer=[{"token": 7}], sampling=Sampling(temperature=0.3, top_k=40))
    deep, last = forked(torpor, one, 3, 4)
    torpor.advance([deep], max_tokens=2)
    torpor.guide([last], free=True)
    torpor.guide([last], logits=np.linspace(0, 1, 4096, dtype="<f4").tobytes())
    return root


def told(torpor: Client, root: int) -> list[tuple[Any, ...]]:
    """All that a tree is, but for the numbers of its branches."""
    there = torpor.branches(root).branches
    place = {each.branch: at for at, each in enumerate(there)}

    def of(each: BranchInfo) -> tuple[Any, ...]:
        parent = None if each.parent is None else place[each.parent]
        children = [place[child] for child in each.children]
        drawing = each.sampling, each.steered_tokens, each.constrained
        return parent, children, each.position, each.fork_head, each.step, *drawing, each.measured_tokens

    drawn = torpor.produce([each.branch for each in there], logprobs=5, logits=True).produced
    now = [(each.step, each.token, each.logits, each.logprob, each.entropy) for each in drawn]
    return [
        (of(each), each.mean_logprob, one, next_tokens(torpor, each.branch, 4))
        for each, one in zip(there, now, strict=True)
    ]


@pytest.mark.one_in(1)
def test_a_tree_sleeps_and_comes_back_in_another_process_br26(tmp_path: Path) -> None:
    with served(tmp_path) as first, Client(first.socket) as torpor:
        root = grown(torpor, "s")
        before = told(torpor, root)
        kept = torpor.keep(root, "tree", subtree=True)
        assert (kept.state, kept.token_count) == ("asleep", before[0][0][2])
        assert told(torpor, root) == before, "the tree itself goes on"
        first.end(kill=True)
    with served(tmp_path) as second, Client(second.socket) as torpor:
        assert {each.state for each in torpor.list_sessions() if "/tree" in each.session} == {"asleep"}
        root = torpor.tree("tree").branch
        assert told(torpor, root) == before
        assert told(torpor, torpor.tree("tree@1").branch) == before, "a version of it, too"
        third = torpor.tree("tree.3").branch
        assert len(torpor.branches(third).branches) == 1, "each branch is a session of its own"
        torpor.prune([root], subtree=True)


@pytest.mark.one_in(1)
def test_a_branch_of_a_tree_sleeps_with_what_is_below_it(daemon: RealDaemon) -> None:
    with Client(daemon.socket) as torpor:
        root = grown(torpor, "part")
        one = torpor.branches(root).branches[1].branch
        torpor.keep(one, "part-of", subtree=True)
        woken = torpor.branches(torpor.tree("part-of").branch).branches
        assert [each.position for each in woken] == [156, 158, 156]
        assert woken[0].parent is None
        assert {each.parent for each in woken[1:]} == {woken[0].branch}


@pytest.mark.one_in(1)
def test_a_tree_that_cannot_be_kept_whole_is_not_kept_at_all(daemon: RealDaemon) -> None:
    with Client(daemon.socket) as torpor:
        root = grown(torpor, "unkept")
        before, there = told(torpor, root), [each.session for each in torpor.list_sessions()]
        daemon.doors.fail("write", after=3)
        assert refused(lambda: torpor.keep(root, "never", subtree=True)).code == "no_space"
        assert [each.session for each in torpor.list_sessions()] == there
        assert told(torpor, root) == before
        torpor.create("taken.2")
        assert refused(lambda: torpor.keep(root, "taken", subtree=True)).code == "session_exists"
        assert refused(lambda: torpor.show("taken")).code == "session_not_found"
        torpor.keep(root, "never", subtree=True)
        assert told(torpor, torpor.tree("never").branch) == before


@pytest.mark.one_in(1)
def test_a_kill_in_the_midst_keeps_no_tree_and_leaves_the_branches_written_as_sessions_br26(tmp_path: Path) -> None:
    with served(tmp_path, doors=True) as first, Client(first.socket) as torpor:
        root = grown(torpor, "cut")
        there = [each.session for each in torpor.list_sessions()]
        first.doors.fail("hold", after=6)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(torpor.keep, root, "half", subtree=True)
            until(lambda: not first.doors.is_armed("hold"))
            first.end(kill=True)
            assert asking.exception() is not None
        with Store.open(first.store, writable=False) as store:
            written = [at for at in range(1, 5) if store.find_session(SessionUri("default", f"half.{at}"))]
        assert 1 <= len(written) < 4, "the kill came between two branches"
    with served(tmp_path) as second, Client(second.socket) as torpor:
        left = [f"torpor://default/half.{at}" for at in written]
        assert {each.session for each in torpor.list_sessions()} == {*there, *left}
        assert refused(lambda: torpor.tree("half")).code == "session_not_found"
        for session in left:
            assert torpor.append(session, text=" and on").token_count > 0


@pytest.mark.one_in(1)
def test_a_root_that_went_on_is_a_session_and_its_version_is_still_the_tree(daemon: RealDaemon) -> None:
    with Client(daemon.socket) as torpor:
        root = grown(torpor, "on")
        torpor.keep(root, "going", subtree=True)
        torpor.append("going", text=" and on")
        assert len(torpor.branches(torpor.tree("going").branch).branches) == 1
        torpor.sleep("going")
        assert len(torpor.branches(torpor.tree("going").branch).branches) == 1
        assert len(torpor.branches(torpor.tree("going@1").branch).branches) == 5
        torpor.delete("going.2")
        refusal = refused(lambda: torpor.tree("going@1"))
        assert refusal.code == "session_not_found"
        assert refusal.details["session"].endswith("going.2")
    with Client(daemon.socket) as torpor:
        until(lambda: torpor.status().memory.branches_bytes == 0)
