"""`torpor blocks`: the blocks of a session or a version, one line each, and a ribbon of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Final, NamedTuple

from ...daemon.api.blocks import BlockInfo, BlocksResult
from ...memvid.units import format_bytes, format_count, format_plural
from ...memvid.uri import VERSION_MARK
from ...socket_api.errors import RemoteError
from ..exit_codes import INTEGRITY, OK
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument, option
from ..reach.viewing import look
from ..view.formatting import format_id, format_name, format_time
from ..view.output import Output, plain, render_problem, rows_table
from ..view.table import PlainTable

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
    """On a terminal a ribbon stands on top: the ledger from its first token to its last. Of a session it is what the
    session holds now, of [cyan]NAME@3[/] what that version holds. Asks the daemon if one runs,
    which knows what is in memory; with no daemon, or with --store, it reads the store's files. What is needed by one
    session alone is freed when that session goes. The status is 6 if a block is damaged or missing.

    [bold]Examples[/]

    [cyan]torpor blocks notes[/]
    [cyan]torpor blocks notes@3 --deep[/]
    [cyan]torpor blocks notes --json | jq .alone_bytes[/]
    """
    output = Output(as_json=as_json)
    found = look(socket, store, lambda source: source.blocks(session, deep=deep)).record
    unread = bool(found.problems) and not (found.blocks or found.rest)
    status = INTEGRITY if unread or any(kind_of(block) == "damaged" for block in found.blocks) else OK
    if output.told("blocks", found):
        return status.number
    if unread:
        raise RemoteError(found.problems[0].code, found.problems[0].message, path=found.problems[0].path)
    stretches = list(stretches_of(found))
    if output.stdout.is_terminal and stretches:
        width = output.stdout.width
        output.show(ribbon(stretches, width), *legend(found, stretches, width), "")
    output.show(render_blocks(found))
    for remark in _remarks(found):
        output.remark(f"[dim]{plain(remark)}[/]")
    for problem in found.problems:
        output.remark(render_problem(problem))
    return status.number


# --- the ribbon


def stretches_of(found: BlocksResult) -> Iterator[Stretch]:
    """The memory from its first token to its last, each stretch with its kind."""
    at = 0
    for block in found.blocks:
        if block.tokens:
            at = _end_of(block, found)
            yield block.start, at, kind_of(block)
    end = min(found.token_count - found.unread_tokens, found.common_tokens)
    if at < end:  # the list is cut
        yield at, end, "untold"
    for each in found.rest:
        yield each.start, each.end, each.place


def _end_of(block: BlockInfo, found: BlocksResult) -> int:
    """Where it ends, or, in its midst, what the session has of it."""
    return min(block.start + block.tokens, found.common_tokens)


def kind_of(block: BlockInfo) -> str:
    """What there is to know first of a block."""
    if block.condition in ("damaged", "missing"):
        return "damaged"
    if block.condition == "stripped":
        return "stripped"
    if block.lossy_bits is not None:
        return "lossy"
    return "shared" if block.sessions_needing > 1 else "alone"


def ribbon(stretches: Sequence[Stretch], width: int) -> str:
    """Markup of one row: each column stands for as many tokens, and shows the kind that most of them have; but damage
    is always shown."""
    total, row = stretches[-1][1], list[str]()
    for column in range(width):
        start, end = column * total / width, (column + 1) * total / width
        shares: Counter[str] = Counter()
        for begins, ends, kind in stretches:
            if (part := min(end, ends) - max(start, begins)) > 0:
                shares[kind] += int(part * width)  # parts of tokens count, too
        row.append("damaged" if "damaged" in shares else shares.most_common(1)[0][0])
    return "".join(f"[{KINDS[kind].style}]{KINDS[kind].sign * len(list(run))}[/]" for kind, run in groupby(row))


def legend(found: BlocksResult, stretches: Iterable[Stretch], width: int) -> Iterator[str]:
    """Markup of what the signs of the ribbon mean, with their tokens and bytes, in lines of that width."""
    tokens: Counter[str] = Counter()
    for start, end, kind in stretches:
        tokens[kind] += end - start
    sizes: Counter[str] = Counter()
    for block in found.blocks:
        sizes[kind_of(block)] += block.stored_bytes
    line, at = list[str](), 0
    for kind, (sign, style, meaning) in KINDS.items():
        if kind in tokens:
            size = f", {format_bytes(sizes[kind])}" if sizes[kind] else ""
            entry = f" {meaning}: {format_plural(tokens[kind], 'token')}{size}"
            if line and at + 5 + len(entry) > width:
                yield "   ".join(line)
                line, at = [], 0
            line.append(f"[{style}]{sign * 2}[/][dim]{entry}[/]")
            at += 5 + len(entry)
    yield "   ".join(line)


# --- the table


def render_blocks(found: BlocksResult) -> PlainTable:
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
        cells = _cells(block, _end_of(block, found))
        table.add_row(*(cells[name] for name in names))
    for each in found.rest:
        kind = KINDS[each.place]
        span = f"{format_count(each.start)}–{format_count(each.end)}"
        cells = {"TOKENS": span, "KEPT": f"[{kind.style}]{kind.meaning}[/]"}
        table.add_row(*(cells.get(name, "") for name in names))
    for what, logical, stored in (
        ("not in blocks", "", format_bytes(found.beside_bytes)),
        ("all", format_bytes(found.logical_bytes), format_bytes(found.stored_bytes)),
    ):
        cells = {"TOKENS": f"[dim]{what}[/]", "LOGICAL": logical, "STORED": stored}
        table.add_row(*(cells.get(name, "") for name in names))
    return table


def _cells(block: BlockInfo, end: int) -> dict[str, str]:
    """end: of what counts of its tokens."""
    span, whole = (f"{format_count(block.start)}–{format_count(each)}" for each in (end, block.start + block.tokens))
    tokens = span if end == block.start + block.tokens else f"{span} of {whole}"
    kept = "exact" if block.lossy_bits is None else f"{block.lossy_bits} bits"
    if block.condition != "whole":
        kept = block.condition
    kind = KINDS[kind_of(block)]
    needed = "alone" if block.sessions_needing == 1 else format_plural(block.sessions_needing, "session")
    versions = f", {format_plural(block.versions_needing, 'version')}" if block.versions_needing > 1 else ""
    return {
        "TOKENS": tokens if block.tokens else f"at {format_count(block.start)}",
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
    name = format_name(found.session)
    yield (
        f"{name}@{found.version}: logical {format_bytes(found.logical_bytes)}; stored "
        f"{format_bytes(found.stored_bytes)} = shared {format_bytes(found.shared_bytes)} + alone "
        f"{format_bytes(found.alone_bytes)}. Not in blocks: its manifest, and what packs have around blocks."
    )
    if found.common_tokens < found.token_count:
        yield (
            f"{name} has the first {format_plural(found.common_tokens, 'token')} of {VERSION_MARK}{found.version}: "
            f"`torpor blocks {name}{VERSION_MARK}{found.version}` has all blocks of that."
        )
    if found.blocks_left_out:
        yield f"{format_plural(found.blocks_left_out, 'further block')} left out"
    if found.blocks and not any(block.holds for block in found.blocks):
        yield "What the blocks hold is left out: the session knows of no messages; it read and wrote plain text."
    if not found.deep:
        yield f"Heads were read, and no payload: `torpor blocks {name}@{found.version} --deep` reads every byte."
