"""`torpor cat`: the text of a version, as the model saw it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Final

from ...daemon.api.contents import Contents
from ...memvid.units import format_count, format_plural
from ...memvid.uri import VERSION_MARK, parse_version_reference
from ..errors import InvalidUsage
from ..exit_codes import INTEGRITY
from ..reach.files import Files
from ..reach.options import JsonOption, SocketOption, StoreOption, VersionArgument, option
from ..reach.viewing import answering
from ..view.formatting import format_time
from ..view.output import Output, describe_turns, facts_table, neutralise, plain, render_problem
from ..view.table import PlainTable

RolesOption = Annotated[bool, option("--roles", "A header before each message: whose it is, and its tokens.")]
TokensOption = Annotated[bool, option("--tokens", "One line a token: its place, its id and its text.")]
FromOption = Annotated[int, option("--from TOKEN", "Begin at this token; the first is 0.", min=0)]
ToOption = Annotated[int | None, option("--to TOKEN", "End before this token.", min=1)]
HeaderOption = Annotated[bool, option("--header", "First what the version is: its id, its model, its tokens.")]
ManifestOption = Annotated[bool, option("--manifest", "The manifest of the version instead, as JSON.")]

_IDS_A_LINE: Final = 12
Turn = Callable[[int], Contents]
"""Gives the page from a token on."""


def cat(
    session: VersionArgument,
    roles: RolesOption = False,
    tokens: TokensOption = False,
    begin: FromOption = 0,
    end: ToOption = None,
    header: HeaderOption = False,
    manifest: ManifestOption = False,
    socket: SocketOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    """The template's marks are in it, and what the model thought. NAME:500 ends at token 500. Asks the daemon if one
    runs, for an awake session is told as it is in memory. With no daemon, or with --store, it reads the store's files;
    the text is then told by the tokenizer of a model folder that this user has loaded or downloaded, if its files are
    those of the version. Else the ids of the tokens are told, and why. Messages that were read in one go stand under
    one header, but where a daemon has the model in memory and proves their words. --json writes one page;
    [cyan].following[/] says where the next begins (--from). In a pipe it is the text to the byte, as the model saw it:
    no end of a line is put behind it.

    [bold]Examples[/]

    [cyan]torpor cat notes --roles[/]
    [cyan]torpor cat notes@3 --from 500 --to 600 --tokens[/]
    [cyan]torpor cat notes~1 > before.txt[/]
    [cyan]torpor cat notes --manifest | jq .identity[/]
    """
    output = Output(as_json=as_json)
    if end is not None and end <= begin:
        raise InvalidUsage(f"--to {end} is not behind --from {begin}.", option="--to")
    with answering(socket, store) as (source, _):
        if isinstance(source, Files) and (uri := source.newer_turns(session)):
            output.remark(describe_turns([uri]))
        asked = partial(source.contents, tokens=tokens, apart=roles, manifest=manifest)
        turn = asking(asked, session, end, output)
        page = turn(begin)
        is_whole = not page.problems
        if output.told("cat", page):
            return 0 if is_whole else INTEGRITY.number
        if page.manifest is not None:
            output.stream(page.manifest + "\n")
        else:
            is_whole = _write(output, page, turn, roles=roles, tokens=tokens, header=header, begin=begin)
        return 0 if is_whole else INTEGRITY.number


def asking(ask: Callable[..., Contents], session: str, end: int | None, output: Output) -> Turn:
    """Pages, all of the version that the first one is of. What an awake session has besides can change between two
    pages, and that is said."""
    first: Contents | None = None
    is_told = False

    def turn(start: int) -> Contents:
        nonlocal first, is_told
        if first is not None and first.bundle_id is not None and not first.changed:
            stop = parse_version_reference(session).token
            ends = [each for each in (end, stop, first.token_count) if each is not None]
            return ask(f"{first.session}{VERSION_MARK}{first.bundle_id}", start=start, end=min(ends))
        page = ask(session, start=start, end=end)
        first = first or page
        if not is_told and (page.bundle_id, page.token_count) != (first.bundle_id, first.token_count):
            is_told = True
            output.remark(f"{plain(page.session)} has changed: from token {start} on this is what it has now.")
        return page

    return turn


def _write(output: Output, page: Contents, turn: Turn, *, roles: bool, tokens: bool, header: bool, begin: int) -> bool:
    """Write page after page. Gives whether all could be read."""
    if header:
        output.show(_header(page))
        output.line("")
    for remark in _remarks(page, begin, roles=roles):
        output.remark(f"[dim]{plain(remark)}[/]")
    role_from, last, is_whole = -1, "\n", True
    while True:
        is_whole = is_whole and not page.problems
        for problem in page.problems:
            output.remark(render_problem(problem))
        if tokens:
            _write_tokens(output, page)
        for passage in () if tokens else page.passages:
            if roles and passage.role_start != role_from:
                role_from = passage.role_start
                output.stream("" if last == "\n" else "\n")
                span = f"tokens {format_count(passage.role_start)} to {format_count(passage.role_end)}"
                output.line(f"[bold cyan]── {plain(passage.role)}[/] [dim]{span}[/]")
            text = passage.text
            if text is None:
                text = _ids(page, passage.start, passage.end)
            output.stream(text)
            last = text[-1:] or last
        if page.following is None:
            break
        page = turn(page.following)
    if last != "\n" and not tokens:
        output.stream("\n" if sys.stdout.isatty() or roles else "")
    return is_whole


def _write_tokens(output: Output, page: Contents) -> None:
    """One line a token; in a pipe its cells are set apart by tabs."""
    texts = page.token_texts or ("",) * len(page.tokens)
    gap = "  " if output.stdout.is_terminal else "\t"
    for place, (token, text) in enumerate(zip(page.tokens, texts, strict=True), page.start):
        shown = neutralise(repr(text)) if page.token_texts else ""
        width = (8, 7) if output.stdout.is_terminal else (0, 0)
        output.stream(f"{place:>{width[0]}}{gap}{token:>{width[1]}}{gap}{shown}".rstrip() + "\n")


def _ids(page: Contents, start: int, end: int) -> str:
    """Tokens without text: their ids, some on a line."""
    ids = page.tokens[start - page.start : end - page.start]
    lines = [ids[at : at + _IDS_A_LINE] for at in range(0, len(ids), _IDS_A_LINE)]
    return "".join(" ".join(map(str, line)) + "\n" for line in lines)


def _remarks(page: Contents, begin: int, *, roles: bool) -> Iterator[str]:
    if page.no_text is not None:
        yield page.no_text
    if roles and not page.has_roles:
        yield f"Nothing tells of messages in {page.session}: no chat has made it, so it stands under one header."
    if page.start == page.end and not page.problems:
        yield f"{page.session} has {format_plural(page.token_count, 'token')}; nothing is at token {begin}."


def _header(page: Contents) -> PlainTable:
    facts = facts_table()
    facts.add_row("session", plain(page.session))
    changed = ", changed since" if page.changed else ""
    facts.add_row("version", f"{page.version or '– (no version yet)'}{changed}")
    facts.add_row("bundle", plain(page.bundle_id or "–"))
    facts.add_row("parent", plain(page.parent or "–"))
    facts.add_row("made", format_time(page.created_ns))
    facts.add_row("model", plain(page.model))
    facts.add_row("tokens", format_count(page.token_count))
    if page.unread_tokens:
        facts.add_row("to compute", f"the last {format_plural(page.unread_tokens, 'token')}, again at the next use")
    if page.lossy is not None:
        tokens = format_plural(page.lossy.tokens, "token")
        facts.add_row("lossy", f"keys and values of the first {tokens} in {page.lossy.bits} bits")
    if page.labels:
        facts.add_row("labels", plain(" ".join(page.labels)))
    return facts
