"""What the daemon tells of itself: every stage, with the figures that the results have, and no word of any text."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.errors import EmptyContext, MemoryBudgetExceeded, ServiceClosed
from torpor.memvid.errors import NoSpace
from torpor.tests.daemon.session_rig import Rigged, broken_at, flip, listening, packs, tokens_of, until

SECRETS = ("xylophone", "quokka", "zeppelin", "Marzipan")


async def test_a_whole_story_is_told_with_true_figures_and_without_a_word_of_it(
    open_rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    one, two, three, four = SECRETS
    async with open_rig() as rig, listening(rig) as heard:
        service = rig.service
        await service.create("story", system=one, labels=["label-of-mine"])
        chatted = await service.chat("story", message=f"{two} {three}", max_tokens=4)
        slept = await service.sleep("story")
        woken = await service.wake("story")
        appended = await service.append("story", text=four)
        again = await service.sleep("story")
        fork = await service.fork("story", name="branch")
        deleted = await service.delete("branch")
        await until(lambda: bool(heard.of("session_deleted")) and len(heard.of("request_finished")) == 8)

    assert [each["verb"] for each in heard.of("request_finished")] == [
        "create", "chat", "sleep", "wake", "append", "sleep", "fork", "delete",
    ]  # fmt: skip
    assert heard.of("request_failed") == []
    story = heard.names("story")
    assert story[:10] == [
        "request_accepted", "session_created", "request_finished", "request_accepted", "prefill_began",
        "prefill_progress", "prefill_progress", "prefill_ended", "first_token", "decode_ended",
    ]  # fmt: skip
    assert story[10:20] == [
        "request_finished", "request_accepted", "sleep_began", "sleep_ended", "request_finished",
        "request_accepted", "wake_began", "wake_verified", "wake_ended", "request_finished",
    ]  # fmt: skip

    began, ended = heard.of("prefill_began"), heard.of("prefill_ended")
    assert [each["tokens"] for each in began] == [chatted.prefilled_tokens, appended.prefilled_tokens]
    assert [each["tokens"] for each in ended] == [chatted.prefilled_tokens, appended.prefilled_tokens]
    assert heard.of("prefill_progress")[1] == {
        "done_tokens": chatted.prefilled_tokens, "total_tokens": chatted.prefilled_tokens,
    }  # fmt: skip
    assert heard.of("first_token") == [{"seconds": chatted.time_to_first_token_s}]
    assert heard.of("decode_ended")[0]["tokens"] == len(chatted.tokens) == 4
    for told, receipt in zip(heard.of("sleep_ended"), (slept, again), strict=True):
        facts = ("version", "bytes_written", "logical_bytes", "blocks_new", "blocks_reused")
        assert {name: told[name] for name in facts} == {name: getattr(receipt, name) for name in facts}
        assert (told["cause"], told["tokens"]) == ("asked", receipt.token_count)
        assert 0 < told["seconds"] <= receipt.seconds
    (wake,) = heard.of("wake_ended")
    assert {name: wake[name] for name in ("version", "bytes_read", "tokens_prefilled", "canary")} == {
        "version": 1, "bytes_read": woken.bytes_read, "tokens_prefilled": 0, "canary": "same_bits",
    }  # fmt: skip
    assert wake["tokens"] == woken.token_count
    assert heard.of("wake_verified")[0]["bytes_read"] == woken.bytes_read
    (forked,) = heard.of("session_forked", "branch")
    assert (forked["source"], forked["blocks_reused"]) == ("torpor://default/story", fork.blocks_reused)
    assert heard.of("session_deleted") == [{"versions": 1, "bytes_freed": deleted.bytes_freed}]

    assert [notice.number for notice in heard] == list(range(len(heard))), "none is lost, none comes twice"
    by_request: dict[int, set[str]] = {}
    for notice in heard:
        if notice.request is not None:
            by_request.setdefault(notice.request, set()).add(notice.event.name)
    assert {"request_accepted", "prefill_ended", "first_token", "decode_ended", "request_finished"} <= by_request[2]
    assert {"request_accepted", "sleep_began", "sleep_ended", "request_finished"} <= by_request[3]
    everything = repr(heard) + repr([record.__dict__ for record in caplog.records])
    for word in (one, two, three, four, "label-of-mine"):
        assert word not in everything


async def test_what_fails_is_told_by_the_code_of_its_error(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.service.create("a")
        with pytest.raises(EmptyContext):
            await rig.sleep("a")
        await rig.service.append("a", tokens=tokens_of(1, 300))
        await broken_at(rig, 2, rig.service.append("a", tokens=tokens_of(2, 300)))
        rig.network.reset()

        def full(*_args: Any, **_options: Any) -> None:
            raise NoSpace("no room for xylophone")

        with monkeypatch.context() as patch:
            patch.setattr(type(rig.service._parts.store.disk), "write_bundle", full)
            with pytest.raises(NoSpace):
                await rig.sleep("a")
        with pytest.raises(Exception, match="nobody"):
            await rig.wake("nobody")
        await until(lambda: len(heard.of("request_failed")) == 4)
    assert [(each["verb"], each["code"]) for each in heard.of("request_failed")] == [
        ("sleep", "empty_context"), ("append", "generation_failed"), ("sleep", "no_space"),
        ("wake", "session_not_found"),
    ]  # fmt: skip
    assert [each["tokens"] for each in heard.of("prefill_ended")] == [300, 0]
    assert [(each["cause"], each["code"]) for each in heard.of("sleep_failed")] == [("asked", "no_space")]
    assert "xylophone" not in repr(heard)


async def test_a_wake_that_is_refused_is_told(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.asleep("a", tokens_of(1, 30))
        (pack,) = packs(store)
        flip(pack, pack.stat().st_size // 2)
        with pytest.raises(Exception, match=r".") as caught:
            await rig.wake("a")
        await until(lambda: bool(heard.of("request_failed")))
        code = caught.value.code  # type: ignore[attr-defined]
    assert heard.names("a")[-4:] == ["request_accepted", "wake_began", "wake_failed", "request_failed"]
    assert heard.of("wake_failed")[0]["code"] == heard.of("request_failed")[0]["code"] == code


async def test_pressure_and_idling_and_a_stop_are_told_as_causes_of_sleeps(open_rig: Any, weights: int) -> None:
    async with open_rig(memory_budget=weights + 700_000, close=False) as rig:
        async with listening(rig) as heard:
            await rig.read_each(("a", "b", "c"), tokens_of(1, 200))
            await rig.service.append("a", tokens=[1])
            await until(lambda: len(heard.of("request_finished")) == 7)
            with pytest.raises(MemoryBudgetExceeded):
                await rig.service.append("a", tokens=tokens_of(2, 1800))
            assert heard.of("sleep_ended", "a")[0]["cause"] == "pressure"
            plan = heard.of("eviction_planned")[0]
            assert plan["wanted_bytes"] > plan["free_bytes"]
            assert plan["sessions"] >= 1
            awaited, granted = heard.of("memory_awaited"), heard.of("memory_granted")
            assert [each["wanted_bytes"] for each in awaited] == [each["wanted_bytes"] for each in granted]
            assert all(each["granted"] for each in granted)
            assert heard.of("wake_ended", "a")[0]["cause"] == "asked"
            await until(lambda: bool(heard.of("memory_refused")))
            refused = heard.of("memory_refused")[0]
            assert refused["budget_bytes"] == weights + 700_000
            await rig.service.close()
            await until(lambda: "shutdown" in {each["cause"] for each in heard.of("sleep_ended")})
        with pytest.raises(ServiceClosed):
            rig.service.subscribe()


async def test_a_session_that_cannot_make_room_is_told(open_rig: Any, weights: int, full_disk: Any) -> None:
    async with open_rig(memory_budget=weights + 400_000) as rig, listening(rig) as heard:
        await rig.read("a", tokens_of(1, 200))
        disk = full_disk()
        with pytest.raises(MemoryBudgetExceeded):
            await rig.read("b", tokens_of(2, 200))
        disk.free()
        await until(lambda: bool(heard.of("request_failed")))
    assert heard.of("eviction_refused", "a") == [{"code": "no_space"}]
    assert heard.of("sleep_failed", "a")[0]["cause"] == "pressure"


async def test_idle_sessions_and_unchanged_ones_sleep_and_say_what_was_written(open_rig: Any) -> None:
    async with open_rig(idle_sleep=0.05) as rig, listening(rig) as heard:
        await rig.read("a", tokens_of(1, 20))
        await until(lambda: not rig.is_awake("a"))
        await rig.wake("a")
        await until(lambda: len(heard.of("sleep_ended")) == 2)
    first, second = heard.of("sleep_ended")
    assert (first["cause"], second["cause"]) == ("idle", "idle")
    assert first["bytes_written"] > 0
    assert (second["bytes_written"], second["blocks_new"]) == (0, 0)
    assert (second["version"], second["tokens"]) == (first["version"], 20)
    assert second["blocks_reused"] == first["blocks_new"]
    idle = [notice for notice in heard if notice.event.name == "sleep_ended"]
    assert [notice.request for notice in idle] == [None, None]


async def test_a_request_behind_another_is_told_to_wait(open_rig: Any) -> None:
    async with open_rig() as rig, listening(rig) as heard:
        await rig.read("a", tokens_of(1, 10))
        gate = rig.network.hold_at(1)
        first = asyncio.create_task(rig.service.append("a", tokens=[1]))
        await gate.reached()
        second = asyncio.create_task(rig.service.append("a", tokens=[2]))
        await until(lambda: bool(heard.of("request_queued")))
        gate.open()
        await asyncio.gather(first, second)
    assert heard.of("request_queued", "a") == [{"ahead": 1}]


async def test_a_prefix_that_is_taken_over_is_told_with_its_source(open_rig: Any) -> None:
    text = tokens_of(1, 600)
    async with open_rig(prefix_reuse="exact") as rig, listening(rig) as heard:
        await rig.read("a", text)
        await rig.service.create("b")
        from_memory = await rig.service.append("b", tokens=text)
        await rig.sleep("a")
        await rig.service.delete("b")
        await rig.service.create("c")
        from_store = await rig.service.append("c", tokens=text)
        await until(lambda: len(heard.of("prefix_hit")) == 2 and len(heard.of("prefill_ended", "c")) == 1)
    for told, result, awake in zip(heard.of("prefix_hit"), (from_memory, from_store), (True, False), strict=True):
        assert told["source"] == "torpor://default/a"
        assert (told["wanted_tokens"], told["cached_tokens"], told["awake"]) == (600, result.cached_tokens, awake)
    assert heard.of("wake_ended", "a")[0]["cause"] == "prefix"
    assert heard.of("prefill_ended", "c")[0]["tokens"] == 600 - from_store.cached_tokens


async def test_subscribers_are_told_of_the_session_that_they_named_also_before_it_is_there(rig: Rigged) -> None:
    async with listening(rig, session="lab/b", names=["session_created", "prefill_ended"]) as heard:
        await rig.read("a", [1, 2, 3])
        await rig.read("lab/b", [1, 2, 3])
        await until(lambda: bool(heard.of("prefill_ended")))
    assert [notice.event.name for notice in heard] == ["subscribed", "session_created", "prefill_ended"]
    assert not rig.service._parts.bus.is_watched
