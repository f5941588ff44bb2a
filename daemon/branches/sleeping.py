"""A tree in the store: each branch is a version of a session of its own, and the version of the root names them all.

The root's version is written last. The store knows them as one group: after a kill in the midst, whoever opens it next
removes the others if the root has no version.
Beside the names, the root's version has what a session has not: topology, measures, biases, constraints with the tokens
that they have seen, and logits that were set.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ...memvid.uri import SessionUri
from ...snapshot.errors import MalformedSnapshot
from ..api.constraints import Constraint
from ..api.limits import MAX_BIAS, MAX_BRANCHES
from ..engine.guiding import Bias, Guide
from ..models.grammars import Matcher
from ..sessions.sessions import TREE
from .trees import Branch


@dataclass(frozen=True, slots=True)
class Planted:
    """One branch of a stored tree, as the root's version tells it. uri, version, bundle_id: of its state; of the root
    itself None. parent: its place in the list; None for the root. accepted: tokens that its constraint has seen. Others
    as of `Branch` and `Guide`."""

    uri: SessionUri | None
    version: int
    bundle_id: bytes
    parent: int | None
    fork_head: int
    step: int
    bias: Bias
    steer: Bias
    measured: int
    logprob_sum: float
    constraint: Constraint | None
    accepted: tuple[int, ...]
    replaced: bytes | None

    @classmethod
    def of(cls, branch: Branch, place: Mapping[Branch, int], kept: tuple[SessionUri, int, bytes] | None) -> Planted:
        """A branch as it stands. place: of the branches in the list. kept: its version."""
        uri, version, bundle_id = kept or (None, 0, b"")
        guide = branch.guide
        return cls(
            uri=uri,
            version=version,
            bundle_id=bundle_id,
            parent=place.get(branch.parent) if branch.parent is not None else None,
            fork_head=branch.fork_head,
            step=branch.step,
            bias=guide.bias,
            steer=guide.steer,
            measured=guide.measured,
            logprob_sum=guide.logprob_sum,
            constraint=branch.constraint,
            accepted=tuple(branch.accepted),
            replaced=None if guide.replaced is None else np.asarray(guide.replaced).astype("<f4").tobytes(),
        )

    def to_map(self) -> dict[str, Any]:
        """As the root's session map has it."""
        form = self.constraint
        return {
            "session": None if self.uri is None else str(self.uri),
            "version": self.version,
            "bundle": self.bundle_id,
            "parent": self.parent,
            "fork_head": self.fork_head,
            "step": self.step,
            "bias": _packed(self.bias),
            "steer": _packed(self.steer),
            "measured": self.measured,
            "logprob_sum": float(self.logprob_sum),
            "constraint": None if form is None else [form.json_schema, form.regex, form.lark],
            "accepted": array("I", self.accepted).tobytes(),
            "logits": self.replaced,
        }

    def dress(self, branch: Branch, matcher: Matcher | None) -> None:
        """Give a branch what it had. matcher: of its constraint, behind the tokens that it has seen."""
        replaced = None if self.replaced is None else mx.array(np.frombuffer(self.replaced, "<f4"))
        branch.guide = Guide(self.bias, self.steer, replaced, self.measured, self.logprob_sum)
        branch.fork_head, branch.step = self.fork_head, self.step
        branch.constraint, branch.matcher, branch.accepted = self.constraint, matcher, list(self.accepted)


def stored_tree(
    branches: Sequence[Branch], kept: Sequence[tuple[SessionUri, int, bytes]]
) -> tuple[Mapping[str, Any], ...]:
    """The map of each branch, the root first and each behind its parent. kept: the versions of all but the root."""
    place = {each: at for at, each in enumerate(branches)}
    return tuple(
        Planted.of(each, place, None if at == 0 else kept[at - 1]).to_map() for at, each in enumerate(branches)
    )


def planted_in(kept: Mapping[str, Any], vocabulary: int) -> list[Planted]:
    """The branches of a stored tree, the root first and each behind its parent; none for a version that is no tree.

    Raises MalformedSnapshot: `to_map` does not make this."""
    stored = kept.get(TREE, ())
    try:
        if len(stored) > MAX_BRANCHES:
            raise ValueError(f"{len(stored)} branches")
        return [_planted(each, at, vocabulary) for at, each in enumerate(stored)]
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedSnapshot(
            f"The version has no tree that can be read ({type(error).__name__}: {error})."
        ) from error


def _planted(stored: Mapping[str, Any], at: int, vocabulary: int) -> Planted:
    accepted, replaced, form = array("I"), stored["logits"], stored["constraint"]
    accepted.frombytes(stored["accepted"])
    numbers = [stored[name] for name in ("version", "fork_head", "step", "measured")]
    if any(type(each) is not int or each < 0 for each in numbers):
        raise ValueError(f"numbers {numbers}")
    if (stored["parent"] is None) != (at == 0) or (at and not 0 <= stored["parent"] < at):
        raise ValueError(f"branch {at} has the parent {stored['parent']}")
    if any(token >= vocabulary for token in accepted):
        raise ValueError("a token outside the vocabulary")
    if replaced is not None and len(replaced) != 4 * vocabulary:
        raise ValueError(f"{len(replaced)} bytes of logits")
    return Planted(
        uri=SessionUri.parse(stored["session"]) if at else None,
        version=stored["version"],
        bundle_id=bytes(stored["bundle"]),
        parent=stored["parent"],
        fork_head=stored["fork_head"],
        step=stored["step"],
        bias=_bias(stored["bias"], vocabulary),
        steer=_bias(stored["steer"], vocabulary),
        measured=stored["measured"],
        logprob_sum=float(stored["logprob_sum"]),
        constraint=None if form is None else Constraint(*form),
        accepted=tuple(accepted),
        replaced=None if replaced is None else bytes(replaced),
    )


def _packed(bias: Bias) -> list[bytes]:
    return [bias.tokens.astype("<u4").tobytes(), bias.added.astype("<f4").tobytes()]


def _bias(stored: Sequence[bytes], vocabulary: int) -> Bias:
    tokens, added = np.frombuffer(stored[0], "<u4").astype(np.int64), np.frombuffer(stored[1], "<f4").astype(np.float32)
    if len(tokens) != len(added) or len(set(tokens.tolist())) != len(tokens) or (tokens >= vocabulary).any():
        raise ValueError("a bias of other tokens than the vocabulary has")
    if not (np.isneginf(added) | (np.abs(added) <= MAX_BIAS)).all():  # so no NaN
        raise ValueError("a bias that is too large")
    return Bias(tokens, added)
