"""The log-probabilities of an answer's tokens."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from ...records import Result
from .limits import MAX_LIKELIHOODS, MAX_TOP_LOGPROBS
from .sampling import TokenId

LOWEST_LOGPROB: Final = -9999.0
"""Stands for less, and for minus infinity, which JSON has no number for."""

TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
"""How many of the likeliest tokens are told beside each token; 0: the token alone."""

Logprob = Annotated[float, Field(ge=LOWEST_LOGPROB, le=0)]


class Likelihood(Result):
    """How likely a token was at its place, by the model's own logits: before penalties, filters, temperature and
    constraints. logprob: natural logarithm of its probability, at least -9999. text: of the token alone; empty if it
    ends an answer. A token that is a part of a character has a replacement character there. part_bytes: its bytes then;
    None for any other token, and where the tokenizer does not tell them.
    """

    token: TokenId
    text: str
    logprob: Logprob
    part_bytes: bytes | None = None


class TokenLogprobs(Likelihood):
    """The same of a token that was drawn. top: the likeliest at its place, the likeliest first, equal ones by the
    lower id; as many as were asked for, or the whole vocabulary. The token may not be among them."""

    top: tuple[Likelihood, ...] = ()


def require_tellable(max_tokens: int | None, logprobs: int | None) -> None:
    """Refuse an answer with more log-probabilities than one result holds. Raises ValueError."""
    if max_tokens is not None and logprobs is not None and max_tokens * (1 + logprobs) > MAX_LIKELIHOODS:
        most = MAX_LIKELIHOODS // (1 + logprobs)
        raise ValueError(f"with logprobs {logprobs} an answer has at most {most} tokens; give a smaller max_tokens")
