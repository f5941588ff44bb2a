"""What holds of agents elsewhere, in terms of requests and branches: turns, folds, cancels, and one end for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torpor.socket_api import Client
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api.wire.messages import ErrorMessage, ResultMessage
from torpor.tests.socket_api.branch_rig import DRAWN, PAST, committed, forked, info, next_tokens, planted, refused
from torpor.tests.socket_api.real_daemon import Asked, RealDaemon, served, until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    """One for all tests of this file, whose model can be made to fail."""
    with served(tmp_path_factory.mktemp("d"), "--batch", "1", doors=True) as running:
        yield running


@pytest.fixture
def torpor(daemon: RealDaemon) -> Iterator[Client]:
    with Client(daemon.socket) as client:
        yield client


@pytest.mark.one_in(1)
def test_attempts_of_which_one_fails_leave_no_branch_br29(daemon: RealDaemon, torpor: Client) -> None:
    root = planted(torpor, "br29").branch
    before, held = torpor.branches(root), torpor.status().memory.branches_bytes
    daemon.doors.fail("network", after=7)
    assert refused(lambda: torpor.diverge(root, count=3, max_tokens=9)).code == "generation_failed"
    assert torpor.branches(root) == before
    assert torpor.status().memory.branches_bytes == held


@pytest.mark.one_in(1)
def test_each_request_has_one_end_whose_reason_is_told_br31(daemon: RealDaemon) -> None:
    """Whether it is done, refused, cancelled, or fails in its midst: events, then one result or one error."""
    link = blocking_link(daemon.socket, timeout_s=120)
    Asked(link, "create", {"session": "br31", "sampling": DRAWN.named()}).answer()
    Asked(link, "append", {"session": "br31", "tokens": tuple(PAST)}).answer()
    root = Asked(link, "tree", {"session": "br31"}).answer()
    assert isinstance(root, ResultMessage)
    branch, position, ends = root.result["branch"], len(PAST), []
    for how in ("done", "refused", "cancelled", "failed"):
        if how == "failed":
            daemon.doors.fail("network", after=3)
        params = {"branches": (branch,), "max_tokens": 0 if how == "refused" else 4000 if how == "cancelled" else 6}
        request = Asked(link, "advance", params)
        if how == "cancelled":
            request.event()
            request.cancel()
        end = request.answer()
        ends.append("done" if isinstance(end, ResultMessage) else end.error.code)
        told = [event.token for event in request.events if getattr(event, "token", None) is not None]
        state = Asked(link, "branches", {"branch": branch}).answer()
        assert isinstance(state, ResultMessage)
        position += len(told)
        assert state.result["branches"][0]["position"] == position, how
    assert ends == ["done", "invalid_request", "cancelled", "generation_failed"]
    # What comes for a request behind its end breaks the protocol, and the client refuses it.
    assert isinstance(Asked(link, "status", {}).answer(), ResultMessage), "nothing of the requests before came late"
    wait(link.close())


def test_a_cancelled_request_leaves_the_siblings_as_they_were_br30(torpor: Client) -> None:
    root = planted(torpor, "br30").branch
    one, other = forked(torpor, root, 1, 2)
    before = torpor.produce([other], logits=True)
    asked = Asked(torpor._link, "advance", {"branches": (one,), "max_tokens": 4000})
    asked.event()
    asked.cancel()
    end = asked.answer()
    assert isinstance(end, ErrorMessage)
    assert end.error.code == "cancelled"
    assert torpor.produce([other], logits=True) == before
    assert info(torpor, one).position == len(PAST) + sum(1 for each in asked.events if each.token is not None)
    torpor.prune([one])
    assert refused(lambda: torpor.produce([one])).details["reason"] == "pruned"


def test_a_connection_that_ends_in_the_midst_takes_its_work_with_it_br30(daemon: RealDaemon, torpor: Client) -> None:
    mine = planted(torpor, "br30-left").branch
    before, held = torpor.produce([mine], logits=True), torpor.status().memory.branches_bytes
    leaver = blocking_link(daemon.socket, timeout_s=120)
    root = Asked(leaver, "tree", {"session": "br30-left"}).answer()
    assert isinstance(root, ResultMessage)
    Asked(leaver, "advance", {"branches": (root.result["branch"],), "max_tokens": 4000}).event()
    assert torpor.status().memory.branches_bytes > held
    wait(leaver.close())
    until(lambda: torpor.status().memory.branches_bytes == held)
    assert refused(lambda: torpor.produce([root.result["branch"]])).details["reason"] == "pruned"
    assert torpor.status().memory.reserved_bytes == 0
    assert torpor.produce([mine], logits=True) == before


@pytest.mark.one_in(1)
def test_turns_that_come_one_by_one_are_read_as_all_at_once_br28(torpor: Client) -> None:
    """Thinking and calls included: a tree on either draws the same."""
    turns = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris.", "reasoning": "Easy."},
        {"role": "user", "content": "And of Italy?"},
        {"role": "assistant", "content": "Rome.", "reasoning": "Also easy."},
        {"role": "user", "content": "Thank you."},
    ]
    for name in ("warm", "cold"):
        torpor.create(name, system="You are brief.")
    for start, end in ((0, 2), (2, 4), (4, 5)):
        torpor.append("warm", messages=turns[start:end])
    torpor.append("cold", messages=turns)
    warm, cold = (torpor.tree(name) for name in ("warm", "cold"))
    assert warm.position == cold.position > 40
    assert torpor.recall("warm").messages == torpor.recall("cold").messages
    assert next_tokens(torpor, warm.branch, 12) == next_tokens(torpor, cold.branch, 12)


@pytest.mark.one_in(1)
def test_a_fold_of_a_fold_begins_alike_and_leaves_no_gap_br27(torpor: Client) -> None:
    torpor.create("long", system="You are brief.")
    for at in range(8):
        torpor.append("long", messages=[{"role": "user", "content": f"Remember the number {at}."}])
    first = torpor.fold("long", "short", summary="Numbers were told.", tail=20)
    torpor.append("short", messages=[{"role": "user", "content": "And one more."}])
    second = torpor.fold("short", "shorter", summary="Many numbers were told.", tail=10)
    assert second.token_count <= first.token_count + 40
    for name, count in (("short", None), ("shorter", second.token_count)):
        root = torpor.tree(name)
        assert count in (None, root.position)
        assert torpor.recall(name).messages[0].content.startswith("You are brief.")
        committed(torpor, root.branch, 40)
        assert info(torpor, root.branch).position == root.position + 1
    torpor.create("nothing")
    assert refused(lambda: torpor.fold("nothing", "less", summary="Nothing.")).code == "empty_context"
