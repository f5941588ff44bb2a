"""What a history tells of versions is what the files have: where each came from, in an order that a graph can draw."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.history import HistoryEntry
from torpor.daemon.api.session import Origin
from torpor.daemon.views.history import history_of, in_order
from torpor.memvid.errors import InvalidUri
from torpor.memvid.folder.folder import manifest_name
from torpor.memvid.format.records import Receipt
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid import store_making as making

AGENT = making.URI
FORK, DEEP, FOLD, TREE, LEAF = (SessionUri("default", name) for name in ("fork", "deep", "fold", "tree", "tree.1"))
LAB = SessionUri("lab", "heir")


def origin(of: Receipt, tokens: int = 300) -> dict[str, Any]:
    return {"session": str(of.uri), "version": of.version, "bundle_id": of.bundle_id, "tokens": tokens}


def heir(store: Store, uri: SessionUri, of: Receipt, **session: Any) -> Receipt:
    """The next version of a session, with all that a version has."""
    count = of.block_tokens
    return making.write(store, (), count, uri=uri, parent=of.bundle_id, reused=of.entries, session=session)


def fold(store: Store, of: Receipt) -> Receipt:
    return making.write(
        store, making.drafts(44, seed=5), 44, uri=FOLD, parent=of.bundle_id, session={"folded_from": origin(of, 600)}
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """agent@1, from which come agent@2 (and from that fold@1), agent@3, and fork@1, deep@1 and lab/heir@1 in a row."""
    with Store.open(tmp_path / "store", writable=True) as opened:
        first = making.sleep(opened, 300)
        second = making.sleep(opened, 600, before=first)
        fork = heir(opened, FORK, first, forked_from=origin(first))
        deep = heir(opened, DEEP, fork, forked_from=origin(fork))
        heir(opened, LAB, deep, forked_from=origin(deep))
        fold(opened, second)
        making.sleep(opened, 310, before=first)
        yield opened


def told(store: Store, *sessions: SessionUri | str, limit: int = 99, **asked: Any) -> dict[str, HistoryEntry]:
    """The entries by the names of their versions, in their order."""
    named = [store.named(str(each), look=True) for each in sessions]
    entries = history_of(store, named, limit=limit, **asked).entries
    return {f"{each.uri.name}@{each.version}": each for each in entries}


def test_all_versions_are_told_the_newest_first_each_with_how_it_came_about(store: Store) -> None:
    found = told(store)
    assert {name: (each.way, each.added_tokens) for name, each in found.items()} == {
        "agent@3": ("went_back", 10),
        "fold@1": ("folded", 44),
        "heir@1": ("forked", 0),
        "deep@1": ("forked", 0),
        "fork@1": ("forked", 0),
        "agent@2": ("went_on", 300),
        "agent@1": ("began", 300),
    }
    assert list(found) == ["agent@3", "fold@1", "heir@1", "deep@1", "fork@1", "agent@2", "agent@1"]
    first = found["agent@1"]
    assert found["fork@1"].origin == Origin(str(AGENT), 1, first.bundle_id, 300)
    assert (found["agent@3"].follows, found["agent@3"].parent_version) == (first.bundle_id, 1)
    assert (found["agent@3"].back_at, {each.back_at for name, each in found.items() if name != "agent@3"}) == (
        300,
        {None},
    )
    assert first.follows is None


def test_of_a_session_it_tells_its_kin_and_no_other(store: Store) -> None:
    assert list(told(store, FORK)) == ["heir@1", "deep@1", "fork@1", "agent@1"], "not what went another way"
    assert list(told(store, FOLD)) == ["fold@1", "agent@2", "agent@1"]
    assert list(told(store, FOLD, DEEP)) == ["fold@1", "heir@1", "deep@1", "fork@1", "agent@2", "agent@1"]
    assert list(told(store, AGENT)) == list(told(store))


def test_of_a_version_it_tells_what_it_came_from(store: Store) -> None:
    assert list(told(store, f"{AGENT}@2")) == ["agent@2", "agent@1"]
    assert list(told(store, "deep~1", f"{FOLD}@1")) == ["fold@1", "fork@1", "agent@2", "agent@1"]
    with pytest.raises(InvalidUri):
        told(store, "agent:7")


def test_of_many_the_newest_are_told_and_how_many_more_there_are(store: Store) -> None:
    found = history_of(store, (), limit=2)
    assert ([each.version for each in found.entries], found.left_out) == ([3, 1], 5)
    assert history_of(store, [store.named(str(FORK))], limit=3).left_out == 1
    since = told(store)["heir@1"].created_ns
    assert list(told(store, since_ns=since)) == ["agent@3", "fold@1", "heir@1"]
    assert list(told(store, FORK, since_ns=since)) == ["heir@1"]


def test_the_oldest_that_is_left_is_the_fork_or_began(store: Store) -> None:
    """A daemon's stand-in goes by itself, and with it what the parent of a version names."""
    fork = store.require_session(FORK).bundle_id
    with store.open_session(AGENT, 1) as first, store.open_bundle(fork) as reader:
        before = told(store)["agent@1"].bundle_id
        heir(store, FORK, reader.receipt(), forked_from=origin(first.receipt(), 250))  # all later versions have it, too
    assert told(store)["fork@2"].way == "went_on"
    store.delete_version(FORK, 1)
    found = told(store)
    assert (found["fork@2"].way, found["fork@2"].added_tokens) == ("forked", 50)
    assert found["fork@2"].origin == Origin(str(AGENT), 1, before, 250)
    assert "fork@2" in told(store, AGENT), "its kin"
    assert list(told(store, f"{FORK}@2")) == ["fork@2", "agent@1"]
    assert (found["deep@1"].way, found["deep@1"].origin) == ("forked", Origin(str(FORK), 1, fork, 300))
    store.delete_version(AGENT, 1)
    found = told(store)
    assert [(found[name].way, found[name].added_tokens) for name in ("agent@2", "agent@3")] == [
        ("began", 600),
        ("cut_off", None),  # it has fewer tokens than the version before it
    ]
    assert {"fork@2", "deep@1", "heir@1"} <= set(told(store, AGENT)), "also where the version that they name is gone"


