"""Turns of awake sessions go into the remote some time after they were answered, so that they survive this machine.

A version that comes meanwhile has them, too. Turns behind a version that the remote does not have yet wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar

from ...memvid.format.journal import JournalRecord
from ...memvid.uri import SessionUri
from ..disk.remote import Remote
from ..options.current import CurrentOptions
from .loop import Job, Upkeep


class SendingTurns(Job[SessionUri]):
    """Sends the last turn of one session after the other."""

    name: ClassVar = "remote turns"

    def __init__(self, upkeep: Upkeep, remote: Remote, options: CurrentOptions) -> None:
        self._remote = remote
        self._options = options
        self._noted: dict[SessionUri, tuple[JournalRecord, float]] = {}
        super().__init__(upkeep)
        remote.on_turn = self._note
        remote.on_gone = self._let_go

    def _note(self, record: JournalRecord) -> None:
        after_s = self._options.now.remote_turns
        if after_s:  # at 0 each is sent before it is told
            _, due = self._noted.get(record.uri, (None, time.monotonic() + after_s))
            self._noted[record.uri] = record, due
            self.look_again()

    def due(self) -> Iterable[tuple[SessionUri, float]]:
        return [(uri, due) for uri, (_, due) in self._noted.items()]

    def _let_go(self, uri: SessionUri) -> None:
        """Of a session that was removed: a new one of its name has other turns."""
        self._noted.pop(uri, None)

    async def piece(self, uri: SessionUri) -> None:
        if uri not in self._noted:
            return
        record, _ = self._noted[uri]
        is_there = uri not in self._remote.leases or await self._remote.send_turns(record)
        if uri not in self._noted:
            return
        newest, _ = self._noted[uri]
        if is_there and newest is record:
            del self._noted[uri]
        else:
            self._noted[uri] = newest, time.monotonic() + (self._options.now.remote_turns or 0)
