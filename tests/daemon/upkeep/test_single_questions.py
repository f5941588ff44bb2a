"""What nobody named and nobody came back to costs its ledger on the disk, and nothing while it is in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.upkeep import loop, writing_behind
from torpor.daemon.upkeep.single_questions import QUIET_S
from torpor.memvid.answers import VersionInfo
from torpor.tests.daemon.session_rig import Rigged, as_killed, packs, tokens_of, until

KINDS = ("qwen3", "gemma3_text")
TURN = {"max_tokens": 4, "unnamed": True}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing_behind, "BLOCKS_DUE", 1)
    monkeypatch.setattr(loop, "REST", 0)


def rows(rig: Rigged, name: str) -> list[VersionInfo]:
    return list(rig.service._parts.store.disk.versions(rig.service._parts.sessions.resolve(name)))


def is_written_behind(rig: Rigged, name: str) -> bool:
    durable = rig.live(name).durable
    return durable is not None and durable.block_tokens > 0


def ten_minutes_later(rig: Rigged) -> None:
    """Let the time of all sessions without a request be over, and that of the upkeep."""
    for live in rig.service._parts.sessions.awake.values():
        live.stay = replace(live.stay, last_used=live.stay.last_used - QUIET_S)
    rig.service._parts.upkeep.loop.look_again()


async def ask(rig: Rigged, name: str = "q") -> Any:
    """A single question, with its blocks written behind."""
    told = await rig.service.generate(name, tokens=tokens_of(1, 600), create=True, **TURN)
    await until(lambda: is_written_behind(rig, name))
    return told


async def left_alone(rig: Rigged, name: str = "q") -> None:
    """Until its ledger alone is on the disk."""
    ten_minutes_later(rig)
    await until(lambda: [row.block_tokens for row in rows(rig, name)] == [0])


@pytest.mark.one_in(1)
@pytest.mark.usefixtures("short_calls")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_single_question_costs_its_ledger_and_goes_on_from_memory(
    open_kind: Callable[..., Any], store: Path, kind: str
) -> None:
    async with open_kind(kind) as rig:
        await ask(rig)
        had = await rig.fingerprint("q")
        before = sum(path.stat().st_size for path in packs(store))
        await left_alone(rig)
        await until(lambda: not packs(store))
        assert before > 100_000 > 10_000 > rows(rig, "q")[0].bundle_bytes
        assert await rig.fingerprint("q") == had
        assert not rig.live("q").dirty
        assert rig.service._parts.bus.figures.sleep.of.keys() == {"ledger"}, "it did not go to sleep"
        killed = as_killed(store)
        again = await rig.service.generate("q", text="And?", **TURN)
        assert (again.prefilled_tokens, again.recomputed_tokens) == (4, 0)
        went_on = await rig.fingerprint("q")
        await rig.sleep_and_wake("q")
        assert await rig.fingerprint("q") == went_on, "what was followed up is kept whole"
    async with open_kind(kind, store=killed) as rig:
        later = await rig.service.generate("q", text="And?", **TURN)
        assert (later.tokens, later.recomputed_tokens) == (again.tokens, 604), "read again, in the same calls"
        assert await rig.fingerprint("q") == went_on


@pytest.mark.one_in(1)
async def test_what_is_kept_as_a_ledger_leaves_memory_without_a_byte_more(
    open_rig: Callable[..., Any], store: Path
) -> None:
    async with open_rig() as rig:
        for name in ("stopped", "idle", "asked", "forked", "back"):
            await ask(rig, name)
            await left_alone(rig, name)
        await until(lambda: not packs(store))
        sleeps = rig.service._parts.models.idle_sleeps
        assert await sleeps.put_away(rig.live("idle").uri, "pressure")
        assert [row.version for row in rows(rig, "idle")] == [rows(rig, "stopped")[0].version]
        assert not packs(store)
        await rig.sleep("asked")
        assert rows(rig, "asked")[-1].block_tokens == 604, "who asks for a sleep gets one"
        assert (await rig.service.fork("forked", name="fork")).tokens_prefilled == 0
        made = await rig.service.fork("back", name="early", at_token=300)
        assert (made.token_count, made.tokens_prefilled) == (300, 1), "the logits there"
    async with open_rig() as rig:
        assert [row.block_tokens for row in rows(rig, "stopped")] == [0]
        woken = await rig.wake("stopped")
        assert (woken.tokens_prefilled, woken.recomputed_because) == (604, "ledger")
        early = await rig.service.fork("idle", name="other", at_token=300)
        assert early.tokens_prefilled == 604 + 1, "it was computed to be cut"


async def test_what_goes_on_or_has_a_name_is_kept_whole(open_rig: Callable[..., Any]) -> None:
    async with open_rig(endless=False) as rig:
        hello: list[dict[str, Any]] = [{"role": "user", "content": "a" * 600}]
        on = await rig.service.converse("on", hello, **TURN)
        answered = [{"role": "assistant", "content": on.text}, {"role": "user", "content": "More."}]
        await rig.service.converse("on", [*hello, *answered], **TURN)
        await rig.service.create("items", unnamed=True)
        await rig.service.append("items", messages=hello, unnamed=True)
        await rig.read("named", tokens_of(3, 600))
        kept = ("on", "items", "named")
        await until(lambda: all(is_written_behind(rig, name) for name in kept))
        await ask(rig)
        ten_minutes_later(rig)
        await until(lambda: rows(rig, "q")[-1].block_tokens == 0)
        assert all(is_written_behind(rig, name) for name in kept)


async def test_nothing_happens_before_the_time_or_while_it_is_used(open_rig: Callable[..., Any]) -> None:
    async with open_rig() as rig:
        await ask(rig)
        upkeep = rig.service._parts.upkeep
        uses = upkeep.single_questions.uses()
        assert uses[rig.live("q").uri] == (rig.live("q").stay.last_used, QUIET_S)
        async with rig.service._parts.sessions.turns.take(rig.live("q").uri):
            await upkeep.single_questions.look_at(rig.live("q").uri)
        assert is_written_behind(rig, "q")


@pytest.mark.usefixtures("short_calls")
async def test_a_ledger_alone_hides_no_session_that_a_new_one_can_take_over(open_rig: Callable[..., Any]) -> None:
    async with open_rig(prefix_reuse="exact") as rig:
        await rig.asleep("whole", tokens_of(1, 600))
        names = [f"q{number}" for number in range(4)]  # as many as are tried
        for name in names:
            await ask(rig, name)
        ten_minutes_later(rig)
        await until(lambda: all(rows(rig, name)[-1].block_tokens == 0 for name in names))
        for name in names:
            await rig.service._parts.models.idle_sleeps.put_away(rig.live(name).uri, "pressure")
        told = await rig.service.append("new", tokens=tokens_of(1, 600), create=True)
        assert told.cached_tokens == 599
