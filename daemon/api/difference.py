"""How two memories differ, as answers show it. Imports no pydantic."""

from __future__ import annotations

from typing import Literal

from ...memvid.answers import Finding
from ...records import Count, Result

Kind = Literal["model", "identity", "backend", "sampling", "system", "tools", "template", "labels"]


class Compared(Result):
    """One of two memories. version: None for an awake session that has never slept; changed: whether an awake session
    has gone on since. token_count: of what is compared: all, or up to a place. differs_at: its first token that the
    other one has not; None where they do not part. text: around the place where they part, 8 tokens before it and 16
    behind; None without a tokenizer, or where they do not part. alone_blocks, alone_bytes: blocks that the other one
    has not, and their raw state.
    """

    session: str
    version: int | None
    bundle_id: str | None
    model: str
    changed: bool
    token_count: Count
    differs_at: Count | None
    text: str | None
    alone_blocks: Count
    alone_bytes: Count


class FactDiffers(Result):
    """A fact beside the tokens. one, other: as text, of long ones the part that differs; None where there is none."""

    kind: Kind
    name: str
    one: str | None
    other: str | None


class Difference(Result):
    """How two memories differ. common_tokens: both begin with these; of two tokenizers, whose texts are compared
    (`by_text`), the tokens of `one` whose text both begin with. cause: what alone tells them apart where they part, as
    of `why`; None where one is the beginning of the other, or nobody knows.

    lines: a unified diff of the texts from the place on, or of the tokens; lines_added and lines_removed count all of
    it, lines_left_out those that are cut off the list, and left_out_tokens the tokens of both that were not compared.
    no_text: why there is no text. common_blocks: of one id; common_bytes: their raw state. problems: blocks that cannot
    be read: their side is compared as far as it can be.
    """

    one: Compared
    other: Compared
    by_text: bool
    common_tokens: Count
    cause: str | None
    common_blocks: Count
    common_bytes: Count
    facts: tuple[FactDiffers, ...]
    lines: tuple[str, ...]
    lines_added: Count
    lines_removed: Count
    lines_left_out: Count
    left_out_tokens: Count
    no_text: str | None = None
    problems: tuple[Finding, ...] = ()

    @property
    def is_none(self) -> bool:
        """Whether both say the same tokens."""
        return self.one.differs_at is None and self.other.differs_at is None
