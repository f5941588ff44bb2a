"""Which tokens' log-probabilities are those of the text."""

from __future__ import annotations

from torpor.daemon.api.events import Channel, TokenEvent
from torpor.daemon.api.logprobs import TokenLogprobs
from torpor.socket_api.http.logprobs import Untold


def said(*tokens: tuple[str, Channel, str]) -> list[str]:
    """What is told of tokens, each with its channel and with the text that it shows."""
    untold = Untold()
    for at, (text, channel, shown) in enumerate(tokens):
        untold.add(TokenEvent(at, shown, channel, logprobs=TokenLogprobs(at, text, -1.0, ())))
    assert bool(untold) == any(channel == "text" for _, channel, _ in tokens)
    told = [each.text for each in untold.take()]
    assert not untold
    return told


def test_a_text_that_was_held_back_comes_with_the_next_one() -> None:
    assert said(("a", "text", "a"), (" ", "text", ""), ("<", "text", ""), ("b", "text", " <b")) == ["a", " ", "<", "b"]


def test_the_tokens_of_a_calls_mark_are_no_text() -> None:
    mark: list[tuple[str, Channel, str]] = [("<", "text", ""), ("tool_call", "text", ""), (">", "call", "")]
    assert said(("a", "text", "a"), *mark, ("{}", "call", ""), ("b", "text", "b")) == ["a", "b"]


def test_a_stop_string_at_the_end_is_told() -> None:
    assert said(("a", "text", "a"), ("EN", "text", ""), ("D", "text", "")) == ["a", "EN", "D"]
