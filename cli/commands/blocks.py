"""`torpor blocks`: the blocks of a version, one line each, and a ribbon of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Final, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from ...daemon.api.blocks import BlockInfo, BlocksResult
from ...daemon.views.blocks import blocks_of
from ...memvid.units import format_bytes, format_count, format_plural
from ..exit_codes import INTEGRITY, OK
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument, option
from ..reach.viewing import look
from ..view.formatting import format_id, format_time
from ..view.output import Output, plain, render_problem, rows_table

DeepOption = Annotated[bool, option("--deep", "Read every byte, so that damage within keys and values is seen too.")]


class Kind(NamedTuple):
    """How a stretch of the ribbon looks, and what it says."""

    sign: str
    style: str
    meaning: str


KINDS: Final = {
    "damaged": Kind("!", "bold red", "damaged or missing"),
    "stripped": Kind("~", "yellow", "stripped"),
    "lossy": Kind("≈", "yellow", "lossy"),
    "shared": Kind("▒", "cyan", "shared"),
    "alone": Kind("█", "green", "alone"),
    "ledger": Kind("+", "default", "tokens alone"),
    "journal": Kind("j", "magenta", "in the journal"),
    "memory": Kind("m", "blue", "in memory alone"),
    "untold": Kind("·", "dim", "not in the list"),
}
"""By what a reader has to know first: where several hold, the first one is drawn."""

_WORDS: Final = {"assistant": "answer", "tool": "tool result"}
_COLUMNS: Final = (
    *("TOKENS", "HOLDS", "LOGICAL", "STORED", "CODEC", "KEPT", "NEEDED BY"),
    *("MEMORY", "READ BACK", "PACK", "BLOCK"),
)
_FIRST_TO_GO: Final = ("BLOCK", "READ BACK", "PACK", "CODEC", "MEMORY", "LOGICAL", "HOLDS")

Stretch = tuple[int, int, str]
"""Tokens from, up to, and the kind."""


def blocks(
    session: VersionArgument,
    deep: DeepOption = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """On a terminal a ribbon stands on top: the ledger from its first token to its last. Asks the daemon if one runs,
    which knows what is in memory; with no daemon, or with --store, it reads the store's files. What is needed by one
    session alone is freed when that session goes. The status is 6 if a block is damaged or missing.

    [bold]Examples[/]

    [cyan]torpor blocks notes[/]
    [cyan]torpor blocks notes@3 --deep[/]
    [cyan]torpor blocks notes --json | jq .alone_bytes[/]
    """
    output = Output(as_json=as_json)
    found = look(
        socket,
        store,
        lambda client: client.blocks(session, deep=deep),
        lambda opened: blocks_of(opened, opened.resolve_version(session, look=True), deep=deep),
    ).record
    status = INTEGRITY if any(kind_of(block) == "damaged" for block in found.blocks) else OK
    if output.told("blocks", found):
        return status.number
    stretches = list(stretches_of(found))
    if output.stdout.is_terminal and stretches:
        output.show(ribbon(stretches, output.stdout.width))
        output.show(legend(found, stretches, output.stdout.width))
        output.show("")
    output.show(render_blocks(found))
    for remark in _remarks(found):
        output.remark(f"[dim]{plain(remark)}[/]")
    for problem in found.problems:
        output.remark(render_problem(problem))
    return status.number


# --- the ribbon


def stretches_of(found: BlocksResult) -> Iterator[Stretch]:
    """The ledger from its first token to its last, each stretch with its kind."""
    at, end = 0, found.token_count - found.unread_tokens
    for block in found.blocks:
        if block.tokens:
            yield block.start, block.start + block.tokens, kind_of(block)
            at = block.start + block.tokens
    if at < end:  # the list is cut
        yield at, end, "untold"
    at = end
    for count, kind in ((found.unread_tokens, "ledger"), (found.journal_tokens, "journal")):
        if count:
            yield at, at + count, kind
            at += count
    if (found.memory_tokens or 0) > at:
        yield at, found.memory_tokens or 0, "memory"


def kind_of(block: BlockInfo) -> str:
    """What there is to know first of a block."""
    if block.condition in ("damaged", "missing"):
        return "damaged"
    if block.condition == "stripped":
        return "stripped"
    if block.lossy_bits is not None:
        return "lossy"
    return "shared" if block.sessions_needing > 1 else "alone"


def ribbon(stretches: Sequence[Stretch], width: int) -> Text:
    """One row: each column stands for as many tokens, and shows the kind that most of them have; but damage is always
    shown."""
    total, drawn, row = stretches[-1][1], Text(no_wrap=True), list[str]()
    for column in range(width):
        start, end = column * total / width, (column + 1) * total / width
        shares: Counter[str] = Counter()
        for begins, ends, kind in stretches:
            if (part := min(end, ends) - max(start, begins)) > 0:
                shares[kind] += int(part * width)  # parts of tokens count, too
        row.append("damaged" if "damaged" in shares else shares.most_common(1)[0][0])
    for kind, run in groupby(row):
        drawn.append(KINDS[kind].sign * len(list(run)), KINDS[kind].style)
    return drawn


def legend(found: BlocksResult, stretches: Iterable[Stretch], width: int) -> Text:
    """What the signs of the ribbon mean, with their tokens and bytes, in lines of that width."""
    tokens: Counter[str] = Counter()
    for start, end, kind in stretches:
        tokens[kind] += end - start
    sizes: Counter[str] = Counter()
    for block in found.blocks:
        sizes[kind_of(block)] += block.stored_bytes
    drawn, at = Text(), 0
    for kind, (sign, style, meaning) in KINDS.items():
        if kind in tokens:
            size = f", {format_bytes(sizes[kind])}" if sizes[kind] else ""
            entry = f" {meaning}: {format_plural(tokens[kind], 'token')}{size}"
            if at and at + 5 + len(entry) > width:
                drawn.append("\n")
                at = 0
            drawn.append("   " if at else "")
            drawn.append(sign * 2, style)
            drawn.append(entry, "dim")
            at += 5 + len(entry)
    return drawn


# --- the table


def render_blocks(found: BlocksResult) -> RenderableType:
    """Draw a row for each block, then what is no block, and the sums."""
    gone = {
        "HOLDS": not any(block.holds for block in found.blocks),
        "MEMORY": not any(block.resident for block in found.blocks),
        "READ BACK": all(block.read_ns is None for block in found.blocks),
    }
    names = [name for name in _COLUMNS if not gone.get(name)]
    right = ("TOKENS", "LOGICAL", "STORED")
    whole = (*right, "HOLDS", "KEPT", "NEEDED BY", "READ BACK", "PACK", "BLOCK")
    table = rows_table(
        *names, right=right, whole=whole, first_to_go=tuple(each for each in _FIRST_TO_GO if each in names)
    )
    for block in found.blocks:
        cells = _cells(block)
        table.add_row(*(cells[name] for name in names))
    for what, logical, stored in (
        ("not in blocks", "", format_bytes(found.beside_bytes)),
        ("all", format_bytes(found.logical_bytes), format_bytes(found.stored_bytes)),
    ):
        cells = {"TOKENS": f"[dim]{what}[/]", "LOGICAL": logical, "STORED": stored}
        table.add_row(*(cells.get(name, "") for name in names))
    return table


def _cells(block: BlockInfo) -> dict[str, str]:
    end = block.start + block.tokens
    kept = "exact" if block.lossy_bits is None else f"{block.lossy_bits} bits"
    if block.condition != "whole":
        kept = block.condition
    kind = KINDS[kind_of(block)]
    needed = "alone" if block.sessions_needing == 1 else format_plural(block.sessions_needing, "session")
    versions = f", {format_plural(block.versions_needing, 'version')}" if block.versions_needing > 1 else ""
    return {
        "TOKENS": f"{format_count(block.start)}–{format_count(end)}" if block.tokens else f"at {format_count(end)}",
        "HOLDS": plain(_holds(block)),
        "LOGICAL": format_bytes(block.logical_bytes),
        "STORED": format_bytes(block.stored_bytes) if block.stored_bytes else "–",
        "CODEC": plain(block.codec or "–"),
        "KEPT": f"[{kind.style}]{plain(kept)}[/]" if kept != "exact" else kept,
        "NEEDED BY": f"{needed}{versions}",
        "MEMORY": {True: "yes", False: "–", None: "–"}[block.resident],
        "READ BACK": format_time(block.read_ns),
        "PACK": plain(format_id(block.pack)),
        "BLOCK": plain(format_id(block.block_id)),
    }


def _holds(block: BlockInfo) -> str:
    """Whose tokens a block has; of one that holds the whole state at a place, that."""
    if block.kind != "span":
        return "state"
    roles = (
        (" + ".join(_WORDS.get(one, one) for one in role.split("+")), count) for role, count in block.holds.items()
    )
    return ", ".join(f"{role} {format_count(count)}" for role, count in roles)


def _remarks(found: BlocksResult) -> Iterator[str]:
    name = found.session.removeprefix("torpor://")
    yield (
        f"{name}@{found.version}: logical {format_bytes(found.logical_bytes)}; stored "
        f"{format_bytes(found.stored_bytes)} = shared {format_bytes(found.shared_bytes)} + alone "
        f"{format_bytes(found.alone_bytes)}. Not in blocks: its manifest, and what packs have around blocks."
    )
    if found.blocks_left_out:
        yield f"{format_plural(found.blocks_left_out, 'further block')} left out"
    if not any(block.holds for block in found.blocks):
        yield "What the blocks hold is left out: the session knows of no messages; it read and wrote plain text."
    if not found.deep:
        yield f"Heads were read, and no payload: `torpor blocks {name}@{found.version} --deep` reads every byte."
