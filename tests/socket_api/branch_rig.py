"""What the tests of branches share: a session to begin trees from, both clients as one, and what a branch would do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torpor.daemon.api.branching import BranchInfo
from torpor.daemon.api.sampling import Sampling
from torpor.socket_api import RemoteError
from torpor.tests.socket_api.real_daemon import tokens_of

DRAWN = Sampling(temperature=0.9, top_p=0.95, seed=5)
PAST = tokens_of(19, 150)


def planted(torpor: Any, name: str, sampling: Sampling = DRAWN, past: list[int] = PAST) -> BranchInfo:
    """The root of a new tree on a new session."""
    torpor.create(name, sampling=sampling)
    if past:
        torpor.append(name, tokens=past)
    root: BranchInfo = torpor.tree(name)
    return root


def forked(torpor: Any, branch: int, *seeds: int) -> list[int]:
    """Children with these seeds."""
    return [each.branch for each in torpor.branch(branch, count=len(seeds), seeds=seeds).branches]


def info(torpor: Any, branch: int) -> BranchInfo:
    """A branch as it is now."""
    return next(each for each in torpor.branches(branch).branches if each.branch == branch)


def next_tokens(torpor: Any, branch: int, count: int = 6) -> tuple[int, ...]:
    """What a branch would write: a child writes it, and is pruned."""
    (child,) = (each.branch for each in torpor.branch(branch).branches)
    (text,) = torpor.advance([child], max_tokens=count).written
    torpor.prune([child])
    tokens: tuple[int, ...] = text.tokens
    return tokens


def committed(torpor: Any, branch: int, *tokens: int) -> None:
    """Commit tokens, one after the other."""
    for token in tokens:
        torpor.commit([{"branch": branch, "token": token}])


def refused(action: Callable[[], object]) -> RemoteError:
    """The error that an action gets."""
    with pytest.raises(RemoteError) as refusal:
        action()
    return refusal.value
