"""`torpor diff`: how two sessions or versions differ."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated, Final

from ...daemon.api.difference import Compared, Difference
from ...daemon.views.why import BEFORE_TOKENS, BEHIND_TOKENS
from ...memvid.units import format_bytes, format_count, format_plural
from ..exit_codes import INTEGRITY
from ..reach.options import JsonOption, OtherArgument, SocketOption, StoreOption, VersionArgument, option
from ..reach.viewing import look
from ..view.output import Output, facts_table, neutralise, plain, render_problem, rows_table
from ..view.table import PlainTable

StatOption = Annotated[bool, option("--stat", "Only how much differs, and what beside the text.")]
TokensOption = Annotated[bool, option("--tokens", "A diff of tokens, and not of lines of text.")]

_CAUSES: Final = {
    "tokenization": "the text is the same, its tokens are not",
    "thinking": "only what was thought differs",
    "clock": "only a date or a time differs",
    "reordered": "the same words stand in another order",
    "template": "the words are the same, the control tokens around them are not",
    "system_text": "the system text differs",
    "message": "a message differs",
    "other_text": "other text was read there",
}
_GAP: Final = "\n"
_STYLES: Final = {"+": "green", "-": "red", "@": "cyan"}


def diff(
    version: VersionArgument,
    other: OtherArgument,
    stat: StatOption = False,
    tokens: TokensOption = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Tokens are compared, so an equal text in other tokens is a difference; of two tokenizers, the texts are. The
    first token that differs is shown with the text on both sides and the kind of cause, as [cyan]torpor why[/] has it.
    Then comes what differs beside the text: model, sampling, system text, tools, labels; then a unified diff of what
    follows. NAME:500 is compared up to its token 500. Asks the daemon if one runs, for an awake session is compared as
    it is in memory. With no daemon, or with --store, it reads the store's files; text is then told as by
    [cyan]torpor cat[/].

    [bold]Examples[/]

    [cyan]torpor diff notes~1 notes[/]
    [cyan]torpor diff notes try-1 --stat[/]
    [cyan]torpor diff notes@before-refactor notes:1500 --tokens[/]
    [cyan]torpor diff notes notes~2 --json | jq .common_tokens[/]
    """
    output = Output(as_json=as_json)
    found = look(socket, store, lambda source: source.difference(version, other, tokens=tokens)).record
    status = INTEGRITY.number if found.problems else 0
    if output.told("diff", found):
        return status
    output.show(*render_difference(found, by_token=tokens))
    if not stat:
        for at, line in enumerate(found.lines):
            style = _STYLES.get(line[:1], "none")
            output.whole_line(f"{'' if at else _GAP}[{style}]{plain(neutralise(line))}[/]")
    for remark in _remarks(found):
        output.remark(f"[dim]{plain(remark)}[/]")
    for problem in found.problems:
        output.remark(render_problem(problem))
    return status


def render_difference(found: Difference, *, by_token: bool = False) -> Iterator[str | PlainTable]:
    """All but the diff itself. by_token: it is one of tokens."""
    yield from (_sides(found), "", _sums(found, "tokens" if by_token or found.no_text else "lines"))
    if found.facts:
        yield from ("", _facts(found))


def _sides(found: Difference) -> PlainTable:
    table = rows_table(
        *("", "SESSION", "VERSION", "MODEL", "TOKENS", "ALONE", "BLOCKS ALONE"),
        right=("TOKENS", "ALONE"),
        whole=("", "SESSION", "VERSION", "TOKENS"),
        first_to_go=("BLOCKS ALONE", "MODEL"),
    )
    for sign, side in (("-", found.one), ("+", found.other)):
        alone = side.token_count - (side.token_count if side.differs_at is None else side.differs_at)
        table.add_row(
            f"[{_STYLES[sign]}]{sign}[/]",
            plain(side.session),
            f"{side.version or '–'}{' and since' if side.changed else ''}",
            plain(side.model),
            format_count(side.token_count),
            format_count(alone),
            _blocks(side.alone_blocks, side.alone_bytes),
        )
    return table


def _sums(found: Difference, unit: str) -> PlainTable:
    facts = facts_table()
    common = f"the first {format_plural(found.common_tokens, 'token')}" if found.common_tokens else "no token"
    by_text = " (their tokenizers differ, so their texts are compared)" if found.by_text else ""
    facts.add_row("in common", f"{common}{by_text}, {_blocks(found.common_blocks, found.common_bytes)}")
    facts.add_row("they part", _where(found))
    for sign, style, text in _texts(found):
        facts.add_row(f"  [{style}]{sign}[/]", f"[{style}]{plain(neutralise(text))}[/]")
    if found.lines_added or found.lines_removed:
        facts.add_row(unit, f"{format_count(found.lines_added)} added, {format_count(found.lines_removed)} removed")
    return facts


def _texts(found: Difference) -> Iterator[tuple[str, str, str]]:
    """The texts where they part, apart from what stands in both before it, each with its sign and its style."""
    one, other = found.one.text, found.other.text
    if one is None or other is None:
        return
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    both = "".join(char for char, _ in pairs)
    if both:
        yield "both", "dim", f"{'… ' if found.common_tokens > BEFORE_TOKENS else ''}{both!r}"
    for sign, side, text in (("-", found.one, one), ("+", found.other, other)):
        if rest := text[len(both) :]:
            at = side.token_count if side.differs_at is None else side.differs_at
            yield sign, _STYLES[sign], f"{rest!r}{' …' if side.token_count > at + BEHIND_TOKENS else ''}"


def _where(found: Difference) -> str:
    if found.is_none:
        return "nowhere: their tokens are the same"
    if found.by_text and found.no_text is not None:
        return "nobody knows: their tokenizers differ, and are not both at hand"
    if found.problems:
        return f"not before token {format_count(found.common_tokens)}, as far as they can be read"
    ended = next((side for side in (found.one, found.other) if side.differs_at is None), None)
    if ended is not None:
        return f"where {plain(_name(ended))} ends: the other one goes on"
    cause = f": {_CAUSES.get(found.cause, found.cause)}" if found.cause else ""
    return f"at token {format_count(found.common_tokens)}{cause}"


def _name(side: Compared) -> str:
    return side.session if side.version is None or side.changed else f"{side.session}@{side.version}"


def _blocks(count: int, size_bytes: int) -> str:
    return f"{format_plural(count, 'block')}, {format_bytes(size_bytes)}" if count else "no block"


def _facts(found: Difference) -> PlainTable:
    table = rows_table("DIFFERS", "NAME", "-", "+", whole=("DIFFERS",))
    for fact in found.facts:
        one, other = ("–" if value is None else plain(neutralise(value)) for value in (fact.one, fact.other))
        table.add_row(fact.kind, plain(neutralise(fact.name)), one, other)
    return table


def _remarks(found: Difference) -> Iterator[str]:
    if found.no_text is not None:
        yield found.no_text
    if found.lines_left_out:
        yield f"{format_plural(found.lines_left_out, 'line')} of the diff are left out."
    if found.left_out_tokens:
        yield f"The diff leaves the last {format_plural(found.left_out_tokens, 'token')} of both out."
