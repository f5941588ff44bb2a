"""A store's files as they answer in the place of a daemon: methods of a client, with the same records.

Each method imports what it needs: a command that asks a daemon does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from ...daemon.api.limits import DEFAULT_HISTORY, MAX_PAGE_TOKENS
from ...daemon.views.stored import detail_of_stored, info_of_stored
from ...memvid.answers import UsageReport
from ...memvid.errors import Corruption
from ...memvid.format.blocks import SlotSpec
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ...memvid.writing.reader import BundleReader

if TYPE_CHECKING:
    from contextlib import ExitStack

    from ...daemon.api.blocks import BlocksResult
    from ...daemon.api.causes import By, CausesResult, WhyResult
    from ...daemon.api.contents import Contents
    from ...daemon.api.difference import Difference
    from ...daemon.api.history import HistoryResult
    from ...daemon.api.session import ListResult, SessionDetail
    from ...daemon.views.difference import Side

_ROWS_AT_ONCE = 1000


class Files:
    """The answers of an open store. They tell nothing of what is in memory, and text where its tokenizer is at hand."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def list_sessions(self, namespace: str | None = None) -> ListResult:
        """The last version of each session, by URI."""
        from ...daemon.api.session import ListResult

        pages = self.store.index.iter_listed(namespace, _ROWS_AT_ONCE)
        return ListResult(tuple(info_of_stored(*each, state="stored") for page in pages for each in page))

    def show(self, session: str) -> SessionDetail:
        """Its newest version, or the one that it names, without its text. Raises SessionNotFound, AmbiguousVersion."""

        def told(reader: BundleReader) -> tuple[list[str], str]:
            header = reader.read_header(reader.entries[0]) if reader.entries else None
            return _layers_of([spec for spec, _ in header.slots] if header else []), ""

        return detail_of_stored(self.store, self.store.resolve_version(session, look=True), "stored", told)

    def blocks(self, session: str, *, deep: bool = False) -> BlocksResult:
        """As `BlocksRequest` has it."""
        from ...daemon.views.blocks import blocks_of, blocks_unread
        from ...daemon.views.ledgers import Present, present_in_files

        named = self.store.named(session, look=True).require_whole()
        try:
            present = Present.of_version(named.row) if named.row else present_in_files(self.store, named.uri)
            return blocks_of(self.store, present, deep=deep)
        except Corruption as error:  # of its manifest
            return blocks_unread(named.row or self.store.require_session(named.uri), error)

    def why(self, session: str) -> WhyResult:
        """As `WhyRequest` has it."""
        from ...daemon.views import causes

        return causes.why(self.store, self.store.resolve(session))

    def causes(self, *, since: str | None = None, by: By = "cause", namespace: str | None = None) -> CausesResult:
        """As `CausesRequest` has it."""
        from ...daemon.views import causes

        return causes.causes(self.store, since=since, by=by, namespace=namespace)

    def history(
        self,
        sessions: Sequence[str] = (),
        *,
        namespace: str | None = None,
        since_ns: int = 0,
        limit: int = DEFAULT_HISTORY,
    ) -> HistoryResult:
        """As `HistoryRequest` has it."""
        from ...daemon.views.history import history_of

        named = [self.store.named(each, look=True) for each in sessions]
        return history_of(self.store, named, namespace=namespace, since_ns=since_ns, limit=limit)

    def usage(self) -> UsageReport:
        """As `UsageRequest` has it."""
        return self.store.usage()

    def contents(
        self,
        session: str,
        *,
        start: int = 0,
        end: int | None = None,
        tokens: bool = False,
        apart: bool = False,  # takes a model in memory
        manifest: bool = False,
    ) -> Contents:
        """As `ContentsRequest` has it, but for `apart`."""
        from ...daemon.views.contents import Span, manifest_text, page_of, told
        from ...daemon.views.words import why_no_words, words_for

        named = self.store.named(session, look=True)
        row = named.row or self.store.require_session(named.uri)
        ends = [each for each in (end, named.place_in(row.token_count)) if each is not None]
        span = Span(start, min(ends, default=None), 1 if manifest else MAX_PAGE_TOKENS, tokens)
        page = page_of(self.store, row, span)
        if manifest:
            with self.store.open_session(row.uri, row.bundle_id) as reader:
                return replace(page.contents, manifest=manifest_text(reader.manifest))
        words = words_for(page.tokenizer, row.model)
        return told(page, None if words is None else words.decode, "" if words else why_no_words(row.model))

    def newer_turns(self, session: str) -> SessionUri | None:
        """The session, if its newest version is meant and the journal has turns since."""
        named = self.store.named(session, look=True)
        return named.uri if named.row is None and self.store.has_turns(named.uri) else None

    def difference(self, session: str, other: str, *, tokens: bool = False) -> Difference:
        """As `DifferenceRequest` has it."""
        from contextlib import ExitStack

        from ...daemon.views.difference import difference_of
        from ...daemon.views.words import words_for

        with ExitStack() as stack:
            one, two = (self._side(each, stack) for each in (session, other))
            return difference_of(one, two, words_for, by_token=tokens)

    def _side(self, text: str, stack: ExitStack) -> Side:
        from ...daemon.views.difference import side_of

        named = self.store.named(text, look=True)
        row = named.row or self.store.require_session(named.uri)
        reader = stack.enter_context(self.store.open_session(row.uri, row.bundle_id))
        return side_of(reader, row, named.place_in(row.token_count))


def _layers_of(slots: Sequence[SlotSpec]) -> list[str]:
    """Describe each layer by its slots, which are named `LAYER.PART`. The daemon knows more of them, by their kinds."""
    layers = groupby(slots, key=lambda spec: spec.name.partition(".")[0])
    return [" + ".join(f"{spec.kind} {spec.dtype} {list(spec.shape)}" for spec in parts) for _, parts in layers]
