"""Heads: the places at which conversations can go on, found by what was said up to them.

A chain digest stands for the words up to a place: it covers the model, the root and the digest of each message. The
text maps of the sessions give the chain digests. What counts beside the words is compared then, at each place that they
find. So a transcript finds the session that has read it, whatever the session's name, and no token is compared before.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from blake3 import blake3

from ...errors import TorporError
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.dialogue import canonical
from ..engine.channels import id_of_call
from ..models.chat_template import Message, Root
from ..sessions.interrupted import DIGEST_BYTES, INTERRUPTED, Interrupted
from ..sessions.sessions import Session
from ..sessions.transcripts import BEYOND_LINE, NOTHING, Said, TextMap, goes_on, is_alike, packed_beyond
from ..sessions.unprocessed_tail import text_map_in, unread_in
from ..sleep.store_threads import StoreThreads
from ..tasks.pieces import NAMES_AT_ONCE

MAX_HEADS: Final = 1_000_000
"""Places of all sessions together, about 250 bytes each. Sessions beyond that are not found by what was said."""


@dataclass(frozen=True, slots=True)
class Head:
    """A place in a session. messages: of a transcript, before it. at: tokens before it. is_last: whether the session
    goes on no further. model: the name of its model. answer: the id of the answer before it; empty without one.
    is_named: whether a transcript names an answer of the session."""

    uri: SessionUri
    messages: int
    at: int
    is_last: bool
    model: str
    answer: bytes = b""
    is_named: bool = False

    def is_named_by(self, message: Message) -> bool:
        """Whether a message that stands just before it names the answer: by its id, or that of one of its calls."""
        if not self.answer:
            return False
        calls = enumerate(message.get("tool_calls", ()), 1)
        names = message.get("answer_id") == self.answer.hex()
        return names or any(call.get("id") == id_of_call(self.answer, number) for number, call in calls)


class Heads:
    """The heads of all sessions, awake and asleep. The event loop's, but for the reading of session maps."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        self._at: dict[bytes, dict[SessionUri, Head]] = {}
        self._of: dict[SessionUri, tuple[bytes, ...]] = {}
        self._beyond: dict[SessionUri, bytes] = {}  # `packed_beyond` of each
        self._count = 0
        self._learning: asyncio.Task[None] | None = None

    def learn_stored(self) -> None:
        """Begin to read the text maps of sleeping sessions in the background."""
        self._learning = asyncio.ensure_future(self._learn_stored())

    async def close(self) -> None:
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait({self._learning})

    async def learned(self) -> None:
        """Wait until all sessions that slept at the start are known."""
        if self._learning is not None:
            await asyncio.wait({self._learning})

    def note(self, session: Session) -> None:
        tokens = len(session.state.tokens)
        self._put(session.uri, session.model.name, session.text_map, tokens, session.left_midway)

    async def learn(self, uri: SessionUri) -> None:
        """Learn a sleeping session. One that is damaged or gone has no heads."""
        try:
            found = await self._threads.on_io(partial(self._read, uri))
        except TorporError:
            self.forget(uri)
            return
        self._put(uri, *found)

    def forget(self, uri: SessionUri) -> None:
        self._beyond.pop(uri, None)
        for digest in self._of.pop(uri, ()):
            heads = self._at[digest]
            del heads[uri]
            self._count -= 1
            if not heads:
                del self._at[digest]

    def find(self, namespace: str, model: str, root: bytes, messages: Sequence[Message]) -> list[Head]:
        """The heads with the longest beginning of a transcript, in one namespace; none if no session has any of it. If
        it names an answer, of the sessions alone that have that answer behind the same words. root: its digest."""
        said = [Said.of(message) for message in messages]
        chain = list(_chain(model, root, [each.digest for each in said]))
        named = self._named(namespace, chain, messages)
        for kept in range(len(said), 0, -1):
            if not goes_on(messages, kept):
                continue
            heads = [head for head in self._heads_at(chain[kept - 1], namespace) if self._is_alike(head, said)]
            if named:
                heads = [replace(head, is_named=True) for head in heads if head.uri in named]
            if heads:
                return heads
        return []

    def _is_alike(self, head: Head, said: Sequence[Said]) -> bool:
        """Whether the messages before a head are those of its session beside their words, too."""
        kept = {at: (beyond, own) for at, own, beyond in BEYOND_LINE.iter_unpack(self._beyond[head.uri])}
        wanted = (at for at, each in enumerate(said[: head.messages]) if each.exact != NOTHING)
        return all(at in kept for at in wanted) and all(
            is_alike(said[at], beyond, own=bool(own)) for at, (beyond, own) in kept.items() if at < head.messages
        )

    def _named(self, namespace: str, chain: Sequence[bytes], messages: Sequence[Message]) -> set[SessionUri]:
        """The sessions with the last answer that a transcript names."""
        for digest, message in zip(reversed(chain), reversed(messages), strict=True):
            heads = self._at.get(digest, {}).items() if message["role"] == "assistant" else ()
            named = {uri for uri, head in heads if uri.namespace == namespace and head.is_named_by(message)}
            if named:
                return named
        return set()

    def behind(self, namespace: str | None, answer: bytes) -> list[Head]:
        """The heads behind an answer, by its id, in one namespace or in all: several where forks share it."""
        return self._heads_at(_key_of("answer", answer), namespace)

    def left_midway(self, namespace: str, request: bytes) -> list[Head]:
        """The places before the messages of a request that was given up in its midst, in one namespace."""
        return self._heads_at(_key_of("request", request), namespace)

    def _heads_at(self, key: bytes, namespace: str | None) -> list[Head]:
        return [head for uri, head in self._at.get(key, {}).items() if namespace in (None, uri.namespace)]

    def _put(self, uri: SessionUri, model: str, text_map: TextMap, tokens: int, midway: Interrupted | None) -> None:
        self.forget(uri)
        turns = text_map.turns
        if self._count + 2 * len(turns) + 1 > MAX_HEADS:
            return
        places: dict[bytes, Head] = {}
        if midway is not None:
            head = Head(uri, 0, midway.begins_at, is_last=True, model=model)
            places[_key_of("request", midway.request)] = head
        for at, digest in enumerate(_chain(model, text_map.root, [turn.digest for turn in turns])):
            end, is_last = turns[at].end, at == len(turns) - 1
            if is_last or turns[at + 1].end > end:
                answer = turns[at].answer
                head = Head(uri, at + 1, end, is_last and end == tokens, model, answer)
                # Clients make the ids up: one that was given twice names its last answer.
                places.update(dict.fromkeys((digest, _key_of("answer", answer)) if answer else (digest,), head))
        for key, head in places.items():
            self._at.setdefault(key, {})[uri] = head
        self._of[uri], self._beyond[uri] = tuple(places), packed_beyond(turns)
        self._count += len(places)

    def _read(self, uri: SessionUri) -> tuple[str, TextMap, int, Interrupted | None]:
        with self._store.open_session(uri) as reader:
            kept: Mapping[str, Any] = reader.manifest.session
            unread, tokens = unread_in(kept, uri), reader.manifest.token_count
            try:
                text_map = text_map_in(kept, uri)
                end = tokens if unread is None else unread.start + len(unread.tokens)
                return str(kept["model"]), text_map, end, Interrupted.from_map(kept.get(INTERRUPTED), end)
            except (KeyError, ValueError):
                return "", TextMap(), 0, None  # its next wake reports it

    async def _learn_stored(self) -> None:
        for uri in itertools.chain.from_iterable(self._store.iter_uris(NAMES_AT_ONCE)):
            if uri not in self._of:
                await self.learn(uri)


def _key_of(what: str, name: bytes) -> bytes:
    """Where the heads of an answer or of a request are: no id that a client makes up stands for a chain digest."""
    return blake3(f"{what}\0".encode() + name).digest(16)


def digest_of_request(model: str, root: Root, messages: Sequence[Message], *how: object) -> bytes:
    """A digest of all that decides an answer. how: else than the messages, as JSON values."""
    said = [Said.of(message) for message in messages]
    *_, last = _chain(
        model, root.to_text().encode("utf-8", "surrogatepass"), [each.digest + each.exact for each in said]
    )
    return blake3(last + canonical(how).encode("utf-8", "surrogatepass")).digest(DIGEST_BYTES)


def _chain(model: str, root: bytes, digests: Iterable[bytes]) -> Iterator[bytes]:
    """The chain digest behind each turn."""
    digest = blake3(f"{model}\0".encode() + root).digest()
    for each in digests:
        digest = blake3(digest + each).digest(16)
        yield digest
