"""A tree in the store: each branch is a version of a session of its own, and the version of the root names them all.

The root's version is written last, and with it the tree is kept: its manifest names the others. After a kill in the
midst they are sessions of their own.
Each version has what a session has not: measures, a steer, a constraint with the tokens that it has seen, and logits
that were set.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from ...memvid.uri import SessionUri
from ...snapshot.errors import MalformedSnapshot
from ..api.constraints import Constraint
from ..api.limits import MAX_LOGIT_BIASES, MAX_SCHEMA_CHARS
from ..api.logprobs import LOWEST_LOGPROB
from ..api.sampling import TokenBias
from ..engine.guiding import Bias, Guide, logits_of
from ..errors import InvalidLogits, InvalidSampling
from ..models.grammars import Matcher
from ..views.trees import BRANCH, TREE, Planted, branches_in, require_counts
from .trees import Branch


@dataclass(frozen=True, slots=True)
class Dress:
    """What a stored branch has beyond a session. position: its tokens. accepted: those that its constraint has seen.
    logit_bias: that of its sampling, which stood here before; None where it stands there. Others as of `Branch`."""

    position: int
    fork_head: int
    step: int
    guide: Guide
    constraint: Constraint | None
    accepted: list[int]
    logit_bias: tuple[TokenBias, ...] | None

    def put_on(self, branch: Branch, matcher: Matcher | None) -> None:
        """Give a branch what it had. matcher: of its constraint, behind the tokens that it has seen. Raises
        MalformedSnapshot: it was another branch's."""
        if branch.position != self.position:
            raise _malformed(f"it has {branch.position} tokens, and its branch had {self.position}")
        branch.guide, branch.fork_head, branch.step = self.guide, self.fork_head, self.step
        branch.constraint, branch.matcher, branch.accepted = self.constraint, matcher, self.accepted
        if self.logit_bias is not None:
            branch.live.sampling = replace(branch.live.sampling, logit_bias=self.logit_bias)


def map_of(branch: Branch) -> dict[str, Any]:
    """A branch as the session map of its version has it."""
    guide, form = branch.guide, branch.constraint
    entry = {
        "position": branch.position,
        "fork_head": branch.fork_head,
        "step": branch.step,
        "answer_at": guide.answer_at,
        "steer": [guide.steer.tokens.astype("<u4").tobytes(), guide.steer.added.astype("<f4").tobytes()],
        "measured": guide.measured,
        "logprob_sum": float(guide.logprob_sum),
        "constraint": None if form is None else [form.json_schema, form.regex, form.lark],
        "accepted": array("I", branch.accepted).tobytes(),
        "logits": None if guide.replaced is None else np.asarray(guide.replaced).astype("<f4").tobytes(),
    }
    return {BRANCH: entry}


def map_of_root(branches: Sequence[Branch], versions: Sequence[tuple[SessionUri, int, str]]) -> dict[str, Any]:
    """The root of a tree as the session map of its version has it. branches: the root first, and each behind its
    parent. versions: those of all but the root."""
    place = {each: at for at, each in enumerate(branches)}
    listed = [
        {
            "session": str(uri),
            "version": version,
            "bundle": bytes.fromhex(bundle_id),
            "parent": None if each.parent is None else place[each.parent],
        }
        for each, (uri, version, bundle_id) in zip(branches[1:], versions, strict=True)
    ]
    return {TREE: listed, **map_of(branches[0])}


def planted_in(session_map: Mapping[str, Any]) -> list[Planted]:
    """As `branches_in`. Raises MalformedSnapshot: `map_of_root` does not make this."""
    try:
        return branches_in(session_map)
    except ValueError as error:
        raise _malformed(str(error)) from error


def dress_in(session_map: Mapping[str, Any], vocabulary: int) -> Dress:
    """What a branch had, from the session map of its version. Raises MalformedSnapshot: `map_of` does not make this."""
    try:
        return _dress(session_map[BRANCH], vocabulary)
    except _WRONG as error:
        raise _malformed(f"{type(error).__name__}: {error}") from error


_WRONG: Final = (KeyError, TypeError, ValueError, InvalidLogits, InvalidSampling)


def _malformed(why: str) -> MalformedSnapshot:
    return MalformedSnapshot(f"The version is of no tree that can be read ({why}). Use it as a session.")


def _dress(stored: Mapping[str, Any], vocabulary: int) -> Dress:
    accepted, logits, form = array("I"), stored["logits"], stored["constraint"]
    accepted.frombytes(stored["accepted"])
    position, fork_head, measured = stored["position"], stored["fork_head"], stored["measured"]
    answer_at = stored.get("answer_at", position)  # no store of before has penalties that count from there
    require_counts(position, fork_head, measured, stored["step"], answer_at)
    if not max(fork_head, measured, len(accepted), answer_at) <= position:
        raise ValueError(
            f"{position} tokens, forked at {fork_head}, an answer at {answer_at}, {measured} measured, "
            f"{len(accepted)} accepted"
        )
    if any(token >= vocabulary for token in accepted):
        raise ValueError("a token outside the vocabulary")
    if any(type(each) not in (str, type(None)) or len(each or "") > MAX_SCHEMA_CHARS for each in form or ()):
        raise ValueError("a constraint that is no text, or a longer one than branches have")
    if not LOWEST_LOGPROB * measured <= stored["logprob_sum"] <= measured:  # so no NaN
        raise ValueError(f"{stored['logprob_sum']} of {measured} tokens")
    logit_bias = _biases(stored["bias"], vocabulary) if "bias" in stored else None
    if len(logit_bias or ()) > MAX_LOGIT_BIASES:
        raise ValueError(f"a logit_bias of {len(logit_bias or ())} tokens, and {MAX_LOGIT_BIASES} are the most")
    steer = Bias.of(_biases(stored["steer"], vocabulary))
    replaced = None if logits is None else mx.array(logits_of(logits, vocabulary))
    guide = Guide(answer_at, steer, replaced, measured, float(stored["logprob_sum"]))
    constraint = None if form is None else Constraint(*form)
    return Dress(position, fork_head, stored["step"], guide, constraint, list(accepted), logit_bias)


def _biases(stored: Sequence[bytes], vocabulary: int) -> tuple[TokenBias, ...]:
    tokens, added = np.frombuffer(stored[0], "<u4").tolist(), np.frombuffer(stored[1], "<f4").tolist()
    if len(tokens) != len(added) or len(set(tokens)) != len(tokens) or max(tokens, default=0) >= vocabulary:
        raise ValueError("a bias of other tokens than the vocabulary has")
    return tuple(
        TokenBias(token, None if bias == -math.inf else bias) for token, bias in zip(tokens, added, strict=True)
    )
