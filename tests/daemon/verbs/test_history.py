"""A daemon adds to a history what is in memory, of all connections; what is kept of a tree has its place in it."""

from __future__ import annotations

from torpor.daemon.api.history import InMemory
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Origin
from torpor.tests.daemon.session_rig import Rigged, tokens_of

BASE = "torpor://default/base"


async def test_what_is_awake_and_its_trees_stand_on_their_versions(rig: Rigged) -> None:
    service = rig.service
    for name in ("base", "other"):
        await service.create(name, sampling=Sampling(temperature=0.8))
        await service.append(name, tokens=tokens_of(1, 40))
    saved = await service.save("base")
    await service.append("base", tokens=tokens_of(2, 5))
    root = (await service.tree("base")).branch
    child = (await service.diverge(root, count=1, max_tokens=3)).attempts[0]
    grown = len(child.tokens)

    found = (await service.history(["base"])).in_memory
    assert found == (
        InMemory(BASE, saved.bundle_id, 1, 45, 5),
        InMemory(BASE, saved.bundle_id, 1, 45 + grown, grown, branch=child.branch, parent=root),
        InMemory(BASE, saved.bundle_id, 1, 45, 5, branch=root),
    )
    assert {each.session for each in (await service.history()).in_memory} == {BASE, "torpor://default/other"}
    assert (await service.history(namespace="lab")).in_memory == ()
    assert [each.branches for each in await service.list_sessions()] == [2, 0]

    await service.keep(child.branch, "kept")
    unwritten = InMemory("torpor://default/kept", saved.bundle_id, None, 45 + grown, 5 + grown)
    assert unwritten in (await service.history(["base"])).in_memory, "it has no version yet"
    await service.keep(root, "tree", subtree=True)
    await service.prune([root], subtree=True)
    await service.sleep("kept")
    origin = Origin(BASE, 1, saved.bundle_id, 40)
    assert (await service.show("kept")).provenance.forked_from == origin
    told = {each.uri.name: each for each in (await service.history(["base"])).entries}
    assert list(told) == ["kept", "tree.1", "tree", "base"]
    assert (told["kept"].way, told["kept"].origin, told["kept"].added_tokens) == ("forked", origin, 5 + grown)
    assert (told["tree"].way, told["tree"].origin, told["tree"].branches) == ("forked", origin, 1)
    assert (told["tree.1"].way, told["tree.1"].follows) == ("branched", told["tree"].bundle_id)


async def test_a_look_back_is_told_where_it_stands(rig: Rigged) -> None:
    service = rig.service
    await service.create("base")
    await service.append("base", tokens=tokens_of(1, 40))
    await service.sleep("base")
    await service.wake("base", at_token=30)
    (state,) = (await service.history(["base"])).in_memory
    assert (state.look, state.version, state.back_at, state.added_tokens) == (True, 1, 30, 0)


async def test_a_session_that_went_back_is_told_so_awake_and_asleep(rig: Rigged) -> None:
    service = rig.service
    await rig.asleep("base", tokens_of(1, 40))
    await service.wake("base", at_token=12)
    await service.append("base", tokens=tokens_of(2, 32))
    found = await service.history(["base"])
    (state,) = found.in_memory
    assert (state.version, state.back_at, state.added_tokens, state.look) == (1, 12, 32, False)
    assert (await service.difference("base@1", "base")).common_tokens == 12
    await service.sleep("base")
    entry, _ = (await service.history(["base"])).entries
    assert (entry.way, entry.parent_version, entry.back_at, entry.added_tokens) == ("went_back", 1, 12, 32)
    await service.wake("base", version=1)
    await service.append("base", tokens=tokens_of(3, 5))
    (state,) = (await service.history(["base"])).in_memory
    assert (state.version, state.back_at, state.added_tokens) == (1, 40, 5), "it goes on from an earlier version"
    await service.sleep("base")
    await service.wake("base")
    await service.append("base", tokens=tokens_of(4, 5))
    (state,) = (await service.history(["base"])).in_memory
    assert (state.version, state.back_at, state.added_tokens) == (3, None, 5)
