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
    """Holds one answer to a grammar. context: the ledger before it. root: of the conversation; None if all is text.

    The mark of thinking and the answer may begin alike. Both may then go on until they differ.
    """

    def __init__(self, matcher: Matcher, model: LoadedModel, context: Sequence[int], root: Root | None) -> None:
        self._beginning = matcher
        self._matcher: Matcher | None = matcher  # None while only the mark of thinking may go on
        self._thinking = np.ones(model.layout.vocabulary, np.bool_)
        self._thinking[[token for token in model.end_tokens if token < model.layout.vocabulary]] = False
        self._opening: tuple[int, ...] = ()  # the rest of the mark of thinking, while it may come or has begun
        ids, thought = model.marks.reasoning_ids, model.marks.thought_behind(context, model.end_tokens)
        if root is not None and ids is not None and thought == "none":
            self._opening = ids[0]

    @property
    def is_at_end(self) -> bool:
        """Whether nothing may follow."""
        if self._matcher is None or self._matcher is self._beginning:
            return False
        return self._matcher.is_at_end

    def allowed(self, channel: Channel) -> Allowed:
        """The tokens that may come next in a channel. Raises InvalidConstraint: there is none, or finding them takes
        too long."""
        if channel == "reasoning":
            return self._thinking
        allowed = np.zeros_like(self._thinking) if self._matcher is None else self._matcher.allowed()
        if self._opening:
            allowed[self._opening[0]] = True
        return allowed

    def accept(self, token: int, channel: Channel) -> bool:
        """Go on behind a token; False if it must not come there, though it was allowed. Raises InvalidConstraint: this
        takes too long."""
        if channel == "reasoning":
            return True
        if not self._opening or token != self._opening[0]:
            if not self._is_taken(token):
                return False
            self._opening = ()
            return True
        self._opening = self._opening[1:]
        if not self._opening:  # the answer begins behind the thinking
            self._matcher = self._beginning
        elif self._matcher is not None and not (self._matcher.allowed()[token] and self._is_taken(token)):
            self._matcher = None
        return True

    def _is_taken(self, token: int) -> bool:
        """Whether the grammar goes on behind a token."""
        if self._matcher is self._beginning:
            self._matcher = self._beginning.copy()
        assert self._matcher is not None
        return self._matcher.accept(token)
