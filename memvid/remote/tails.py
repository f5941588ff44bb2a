"""Turns behind the newest version of a session, in a remote: a record of the journal, as an object that the head names.

A record says all that the version behind which it stands does not have, so the last one counts alone. Who takes the
session makes a version of it, as an opening does of a journal.
"""

from __future__ import annotations

import os
from typing import Final

from ..errors import CorruptBundle, CorruptJournal
from ..format.journal import JournalRecord
from ..format.sealing import DIGEST_BYTES
from ..limits import MAX_JOURNAL_RECORD_BYTES
from ..uri import SessionUri
from .heads import HEADS, TAILS, tails_of, uri_in
from .objects import Objects
from .sealing import seal, unseal
from .versions import RemoteVersions

_NAME_BYTES: Final = 8
_MOST_BYTES: Final = DIGEST_BYTES + MAX_JOURNAL_RECORD_BYTES


def put_record(versions: RemoteVersions, record: JournalRecord, store: str) -> str:
    """Write a record of a store, by the uuid of its party, under a key of its own; the key. Raises InvalidDraft,
    LimitExceeded, and as `RemoteVersions.write`."""
    key = f"{tails_of(record.uri)}/{store}.{os.urandom(_NAME_BYTES).hex()}"
    versions.write(key, seal(record.encode()))
    return key


def uri_of_tail(key: str) -> SessionUri | None:
    """The session whose turns have this key; None: no turns have it."""
    return uri_in(HEADS + key.removeprefix(TAILS).rpartition("/")[0])


def is_of(key: str, store: str) -> bool:
    """Whether a record is one of this store."""
    return key.rpartition("/")[2].startswith(f"{store}.")


def record_of(objects: Objects, key: str, uri: SessionUri) -> JournalRecord:
    """The record that a head names. Raises CorruptBundle: it is missing, damaged, or another session's; and as
    `Objects`."""
    path = f"{objects.url}/{key}"
    found = objects.get(key, _MOST_BYTES)
    if found is None:
        raise _corrupt(path, "it is missing")
    if (encoded := unseal(found.data)) is None:
        raise _corrupt(path, "its digest differs")
    try:
        record = JournalRecord.decode(encoded)
    except CorruptJournal as error:
        raise _corrupt(path, error.message.rstrip(".")) from error
    if record.uri != uri:
        raise _corrupt(path, f"it has turns of {record.uri}")
    return record


def _corrupt(path: str, why: str) -> CorruptBundle:
    return CorruptBundle(
        f"{path} has turns that were answered and that no version has, and cannot be read: {why}. Put it back, or let "
        "the machine that wrote it push the session.",
        path=path,
        part="tail",
    )
