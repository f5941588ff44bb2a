"""Bad input for branches as it comes over the socket, past a client's own checks: typed errors that change nothing."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from torpor.daemon.api.branching import BranchesResult, ProduceResult
from torpor.daemon.api.limits import MAX_BRANCHES, MAX_GRAMMAR_CHARS, MAX_SCHEMA_CHARS, MAX_TOP_LOGPROBS
from torpor.daemon.api.verbs import VERBS
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api.client.link import Link
from torpor.socket_api.wire.asking import Call
from torpor.socket_api.wire.messages import ErrorMessage, ResultMessage
from torpor.tests.socket_api.branch_rig import DRAWN, PAST
from torpor.tests.socket_api.real_daemon import Asked, RealDaemon, served, tokens_of

pytestmark = pytest.mark.timeout(180)
VOCABULARY = 4096


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealDaemon]:
    with served(tmp_path_factory.mktemp("d"), "--memory-budget", "120MB") as running:
        yield running


@dataclass
class Planted:
    """A tree on a connection of its own: a root with two children, of which the first is held to a constraint; another
    tree, a tree of another connection, one at temperature 0, and a branch that was pruned."""

    link: Link
    root: int = 0
    bound: int = 0
    free: int = 0
    pruned: int = 0
    empty: int = 0
    foreign: int = 0
    greedy: int = 0

    def ask(self, method: str, **params: Any) -> Any:
        answer = Asked(self.link, method, params).answer()
        assert isinstance(answer, ResultMessage), answer
        return Call(VERBS[method], params).load_result(answer.result)

    def look(self) -> tuple[BranchesResult, ProduceResult]:
        """All that there is to see of the tree."""
        return self.ask("branches", branch=self.root), self.ask(
            "produce", branches=(self.bound, self.free), logprobs=20
        )


@pytest.fixture(scope="module")
def tree(daemon: RealDaemon) -> Iterator[Planted]:
    link, other = (blocking_link(daemon.socket, timeout_s=120) for _ in range(2))
    planted, theirs = Planted(link), Planted(other)
    planted.ask("create", session="s", sampling=DRAWN.named())
    planted.ask("append", session="s", tokens=tuple(PAST))
    planted.ask("create", session="empty")
    planted.ask("append", session="greedy", tokens=tuple(PAST), create=True)
    planted.greedy = planted.ask("tree", session="greedy").branch
    planted.root = planted.ask("tree", session="s").branch
    planted.empty = planted.ask("tree", session="empty").branch
    planted.foreign = theirs.ask("tree", session="s").branch
    bound, free, pruned = (
        each.branch for each in planted.ask("branch", branch=planted.root, count=3, seeds=(1, 2, 3)).branches
    )
    planted.bound, planted.free, planted.pruned = bound, free, pruned
    planted.ask("prune", branches=(pruned,))
    planted.ask("guide", branches=(bound,), constraint={"regex": "[ab]{9}"})
    yield planted
    wait(link.close())
    wait(other.close())


def bias(token: int, value: float | None = None) -> tuple[dict[str, Any], ...]:
    return ({"token": token, "bias": value},)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a branch that never was": ("produce", {"branches": (3,)}, "branch_not_found"),
    "a branch to come": ("produce", {"branches": (2**62,)}, "branch_not_found"),
    "a pruned branch": ("produce", {"branches": ("pruned",)}, "branch_not_found"),
    "a pruned branch among others": ("advance", {"branches": ("free", "pruned"), "max_tokens": 3}, "branch_not_found"),
    "a branch of another connection": ("prune", {"branches": ("foreign",)}, "branch_not_found"),
    "a branch of another tree": ("advance", {"branches": ("free", "empty"), "max_tokens": 3}, "invalid_branches"),
    "a branch twice": ("produce", {"branches": ("free", "free")}, "invalid_branches"),
    "a branch twice in readings": (
        "prefill",
        {"readings": ({"branch": "free", "text": "a"}, {"branch": "free", "text": "b"})},
        "invalid_branches",
    ),
    "a branch twice in commits": (
        "commit",
        {"commits": ({"branch": "free", "token": 9}, {"branch": "free", "token": 9})},
        "invalid_branches",
    ),
    "a branch with children": ("prune", {"branches": ("root",)}, "branch_has_children"),
    "a branch that is no number": ("produce", {"branches": ("s",)}, "invalid_request"),
    "nothing to read": ("prefill", {"readings": ({"branch": "free"},)}, "invalid_request"),
    "two things to read": (
        "prefill",
        {"readings": ({"branch": "free", "text": "a", "tokens": (1,)},)},
        "invalid_request",
    ),
    "a token to read outside the vocabulary": (
        "prefill",
        {"readings": ({"branch": "free", "text": "a"}, {"branch": "bound", "tokens": (1, VOCABULARY)})},
        "invalid_tokens",
    ),
    "a token to commit outside the vocabulary": (
        "commit",
        {"commits": ({"branch": "bound", "token": 9}, {"branch": "free", "token": VOCABULARY})},
        "invalid_tokens",
    ),
    "a bias outside the vocabulary": (
        "guide",
        {"branches": ("free",), "sampling": {"logit_bias": bias(VOCABULARY)}},
        "invalid_sampling",
    ),
    "a steer outside the vocabulary": ("guide", {"branches": ("free",), "steer": bias(VOCABULARY)}, "invalid_tokens"),
    "a bias that is no number": ("guide", {"branches": ("free",), "steer": bias(1, math.nan)}, "invalid_request"),
    "an infinite bias": ("guide", {"branches": ("free",), "steer": bias(1, -math.inf)}, "invalid_request"),
    "logits of a wrong length": (
        "guide",
        {"branches": ("free",), "logits": bytes(4 * VOCABULARY - 4)},
        "invalid_logits",
    ),
    "logits with NaN": (
        "guide",
        {"branches": ("free",), "logits": struct.pack("<f", math.nan) * VOCABULARY},
        "invalid_logits",
    ),
    "logits that allow nothing": (
        "guide",
        {"branches": ("free",), "logits": struct.pack("<f", -math.inf) * VOCABULARY},
        "invalid_logits",
    ),
    "too many of the likeliest": (
        "produce",
        {"branches": ("free",), "logprobs": MAX_TOP_LOGPROBS + 1},
        "invalid_request",
    ),
    "more log-probabilities than one result holds": (
        "advance",
        {"branches": ("free", "bound"), "max_tokens": 10_000, "logprobs": 20},
        "invalid_request",
    ),
    "a grammar that is wrong": ("guide", {"branches": ("free",), "constraint": {"regex": "[a"}}, "invalid_constraint"),
    "two grammars": ("guide", {"branches": ("free",), "constraint": {"regex": "a", "lark": "b"}}, "invalid_request"),
    "a grammar that is remote": (
        "guide",
        {"branches": ("free",), "constraint": {"json_schema": '{"$ref": "http://localhost:1/s.json"}'}},
        "invalid_constraint",
    ),
    "a schema that is too long": (
        "guide",
        {"branches": ("free",), "constraint": {"json_schema": "{}" + " " * MAX_SCHEMA_CHARS}},
        "invalid_request",
    ),
    "a grammar that is too long": (
        "guide",
        {"branches": ("free",), "constraint": {"lark": "a" * (MAX_GRAMMAR_CHARS + 1)}},
        "invalid_request",
    ),
    "a grammar that is too large": (
        "guide",
        {"branches": ("free",), "constraint": {"lark": "start: " + '"a"{0,100}' * 1400}},
        "invalid_constraint",
    ),
    "a grammar that is too slow": (
        "guide",
        {"branches": ("free",), "constraint": {"lark": "start: " + "(" * 8000 + '"a"' + ")" * 8000}},
        "invalid_constraint",
    ),
    "a grammar that allows nothing": (
        "guide",
        {"branches": ("free",), "constraint": {"regex": r"[^\s\S]"}},
        "invalid_constraint",
    ),
    "a token that the constraint does not allow": (
        "commit",
        {"commits": ({"branch": "free", "token": 9}, {"branch": "bound", "token": 9})},
        "invalid_constraint",
    ),
    "too many branches": ("branch", {"branch": "free", "count": MAX_BRANCHES - 2}, "too_many_branches"),
    "more than a request may name": ("branch", {"branch": "free", "count": MAX_BRANCHES}, "invalid_request"),
    "seeds for other children": ("branch", {"branch": "free", "count": 2, "seeds": (1,)}, "invalid_request"),
    "more bytes than the budget has": ("branch", {"branch": "free", "count": 500}, "memory_budget_exceeded"),
    "more tokens than the context has": ("advance", {"branches": ("free",), "max_tokens": 8192}, "context_overflow"),
    "a token before any was read": ("produce", {"branches": ("empty",)}, "empty_context"),
    "to write before anything was read": ("advance", {"branches": ("empty",), "max_tokens": 1}, "empty_context"),
    "to commit before anything was read": ("commit", {"commits": ({"branch": "empty", "token": 9},)}, "empty_context"),
    "a stale step": (
        "commit",
        {"commits": ({"branch": "free", "token": 9}, {"branch": "root", "token": 9, "step": 7})},
        "stale_step",
    ),
    "a name that is taken": ("keep", {"branch": "free", "name": "s"}, "session_exists"),
    "a session that is not there": ("tree", {"session": "nobody"}, "session_not_found"),
    "a version that is not there": ("tree", {"session": "s@9"}, "session_not_found"),
    "more attempts than a tree has places": (
        "diverge",
        {"branch": "free", "count": MAX_BRANCHES - 2, "max_tokens": 1},
        "too_many_branches",
    ),
    "attempts that would all be the same": (
        "diverge",
        {"branch": "greedy", "count": 2, "max_tokens": 1},
        "invalid_sampling",
    ),
    "a measure that there is not": (
        "diverge",
        {"branch": "free", "count": 2, "max_tokens": 1, "by": "beauty"},
        "invalid_request",
    ),
}


def with_numbers(tree: Planted, value: Any) -> Any:
    """Parameters with the branches' numbers in place of their names."""
    if isinstance(value, dict):
        return {key: each if key in ("session", "name") else with_numbers(tree, each) for key, each in value.items()}
    if isinstance(value, tuple):
        return tuple(with_numbers(tree, each) for each in value)
    return getattr(tree, value) if value in ("root", "bound", "free", "pruned", "empty", "foreign", "greedy") else value


