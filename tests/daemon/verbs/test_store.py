"""Deletes of single versions."""

from __future__ import annotations

import pytest
from torpor.memvid.errors import AmbiguousVersion, InvalidUri
from torpor.tests.daemon.session_rig import Rigged, tokens_of
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import URI, manifest_path


@pytest.mark.parametrize("kept", [0, 1])
async def test_one_of_two_versions_with_one_number_is_deleted_and_the_other_wakes(rig: Rigged, kept: int) -> None:
    """The daemon goes on by numbers: the version that its number does not mean is refused, and never taken for the
    other."""
    store, counts = rig.service._parts.store.disk, (5, 9)
    await rig.asleep("agent", tokens_of(1, 20))
    await rig.service.append("agent", tokens=tokens_of(2, counts[0]))
    older = (await rig.sleep("agent")).bundle_id
    with making.away(manifest_path(store, older)):
        store.index.drop([older])
        await rig.service.append("agent", tokens=tokens_of(3, counts[1]))
        await rig.sleep("agent")
    two = [row for row in store.versions(URI) if row.version == 2]
    ids = [f"agent@{row.bundle_id}" for row in two]
    for refused in (
        rig.wake("agent@2"),
        rig.wake(ids[0]),
        rig.service.fork(ids[0], "fork"),
        rig.service.delete("agent@2"),
    ):
        with pytest.raises(AmbiguousVersion, match="torpor rm"):
            await refused
    assert (await rig.service.delete(ids[1 - kept])).versions_deleted == 1
    assert [row.bundle_id for row in store.versions(URI) if row.version == 2] == [two[kept].bundle_id]
    assert (await rig.wake("agent@2")).token_count == 20 + counts[kept]


async def test_every_verb_that_takes_a_version_takes_each_way_to_name_one(rig: Rigged) -> None:
    store = rig.service._parts.store.disk
    for seed in range(3):
        await rig.service.append("agent", tokens=tokens_of(seed, 20), create=True)
        await rig.sleep("agent")
    first, second, _ = (row.bundle_id for row in store.versions(URI))
    assert (await rig.wake("agent~1")).token_count == 40
    await rig.sleep("agent")
    assert (await rig.wake(f"{first[:10]}:15")).token_count == 15
    await rig.sleep("agent")
    assert (await rig.wake("agent:55")).token_count == 55
    await rig.sleep("agent")
    assert (await rig.service.plan_wake("agent~2")).token_count == 20
    for twice in (
        rig.wake("agent:5", at_token=30),
        rig.service.plan_wake("agent:5", at_token=30),
        rig.service.fork("agent:5", "fork", at_token=30),
    ):
        with pytest.raises(InvalidUri, match="agent:5 names a place, and so does at_token, 30"):
            await twice
    forked = await rig.service.fork("agent~1:35", "fork")
    assert (forked.token_count, forked.forked_from.bundle_id) == (35, second)
    assert (await rig.service.contents("fork~1", tokens=True)).version == 2  # the version that it was forked from
    assert (await rig.service.fork("fork~1:15", "again")).token_count == 15
    await rig.service.delete("again")
    told = r"^fork~1 is torpor://default/agent@2; name it so\.$"
    for refused in (
        rig.service.delete("fork~1"),
        rig.service.wake("fork~1"),
        rig.service.mark("fork~1", tag="keep"),
        rig.service.mark("fork~1", pinned=True),
        rig.service.mark("fork~1", pinned=False),
        rig.service.maintain("strip", session="fork~1"),
    ):
        with pytest.raises(InvalidUri, match=told):
            await refused
    await rig.sleep("agent")
    assert (await rig.service.tree(f"@{first[:10]}")).position == 20
    assert (await rig.service.mark("agent~2", tag="begun")).bundle_id == first
    assert (await rig.service.analyze("agent@begun")).bundle_id == first
    assert (await rig.service.maintain("strip", session="agent@begun", dry_run=True)).ok
    for refused in (rig.service.delete("agent:5"), rig.service.analyze("agent:5"), rig.service.tree("agent~1:5")):
        with pytest.raises(InvalidUri, match="only a whole version can be taken"):
            await refused
    assert (await rig.service.delete(f"@{second[:10]}")).versions_deleted == 1
    assert [row.version for row in store.versions(URI)] == [1, 3]
