"""Handler for contents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ...memvid.answers import VersionInfo
from ..api.contents import Contents, Passage
from ..api.store import ContentsRequest
from ..chat.conversing import Dialogue
from ..models.models import LoadedModel
from ..parts.parts import Parts
from ..sessions.sessions import Session
from ..views.contents import Page, Said, Span, apart, manifest_text, page_of, page_of_ledger, told
from ..views.roles import RoleSpan
from ..views.why import Detokenizer
from ..views.words import TOKENIZER, why_no_words, words_for
from .answering import answers

_MOST_RECALLED: Final = 131_072
"""Tokens of a ledger in which messages are told apart: each costs time as the ledger has tokens."""


@answers(ContentsRequest, told=False)
async def contents(parts: Parts, request: ContentsRequest) -> Contents:
    """Raises SessionNotFound, AmbiguousVersion, and the errors of a damaged manifest."""
    named = await parts.sessions.named(request.session, look=True)
    live = parts.sessions.awake.get(named.uri)
    if named.row is None and live is not None and not request.manifest:
        page = _page_of_live(live, _span(request, named.place_in(len(live.state.tokens))))
        found = await with_text(parts, page)
        return await _apart(parts, found, page, live.model, Dialogue.of(live)) if request.apart else found
    row = named.row or parts.store.standing.require_row(named.uri)
    page = await parts.store.on_look(
        partial(page_of, parts.store.disk, row, _span(request, named.place_in(row.token_count)))
    )
    if request.manifest:
        return replace(page.contents, manifest=await parts.store.on_look(lambda: _manifest_of(parts, row)))
    found = await with_text(parts, page)
    in_one_go = request.apart and any("+" in each.role for each in found.passages)
    model = parts.models.shelf.loaded_of(row) if in_one_go else None
    if model is None or row.token_count > _MOST_RECALLED:
        return found
    return await _apart(parts, found, page, model, await parts.sessions.recalling.dialogue_of(row))


def _span(request: ContentsRequest, place: int | None) -> Span:
    ends = [end for end in (request.end, place) if end is not None]
    return Span(request.start, min(ends, default=None), 1 if request.manifest else request.most, request.tokens)


async def spans_apart(parts: Parts, row: VersionInfo, model: LoadedModel) -> tuple[RoleSpan, ...]:
    """Whose the tokens of a version are, with messages apart that were read in one go; none where its session map tells
    as much. model: its own, in memory."""
    if row.token_count > _MOST_RECALLED:
        return ()
    page = await parts.store.on_look(partial(page_of, parts.store.disk, row, Span(most=row.token_count)))
    if not any("+" in role for _, _, role in page.spans):
        return ()
    found = await with_text(parts, page)
    found = await _apart(parts, found, page, model, await parts.sessions.recalling.dialogue_of(row))
    told = [(each.start, each.end, each.role) for each in found.passages if each.role is not None]
    end = told[-1][1] if told else 0
    return (*told, *((max(one, end), two, role) for one, two, role in page.spans if two > end))


async def with_text(parts: Parts, page: Page) -> Contents:
    """A page with its text: by the files of a tokenizer, else by that of a model in memory."""
    name, models = page.contents.model, list(parts.models.shelf.loaded())
    folders = [model.folder for model in models]

    def by_files() -> Contents | None:
        words = words_for(page.tokenizer, name, folders)
        return None if words is None else told(page, words.decode)

    if (found := await parts.store.on_look(by_files)) is not None:
        return found
    model = next((each for each in models if dict(each.identity.parts).get(TOKENIZER) == page.tokenizer), None)
    if model is None:
        return told(page, None, why_no_words(name))
    return await parts.models.encoder.with_detokenizer(model, lambda reader: told(page, reader.decode))


async def _apart(parts: Parts, found: Contents, page: Page, model: LoadedModel, dialogue: Dialogue) -> Contents:
    """The page with the messages apart that were read in one go, as far as their words are proven."""
    told = list[Passage]()
    for passage in found.passages:
        whole = (passage.role_start, passage.role_end) == (passage.start, passage.end)
        if "+" not in passage.role or not whole or passage.text is None or found.token_count > _MOST_RECALLED:
            told.append(passage)
            continue
        turns = [at for at, turn in enumerate(dialogue.text_map.turns) if turn.end == passage.end]
        messages = await parts.sessions.recalling.messages(model, dialogue, turns[0], turns[-1])
        said = [Said(each.role, each.content.strip()) for each in messages if each.certain]
        tokens = page.tokens[passage.start - page.contents.start : passage.end - page.contents.start]
        if len(said) != len(turns):
            told.append(passage)
            continue

        def split(
            reader: Detokenizer, passage: Passage = passage, tokens: Sequence[int] = tokens, said: list[Said] = said
        ) -> list[Passage]:
            opens = reader.controls - model.end_tokens
            return apart(passage, tokens, said, reader.decode, opens.__contains__)

        told += await parts.models.encoder.with_detokenizer(model, split)
    return replace(found, passages=tuple(told))


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