def test_of_a_row_of_versions_those_that_are_left_went_on_from_each_other(store: Store) -> None:
    with store.open_session(AGENT, 2) as reader:
        second = reader.receipt()
    fourth = making.sleep(store, 620, before=making.sleep(store, 610, before=second))
    fifth = making.sleep(store, 630, before=fourth)
    store.delete_version(AGENT, 4)
    store.delete_version(AGENT, 3)
    found = told(store)
    entry = found["agent@5"]
    assert (entry.way, entry.parent, entry.parent_version) == ("went_on", second.bundle_id, 2)
    assert (entry.added_tokens, fifth.version) == (20, 6)
    assert list(told(store, f"{AGENT}@6")) == ["agent@6", "agent@5", "agent@2", "agent@1"]


def rewound(store: Store, before: Receipt, at: int, count: int, uri: SessionUri = AGENT) -> Receipt:
    """The next version of a session that went back to a token of one, and read others there."""
    entries = [each for each in before.entries if each.kind == "span" and each.end <= at and each.token_count == 256]
    first = entries[-1].end if entries else 0
    tokens = making.token_ids(0, at) + making.token_ids(at, count - at, seed=9 + count)
    drafts = [
        replace(each, tokens=tokens[4 * each.start : 4 * each.start + len(each.tokens)])
        for each in making.drafts(count, first=first)
    ]
    return making.write(store, drafts, count, uri=uri, parent=before.bundle_id, reused=entries)


@pytest.mark.parametrize("at", [0, 12, 256, 290])
@pytest.mark.parametrize("count", [298, 400])
def test_a_version_that_left_the_one_before_in_its_midst_went_back(store: Store, at: int, count: int) -> None:
    with store.open_session(FORK) as reader:
        fork = reader.receipt()
    rewound(store, fork, at, count, FORK)
    entry = told(store)["fork@2"]
    assert (entry.way, entry.parent_version, entry.back_at, entry.added_tokens) == ("went_back", 1, at, count - at)


def test_each_of_several_ways_back_is_told_and_what_grew_from_there_went_on(store: Store) -> None:
    with store.open_session(AGENT, 2) as reader:
        second = reader.receipt()
    fourth = rewound(store, second, 500, 520)
    fifth = rewound(store, fourth, 512, 560)
    making.write(store, (), 560, parent=fifth.bundle_id, reused=fifth.entries)
    found = told(store)
    assert [(found[f"agent@{each}"].way, found[f"agent@{each}"].back_at) for each in (4, 5, 6)] == [
        ("went_back", 500),
        ("went_back", 512),
        ("went_on", None),
    ]
    store.delete_version(AGENT, 5)
    entry = told(store)["agent@6"]
    assert (entry.way, entry.parent_version, entry.back_at, entry.added_tokens) == ("went_back", 4, 512, 48)


def test_a_version_whose_tokens_cannot_be_read_is_told_by_its_size(store: Store) -> None:
    with store.open_session(AGENT, 2) as reader:
        second = reader.receipt()
    making.pack_of(store, second, len(second.entries) - 2).unlink()
    with Store.open(store.path, writable=False) as beside:
        entry = told(beside)["agent@2"]
    assert (entry.way, entry.back_at, entry.added_tokens) == ("went_on", None, 300)


