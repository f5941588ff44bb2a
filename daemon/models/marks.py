"""The marks with which a model tells its channels apart: its thinking, and its calls of tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .control_tokens import NO_CONTROL_TOKENS, ControlTokens
from .written_tools import CALL_END, CALL_START

Parse = Callable[[str, Any], Any]


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a model. reasoning, call: where each begins and ends. reasoning is None, with its ids, if the model
    has no marks for it; the end of a call is empty if the end of the answer ends it. parse: reads what stands between
    the marks of a call, with the offered tools. scaffold: marks that no channel shows. special: the names of control
    tokens, by their ids; in_marks: those that marks are made of; shown: those that are shown where all is text.
    """

    reasoning: tuple[str, str] | None
    reasoning_ids: tuple[tuple[int, ...], tuple[int, ...]] | None
    call: tuple[str, str]
    parse: Parse
    scaffold: tuple[str, ...]
    special: Mapping[int, str]
    in_marks: frozenset[int]
    shown: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, controls: ControlTokens = NO_CONTROL_TOKENS, *, knows_tools: bool = True) -> Marks:
        """The marks of a tokenizer of mlx-lm. Without its own, or with a template that does not know tools, a call
        stands as `written_tools.py` says it."""
        reasoning = reasoning_ids = None
        if tokenizer.has_thinking:
            reasoning = (tokenizer.think_start, tokenizer.think_end)
            reasoning_ids = (tuple(tokenizer.think_start_tokens), tuple(tokenizer.think_end_tokens))
        call, parse = (CALL_START, CALL_END), _parse_json
        if tokenizer.has_tool_calling and knows_tools:
            call, parse = (tokenizer.tool_call_start, tokenizer.tool_call_end), tokenizer.tool_parser
        scaffold = tuple(tokenizer.structural_markers)
        texts = [*(reasoning or ()), *call, *scaffold]
        special = controls.names
        in_marks = frozenset(token for token, text in special.items() if any(text in mark for mark in texts))
        return cls(reasoning, reasoning_ids, call, parse, scaffold, special, in_marks, controls.unflagged)

    @property
    def parser(self) -> str:
        """The name of the form of calls: the last part of the parser's module."""
        return self.parse.__module__.rpartition(".")[2]

    def thinks_behind(self, tokens: Sequence[int], ends: frozenset[int]) -> bool:
        """Whether a ledger ends inside the thinking of an open turn, as a template may begin it. ends: tokens that end
        a turn."""
        return self.thought_behind(tokens, ends) == "open"

    def thought_behind(self, tokens: Sequence[int], ends: frozenset[int]) -> Literal["none", "open", "done"]:
        """How far the thinking of an open turn is at a ledger's end. ends: as of `thinks_behind`."""
        if self.reasoning_ids is None:
            return "done"
        begins, closes = self.reasoning_ids
        for at in range(len(tokens) - 1, -1, -1):
            if tokens[at] in ends:
                return "none"
            if tokens[at] == closes[0] and tuple(tokens[at : at + len(closes)]) == closes:
                return "done"
            if tokens[at] == begins[0] and tuple(tokens[at : at + len(begins)]) == begins:
                return "open"
        return "none"


def _parse_json(text: str, _tools: Any) -> Any:
    return json.loads(text)
