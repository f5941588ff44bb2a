"""Sessions and receipts as those who ask see them."""

from __future__ import annotations

from typing import Any

from session_rig import MODEL, SAMPLED, ignore, tokens_of
from torpor.daemon.listing import TAIL_CHARACTERS

LAYERS = ("kv/1 2x16 float32",) * 3


async def test_a_session_in_memory_is_shown_with_its_size_and_whether_it_has_changed(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("work/a", tokens_of(1, 20), labels=["x"], sampling=SAMPLED)
        (info,) = await rig.service.list_sessions()
        assert (info.session, info.namespace, info.name) == ("torpor://work/a", "work", "a")
        assert (info.state, info.model, info.token_count, info.dirty) == ("awake", MODEL, 20, True)
        assert (info.version, info.bundle_id, info.stored_bytes) == (None, None, 0)
        assert info.resident_bytes == 256 * 3 * 2 * 2 * 16 * 4
        assert (info.labels, info.sampling) == (("x",), SAMPLED)
        receipt = await rig.sleep("a")
        await rig.wake("a")
        (info,) = await rig.service.list_sessions()
        assert (info.dirty, info.version, info.bundle_id) == (False, 1, receipt.bundle_id)
        assert info.stored_bytes == receipt.bytes_written
        await rig.write("a", 1)
        assert (await rig.service.list_sessions())[0].dirty


async def test_a_session_on_disk_is_shown_as_the_index_knows_it(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 20), labels=["x", "y"])
        receipt = await rig.sleep("a")
        (info,) = await rig.service.list_sessions()
        assert (info.state, info.model, info.token_count, info.dirty) == ("asleep", MODEL, 20, False)
        assert (info.version, info.bundle_id, info.stored_bytes) == (1, receipt.bundle_id, receipt.bytes_written)
        assert (info.labels, info.resident_bytes) == (("x", "y"), 0)


async def test_awake_and_asleep_a_session_is_shown_the_same_in_full(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.service.create(session="a", sampling=SAMPLED)
        await rig.service.append(session="a", text="What was said. " * 40, emit=ignore)
        await rig.sleep("a")
        await rig.service.append(session="a", text="The end.", emit=ignore)
        await rig.sleep("a")
        asleep = await rig.service.show(session="a")
        assert not rig.is_awake("a"), "showing wakes nobody"
        await rig.wake("a")
        awake = await rig.service.show(session="a")
        for name in ("versions", "tail_text", "layers", "lineage", "identity"):
            assert getattr(asleep, name) == getattr(awake, name), name
        assert asleep.info.sampling == awake.info.sampling == SAMPLED
        assert asleep.layers == LAYERS
        assert asleep.tail_text.endswith("What was said. The end.")
        assert len(asleep.tail_text) <= TAIL_CHARACTERS
        assert asleep.identity == dict(rig.model.identity.parts)


async def test_versions_are_listed_oldest_first_and_the_lineage_newest_first(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 300))
        receipts = [await rig.sleep("a")]
        for _ in range(2):
            await rig.write("a", 1)
            receipts.append(await rig.sleep("a"))
        detail = await rig.service.show(session="a")
        assert [version.version for version in detail.versions] == [1, 2, 3]
        assert [version.bundle_id for version in detail.versions] == [receipt.bundle_id for receipt in receipts]
        assert [version.parent for version in detail.versions] == [None, receipts[0].bundle_id, receipts[1].bundle_id]
        assert detail.lineage == tuple(receipt.bundle_id for receipt in reversed(receipts))
        assert [version.token_count for version in detail.versions] == [300, 301, 302]


async def test_a_lineage_follows_the_parents_past_versions_that_were_left(open_rig: Any) -> None:
    """Version 3 goes on from version 1: version 2 is not among its ancestors."""
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 300))
        first = await rig.sleep("a")
        await rig.write("a", 1)
        await rig.sleep("a")
        await rig.wake("a", version=1)
        await rig.write("a", 2)
        third = await rig.sleep("a")
        assert (await rig.service.show(session="a")).lineage == (third.bundle_id, first.bundle_id)


async def test_an_empty_session_can_be_shown(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.service.create(session="a")
        detail = await rig.service.show(session="a")
        assert (detail.tail_text, detail.versions, detail.lineage, detail.layers) == ("", (), (), LAYERS)
