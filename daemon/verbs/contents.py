"""Handler for contents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...memvid.answers import VersionInfo
from ..api.contents import Contents
from ..api.store import ContentsRequest
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.contents import Page, Span, manifest_text, page_of, page_of_ledger, told
from ..views.words import TOKENIZER, why_no_words, words_for
from .answering import answers


@answers(ContentsRequest, told=False)
async def contents(parts: Parts, request: ContentsRequest) -> Contents:
    """Raises SessionNotFound, AmbiguousVersion, and the errors of a damaged manifest."""
    named = await parts.sessions.named(request.session)
    ends = [end for end in (request.end, named.token) if end is not None]
    span = Span(request.start, min(ends, default=None), 1 if request.manifest else request.most, request.tokens)
    live = parts.sessions.awake.get(named.uri)
    if named.row is None and live is not None and not request.manifest:
        return await with_text(parts, _page_of_live(live, span))
    row = named.row or parts.store.standing.require_row(named.uri)
    page = await parts.store.on_io(partial(page_of, parts.store.disk, row, span))
    if request.manifest:
        return replace(page.contents, manifest=await parts.store.on_io(lambda: _manifest_of(parts, row)))
    return await with_text(parts, page)


async def with_text(parts: Parts, page: Page) -> Contents:
    """A page with its text: by the files of a tokenizer, else by that of a model in memory."""
    name, models = page.contents.model, list(parts.models.shelf.loaded())
    folders = [model.folder for model in models]

    def by_files() -> Contents | None:
        words = words_for(page.tokenizer, name, folders)
        return None if words is None else told(page, words.decode)

    if (found := await parts.store.on_io(by_files)) is not None:
        return found
    model = next((each for each in models if dict(each.identity.parts).get(TOKENIZER) == page.tokenizer), None)
    if model is None:
        return told(page, None, why_no_words(name))
    return await parts.models.encoder.with_detokenizer(model, lambda reader: told(page, reader.decode))


def _manifest_of(parts: Parts, row: VersionInfo) -> str:
    with parts.store.disk.open_session(row.uri, row.bundle_id) as reader:
        return manifest_text(reader.manifest)


def _page_of_live(live: Session, span: Span) -> Page:
    durable = live.durable
    facts = Contents(
        session=str(live.uri),
        version=None if durable is None else durable.version,
        bundle_id=None if durable is None else durable.bundle_id,
        parent=None if durable is None else durable.parent,
        model=live.model.name,
        labels=live.labels,
        created_ns=None,
        token_count=len(live.state.tokens),
        unread_tokens=0,
        lossy=live.loss,
        changed=live.dirty,
        has_roles=False,
        start=0,
        end=0,
        following=None,
    )
    return page_of_ledger(facts, dict(live.model.identity.parts)[TOKENIZER], live.state.tokens, live.to_map(), span)
