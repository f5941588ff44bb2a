"""Sessions and receipts as those who ask see them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.reach.files import Files
from torpor.daemon.errors import InvalidSampling
from torpor.daemon.residency.listing import TAIL_CHARACTERS
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.store import VersionDraft
from torpor.memvid.uri import SessionUri
from torpor.snapshot.errors import LayoutMismatch, SnapshotError
from torpor.tests.daemon.session_rig import HELD, MODEL, SAMPLED, Rigged, manifests, open_rigged, packs, tokens_of

LAYERS = ("kv/1 k, v 2xnx24 float32",) * 2


async def test_a_session_is_listed_with_its_size_and_whether_it_has_changed(rig: Rigged) -> None:
    await rig.read("work/a", tokens_of(1, 20), labels=["x"], sampling=SAMPLED)
    (info,) = await rig.service.list_sessions()
    assert (info.session, info.namespace, info.name) == ("torpor://work/a", "work", "a")
    assert (info.state, info.model, info.token_count, info.dirty) == ("awake", MODEL, 20, True)
    assert (info.version, info.bundle_id, info.written_bytes) == (None, None, 0)
    assert info.resident_bytes == HELD
    assert (info.labels, info.sampling) == (("x",), SAMPLED)
    receipt = await rig.sleep("work/a")
    await rig.wake("work/a")
    (info,) = await rig.service.list_sessions()
    assert (info.dirty, info.version, info.bundle_id) == (False, 1, receipt.bundle_id)
    assert info.written_bytes == receipt.bytes_written
    await rig.write("work/a", 1)
    assert (await rig.service.list_sessions())[0].dirty
    receipt = await rig.asleep("a", tokens_of(1, 20), labels=["x", "y"])
    info = (await rig.service.list_sessions())[0]
    assert (info.state, info.model, info.token_count, info.dirty) == ("asleep", MODEL, 20, False)
    assert (info.version, info.bundle_id, info.written_bytes) == (1, receipt.bundle_id, receipt.bytes_written)
    assert (info.labels, info.resident_bytes) == (("x", "y"), 0)


async def test_awake_and_asleep_a_session_is_shown_the_same_in_full(rig: Rigged) -> None:
    await rig.service.create("a", sampling=SAMPLED)
    await rig.service.append("a", text="What was said. " * 40)
    await rig.sleep("a")
    await rig.service.append("a", text="The end.")
    await rig.sleep("a")
    asleep = await rig.service.show("a")
    assert not rig.is_awake("a"), "showing wakes nobody"
    await rig.wake("a")
    awake = await rig.service.show("a")
    for name in ("tail_text", "layers", "lineage", "identity"):
        assert getattr(asleep, name) == getattr(awake, name), name
    *earlier, newest = awake.versions
    assert newest.used_ns > 0, "it was woken"
    assert asleep.versions == (*earlier, replace(newest, used_ns=0))
    assert asleep.info.sampling == awake.info.sampling == SAMPLED
    assert asleep.layers == LAYERS
    assert asleep.tail_text.endswith("What was said. The end.")
    assert len(asleep.tail_text) <= TAIL_CHARACTERS
    assert asleep.identity == dict(rig.model.identity.parts)


async def test_a_version_is_shown_as_it_was_though_the_session_has_gone_on(rig: Rigged) -> None:
    await rig.service.create("a")
    await rig.service.append("a", text="What was said.")
    first = await rig.sleep("a")
    await rig.service.append("a", text=" The end.")
    await rig.sleep("a")
    await rig.wake("a")
    for name in ("a@1", first.bundle_id[:12]):
        shown = await rig.service.show(name)
        assert (shown.info.state, shown.info.version, shown.info.bundle_id) == ("stored", 1, first.bundle_id)
        assert (shown.tail_text, len(shown.versions)) == ("What was said.", 2)
    assert (await rig.service.show("a")).info.state == "awake"


async def test_the_end_of_a_long_text_begins_with_a_whole_character(rig: Rigged) -> None:
    for after in range(4):
        name = f"owls-{after}"
        await rig.service.create(name)
        await rig.service.append(name, text="🦉" * 200 + "." * after)
        tail = (await rig.service.show(name)).tail_text
        assert tail.startswith("🦉")
        assert "\N{REPLACEMENT CHARACTER}" not in tail


async def test_versions_are_listed_oldest_first_and_the_lineage_newest_first(rig: Rigged) -> None:
    """Of a look from the version that is looked at, and past versions that were left."""
    await rig.read("a", tokens_of(1, 300))
    receipts = [await rig.sleep("a")]
    for _ in range(2):
        await rig.write("a", 1)
        receipts.append(await rig.sleep("a"))
    detail = await rig.service.show("a")
    assert [version.version for version in detail.versions] == [1, 2, 3]
    assert [version.bundle_id for version in detail.versions] == [receipt.bundle_id for receipt in receipts]
    assert [version.parent for version in detail.versions] == [None, receipts[0].bundle_id, receipts[1].bundle_id]
    assert detail.lineage == tuple(receipt.bundle_id for receipt in reversed(receipts))
    assert [version.token_count for version in detail.versions] == [300, 301, 302]
    await rig.wake("a", version=1)
    detail, first = await rig.service.show("a"), receipts[0].bundle_id
    assert (detail.info.bundle_id, detail.lineage) == (first, (first,))
    await rig.write("a", 2)
    fourth = await rig.sleep("a")
    assert (await rig.service.show("a")).lineage == (fourth.bundle_id, first)


async def test_what_a_session_takes_on_the_disk_is_what_all_its_versions_wrote(rig: Rigged, store: Path) -> None:
    await rig.asleep("a", tokens_of(1, 600))
    await rig.service.append("a", tokens=[1])
    await rig.sleep("a")
    files = sum(path.stat().st_size for path in (*manifests(store), *packs(store)))
    for state in ("asleep", "awake"):
        (listed,) = await rig.service.list_sessions()
        shown = (await rig.service.show("a")).info
        assert (listed.state, shown.state) == (state, state)
        assert listed.written_bytes == shown.written_bytes == files
        await rig.wake("a")


async def test_text_is_decoded_by_the_very_model_that_read_it_or_not_at_all(
    open_rig: Any, own_tiny_model: Path, store: Path, digest_cache: Path
) -> None:
    async with open_rig(own_tiny_model) as rig:
        await rig.service.create("a")
        await rig.service.append("a", text="my secret is 42")
        await rig.sleep("a")
    other = shutil.copytree(own_tiny_model, own_tiny_model.parent / "other")
    described = json.loads((other / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    described["model"]["vocab"] = {symbol: (index + 1) % 256 for symbol, index in vocabulary.items()}
    (other / "tokenizer.json").write_text(json.dumps(described))
    async with open_rig(other) as rig:
        detail = await rig.service.show("a")
        assert detail.tail_text == ""
        assert (detail.info.token_count, detail.layers) == (15, LAYERS)
    async with open_rigged(store, {MODEL: str(other), "moved": str(own_tiny_model)}, digest_cache) as rig:
        assert (await rig.service.show("a")).tail_text == "my secret is 42", "by whatever name it goes now"


def kv(shape: tuple[int, ...]) -> list[SlotSpec]:
    return [SlotSpec("0.k", "kv.k/1", "float32", shape), SlotSpec("0.v", "kv.v/1", "float32", shape)]


def hand_made(rig: Rigged, name: str, slots: list[SlotSpec] | None, **session: Any) -> None:
    """A snapshot of one token with these slots of zeros, or of none."""
    blocks = []
    if slots is not None:
        drafts = [SlotDraft(spec, [memoryview(bytes(spec.size_bytes))]) for spec in slots]
        blocks = [BlockDraft("span", 0, bytes(4), drafts)]
    rig.service._parts.store.disk.write_bundle(
        VersionDraft(
            uri=SessionUri("default", name),
            identity=rig.model.identity,
            parent=None,
            reused=(),
            blocks=blocks,
            session={"model": MODEL, "sampling": SAMPLED.to_map(), **session},
            block_tokens=len(blocks),
        )
    )


async def test_a_sound_bundle_that_this_version_did_not_write_is_shown_as_by_its_files_and_refused_by_a_wake(
    rig: Rigged,
) -> None:
    """Threat 13: a wake says what is wrong, and the daemon goes on."""
    store = rig.service._parts.store.disk
    unknown = ([SlotSpec(name, kind, "float32", (2,))] for name, kind in (("x", "other/1"), ("0.k", "other.k/1")))
    strange: list[Any] = [(None, {}), *((slots, {}) for slots in unknown)]
    samplings: tuple[Any, ...] = (None, [], {}, {**SAMPLED.to_map(), "seed": "x"})
    for at, (slots, session) in enumerate([*strange, *((kv((2, 1, 24)), {"sampling": each}) for each in samplings)]):
        hand_made(rig, f"s{at}", slots, **session)
        shown, of_files = await rig.service.show(f"s{at}"), Files(store).show(f"s{at}")
        differs = {"layers": (), "tail_text": "", "info": replace(shown.info, state="stored")}
        assert replace(shown, **differs) == replace(of_files, layers=())
        with pytest.raises((SnapshotError, InvalidSampling)):
            await rig.wake(f"s{at}")
        assert not rig.is_awake(f"s{at}")


async def test_slots_that_no_cache_of_the_model_has_are_refused_by_a_wake(rig: Rigged) -> None:
    """Threat 14: they can be looked at, for there is nothing wrong with them but that they are not this model's."""
    whole = kv((2, 1, 24))
    for at, slots in enumerate((whole[:1], whole[::-1], kv((2,)), kv((2, 1)), [])):
        hand_made(rig, f"s{at}", slots)
        assert (await rig.service.show(f"s{at}")).info.token_count == 1
        with pytest.raises(LayoutMismatch):
            await rig.wake(f"s{at}")
        assert not rig.is_awake(f"s{at}")


async def test_an_empty_session_can_be_shown(rig: Rigged) -> None:
    await rig.service.create("a")
    detail = await rig.service.show("a")
    assert (detail.tail_text, detail.versions, detail.lineage, detail.layers) == ("", (), (), LAYERS)