@pytest.mark.one_in(1)
@pytest.mark.parametrize("what", REFUSED)
def test_bad_input_is_a_typed_error_that_changes_nothing_br4(tree: Planted, what: str) -> None:
    method, params, code = REFUSED[what]
    before = tree.look()
    answer = Asked(tree.link, method, with_numbers(tree, params)).answer()
    assert isinstance(answer, ErrorMessage), "it was carried out"
    assert answer.error.code == code, answer.error.message
    assert tree.look() == before


def test_an_empty_list_is_nothing_to_do_br4(tree: Planted) -> None:
    before = tree.look()
    assert tree.ask("produce", branches=()).produced == ()
    assert tree.ask("commit", commits=()).branches == ()
    assert tree.ask("prefill", readings=()).branches == ()
    assert tree.ask("advance", branches=(), max_tokens=1).written == ()
    assert tree.ask("guide", branches=(), free=True).branches == ()
    assert tree.ask("prune", branches=()).pruned == ()
    assert tree.look() == before


def test_a_token_of_an_earlier_step_is_refused_once_the_branch_went_on(tree: Planted) -> None:
    (child,) = tree.ask("branch", branch=tree.root).branches
    (drawn,) = tree.ask("produce", branches=(child.branch,)).produced
    commit = {"branch": child.branch, "token": drawn.token, "step": drawn.step}
    tree.ask("commit", commits=(commit,))
    refusal = Asked(tree.link, "commit", {"commits": (commit,)}).answer()
    assert isinstance(refusal, ErrorMessage)
    assert (refusal.error.code, refusal.error.details["step"]) == ("stale_step", drawn.step + 1)
    tree.ask("prefill", readings=({"branch": child.branch, "tokens": tuple(tokens_of(1, 3))},))
    assert tree.ask("branches", branch=child.branch).branches[-1].position == len(PAST) + 4
    tree.ask("prune", branches=(child.branch,))
