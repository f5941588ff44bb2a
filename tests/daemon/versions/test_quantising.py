"""Sessions that sleep are kept in fewer bits by order: as a new version, told as what it is."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import GenerationFailed, SessionAwake, SessionBusy
from torpor.daemon.versions.quantising import Plan, Span, plan_spans
from torpor.memvid.answers import Lossy
from torpor.memvid.errors import InvalidPolicy, NoSpace, SessionNotFound
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.snapshot.checkpoints import CHECKPOINT_TOKENS
from torpor.snapshot.errors import CanaryFailed, MalformedSnapshot
from torpor.tests.daemon import session_rig
from torpor.tests.daemon.session_rig import Rigged, crowded, ignore, lose_state, packs, tokens_of
from torpor.tests.memvid.store_making import index_row

HYBRIDS = ["gemma4_text", "kimi_linear"]
KINDS = ["plain", "deepseek_v3", *HYBRIDS]


@pytest.fixture
def open_kind(open_rig: Any, quantisable_model: Path, models_of_kinds: Callable[[str], Path]) -> Callable[..., Any]:
    return lambda kind="plain", **options: open_rig(
        quantisable_model if kind == "plain" else models_of_kinds(kind), **options
    )


async def asleep(rig: Rigged, name: str = "s", count: int = 600) -> None:
    await rig.asleep(name, tokens_of(1, count))
    rig.network.reset()


async def quantize(rig: Rigged, name: str | None = "s", bits: int = 8, **options: Any) -> Any:
    return await rig.service.maintain(operation="quantize", session=name, bits=bits, **options)


def versions(rig: Rigged, name: str = "s") -> list[int]:
    return [row.version for row in rig.service._parts.store.disk.versions(rig.service._parts.sessions.resolve(name))]


@pytest.fixture
def rig(open_kind: Any) -> Any:
    return open_kind()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_next_version_is_lossy_and_wakes_proven_and_told(open_kind: Any, kind: str, bits: int) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        [action] = (report := await quantize(rig, bits=bits)).actions
        assert (action.kind, action.version, report.problems) == ("quantize", 2, ())
        assert report.bytes_written == action.size_bytes > 0
        assert not rig.is_awake("s")
        woken = await rig.wake("s")
        assert (woken.version, woken.token_count, woken.tokens_prefilled) == (2, 600, 0)
        assert woken.lossy == Lossy(bits, 512)
        assert woken.canary == "same_bits"
        assert woken.bytes_read < (await size_of_exact(rig))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("request_of", ["append", "generate", "chat"])
async def test_a_request_that_wakes_a_lossy_session_tells_so(open_kind: Any, request_of: str) -> None:
    async with open_kind("plain") as rig:
        await asleep(rig)
        await quantize(rig, bits=4)
        limit = {} if request_of == "append" else {"max_tokens": 1}
        words = {"message": "go on"} if request_of == "chat" else {"text": "go on"}
        ask = partial(getattr(rig.service, request_of), session="s", **words, **limit, on_event=ignore)
        waking, awake = await ask(), await ask()
        assert (waking.woken.lossy, waking.woken.version, waking.woken.canary) == (Lossy(4, 512), 2, "same_bits")
        assert (waking.woken.token_count, waking.woken.tokens_prefilled) == (600, 0)
        assert awake.woken is None


async def size_of_exact(rig: Rigged) -> int:
    with rig.service._parts.store.disk.open_session(rig.service._parts.sessions.resolve("s"), 1) as reader:
        return sum(entry.raw_bytes for entry in reader.entries)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_keys_and_values_is_exact(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        await quantize(rig, bits=4)
        exact = await rig.woken_fingerprint("s", 1)
        lossy = await fingerprint_at(rig, 2)
        assert lossy.tokens == exact.tokens
        assert lossy.logits == exact.logits
        assert lossy.random_key == exact.random_key
        assert lossy.offsets == exact.offsets
        assert lossy.kv != exact.kv
        if kind in HYBRIDS:
            assert set(lossy.kv) & set(exact.kv), "windows and recurrences are as they were"


async def fingerprint_at(rig: Rigged, version: int) -> Any:
    rig.service._parts.sessions.residency.awake.clear()
    await rig.wake("s", version)
    return await rig.fingerprint("s")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_exact_version_stays_as_it_was_until_a_prune(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        before = await fingerprint_at(rig, 1)
        rig.service._parts.sessions.residency.awake.clear()
        await quantize(rig)
        assert await fingerprint_at(rig, 1) == before
        assert rig.live("s").loss is None
        rig.service._parts.sessions.residency.awake.clear()
        await rig.service.maintain(operation="prune", session="s", keep_last=1)
        assert versions(rig) == [2]
        assert (await rig.wake("s")).canary == "same_bits"


async def test_a_canary_of_the_lossy_state_finds_what_is_not_that_state(rig: Rigged) -> None:
    await asleep(rig)
    await quantize(rig)
    rig.network.after = lambda _, logits: logits.at[..., 5].add(1e-4)
    with pytest.raises(CanaryFailed) as refusal:
        await rig.wake("s")
    assert refusal.value.tolerance == 0.0


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_lossy_session_stays_marked_and_its_lossy_blocks_are_referred_to(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        await quantize(rig)
        await rig.wake("s")
        await rig.service.append("s", tokens=tokens_of(2, 300))
        await rig.write("s", 5)
        before = await rig.fingerprint("s")
        receipt = await rig.sleep("s")
        assert receipt.blocks_reused >= 2
        with rig.service._parts.store.disk.open_session(rig.service._parts.sessions.resolve("s")) as reader:
            spans = [entry for entry in reader.entries if entry.kind == "span"]
            assert spans[2].raw_bytes > spans[1].raw_bytes, "what is new is exact"
            assert reader.manifest.session["lossy"] == {"bits": 8, "tokens": 512}
        woken = await rig.wake("s")
        assert (woken.lossy, woken.canary) == (Lossy(8, 512), "same_bits")
        assert await rig.fingerprint("s") == before


@pytest.mark.parametrize("layers_grown", [0, 1])
async def test_a_lossy_session_whose_canary_fails_stays_as_it_was(rig: Rigged, layers_grown: int) -> None:
    await asleep(rig)
    await quantize(rig)
    await rig.wake("s")
    await rig.write("s", 5)
    before = await rig.fingerprint("s")
    rig.network.fail_at(1, layers_grown=layers_grown)
    with pytest.raises(GenerationFailed, match="canary"):
        await rig.sleep("s")
    rig.network.reset()
    assert await rig.fingerprint("s") == before
    assert rig.live("s").state.is_consistent


async def test_a_session_whose_lossy_blocks_are_gone_is_written_from_memory_and_stays_marked(
    rig: Rigged, store: Path
) -> None:
    await asleep(rig)
    await quantize(rig)
    await rig.service.maintain(operation="prune", session="s", keep_last=1)
    await rig.wake("s")
    await rig.write("s", 3)
    before = await rig.fingerprint("s")
    for pack in packs(store):
        pack.unlink()
    assert (await rig.sleep("s")).blocks_reused == 0
    woken = await rig.wake("s")
    assert (woken.lossy, woken.canary) == (Lossy(8, 512), "same_bits")
    assert await rig.fingerprint("s") == before


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_woken_at_an_earlier_token_or_version_it_sleeps_and_wakes_proven(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig, count=1200)
        await quantize(rig)
        for at in (100, 512, 700, 1199):
            woken = await rig.wake("s", 2, at_token=at)
            held = at if kind not in HYBRIDS else at - at % CHECKPOINT_TOKENS  # the rest is computed again
            assert woken.lossy == (Lossy(8, min(held, 1024)) if held else None)
            before = await rig.fingerprint("s")
            rig.live("s").dirty = True  # as if it had been changed: its state is written as it is
            again = await rig.sleep_and_wake("s")
            assert (again.lossy, again.canary) == (woken.lossy, "same_bits")
            assert await rig.fingerprint("s") == before
            rig.service._parts.sessions.residency.awake.clear()
        await rig.wake("s", 2)  # with the exact logits of what it was
        await rig.sleep("s")
        assert (await rig.wake("s")).canary == "same_bits"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", HYBRIDS)
async def test_checkpoints_go_on_serving_time_travel(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig, count=3 * CHECKPOINT_TOKENS + 20)
        await quantize(rig)
        rig.network.reset()
        for at in (CHECKPOINT_TOKENS, 2 * CHECKPOINT_TOKENS + 5):
            woken = await rig.wake("s", at_token=at)
            assert woken.tokens_prefilled == at % CHECKPOINT_TOKENS
            assert woken.canary == "not_run", "that of the exact state would not agree"
            rig.service._parts.sessions.residency.awake.clear()


@pytest.mark.one_in(1)
async def test_quantising_again_refers_to_what_is_kept_in_as_few_bits(rig: Rigged) -> None:
    await asleep(rig)
    await quantize(rig)
    [action] = (await quantize(rig)).actions
    assert (action.kind, action.reason) == ("keep", "its full blocks are kept in as few bits already")
    await rig.service.append("s", tokens=tokens_of(2, 600))
    await rig.sleep("s")
    with rig.service._parts.store.disk.open_session(rig.service._parts.sessions.resolve("s")) as reader:
        in_few_bits = reader.entries[:2]
    [action] = (await quantize(rig)).actions
    assert (action.kind, action.version) == ("quantize", 4)
    with rig.service._parts.store.disk.open_session(rig.service._parts.sessions.resolve("s")) as reader:
        spans = [entry for entry in reader.entries if entry.kind == "span"]
        assert tuple(spans[:2]) == in_few_bits
        assert len({entry.raw_bytes for entry in spans[:4]}) == 1
    woken = await rig.wake("s")
    assert (woken.lossy, woken.canary) == (Lossy(8, 1024), "same_bits")
    await rig.sleep("s")
    [action] = (await quantize(rig, bits=4)).actions
    assert action.kind == "quantize"
    assert (await rig.wake("s")).lossy == Lossy(4, 1024)
    await rig.sleep("s")
    [action] = (await quantize(rig, bits=8)).actions
    assert action.kind == "keep", "fewer bits are never made more"


async def test_a_plan_changes_nothing_and_says_what_it_saves(rig: Rigged) -> None:
    await asleep(rig)
    report = await quantize(rig, dry_run=True)
    [action] = report.actions
    assert (action.kind, action.version) == ("quantize", 1)
    assert (report.dry_run, report.bytes_written) == (True, action.size_bytes)
    assert action.reason == (
        "768 KiB of keys and values are 240 KiB in 8 bits; version 1 stays as it is until a prune removes it"
    )
    assert versions(rig) == [1]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_plan_tells_what_is_then_written_but_for_heads(open_kind: Any, kind: str, bits: int) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        planned = (await quantize(rig, bits=bits, dry_run=True)).bytes_written
        written = (await quantize(rig, bits=bits)).bytes_written
        uri, opened = rig.service._parts.sessions.resolve("s"), rig.service._parts.store.disk
        with opened.open_session(uri) as reader, opened.open_session(uri, 1) as earlier:
            own = [entry for entry in reader.entries if entry not in earlier.entries]
        assert planned == sum(entry.raw_bytes for entry in own)
        assert planned < written < planned + 4096 * (len(own) + 1)


async def test_an_awake_session_is_not_touched(rig: Rigged) -> None:
    await asleep(rig)
    before = await rig.woken_fingerprint("s")
    with pytest.raises(SessionAwake):
        await quantize(rig)
    assert await rig.fingerprint("s") == before
    assert versions(rig) == [1]


async def test_a_version_that_is_marked_is_not_followed_by_a_lossy_one(rig: Rigged) -> None:
    for name, mark, why in (
        ("s", {"tag": "keep"}, "tagged keep: `torpor untag default/s keep`"),
        ("t", {"pinned": True}, "pinned: `torpor unpin default/t@1`"),
    ):
        await asleep(rig, name)
        await rig.service.mark(name, **mark)
        [action] = (await quantize(rig, name)).actions
        assert (action.kind, action.reason) == ("keep", f"version 1 is {why}, then quantize again")
        assert versions(rig, name) == [1]


async def test_what_cannot_be_quantised_is_left_and_told_why(open_rig: Any, open_kind: Any) -> None:
    async with open_rig() as rig:
        await asleep(rig)
        [action] = (await quantize(rig)).actions
        assert action.reason == "none of its caches can be kept in few bits"
    async with open_kind() as rig:
        [action] = (await quantize(rig)).actions
        assert action.reason == "its model is not served here"
        await asleep(rig, "short", 255)
        [action] = (await quantize(rig, "short")).actions
        assert action.reason == "it has no full block: only whole ones, of 256 tokens, are quantized"
        with pytest.raises(SessionNotFound):
            await quantize(rig, "nobody")


async def test_an_order_that_means_nothing_is_refused(rig: Rigged) -> None:
    for order in ({"bits": 5}, {"bits": None}, {"session": None}):
        with pytest.raises(InvalidPolicy):
            await rig.service.maintain(**({"operation": "quantize", "session": "s", "bits": 8} | order))


async def test_one_that_cannot_be_written_is_as_it_was(rig: Rigged, full_disk: Any) -> None:
    await asleep(rig, "a")
    full_disk("a")
    with pytest.raises(NoSpace):
        await quantize(rig, "a")
    assert versions(rig, "a") == [1]
    assert (await rig.wake("a")).lossy is None


async def test_one_that_too_many_wait_for_is_refused(rig: Rigged) -> None:
    await asleep(rig, "a")
    async with crowded(rig, "a"):
        with pytest.raises(SessionBusy):
            await quantize(rig, "a")
    assert versions(rig, "a") == [1]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("at", "left"),
    [
        ("torpor.daemon.versions.quantising:quantize", [1]),
        ("torpor.memvid.format.pack_writer:PackWriter.finish", [1]),
        ("torpor.memvid.folder.folder:StoreFolder.publish", [1]),
        ("torpor.memvid.index.index:Index.add", [1, 2]),
    ],
)
async def test_killed_on_the_way_it_has_done_all_or_nothing(
    open_kind: Any, store: Path, quantisable_model: Path, digest_cache: Path, at: str, left: list[int]
) -> None:
    async with open_kind() as rig:
        await rig.read("s", tokens_of(1, 600))
        before = await rig.fingerprint("s")
        await rig.sleep("s")
    order = {"store": str(store), "model": str(quantisable_model), "digests": str(digest_cache)}
    command = [sys.executable, session_rig.__file__, "quantize", json.dumps({**order, "session": "s", "at": at})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"reached": at}
        process.kill()
    async with open_kind() as rig:
        assert versions(rig) == left
        woken = await rig.wake("s")
        assert woken.canary == "same_bits"
        assert woken.lossy == (Lossy(8, 512) if left[1:] else None)
        await rig.sleep("s")
        assert await rig.woken_fingerprint("s", 1) == before


async def test_other_sessions_write_while_one_is_quantised(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    await asleep(rig)
    await rig.read_each(("b", "control"), tokens_of(3, 100))
    order = asyncio.ensure_future(quantize(rig))
    assert await rig.write("b", 20) == await rig.write("control", 20)
    assert [action.kind for action in (await order).actions] == ["quantize"]


async def test_a_mark_of_another_maker_is_shown_and_not_woken(rig: Rigged) -> None:
    await rig.read("odd-bits", tokens_of(1, 20))
    rig.live("odd-bits").loss = Lossy(7, 20)
    await rig.sleep("odd-bits")
    with pytest.raises(MalformedSnapshot):
        await rig.wake("odd-bits")
    assert (await rig.service.show("odd-bits")).versions[-1].lossy == Lossy(7, 20)


async def test_show_says_it_awake_and_asleep(rig: Rigged) -> None:
    await asleep(rig)
    assert (await rig.service.show("s")).info.lossy is None
    await quantize(rig)
    shown = await rig.service.show("s")
    assert shown.info.lossy == Lossy(8, 512)
    assert [info.lossy for info in await rig.service.list_sessions()] == [Lossy(8, 512)], "as the index has it"
    assert shown.layers[0] == "kv/1 k, v 2xnx32 float32 in 8 bits, groups of 32"
    await rig.wake("s")
    assert (await rig.service.show("s")).info.lossy == Lossy(8, 512)
    assert (await rig.wake("s")).lossy == Lossy(8, 512), "also of a session that is awake already"


async def test_the_loss_is_of_the_size_that_bits_make(open_kind: Any) -> None:
    """Of 8 bits the logits are near those of the exact state, of 4 bits less so; both differ."""
    differences = {}
    async with open_kind() as rig:
        await asleep(rig)
        await rig.wake("s", at_token=599)
        exact = (await logits(rig)).tolist()
        for bits in (8, 4):
            rig.service._parts.sessions.residency.awake.clear()
            await quantize(rig, bits=bits)
            await rig.wake("s", at_token=599)
            differences[bits] = max(abs(a - b) for a, b in zip(exact, (await logits(rig)).tolist(), strict=True))
    assert 0 < differences[8] < differences[4]


async def logits(rig: Rigged) -> Any:
    found = rig.live("s").state.last_logits
    assert found is not None
    return found


async def test_turns_that_became_no_version_when_their_session_lost_its_state_are_kept(
    open_kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NoSpace("No room.")

    async with open_kind() as rig:
        await asleep(rig)
        await rig.service.append("s", tokens=tokens_of(2, 10))
        with monkeypatch.context() as patch:
            patch.setattr(Store, "replay_turns", refuse)
            await lose_state(rig, "s")
            with pytest.raises(NoSpace):
                await quantize(rig)
        await quantize(rig)
        assert (await rig.wake("s")).token_count == 610


def test_a_plan_begins_at_the_first_full_block_that_is_not_done() -> None:
    done, new, last = Span(BLOCK_TOKENS, 40, True), Span(BLOCK_TOKENS, 128, False), Span(80, 60, False)
    row = index_row(SessionUri("default", "s"), 3, "bb" * 32, token_count=600)
    assert plan_spans(row, [done, new, done, new, last], 40) == Plan(row, None, 256, 1024, 128 + 40 + 128, 120, 60)
    assert plan_spans(row, [new], 40) == Plan(row, None, 0, 256, 128, 40)
    assert plan_spans(row, [done, last], 40).left == "its full blocks are kept in as few bits already"
    assert plan_spans(row, [last], 40).left == "it has no full block: only whole ones, of 256 tokens, are quantized"
