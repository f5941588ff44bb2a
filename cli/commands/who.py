"""`torpor who`: who needs a block, a version or a pack of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ...daemon.api.blocks import Needer, WhoResult
from ...daemon.views.who import who_needs
from ...memvid.units import format_bytes, format_count, format_plural
from ..exit_codes import INTEGRITY, OK
from ..reach.options import JsonOption, SocketOption, StoreOption, argument
from ..reach.store_view import choose_store, open_store
from ..view.formatting import format_id, format_marks, format_name
from ..view.output import Output, plain, render_problem, rows_table, typed
from ..view.table import PlainTable

NamedArgument = Annotated[
    str,
    argument("BLOCK|BUNDLE|PATH", "8 or more digits of the id of a block, a version or a pack, or the path of a file."),
]


def who(
    named: NamedArgument,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """Reads the manifests of the store of --store, of the running daemon's store, or of the default one: what no
    manifest names is needed by nobody. ALONE is freed when that version goes. While a manifest is damaged or missing
    the answer is not complete, which status 6 says, and no pack is removed. A version with "turns behind it" is the one
    that turns in the journal go on from, which no version has yet.

    [bold]Examples[/]

    [cyan]torpor who e871766fc7aa[/]
    [cyan]torpor who packs/6fa8daa9….mvp --json | jq .needers[/]
    """
    output = Output(as_json=as_json)
    path = choose_store(store, socket)
    with open_store(path) as opened:
        found = who_needs(opened, named)
    status = INTEGRITY if found.problems else OK
    if output.told("who", found, store=str(path)):
        return status.number
    for problem in found.problems:
        output.remark(render_problem(problem))
    if found.needers:
        output.show(render_needers(found))
    output.remark(_sentence(found))
    return status.number


def render_needers(found: WhoResult) -> PlainTable:
    """Draw a row for each version that needs it."""
    right = ("VERSION", "BLOCKS", "STORED", "ALONE")
    whole = ("SESSION", *right, "BUNDLE")
    table = rows_table("SESSION", *right, "BUNDLE", "MARKS", right=right, whole=whole, first_to_go=("BUNDLE", "MARKS"))
    for one in found.needers:
        table.add_row(
            plain(format_name(one.session)),
            str(one.version),
            format_count(one.blocks),
            format_bytes(one.stored_bytes),
            format_bytes(one.alone_bytes),
            plain(format_id(one.bundle_id)),
            plain(format_marks([*one.tags, *_marks(one)])),
        )
    return table


def _marks(one: Needer) -> list[str]:
    words = {"pinned": one.pinned, "stripped": one.stripped, "turns behind it": one.journal}
    return [word for word, holds in words.items() if holds]


def _sentence(found: WhoResult) -> str:
    """What it is, and what to do where nothing needs it."""
    what = f"{found.kind} {format_id(found.id)}: {format_bytes(found.stored_bytes)}"
    if found.kind != "block":
        what += f" in {format_plural(found.blocks, 'block')}"
    if not found.path:
        what += ", and no pack has it"
    elif found.kind == "block":
        what += f", in pack {format_id(Path(found.path).stem)}"
    cut = found.needers_left_out
    more = f"; {format_plural(cut, 'further version')} left out" if cut else ""
    if found.needers:
        sessions = len({one.session for one in found.needers})
        versions = len(found.needers) + cut
        unneeded = f"; {format_bytes(found.unneeded_bytes)} of it nobody needs" if found.unneeded_bytes else ""
        needed = f"{format_plural(versions, 'version')} of {format_plural(sessions, 'session')}"
        return f"[dim]{plain(what)}. Needed by {needed}{unneeded}{more}[/]"
    if found.problems:
        return (
            f"{plain(what)}. No manifest that can be read needs it, but what is named above may. Leave it until "
            f"{typed('torpor verify')} finds nothing."
        )
    return f"{plain(what)}. Nothing needs it: {typed('torpor repack')} gives back what is worth it."
