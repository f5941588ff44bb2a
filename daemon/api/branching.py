"""Verbs of branches: many futures of one past. A tree lives in memory while the connection does that made it; `keep`
makes a session of a branch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Literal

from pydantic import Field

from ...records import Count, Listed, Record, Result
from .constraints import Constraint
from .events import Listener, Reporting
from .limits import MAX_APPENDED_TOKENS, MAX_BRANCHES, MAX_CHILDREN, MAX_NUMBER, MAX_SEED, MAX_STEERED
from .logprobs import Logprob, TokenLogprobs, TopLogprobs, require_tellable
from .reading import FinishReason, MaxTokens, Stops
from .records import Labels, LentBytes, NamedSampling, Priority, Request, SessionText, Text
from .sampling import Sampling, TokenBias, TokenId

BranchId = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
"""Never used again, also not by a later daemon."""

Branches = Annotated[Sequence[BranchId], Listed(), Field(max_length=MAX_BRANCHES)]
"""Of one tree, each once. None at all is nothing to do."""


Seeds = Annotated[Sequence[Annotated[int, Field(ge=0, le=MAX_SEED)]], Listed(), Field(max_length=MAX_CHILDREN)]
Measure = Literal["perplexity", "mean_logprob", "client"]


Steer = Annotated[Sequence[TokenBias], Listed(), Field(max_length=MAX_STEERED)]


class BranchInfo(Result):
    """A branch. parent: None for the root. position: its tokens; fork_head: how many it had when it was forked.

    step: changes whenever its logits do; a token drawn at a step can be committed at that step alone.
    steered_tokens: how many tokens its `steer` names. constrained: whether its text must match a constraint.
    measured_tokens: the tokens that it and its ancestors in the tree have committed, not those that were prefilled.
    mean_logprob: the mean log-probability of these, in nats; None without one.
    """

    branch: int
    parent: int | None
    children: tuple[int, ...]
    position: Count
    fork_head: Count
    step: Count
    sampling: Sampling
    steered_tokens: Count
    constrained: bool
    measured_tokens: Count
    mean_logprob: Logprob | None
    resident_bytes: Count

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprisal; infinite before the first committed token."""
        return perplexity_of(self.mean_logprob)


def require_seeds(seeds: Sequence[int], count: int) -> None:
    """Raises ValueError: there are seeds, and not one for each."""
    if seeds and len(seeds) != count:
        raise ValueError("give as many seeds as branches, or none")


def perplexity_of(mean_logprob: float | None) -> float:
    """From a mean log-probability in nats; infinite for None, and where float64 has no such number."""
    try:
        return math.inf if mean_logprob is None else math.exp(-mean_logprob)
    except OverflowError:
        return math.inf


class BranchesResult(Result):
    """Branches, in the order in which they were named or made."""

    branches: tuple[BranchInfo, ...]


class Produced(Result):
    """The token that a branch would draw at its step; nothing has changed. ends: whether it ends an answer.

    logprob, entropy: with `logprobs` alone. logprob: of the token, and the likeliest in its place. entropy: of the
    model's next token, in nats. logits: of this step, where they were asked for: float32 `[vocabulary]`, little-endian;
    in the daemon's own process not a copy, but its memory, to read alone.
    """

    branch: int
    step: Count
    token: TokenId
    text: str
    ends: bool
    logprob: TokenLogprobs | None = None
    entropy: Annotated[float, Field(ge=0)] | None = None
    logits: LentBytes | None = None


class ProduceResult(Result):
    """What each branch would draw, in the order in which they were named."""

    produced: tuple[Produced, ...]


class BranchText(Result):
    """What one branch has written, as of `GenerateResult`. `length`: it was cut off."""

    branch: int
    text: str
    tokens: tuple[TokenId, ...]
    finish_reason: FinishReason
    stopped_by: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    position: Count


class Attempt(BranchText):
    """One of several futures. kept: whether the branch is still there. measure: what it was ranked by; None where it
    has none."""

    _: KW_ONLY
    kept: bool
    measure: float | None


class DivergeResult(Result):
    """All attempts, the best first; those that were cut off behind all others."""

    attempts: tuple[Attempt, ...]


class AdvanceResult(Result):
    """What each branch has written, in the order in which they were named."""

    written: tuple[BranchText, ...]


class PruneResult(Result):
    """The branches that are gone, each before its parent, and the memory that they held."""

    pruned: tuple[int, ...]
    bytes_freed: Count


