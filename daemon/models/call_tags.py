"""The forms of calls that put tags around each argument: one shape, from which calls are both read and held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Tags:
    """What stands around a call and each of its arguments. NAME and KEY stand for the names. A value stands up to the
    first `closes`: a text as it is, others as JSON.

    before: the blank on both sides of a value that is none of it. behind: the one behind the closing tag. quoted: when
    a text stands as JSON: never; where its schema allows other values, too; or always, though it may be plain. empty: a
    call without arguments, if it has a form of its own. cdata: whether a value may stand in a CDATA section.
    """

    head: str
    opens: str
    closes: str
    tail: str
    quoted: Literal["never", "mixed", "always"] = "never"
    before: str = ""
    behind: str = ""
    empty: str | None = None
    cdata: bool = False

    @property
    def begins(self) -> str:
        """How the tag of each argument begins. A value that has it in it is not read: as likely it was not closed."""
        return self.opens.partition("KEY")[0]


GLM: Final = Tags("NAME", "<arg_key>KEY</arg_key><arg_value>", "</arg_value>", "", quoted="mixed")
LONGCAT: Final = Tags(
    "NAME",
    "<longcat_arg_key>KEY</longcat_arg_key><longcat_arg_value>",
    "</longcat_arg_value>",
    "",
    quoted="mixed",
    empty='{"name": "NAME", "arguments": {}}',
)
QWEN_CODER: Final = Tags(
    "\n<function=NAME>\n", "<parameter=KEY>", "</parameter>", "</function>\n", before="\n", behind="\n"
)
MINIMAX: Final = Tags('\n<invoke name="NAME">\n', '<parameter name="KEY">', "</parameter>", "</invoke>\n", behind="\n")
MINICPM: Final = Tags('"NAME">', '<param name="KEY">', "</param>", "", cdata=True)
MUSE: Final = Tags(
    '<atem:invoke name="NAME">',
    '<atem:parameter name="KEY">',
    "</atem:parameter>",
    "</atem:invoke>",
    quoted="always",
)

FUNCTION_GEMMA_QUOTE: Final = "<escape>"
GEMMA_4_QUOTE: Final = '<|"|>'
"""What stands on both sides of a text, in the forms with bare keys."""
