"""Two versions have one number, and one of them is damaged: what is said."""

from __future__ import annotations

from rich.text import Text
from torpor.cli.commands.verify import render_damage
from torpor.cli.view.damage import damage_by_session
from torpor.memvid.store import Store
from torpor.tests.cli.cli_rig import MadeStore
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import URI


def test_damage_of_one_of_two_versions_with_one_number_is_not_told_of_the_other(made_store: MadeStore) -> None:
    with Store.open(made_store.path, writable=True) as store:
        store.delete_session(URI)
        older, younger = making.rivals(store)
        making.spoil(store, younger, 1)
        (told,) = damage_by_session(store, store.verify(deep=True))
    ids = [one.bundle_id[:12] for one in (older, younger)]
    lines = [Text.from_markup(line).plain for line in render_damage(told)]
    assert lines[1:3] == [
        f"  versions 1 and 2 ({ids[0]}): whole",
        f"  version 2 ({ids[1]}): whole up to token 256 of 900",
    ]
    assert f"`torpor wake {URI}@{ids[1]} --at 256`" in lines[-1]
    assert f"`torpor wake {URI}@1`" in lines[-1]


def test_one_of_two_versions_with_one_number_is_shown_exported_and_deleted_by_its_id(made_store: MadeStore) -> None:
    with Store.open(made_store.path, writable=True) as store:
        store.delete_session(URI)
        two = making.rivals(store)
    for one in two:
        text = f"agent@{one.bundle_id[:8]}"
        assert made_store("show", text, "--json").document["info"]["token_count"] == one.token_count
        file = made_store.path.parent / f"{one.token_count}.mvb"
        assert made_store("export", text, file, "--json").document["bundle_id"] == one.bundle_id
    assert made_store("show", "agent@2").status == 4
    assert made_store("rm", "agent@2", "--yes").status == 4
    assert made_store("rm", f"agent@{two[0].bundle_id[:8]}", "--yes").status == 0
    assert made_store("show", "agent@2", "--json").document["info"]["bundle_id"] == two[1].bundle_id
