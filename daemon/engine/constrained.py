"""What the next token of an answer may be: as its grammar says, once the model has done thinking.

A model may think first, where its template leaves that to it. Its thinking is free, but it does not end the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.dialogue import Channel
from ..models.chat_template import Root
from ..models.grammars import Allowed, Matcher
from ..models.models import LoadedModel


class Constrained:
    """Holds one answer to a grammar. context: the ledger before it. root: of the conversation; None if all is text."""

    def __init__(self, matcher: Matcher, model: LoadedModel, context: Sequence[int], root: Root | None) -> None:
        self._matcher = matcher
        self._thinking = np.ones(model.layout.vocabulary, np.bool_)
        self._thinking[[token for token in model.end_tokens if token < model.layout.vocabulary]] = False
        self._opening: tuple[int, ...] = ()  # the rest of the mark of thinking, while it may come or has begun
        self._opens = False
        self._has_begun = False
        ids, thought = model.marks.reasoning_ids, model.marks.thought_behind(context, model.end_tokens)
        if root is not None and ids is not None and thought == "none":
            self._opening = ids[0]

    @property
    def is_at_end(self) -> bool:
        """Whether nothing may follow."""
        return self._has_begun and self._matcher.is_at_end

    def allowed(self, channel: Channel) -> Allowed:
        """The tokens that may come next in a channel. Raises InvalidConstraint: there is none, or finding them takes
        too long."""
        if channel == "reasoning":
            return self._thinking
        if self._opens and self._opening:
            return self._only(self._opening[0])
        found = self._matcher.allowed()
        if self._opening and not self._has_begun:
            if found[self._opening[0]]:
                self._opening = ()  # the grammar begins with the same token
            else:
                found[self._opening[0]] = True
        return found

    def accept(self, token: int, channel: Channel) -> bool:
        """Go on behind a token; False if it must not come there, though it was allowed. Raises InvalidConstraint: this
        takes too long."""
        if channel == "reasoning":
            return True
        if self._opening and not self._has_begun and token == self._opening[0]:
            self._opens, self._opening = True, self._opening[1:]
            return True
        self._has_begun, self._opening = True, ()
        return self._matcher.accept(token)

    def _only(self, token: int) -> Allowed:
        found = np.zeros_like(self._thinking)
        found[token] = True
        return found
