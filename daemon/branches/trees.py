"""Trees of branches, by number: which branches there are, whose they are, and the memory that they hold.

A branch has caches, ledger and sampling of its own, as a session has, and no name: it is in no list, never sleeps by
itself, and is never durable. Its memory counts in the budget until it is pruned. Requests for one tree take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import mlx.core as mx

from ...snapshot.caches import resident_bytes
from ...snapshot.forking import fork_bytes, held
from ...snapshot.memory import require_available
from ..api.constraints import Constraint
from ..api.limits import MAX_BRANCHES
from ..engine.decoding import lost
from ..engine.engine import Engine
from ..engine.guiding import Guide
from ..errors import BranchHasChildren, BranchNotFound, EmptyContext, InvalidBranches, TooManyBranches
from ..memory.line import Claim
from ..memory.loading import Loading
from ..memory.memory import Memory
from ..models.grammars import Matcher
from ..sessions.sessions import Session
from ..tasks.cancellation import in_any_case
from ..tasks.holding import Holder, holder
from .accounts import Account
from .views import Lending, LogitsView

Result = TypeVar("Result")

_MAX_TOLD: Final = 16
"""Children that a refusal names."""

BIAS_BYTES: Final = 400
"""Of a token of a `logit_bias`."""

MATCHER_BYTES: Final = 8192
_MATCHED_TOKEN_BYTES: Final = 400
"""Of a constraint's place, at its beginning and for each token behind it. Measured with a schema of nested lists: 5 kB,
and 350 bytes a token."""


@dataclass(slots=True, eq=False)
class Branch:
    """One branch. live: its state, in the shape of a session that nobody finds. guide: how it draws and what it has
    measured. constraint, matcher: what its text must match, and where it stands in that; accepted: the tokens that led
    there. Others as of `BranchInfo`."""

    number: int
    tree: Tree
    parent: Branch | None
    live: Session
    guide: Guide
    constraint: Constraint | None = None
    matcher: Matcher | None = None
    step: int = 0
    fork_head: int = 0
    children: list[Branch] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    _lending: Lending = field(default_factory=Lending)

    def __post_init__(self) -> None:
        self.fork_head = self.position

    @property
    def position(self) -> int:
        """How many tokens it has."""
        return len(self.live.state.tokens)

    @property
    def fork_bytes(self) -> int:
        """The most memory that a fork of it takes."""
        state = self.live.state
        return self.live.resident_bytes - resident_bytes(state.caches) + fork_bytes(state) + self.matcher_bytes()

    def matcher_bytes(self, more: int = 0) -> int:
        """About what its place in its constraint takes, so many tokens on: llguidance does not tell."""
        return 0 if self.matcher is None else MATCHER_BYTES + _MATCHED_TOKEN_BYTES * (len(self.accepted) + more)

    def given(self) -> dict[int, int]:
        """The bytes of what `guide` has given to it, by the place of each piece: other branches may have the same."""
        biases = self.live.sampling.logit_bias
        return {id(biases): BIAS_BYTES * len(biases), **{id(one): one.nbytes for one in self.guide.given()}}

    def logits(self) -> LogitsView:
        """The logits of this step, lent until the branch goes on. Raises EmptyContext: it has read nothing."""
        return self._lending.view(self.number, self.step, self.head())

    def with_logits(self, look: Callable[[LogitsView], Result]) -> Result:
        """What a function finds in the logits; meanwhile the branch cannot go on. Raises TypeError: it would look
        later."""
        return self._lending.borrowed(self.logits(), look)

    def revoke(self) -> None:
        """Take the lent logits back, before anything overwrites them. Raises LogitsLent: a function looks at them."""
        self._lending.revoke(self.number)

    def head(self) -> mx.array:
        """The logits that it draws from, before any bias. Raises EmptyContext: it has read nothing. GenerationFailed:
        its state was lost."""
        state = self.live.state
        if state.is_lost:
            raise lost(state)
        if state.last_logits is None:
            raise EmptyContext(
                f"Branch {self.number} has read nothing yet, so it has no next token; prefill it first.",
                branch=self.number,
            )
        return self.guide.head(state.last_logits)

    def subtree(self) -> list[Branch]:
        """It and all below it, each before its parent."""
        branches = [self]
        for each in branches:
            branches += each.children  # the list grows while it is walked
        return branches[::-1]


@dataclass(slots=True, eq=False)
class Tree:
    """The branches of one root. number: of its first root. owner: the connection that it ends with; None: no
    connection. turn: held by the request that uses it. needs: keeps its model loaded.
    account: the memory of their states, and of what `guide` has given to them."""

    number: int
    owner: Holder | None
    needs: AsyncExitStack
    root: Branch = field(init=False)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    account: Account = field(default_factory=Account)


class Forest:
    """All trees of a daemon. The event loop's."""

    def __init__(self, engine: Engine, memory: Memory, models: Loading) -> None:
        self._engine = engine
        self._memory = memory
        self._models = models
        self._branches: dict[int, Branch] = {}
        # Later daemons begin behind: no branch is made in less than a microsecond.
        self._numbers = itertools.count(time.time_ns() // 1000)
        self._first = self._newest = next(self._numbers)

    # --- which

    def find(self, number: int) -> Branch:
        """A branch of this connection. Raises BranchNotFound."""
        branch = self._branches.get(number)
        if branch is not None and branch.tree.owner is holder.get():
            return branch
        raise self._not_found(number, "foreign" if branch is not None else "pruned" if self._was(number) else "unknown")

    def trees(self) -> list[Tree]:
        """Those of this connection, in the order of their making."""
        return [each for each in self.all_trees() if each.owner is holder.get()]

    def all_trees(self) -> list[Tree]:
        """Those of all connections, to tell of them."""
        return [each.tree for each in self._branches.values() if each is each.tree.root]

    def standing_on(self) -> Counter[str]:
        """How many branches of all connections there are on each session, by its URI, their roots too."""
        return Counter(str(each.tree.root.live.uri) for each in self._branches.values())

    def holds(self, branch: Branch) -> bool:
        """Whether a branch is not pruned."""
        return branch.number in self._branches

    @asynccontextmanager
    async def working(self, numbers: Sequence[int], *, gone_is_fine: bool = False) -> AsyncIterator[list[Branch]]:
        """Hold a tree alone, and give those of its branches, in this order. gone_is_fine: without pruned ones. Raises
        BranchNotFound, InvalidBranches: nothing has happened."""
        named = self._all_of(numbers, gone_is_fine=gone_is_fine)
        if not named:
            yield []
            return
        async with named[0].tree.turn:
            yield self._all_of(numbers, gone_is_fine=gone_is_fine)

    def _all_of(self, numbers: Sequence[int], *, gone_is_fine: bool) -> list[Branch]:
        there = [each for each in numbers if each in self._branches or not (gone_is_fine and self._was(each))]
        branches = [self.find(number) for number in there]
        twice = next((each for each, times in Counter(numbers).items() if times > 1), None)
        if twice is not None:
            raise InvalidBranches(f"Branch {twice} is named twice; name each branch once.", branch=twice)
        other = next((each for each in branches if each.tree is not branches[0].tree), None)
        if other is not None:
            raise InvalidBranches(
                f"Branches {branches[0].number} and {other.number} are of different trees; ask for one tree at a time.",
                branch=other.number,
            )
        return branches

    def _was(self, number: int) -> bool:
        return self._first < number <= self._newest

    def _not_found(self, number: int, reason: str) -> BranchNotFound:
        why = {
            "foreign": "belongs to another connection; use it there",
            "pruned": "was pruned; list the others with `branches`",
            "unknown": "was never made by this daemon; begin a tree, and use the numbers that it gives",
        }[reason]
        return BranchNotFound(f"Branch {number} {why}.", branch=number, reason=reason)

    # --- life

    @asynccontextmanager
    async def room(self, wanted: int) -> AsyncIterator[None]:
        """Reserve memory for what branches are about to take. Raises MemoryBudgetExceeded, MemoryBusy, NotEnoughMemory:
        there is none."""
        with self._memory.apart(next(self._memory.numbers)) as claim:
            claim.what = "The tree of branches"
            await self._memory.reserve(claim, wanted)
            require_available(wanted)
            yield

    @asynccontextmanager
    async def planting(self, live: Session) -> AsyncIterator[Branch]:
        """Begin a tree with a state, which becomes the root's, and hold it alone meanwhile. If that or the work with it
        fails, there is no tree."""
        needs = AsyncExitStack()
        await needs.enter_async_context(self._models.holding(live.model.name, Claim(None, next(self._memory.numbers))))
        tree = Tree(self._newest + 1, holder.get(), needs)
        tree.root = self._made(tree, None, live, Guide(len(live.state.tokens)))
        if tree.owner is not None:
            tree.owner.hold(tree.number, lambda: self._end(tree))
        async with tree.turn:
            try:
                await self.settle(tree.root)
                yield tree.root
            except BaseException:
                await in_any_case(self.prune(tree.root.subtree()))
                raise

    def require_places(self, tree: Tree, count: int) -> None:
        """Raises TooManyBranches: the tree has no place for so many more."""
        there = len(tree.root.subtree())
        if there + count > MAX_BRANCHES:
            raise TooManyBranches(
                f"A tree has at most {MAX_BRANCHES} branches, and this one would have {there + count}. Prune some of "
                "them, or ask for fewer.",
                branches=there,
                limit=MAX_BRANCHES,
            )

    def fork(self, parent: Branch, live: Session) -> Branch:
        """Add a child with a state that is its own. `settle` counts it."""
        child = self._made(parent.tree, parent, live, parent.guide.forked())
        child.constraint, child.step = parent.constraint, parent.step
        child.matcher = None if parent.matcher is None else parent.matcher.copy()
        child.accepted = list(parent.accepted)
        parent.children.append(child)
        return child

    async def settle(self, *changed: Branch) -> None:
        """Count the memory that a tree holds now, what its branches share once. changed: those of them that may hold
        more or less than before. Runs to its end."""
        if changed:
            bytes_of = await in_any_case(self._engine.call(lambda: {each.number: _held(each) for each in changed}))
            changed[0].tree.account.enter(bytes_of)
            self.count_given(*changed)

    def count_given(self, *changed: Branch) -> None:
        """Count what `guide` has given to branches of a tree, what they share once. `settle` counts it, too."""
        bytes_of = {~each.number: (each.matcher_bytes(), each.given()) for each in changed}
        changed[0].tree.account.enter(bytes_of)
        self._count(changed[0].tree)

    def _count(self, tree: Tree) -> None:
        self._memory.trees[tree.number] = tree.account.total

    def prunable(self, branches: Sequence[Branch], *, subtree: bool) -> list[Branch]:
        """The branches that end with these, each before its parent. Raises BranchHasChildren: others would end that are
        not named."""
        going = dict.fromkeys(each for branch in branches for each in branch.subtree())
        for branch in branches if not subtree else ():
            if others := [child.number for child in branch.children if child not in branches]:
                raise BranchHasChildren(
                    f"Branch {branch.number} has children: {', '.join(map(str, others[:_MAX_TOLD]))}. Prune them "
                    "first, or prune the whole subtree.",
                    branch=branch.number,
                    children=others[:_MAX_TOLD],
                )
        return list(going)

    async def prune(self, going: Sequence[Branch]) -> int:
        """End branches of one tree, each before its parent, and free their memory: so many bytes. Those that are gone
        are left out."""
        going = [each for each in going if self.holds(each)]
        if not going:
            return 0
        tree = going[0].tree
        before = self._memory.trees.get(tree.number, 0)
        for branch in going:
            del self._branches[branch.number]
            tree.account.leave((branch.number, ~branch.number))
            branch.revoke()
            branch.live.let_go()
            branch.matcher = None
            if branch.parent is not None:
                branch.parent.children.remove(branch)
        if tree.root in going:
            self._memory.trees.pop(tree.number, None)
            if tree.owner is not None:
                tree.owner.let_go(tree.number)
            await tree.needs.aclose()
        else:
            self._count(tree)
        self._memory.look_again()
        return before - self._memory.trees.get(tree.number, 0)

    async def retain(self, branch: Branch) -> None:
        """End all others of its tree; it becomes the root."""
        tree, before = branch.tree, branch.tree.root
        going = branch.subtree()[:-1]
        if branch.parent is not None:
            branch.parent.children.remove(branch)
            branch.parent, tree.root = None, branch
            going += before.subtree()
        await self.prune(going)

    async def close(self) -> None:
        while self._branches:
            await self._end(next(iter(self._branches.values())).tree)

    async def _end(self, tree: Tree) -> None:
        async with tree.turn:
            await self.prune(tree.root.subtree())

    def _made(self, tree: Tree, parent: Branch | None, live: Session, guide: Guide) -> Branch:
        self._newest = next(self._numbers)
        branch = self._branches[self._newest] = Branch(self._newest, tree, parent, live, guide)
        return branch


def _held(branch: Branch) -> tuple[int, dict[int, int]]:
    live, state = branch.live, branch.live.state
    live.stay = replace(live.stay, held_bytes=live.resident_bytes)
    own, shared = held(state)
    own += state.checkpoints.resident_bytes + (0 if state.last_logits is None else state.last_logits.nbytes)
    return own, shared
