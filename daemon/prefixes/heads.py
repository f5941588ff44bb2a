"""Heads: the places at which conversations can go on, found by what was said up to them.

A chain digest stands for the words up to a place: it covers the root and the digest of each message. The text maps of
the sessions give the chain digests. What counts beside the words is compared then, at each place that they
find. So a transcript finds the session that has read it, whatever the session's name, and no token is compared before.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from blake3 import blake3

from ...errors import TorporError
from ...memvid.store import Store
from ...memvid.uri import SessionUri
from ..api.dialogue import canonical
from ..disk.store_threads import StoreThreads
from ..engine.channels import id_of_call
from ..models.chat_template import Message, Root
from ..sessions.interrupted import DIGEST_BYTES, INTERRUPTED, Interrupted
from ..sessions.results import NOTHING
from ..sessions.said import Said, begun_chain, chained, is_alike
from ..sessions.sessions import Session
from ..sessions.transcripts import TextMap, Turn, goes_on
from ..sessions.turn_parts import BEYOND_LINE, packed_beyond
from ..sessions.unprocessed_tail import text_map_in, unread_in
from ..tasks.pieces import NAMES_AT_ONCE

MAX_HEADS: Final = 1_000_000
"""Places of all sessions together, about 250 bytes each. Beyond it, the oldest sessions of the namespace with the most
places are no longer found by what was said, until they say more."""

_NAMES: Final = frozenset({"answer_id", "tool_calls"})
"""Fields by which a message may name an answer."""


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


@dataclass(frozen=True, slots=True)
class Chain:
    """A transcript, with the chain digest behind each message. places: behind how many of them a conversation can go
    on, the most first. naming: those that may name an answer, the last first, each with its digest."""

    said: Sequence[Said]
    digests: Sequence[bytes]
    places: Sequence[int]
    naming: Sequence[tuple[bytes, Message]]

    @classmethod
    def of(cls, messages: Sequence[Message], root: bytes, *, to_end: bool = True) -> Chain:
        """root: its digest. to_end: whether its own end is a place. Any thread may make it."""
        said, chain, digests = [Said.of(message) for message in messages], begun_chain(root), list[bytes]()
        for each in said:
            chain = chained(chain, each.digest)
            digests.append(chain)
        places = [kept for kept in range(len(said) - (not to_end), 0, -1) if goes_on(messages, kept)]
        naming = [(digests[at], message) for at, message in enumerate(messages) if message.keys() & _NAMES]
        return cls(said, digests, places, naming[::-1])


@dataclass(slots=True)
class _Words:
    """The words of a session, as of its text map. number: its own, for `Heads`. keys, ends, marks: of each turn where
    its head is, its end, and what tells it from another with the same words. beyond: `packed_beyond`. tokens: of its
    ledger. midway: where the head before a request is that was given up, and the token at which that begins."""

    uri: SessionUri
    number: int
    model: str
    keys: list[bytes] = field(default_factory=list)
    ends: array[int] = field(default_factory=lambda: array("Q"))
    marks: array[int] = field(default_factory=lambda: array("q"))
    answers: dict[int, bytes] = field(default_factory=dict)
    beyond: bytes = b""
    tokens: int = 0
    midway: tuple[bytes, int] | None = None

    def in_common(self, model: str, turns: Sequence[Turn]) -> int:
        """How many of the first turns it has as these are."""
        if model != self.model:
            return 0
        pairs = enumerate(zip(self.keys, self.marks, turns, strict=False))
        shorter = min(len(self.keys), len(turns))
        return next((at for at, (key, mark, turn) in pairs if key != turn.chain or mark != _mark_of(turn)), shorter)

    def head(self, at: int) -> Head | None:
        """The head behind a turn; None if no place is there."""
        is_last = at == len(self.keys) - 1
        if not is_last and self.ends[at + 1] == self.ends[at]:
            return None
        end = self.ends[at]
        return Head(self.uri, at + 1, end, is_last and end == self.tokens, self.model, self.answers.get(at, b""))


def _mark_of(turn: Turn) -> int:
    return hash((turn.end, turn.answer, turn.own, turn.beyond))


class Heads:
    """The heads of all sessions, awake and asleep. The event loop's, but for the reading of session maps."""

    def __init__(self, store: Store, threads: StoreThreads) -> None:
        self._store = store
        self._threads = threads
        # Turns by the numbers of their sessions, and no objects: Python's collector does not look at such a map.
        self._at: dict[bytes, dict[int, int]] = {}
        self._of: dict[SessionUri, _Words] = {}
        self._by_number: dict[int, _Words] = {}
        self._numbers = itertools.count()
        self._counts = Counter[str]()  # places by namespace
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
        self._put(session.uri, session.model.name, session.chat.text_map, tokens, session.left_midway)

    async def learn(self, uri: SessionUri) -> None:
        """Learn a sleeping session. One that is damaged or gone has no heads."""
        try:
            found = await self._threads.on_io(partial(self._read, uri))
        except TorporError:
            self.forget(uri)
            return
        self._put(uri, *found)

    def forget(self, uri: SessionUri) -> None:
        words = self._of.pop(uri, None)
        if words is not None:
            self._cut(words, 0)
            del self._by_number[words.number]

    def find(self, namespace: str, model: str, chain: Chain) -> list[Head]:
        """The heads with the longest beginning of a transcript, in one namespace; none if no session has any of it. If
        it names an answer, of the sessions alone that have that answer behind the same words."""
        named = self._named(namespace, chain)
        alike: dict[SessionUri, int] = {}
        for kept in chain.places:
            heads = self._heads_at(chain.digests[kept - 1], namespace)
            heads = [head for head in heads if head.model == model and self._is_alike(head, chain, alike)]
            if named:
                heads = [replace(head, is_named=True) for head in heads if head.uri in named]
            if heads:
                return heads
        return []

    def _is_alike(self, head: Head, chain: Chain, known: dict[SessionUri, int]) -> bool:
        """Whether the messages before a head are those of its session beside their words, too. known: up to which
        message those of a session are."""
        if head.uri not in known:
            known[head.uri] = _alike(self._of[head.uri].beyond, chain.said[: head.messages])
        return head.messages <= known[head.uri]

    def _named(self, namespace: str, chain: Chain) -> set[SessionUri]:
        """The sessions with the last answer that a transcript names."""
        for digest, message in chain.naming:
            named = {head.uri for head in self._heads_at(digest, namespace) if head.is_named_by(message)}
            if named:
                return named
        return set()

    def behind(self, namespace: str | None, answer: bytes) -> list[Head]:
        """The heads behind an answer, by its id, in one namespace or in all: several where forks share it."""
        return self._heads_at(_key_of("answer", answer), namespace)

    def left_midway(self, namespace: str, request: bytes) -> list[Head]:
        """The places before the messages of a request that was given up in its midst, in one namespace."""
        found = [self._by_number[number] for number in self._at.get(_key_of("request", request), {})]
        known = [(words, words.midway) for words in found if words.uri.namespace == namespace]
        return [Head(of.uri, 0, midway[1], is_last=True, model=of.model) for of, midway in known if midway is not None]

    def _heads_at(self, key: bytes, namespace: str | None) -> list[Head]:
        found = ((self._by_number[number], at) for number, at in self._at.get(key, {}).items())
        heads = (words.head(at) for words, at in found if namespace in (None, words.uri.namespace))
        return [head for head in heads if head is not None]

    def _put(self, uri: SessionUri, model: str, text_map: TextMap, tokens: int, midway: Interrupted | None) -> None:
        """Note what a session has said. It costs as much as is new."""
        turns, words = text_map.said, self._of.get(uri) or self._new(uri, model)
        self._cut(words, kept := words.in_common(model, turns))
        if not self._make_room(words, 2 * (len(turns) - kept) + 1):
            return
        for at, turn in enumerate(turns[kept:], kept):
            words.keys.append(turn.chain)
            self._set(words, turn.chain, at)
            if turn.answer:
                words.answers[at] = turn.answer
                # Clients make the ids up: one that was given twice names its last answer.
                self._set(words, _key_of("answer", turn.answer), at)
        words.ends.extend(turn.end for turn in turns[kept:])
        words.marks.extend(map(_mark_of, turns[kept:]))
        words.beyond += packed_beyond(turns[kept:], kept)
        words.model, words.tokens = model, tokens
        if midway is not None:
            words.midway = _key_of("request", midway.request), midway.begins_at
            self._set(words, words.midway[0], 0)

    def _make_room(self, words: _Words, places: int) -> bool:
        """Forget sessions until a session may have so many places more. False if it is forgotten itself."""
        while self._counts.total() + places > MAX_HEADS:
            most = max(self._counts, key=self._counts.__getitem__, default=words.uri.namespace)
            # The first in the map is the oldest.
            oldest = next((each for each in self._of.values() if each.uri.namespace == most), words)
            self.forget(oldest.uri)
            if oldest is words:
                return False
        return True

    def _new(self, uri: SessionUri, model: str) -> _Words:
        words = self._of[uri] = _Words(uri, next(self._numbers), model)
        self._by_number[words.number] = words
        return words

    def _set(self, words: _Words, key: bytes, at: int) -> None:
        of = self._at.setdefault(key, {})
        self._counts[words.uri.namespace] += words.number not in of
        of[words.number] = at

    def _unset(self, words: _Words, key: bytes) -> None:
        of = self._at.get(key, {})
        if of.pop(words.number, None) is not None:
            self._counts[words.uri.namespace] -= 1
            if not of:
                del self._at[key]

    def _cut(self, words: _Words, kept: int) -> None:
        """Forget all behind its first turns."""
        if words.midway is not None:
            self._unset(words, words.midway[0])
            words.midway = None
        for key in words.keys[kept:]:
            self._unset(words, key)
        gone = {words.answers.pop(at) for at in range(kept, len(words.keys)) if at in words.answers}
        for answer in gone:
            self._unset(words, _key_of("answer", answer))
        for at, answer in words.answers.items() if gone else ():
            if answer in gone:
                self._set(words, _key_of("answer", answer), at)
        del words.keys[kept:], words.ends[kept:], words.marks[kept:]
        size = len(words.beyond)
        while size and BEYOND_LINE.unpack_from(words.beyond, size - BEYOND_LINE.size)[0] >= kept:
            size -= BEYOND_LINE.size
        words.beyond = words.beyond[:size]

    def _read(self, uri: SessionUri) -> tuple[str, TextMap, int, Interrupted | None]:
        with self._store.open_session(uri) as reader:
            kept: Mapping[str, Any] = reader.manifest.session
            unread, tokens = unread_in(kept, uri), reader.manifest.block_tokens
            try:
                text_map = text_map_in(kept, uri)
                end = tokens if unread is None else unread.start + len(unread.tokens)
                return str(kept["model"]), text_map, end, Interrupted.from_map(kept.get(INTERRUPTED), end)
            except (KeyError, ValueError):
                return "", TextMap(), 0, None  # its next wake reports it

    async def _learn_stored(self) -> None:
        for uri in itertools.chain.from_iterable(self._store.index.iter_uris(NAMES_AT_ONCE)):
            if uri not in self._of:
                await self.learn(uri)


def _alike(beyond: bytes, said: Sequence[Said]) -> int:
    """How many of the first messages are those of a session beside their words. beyond: of the session."""
    unlike, kept = len(said), set()
    for at, own, each in BEYOND_LINE.iter_unpack(beyond):
        if at >= len(said):
            break
        kept.add(at)
        if not is_alike(said[at], each, own=bool(own)):
            unlike = at
            break
    return next((at for at, each in enumerate(said[:unlike]) if each.exact != NOTHING and at not in kept), unlike)


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