class BranchReading(Record):
    """What a branch is to read: a text, or token ids."""

    branch: BranchId
    text: Text | None = None
    tokens: Annotated[Sequence[TokenId], Listed(), Field(min_length=1, max_length=MAX_APPENDED_TOKENS)] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: there is not exactly one of them."""
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens for each branch")


class BranchCommit(Record):
    """A token for a branch. step: the step at which it was drawn; None: whatever the step is."""

    branch: BranchId
    token: TokenId
    step: Count | None = None


class TreeRequest(Reporting):
    """Begin a tree. Its root stands where `session` stands, or where a version of it behind an `@` ends. If that
    version was kept with its subtree, all branches of that come back. The session does not change, and goes on by
    itself. The tree is gone when the connection ends."""

    session: SessionText
    _: KW_ONLY
    priority: Priority = "normal"
    on_event: Listener = None


class BranchRequest(Request):
    """Fork a branch: `count` children that stand where it stands, with its sampling, constraint and measures, but not
    its `steer`. seeds: one for each; without them all have the parent's, and draw the same. At temperature 0
    they draw the same with any seeds, until `guide` changes some of them."""

    branch: BranchId
    _: KW_ONLY
    count: Annotated[int, Field(ge=1, le=MAX_CHILDREN)] = 1
    seeds: Seeds = ()
    priority: Priority = "normal"

    def require(self) -> None:
        require_seeds(self.seeds, self.count)


class PrefillRequest(Reporting):
    """Let branches read: all of it, or nothing if one fails. It counts for no measure and no constraint."""

    readings: Annotated[Sequence[BranchReading], Listed(), Field(max_length=MAX_BRANCHES)]
    _: KW_ONLY
    priority: Priority = "normal"
    on_event: Listener = None


class ProduceRequest(Request):
    """The token that each branch would draw next. Nothing changes: asked again, it is the same. logprobs: with its
    log-probability, and of so many of the likeliest. logits: with all logits."""

    branches: Branches
    _: KW_ONLY
    logprobs: TopLogprobs | None = None
    logits: bool = False
    priority: Priority = "normal"


class CommitRequest(Request):
    """Append one token to each of some branches, whatever it is: to all, or to none if one fails."""

    commits: Annotated[Sequence[BranchCommit], Listed(), Field(max_length=MAX_BRANCHES)]
    _: KW_ONLY
    priority: Priority = "normal"


class AdvanceRequest(Reporting):
    """Let branches write, side by side. Each event of a token names its branch, and the token is committed. A token
    that ends an answer is not.

    max_tokens: at most so many for each. stop: texts, as for `generate`. logprobs: as for `generate`.
    """

    branches: Branches
    _: KW_ONLY
    max_tokens: MaxTokens
    stop: Stops = ()
    logprobs: TopLogprobs | None = None
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        require_tellable(self.max_tokens * max(1, len(self.branches)), self.logprobs)


class GuideRequest(Request):
    """Change how branches draw from now on. What is left out stays.

    sampling: only the given fields; another seed draws otherwise from here on. steer: biases beside those of the
        sampling, in place of those that they have; forks do not inherit them. constraint: what their text must match
        from here on; free: nothing. logits: in place of the model's at this step, as `produce` gives them; keys and
        values stay.
    """

    branches: Branches
    _: KW_ONLY
    sampling: NamedSampling | None = None
    steer: Steer | None = None
    constraint: Constraint | None = None
    free: bool = False
    logits: bytes | None = None

    def require(self) -> None:
        if self.free and self.constraint is not None:
            raise ValueError("give either a constraint or free")


class DivergeRequest(Reporting):
    """Fork a branch, let the children write side by side, and keep the best. The branch itself does not change.

    count, max_tokens: of the children. Several need a temperature above 0, by the session or `guide`: else all would be
        the same, and are refused. seeds: one for each; those behind the parent's without them. by: what the best
        is the best by. `perplexity`: the lowest of all that was committed since the root; `mean_logprob`: the highest
        of what it wrote; `client`: nothing is pruned, and the client prunes what it does not want. stop, logprobs: as
        for `advance`.
    """

    branch: BranchId
    _: KW_ONLY
    count: Annotated[int, Field(ge=1, le=MAX_CHILDREN)]
    max_tokens: MaxTokens
    seeds: Seeds = ()
    by: Measure = "mean_logprob"
    stop: Stops = ()
    logprobs: TopLogprobs | None = None
    priority: Priority = "normal"
    on_event: Listener = None

    def require(self) -> None:
        require_seeds(self.seeds, self.count)
        require_tellable(self.max_tokens * self.count, self.logprobs)


class PruneRequest(Request):
    """End branches and free their memory; those that are gone already are left out. subtree: with all below them; the
    root with its subtree is the whole tree."""

    branches: Branches
    _: KW_ONLY
    subtree: bool = False


class RetainRequest(Request):
    """End all branches of a tree but this one, which becomes its root and goes on as it is."""

    branch: BranchId


class KeepRequest(Reporting):
    """Make a session `name` of a branch, as it stands. The branch stays. The session is awake, and durable when this is
    answered. From then on its turns are kept as the daemon's option says, even if those of the tree's session are not.
    labels: its own; those of the tree's session if None.

    subtree: put the branch and all below it to sleep as one tree. Each is a version of a session: of `name`, `name.1`,
        `name.2` and so on. A `tree` on `name` then has all branches, with what was set and measured in them.
    """

    branch: BranchId
    name: SessionText
    _: KW_ONLY
    labels: Labels | None = None
    subtree: bool = False
    priority: Priority = "normal"
    on_event: Listener = None


class BranchesRequest(Request):
    """All branches of the tree that a branch is of, each behind its parent; without one, of all trees of this
    connection."""

    branch: BranchId | None = None
