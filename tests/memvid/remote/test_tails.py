"""The records of turns in a remote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from torpor.memvid.limits import MAX_NAME_CHARS
from torpor.memvid.remote.heads import Head
from torpor.memvid.remote.tails import is_of, put_record, record_of
from torpor.memvid.remote.versions import RemoteVersions
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.remote.faulty_objects import FaultyObjects, MemoryObjects
from torpor.tests.memvid.store_making import URI

STORE = "00000000-0000-5000-8000-000000000001"


def test_a_session_of_the_longest_name_has_turns_there(tmp_path: Path) -> None:
    """A head may name their key."""
    uri, bucket = SessionUri("N" * MAX_NAME_CHARS, "S" * MAX_NAME_CHARS), MemoryObjects()
    with Store.open(tmp_path, writable=True) as store:
        making.sleep(store, 300)
        record = dataclasses.replace(making.turn(store, 3), uri=uri)
    key = put_record(RemoteVersions(bucket), record, STORE)
    head = Head(uri, 1, 60, tail=(key,), revision=1, token=bytes(16))
    assert Head.decode(head.encode(), "it") == head
    assert record_of(bucket, key, uri) == record
    assert is_of(key, STORE)
    assert not is_of(key, STORE[:-1] + "2")


@pytest.mark.parametrize("fault", ["lost", "unclear", "conflict", "landed_twice"])
def test_a_record_is_there_once_it_has_a_key(
    fault: Literal["lost", "unclear", "conflict", "landed_twice"], tmp_path: Path
) -> None:
    """Some object stores answer 409 to a write that met itself, though neither landed. A head that named such a record
    would keep the session from every other machine."""
    bucket = MemoryObjects()
    with Store.open(tmp_path, writable=True) as store:
        making.sleep(store, 300)
        record = making.turn(store, 3)
    key = put_record(RemoteVersions(FaultyObjects(bucket, {0: fault})), record, STORE)
    assert record_of(bucket, key, URI) == record
