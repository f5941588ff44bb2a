"""mlx-lm's own rendering of whole dialogues, and the tokens with which a model would write an answer.

Tokenizers here have a token for each byte, and their control tokens. So two renderings are alike token by token if
their texts are, and a control token that a text only quotes stands out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torpor.daemon.models.chat_template import Root, rules_of
from torpor.daemon.models.models import LoadedModel
from torpor.daemon.models.token_bytes import BYTE_SYMBOLS
from torpor.daemon.models.turn_rules import as_taken
from torpor.tests.daemon.models.template_families import Family

Message = Mapping[str, Any]

STAND_INS: Final = {"<": "~", "[": "^"}
"""For the first character of a quoted name: no dialogue and no template has them."""


class Rendering:
    """mlx-lm's own rendering of dialogues by one model, with quoted names as their bytes."""

    def __init__(self, model: LoadedModel, family: Family) -> None:
        self.model, self.family, self._rules = model, family, rules_of(model.tokenizer)
        self._names = re.compile("|".join(map(re.escape, sorted(family.controls, key=len, reverse=True))))
        vocabulary = model.tokenizer.get_vocab()
        self._back = {vocabulary[stand_in]: vocabulary[first] for first, stand_in in STAND_INS.items()}
        self.controls = {vocabulary[name]: name for name in family.controls}
        self._bytes = {vocabulary[symbol]: chr(byte) for symbol, byte in BYTE_SYMBOLS.items()}

    def tokens(
        self, messages: Sequence[Message], root: Root, *, prompt: bool = True, seen: Counter[str] | None = None
    ) -> list[int]:
        """The tokens of a whole dialogue. seen: counts what had to be done for it."""
        seen = Counter() if seen is None else seen
        told, tools = as_taken(messages, root.tools, self._rules)
        if tools != root.tools:
            seen["tools as texts"] += 1
        elif told != list(messages):
            seen["taken otherwise"] += 1
        return self._tokens(told, Root(tools, root.arguments), prompt, seen)

    def _tokens(self, messages: Sequence[Message], root: Root, prompt: bool, seen: Counter[str]) -> list[int]:
        plain = [self._neutral(_as_mlx_lm_takes(each), each["role"]) for each in messages]
        tools = [{"type": "function", "function": dict(tool)} for tool in root.tools]
        given = {"tools": self._neutral(tools)} if tools else {}
        ids = self.model.tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=prompt, **given, **root.arguments
        )
        seen["quoted names"] += any(token in self._back for token in ids)
        return [self._back.get(token, token) for token in ids]

    def _neutral(self, value: Any, role: str = "") -> Any:
        """A value without names of control tokens, but for the tags around the thinking that an assistant's text begins
        with: a template finds it by them."""
        if isinstance(value, str):
            return self._names.sub(lambda found: STAND_INS[found[0][0]] + found[0][1:], value)
        if isinstance(value, dict):
            if role == "assistant" and isinstance(value.get("content"), str):
                opens, thought = re.fullmatch(r"(\s*<think>)?(.*)", value["content"], re.DOTALL).groups("")
                thought, closes, words = thought.partition("</think>" if opens else "\0")
                plain = [self._without_tags(self._neutral(each)) for each in (thought, words)]
                content = f"{opens}{plain[0]}{closes}{plain[1]}"
                return {**self._neutral({**value, "content": ""}), "content": content}
            return {self._neutral(key): self._neutral(item) for key, item in value.items()}
        return [self._neutral(item) for item in value] if isinstance(value, list | tuple) else value

    def quoted(self, text: str) -> list[int]:
        """The tokens of a text that a model writes: names of control tokens as bytes."""
        ids = self.model.tokenizer.encode(self._neutral(text), add_special_tokens=False)
        return [self._back.get(token, token) for token in ids]

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens, a character for each byte, and control tokens by their names."""
        return "".join(self.controls.get(token) or self._bytes.get(token, "\n\n") for token in tokens)

    # --- what a model would write

    def answer(
        self, history: Sequence[Message], message: Message, root: Root, *, is_open: bool
    ) -> tuple[int, list[int]]:
        """How many tokens open an answer's turn, and those with which a model says a message, its end token with them.
        is_open: whether its thinking has begun. Raises TemplateUnusable."""
        marks, thought = self.model.marks.reasoning, message.get("reasoning", "")
        opening, shown = self.opened(history, message, root)
        if marks and thought and not self.text(shown).lstrip().startswith(marks[0]):
            opened = [] if is_open else self.model.encode(f"{marks[0]}\n", opening=False)
            closed = self.model.encode(f"\n{marks[1]}\n\n", opening=False)
            shown = [*opened, *self.quoted(thought), *closed, *shown]
        elif marks and is_open:
            shown = [*self.model.encode(f"\n{marks[1]}\n\n", opening=False), *shown]
        return opening, [self._back.get(token, token) for token in shown]

    def opened(self, history: Sequence[Message], message: Message, root: Root) -> tuple[int, list[int]]:
        """How many tokens open an answer's turn, that stand otherwise in an earlier one; and those with which the
        template goes on from there."""
        marks, before = self.model.marks.reasoning, self.tokens(history, root)
        quoting = {**message, "content": self._without_tags(message["content"])}
        opening, shown = self._behind(before, [*history, quoting], root)
        if marks and marks[1] in self.text(before[-8:]):  # what closes it there is left out of an earlier turn
            opening = len(before) - alike(before, self.tokens(history, root, prompt=False))
        return opening, shown

    def _without_tags(self, text: str) -> str:
        return re.sub("<(/?think>)", r"~\1", text)

    def _behind(self, before: Sequence[int], messages: Sequence[Message], root: Root) -> tuple[int, list[int]]:
        """What a template writes for the last message, up to its end token, and how much less opens its turn there."""
        whole = self.tokens(messages, root, prompt=False)
        size = alike(before, whole)
        rest, opening = whole[size:], len(before) - size
        ends = self.model.end_tokens
        at = next((at for at, token in enumerate(rest) if token in ends), None)
        if at is not None:
            return opening, rest[: at + 1]
        # A role that comes next ends the turn.
        ends_by = self.family.ends[2 if messages[-1].get("tool_calls") else 1] if len(self.family.ends) > 2 else ""
        name = ends_by if ends_by in ("<|user|>", "<|observation|>") else self.family.ends[0]
        return opening, [*rest, *self.model.encode(name, opening=False)]


def _as_mlx_lm_takes(message: Message) -> dict[str, Any]:
    found = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        found["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    return found


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two ledgers begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
