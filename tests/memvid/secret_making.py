"""A session that is to be forgotten, and forks of it."""

from __future__ import annotations

import contextlib

from torpor.memvid.writing.rewriting import Contents, prepared
from torpor.tests.memvid.store_making import (
    IDENTITY,
    OTHER_URI,
    Receipt,
    SessionUri,
    Store,
    drafts,
)

SECRET = SessionUri("private", "zyx-secret-session")


TEXT = "the-words-of-a-secret-conversation"


THIRD = SessionUri("default", "third")


def sleep_secret(store: Store, tokens: int, *, before: Receipt | None = None, seed: int = 7) -> Receipt:
    reused = [entry for entry in before.entries if entry.kind == "span" and entry.token_count == 256] if before else []
    return store.write_bundle(
        uri=SECRET,
        identity=IDENTITY,
        parent=before.bundle_id if before else None,
        reused=reused,
        blocks=drafts(tokens, first=reused[-1].end if reused else 0, seed=seed),
        session={"transcript": TEXT, "labels": ["hush-label"]},
        token_count=tokens,
    )


def fork(store: Store, tokens: int, before: Receipt, uri: SessionUri = OTHER_URI, seed: int = 9) -> Receipt:
    """A session of its own that goes on where the other was: other tokens and other bytes from there."""
    reused = [entry for entry in before.entries if entry.kind == "span" and entry.token_count == 256]
    return store.write_bundle(
        uri=uri,
        identity=IDENTITY,
        parent=before.bundle_id,
        reused=reused,
        blocks=drafts(tokens, first=reused[-1].end, seed=seed),
        session={"model": "demo"},
        token_count=tokens,
    )


def adopt(store: Store, into: Receipt, source: Receipt) -> None:
    """What a compaction does: a live bundle's file takes in the frames of another one."""
    core = store._core
    with contextlib.closing(core.open_bundle(into.bundle_id)) as file:
        own = [(block, into.bundle_id) for block in file.frames]
    with contextlib.closing(core.open_bundle(source.bundle_id)) as file:
        other = [(block, source.bundle_id) for block in file.frames]
    with prepared(core, into.bundle_id, Contents([*own, *other], {})) as fresh:
        assert fresh.commit()