def test_what_another_store_made_is_imported_and_fewer_bits_are_quantized(store: Store) -> None:
    with store.open_session(DEEP) as reader:
        deep = reader.receipt()
    heir(store, SessionUri("default", "taken"), deep)  # its map names no origin
    lossy = heir(store, DEEP, deep, lossy={"bits": 8, "tokens": 300})
    heir(store, DEEP, lossy, lossy={"bits": 8, "tokens": 300})
    found = told(store)
    assert [found[name].way for name in ("taken@1", "deep@2", "deep@3")] == ["imported", "quantized", "went_on"]


def written(store: Store, name: str, count: int, **session: Any) -> Receipt:
    session["branch"] = {"fork_head": 200}
    return making.write(store, making.drafts(count), count, uri=SessionUri("default", name), session=session)


def plant(store: Store) -> tuple[Receipt, Receipt]:
    """A tree, a branch of it, and a branch of that, as `keep` writes them: the root last. Gives the first branch, and
    the root."""
    below = [written(store, "tree.1", 300), written(store, "tree.2", 300)]
    tree = [
        {"session": str(each.uri), "version": 1, "bundle": bytes.fromhex(each.bundle_id), "parent": at}
        for at, each in enumerate(below)
    ]
    return below[0], written(store, "tree", 200, tree=tree)


def test_a_kept_tree_stands_below_its_branches_though_it_was_written_last(store: Store) -> None:
    branch, root = plant(store)
    found = told(store, TREE)
    assert list(found) == ["tree.2@1", "tree.1@1", "tree@1"]
    assert found["tree.1@1"].origin == Origin(str(TREE), 1, root.bundle_id, 200)
    assert found["tree.2@1"].origin == Origin(str(LEAF), 1, branch.bundle_id, 200)
    assert [(each.way, each.added_tokens, each.branches) for each in found.values()] == [
        ("branched", 100, 0),
        ("branched", 100, 0),
        ("began", 200, 2),
    ]
    assert list(told(store, LEAF)) == ["tree.1@1", "tree@1"]


def test_a_damaged_manifest_is_named_and_its_version_told_as_the_index_has_it(store: Store) -> None:
    row = store.require_session(FORK)
    path = Path(store.path) / manifest_name(row.bundle_id)
    os.truncate(path, path.stat().st_size - 1)
    found = history_of(store, [store.named(str(FORK))], limit=9)
    (problem,) = found.problems
    assert (problem.session, problem.version, problem.code) == (str(FORK), 1, "truncated")
    assert (told(store)["fork@1"].way, told(store)["fork@1"].follows) == ("unknown", row.parent)


def test_marks_are_told_and_lost_marks_hide_no_version(store: Store) -> None:
    store.tag(AGENT, 1, "first")
    store.pin(AGENT, 2)
    store.strip(FORK)
    found = told(store)
    assert (found["agent@1"].tags, found["agent@2"].pinned, found["fork@1"].stripped) == (("first",), True, True)
    (Path(store.path) / "marks.json").unlink()
    assert told(store)["agent@1"].tags == ()


def test_of_one_namespace_it_says_nothing_of_another(store: Store) -> None:
    (entry,) = told(store, namespace="lab").values()
    assert (entry.session, entry.parent, entry.origin, entry.way) == (str(LAB), None, None, "forked")
    assert "default" not in repr(entry)
    assert str(LAB) not in repr(told(store, AGENT, namespace="default"))


def test_what_is_forgotten_leaves_nothing(store: Store) -> None:
    store.forget(FOLD)
    assert "fold" not in repr(history_of(store, (), limit=99))


def test_each_stands_below_all_that_came_from_it_and_else_the_newest_is_first(store: Store) -> None:
    chance, pattern = random.Random(7), told(store)["agent@1"]
    for _ in range(60):
        entries = [
            replace(
                pattern,
                bundle_id=f"{at:064x}",
                version=at + 1,
                created_ns=chance.randrange(6),
                parent=f"{chance.randrange(at):064x}" if at and chance.random() < 0.8 else None,
            )
            for at in range(12)
        ]
        waiting, expected = list(entries), []
        while waiting:
            ready = [each for each in waiting if all(other.parent != each.bundle_id for other in waiting)]
            first = max(ready, key=lambda each: (each.created_ns, each.version))
            waiting.remove(first)
            expected.append(first)
        chance.shuffle(entries)
        assert in_order(entries) == expected
