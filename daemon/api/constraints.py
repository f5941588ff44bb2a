"""What an answer is held to: a constraint on its text, and the tools that it may or must call."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from ...records import Listed, Record
from .dialogue import ToolName
from .limits import MAX_GRAMMAR_CHARS, MAX_SCHEMA_CHARS, MAX_TOOLS

SchemaText = Annotated[str, Field(min_length=1, max_length=MAX_SCHEMA_CHARS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]


class Constraint(Record):
    """What an answer's text must match from its first character to its last: a JSON schema, a regular expression, or a
    grammar in llguidance's form of Lark. One of them, as its source. A model thinks freely before it.

    The answer ends where the grammar allows no more. A schema's JSON has no blanks but one behind each comma and colon,
    and its properties stand in the schema's order. Of a schema, keywords that only tell do not bind, nor do those that
    are null, formats that no grammar can say, and `uniqueItems`; of `oneOf` at least one matches. A keyword whose value
    has a wrong shape is refused. So is what takes too long to compile, as more than 8 patterns and formats that hold
    for one text, more than 8 `&` in a grammar, and a `multipleOf` above 10,000 that is not round.
    """

    json_schema: SchemaText | None = None
    regex: GrammarText | None = None
    lark: GrammarText | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: there is not exactly one source."""
        if sum(each is not None for each in (self.json_schema, self.regex, self.lark)) != 1:
            raise ValueError("give one of json_schema, regex and lark")


class ToolChoice(Record):
    """Which of the conversation's tools an answer may call.

    mode: `auto`, the model calls or answers; `none`, it calls none; `required`, the answer is one call, and its
        arguments match the tool's schema. names: with `required`, one of these; all if empty. strict: with `auto`, the
        arguments of calls of these tools match their schemas, too. parallel: if false, the answer ends behind its
        first call.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: Annotated[Sequence[ToolName], Listed(), Field(max_length=MAX_TOOLS)] = ()
    strict: Annotated[Sequence[ToolName], Listed(), Field(max_length=MAX_TOOLS)] = ()
    parallel: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError: a field is of another mode."""
        if self.names and self.mode != "required":
            raise ValueError("names go with the mode required")
        if self.strict and self.mode != "auto":
            raise ValueError(
                "strict goes with the mode auto; of the others, required holds each call, and none allows none"
            )

    def without_strict(self, names: Container[str]) -> ToolChoice:
        """The choice with these tools held to nothing."""
        return replace(self, strict=tuple(name for name in self.strict if name not in names))


FREE = ToolChoice()
