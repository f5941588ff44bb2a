"""Chat messages to text, only ever the new part.

The daemon keeps the sampled tokens in the ledger, so earlier turns are never rendered again. A new turn is rendered
behind a placeholder exchange, and the text after the placeholder is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import TemplateUnusable

Message = Mapping[str, str]
Render = Callable[[Sequence[Message], bool], str]

# No template strips, quotes or moves these: only letters and digits, and no word of any language.
_USER = "torporuserplaceholder7f3a"
_ASSISTANT = "torporassistantplaceholder9c1d"


def renderer(tokenizer: Any) -> Render:
    """A function from messages to the template's text; its flag asks for the start of the assistant's turn. It raises
    TemplateUnusable: the template is missing or refuses the messages."""

    def render(messages: Sequence[Message], open_turn: bool) -> str:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnusable("This model has no chat template; use append and generate instead.")
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_turn)
        except Exception as error:
            raise TemplateUnusable(f"The model's chat template refused the message: {error}.") from error
        return str(text)

    return render


def opening(render: Render, messages: Sequence[Message]) -> str:
    """The text of a conversation from its beginning to the start of the assistant's turn."""
    return render(messages, True)


def continuation(render: Render, messages: Sequence[Message], *, turn_open: bool, end_text: str) -> str:
    """The text of messages behind the ledger's end, to the start of the assistant's turn.

    turn_open: whether the ledger ends inside an assistant's turn, which has to be closed first. end_text: the text of
    the end token at the ledger's end; empty if there is none.
    """
    exchange = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ASSISTANT}]
    closing = _after_placeholder(render(exchange, False))
    whole = _after_placeholder(render([*exchange, *messages], True))
    if not whole.startswith(closing):
        raise TemplateUnusable(
            "The model's chat template renders an earlier turn differently once another follows, so a "
            "conversation cannot be continued token by token; use append and generate instead."
        )
    if not turn_open:
        return whole[len(closing) :]
    return whole[len(end_text) :] if end_text and whole.startswith(end_text) else whole


def _after_placeholder(text: str) -> str:
    _, found, rest = text.partition(_ASSISTANT)  # the first: a message may quote it
    if not found:
        raise TemplateUnusable(
            "The model's chat template does not show the assistant's words; use append and generate."
        )
    return rest
