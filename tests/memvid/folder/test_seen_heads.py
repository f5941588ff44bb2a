"""How new heads were is known to the next daemon, tells no name, and costs nothing when it is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.errors import HeadReplayed, NoSpace
from torpor.memvid.folder import seen_heads
from torpor.memvid.folder.folder import StoreFolder
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.limits import MAX_SEEN_HEADS
from torpor.memvid.uri import SessionUri

URI = SessionUri("work", "notes")
PLACE = "s3://bucket/team"


def refuses(heads: SeenHeads, revision: int | None, uri: SessionUri = URI, url: str = PLACE) -> bool:
    try:
        heads.require_new(url, uri, revision, heads.newest(url, uri))
    except HeadReplayed:
        return True
    return False


def test_what_was_seen_is_known_after_a_restart(folder: StoreFolder) -> None:
    heads = SeenHeads(folder)
    assert not refuses(heads, None)
    heads.note(PLACE, URI, 7)
    heads.note(PLACE, URI, 5)
    heads.save()
    for each in (heads, SeenHeads(folder)):
        assert [revision for revision in (None, 1, 6, 7, 8) if refuses(each, revision)] == [None, 1, 6]
        assert not refuses(each, 1, SessionUri("work", "other"))
    assert not refuses(heads, 1, url="s3://bucket/other"), "that is another remote's head"


def test_a_refusal_says_what_was_seen_and_what_to_do(folder: StoreFolder) -> None:
    heads = SeenHeads(folder)
    heads.note(PLACE, URI, 7)
    with pytest.raises(HeadReplayed, match=r"had revision 7 .* this one has revision 2\.") as caught:
        heads.require_new(PLACE, URI, 2, heads.newest(PLACE, URI))
    assert f"remove {folder.path}/heads.json" in caught.value.message
    assert "torpor forget" not in caught.value.message
    assert (caught.value.seen, caught.value.found, caught.value.session) == (7, 2, str(URI))
    with pytest.raises(HeadReplayed, match=r"there is none now\. .* \(`torpor forget torpor://work/notes`\)"):
        heads.require_new(PLACE, URI, None, heads.newest(PLACE, URI))


def test_the_file_names_nobody_and_is_written_when_it_has_something_new(folder: StoreFolder) -> None:
    heads, file = SeenHeads(folder), Path(folder.path, "heads.json")
    heads.save()
    assert not file.exists()
    heads.note(PLACE, URI, 1)
    assert not file.exists()
    heads.save()
    before = file.stat()
    heads.note(PLACE, URI, 1)
    heads.save()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for text in (b"notes", b"work", b"bucket"):
        assert text not in file.read_bytes()


def test_a_forgotten_session_begins_anew(folder: StoreFolder) -> None:
    heads = SeenHeads(folder)
    heads.note(PLACE, URI, 7)
    heads.save()
    heads.note("s3://bucket/other", URI, 3)
    heads.note(PLACE, SessionUri("work", "other"), 2)
    assert heads.knows(URI)
    with mock.patch.object(durable, "write_file", side_effect=NoSpace("full")), pytest.raises(NoSpace):
        heads.forget(URI)
    heads.forget(URI)
    for each in (heads, SeenHeads(folder)):
        assert not each.knows(URI)
        assert not refuses(each, None)
        assert not refuses(each, None, url="s3://bucket/other")
        assert refuses(each, 1, SessionUri("work", "other"))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data.replace(b"7", b"8"),
        lambda data: b"[" * 60_000,
        lambda data: seen_heads._FORMAT.encode({"heads": 5}),
        lambda data: seen_heads._FORMAT.encode({"heads": [["00" * 16, 1]]}),
        lambda data: seen_heads._FORMAT.encode({"heads": [[[], "00" * 16, 1]]}),
        lambda data: seen_heads._FORMAT.encode({"heads": [[*seen_heads._key(PLACE, URI), 7.5]]}),
        lambda data: seen_heads._FORMAT.encode({"heads": [[*seen_heads._key(PLACE, URI), "7"]]}),
        lambda data: seen_heads._FORMAT.encode({"heads": [None]}),
        lambda data: seen_heads._FORMAT.encode({}),
    ],
)
def test_a_damaged_file_counts_as_none_and_is_written_anew(
    spoil: Callable[[bytes], bytes], folder: StoreFolder
) -> None:
    file = Path(folder.path, "heads.json")
    heads = SeenHeads(folder)
    heads.note(PLACE, URI, 7)
    heads.save()
    file.write_bytes(spoil(file.read_bytes()))
    again = SeenHeads(folder)
    assert not refuses(again, 1)
    again.note(PLACE, URI, 2)
    again.save()
    assert refuses(SeenHeads(folder), 1)


def test_a_full_disk_refuses_nothing_and_the_next_change_writes_all(folder: StoreFolder) -> None:
    heads = SeenHeads(folder)
    heads.note(PLACE, URI, 7)
    with mock.patch.object(durable, "write_file", side_effect=NoSpace("full")):
        heads.save()
    assert refuses(heads, 6)
    assert not refuses(SeenHeads(folder), 6)
    heads.save()
    assert refuses(SeenHeads(folder), 6)


def test_a_full_file_lets_go_of_what_was_noted_longest_ago(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_heads, "MAX_SEEN_HEADS", 4)
    heads = SeenHeads(folder)
    uris = [SessionUri("work", f"s{number}") for number in range(6)]
    for uri in (*uris[:4], uris[0], *uris[4:]):
        heads.note(PLACE, uri, 2 if uri is not uris[0] else 2 + refuses(heads, 1, uri))
    heads.save()
    kept = [uri for uri in uris if refuses(SeenHeads(folder), 1, uri)]
    assert kept == [uris[0], *uris[3:]]


def test_as_many_as_there_may_be_are_read_back(folder: StoreFolder) -> None:
    heads = SeenHeads(folder)
    for number in range(MAX_SEEN_HEADS):
        heads.note(PLACE, SessionUri("work", f"s{number}"), (1 << 53) - 1)
    heads.save()
    again = SeenHeads(folder)
    assert len(again._revisions) == MAX_SEEN_HEADS
    assert refuses(again, 1, SessionUri("work", "s0"))
