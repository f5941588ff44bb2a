"""An answer in company that is not that of a fresh daemon, explained: by what its session's ledger has kept.

A fresh daemon reads a dialogue anew. A session keeps its answers as they were written, so its ledger may differ from
what the fresh one reads, and then their answers may. That is right if the ledger is the transcript, but for the named
differences (`comparing.py`); if its answer is the one that a fresh daemon gives to these very tokens; and if what was
told is what stands there.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torpor.daemon.models.chat_template import Root
from torpor.daemon.models.models import load_model
from torpor.daemon.sessions.transcripts import Turn
from torpor.daemon.sessions.unprocessed_tail import text_map_in
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.state import token_array
from torpor.socket_api.http.chat_completions import _order
from torpor.socket_api.http.json_reading import object_of
from torpor.socket_api.http.turns import Turn as Asked
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.comparing import Explained, Said, compare
from torpor.tests.dialogues.oracle import message_in, shown_of
from torpor.tests.dialogues.rendering import STAND_INS, Message, Rendering

PASSED_OVER: Final = "passed over"
"""A dialogue that has in it what the rendering needs for itself."""


@dataclass(frozen=True)
class Ledger:
    """The tokens of a session, and its messages."""

    tokens: list[int]
    turns: Sequence[Turn]

    @classmethod
    def of(cls, store: Path, session: str) -> Ledger:
        """As the newest version has it."""
        uri = SessionUri.parse(session)
        with closing(Store.open(store, writable=False)) as opened, opened.open_session(uri) as reader:
            return cls(list(token_array(reader.tokens())), text_map_in(reader.manifest.session, uri).turns)


class Explaining:
    """Explains answers of one model."""

    def __init__(self, folder: Path, family: Family) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            self._model = load_model(family.name, str(folder), DigestCache(Path(scratch) / "digests"))
        self._rendering = Rendering(self._model, family)

    def ledger_of(self, ledger: Ledger, body: bytes, written: int) -> Explained:
        """Whether a ledger that ends with an answer is, in front of it, what a request asks. body: the request's.
        written: tokens of the answer."""
        if any(stand_in in body.decode() for stand_in in STAND_INS.values()):
            return Explained(Counter({PASSED_OVER: 1}))
        asked = asked_in(body)
        messages, root = asked.messages, root_of(asked)
        names: Counter[str] = Counter()
        whole = self._rendering.tokens(messages, root, seen=names)
        said = list(self._said(ledger, messages, root))
        explained = compare(self._rendering, ledger.tokens[: len(ledger.tokens) - written], whole, said, messages)
        if not explained.fault and not explained.names:
            explained.fault = "the ledger is what a fresh daemon reads, so the answer should be the same"
        return explained

    def told(self, ledger: Ledger, body: bytes, written: int) -> Message:
        """What a client is shown of the answer at a ledger's end."""
        asked, tokens = asked_in(body), ledger.tokens
        return self._shown(tokens, len(tokens) - written, len(tokens), root_of(asked))

    def _said(self, ledger: Ledger, messages: Sequence[Message], root: Root) -> Iterator[Said]:
        for number, (before, turn) in enumerate(zip(ledger.turns, ledger.turns[1:], strict=False), 1):
            if turn.own and number < len(messages):
                shown = self._shown(ledger.tokens, before.end, turn.end, root)
                opening, _ = self._rendering.opened(messages[:number], shown, root)
                is_cut = ledger.tokens[turn.end - 1] not in self._model.end_tokens
                yield Said(number, messages[number], shown, opening, before.end, turn.end, is_cut)

    def _shown(self, tokens: Sequence[int], start: int, end: int, root: Root) -> dict[str, Any]:
        is_cut = tokens[end - 1] not in self._model.end_tokens
        return message_in(shown_of(self._model, tokens[:start], tokens[start:end], root, is_cut=is_cut))


def root_of(asked: Asked) -> Root:
    """What stands before the messages."""
    return Root(tuple(asked.tools), asked.template_arguments)


def asked_in(body: bytes) -> Asked:
    """The dialogue that a chat completion asks for, as the daemon takes it."""
    asked = _order(object_of(body)).asked
    assert isinstance(asked, Asked)
    return asked
