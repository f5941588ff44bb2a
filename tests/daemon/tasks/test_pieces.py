"""All sessions are looked over in pieces, whatever happens between two of them; the loop serves others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from torpor.daemon.engine import generation
from torpor.daemon.errors import InvalidTokens
from torpor.daemon.prefixes import heads, reuse
from torpor.daemon.residency import labels, listing
from torpor.daemon.tasks import pieces
from torpor.daemon.tasks.pieces import Pieces, in_pieces
from torpor.daemon.upkeep import scrubbing
from torpor.daemon.upkeep.scrubbing import ScrubPolicy
from torpor.memvid.index.index import Index
from torpor.memvid.store import Store
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until

AT_ONCE = 1
ASLEEP, AWAKE = ("a", "b", "c", "lab/d", "lab/e"), ("f", "g", "h", "i", "lab/j")


@asynccontextmanager
async def counting_turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """How many sessions have been looked at in each turn of the event loop."""
    counts = [0]

    def counting(look: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[-1] += 1
            return look(*args)

        return counted

    for module in (listing, labels):
        monkeypatch.setattr(module, "SESSIONS_AT_ONCE", AT_ONCE)
    for name in ("info_of_stored", "info_of_awake"):
        monkeypatch.setattr(listing, name, counting(getattr(listing, name)))
    monkeypatch.setattr(labels.Labels, "_with", counting(labels.Labels._with))
    monkeypatch.setattr(Store, "find_session", counting(Store.find_session))
    async with beginning_anew(counts):
        yield counts


@asynccontextmanager
async def beginning_anew(counts: list[int]) -> AsyncIterator[None]:
    """Another count in each turn of the event loop."""

    async def turn() -> None:
        while True:
            counts.append(0)
            await asyncio.sleep(0)

    turning = asyncio.ensure_future(turn())
    try:
        yield
    finally:
        turning.cancel()


async def fill(rig: Rigged) -> None:
    for name in (*ASLEEP, *AWAKE):
        await rig.service.create(name, labels=["x"])
        await rig.service.append(name, tokens=tokens_of(1, 5))
    for name in ASLEEP:
        await rig.service.sleep(name)


async def test_no_request_for_all_sessions_looks_at_more_than_a_few_in_one_turn_of_the_loop(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = len(ASLEEP) + len(AWAKE)
    async with open_rig() as rig, counting_turns(monkeypatch) as counts:
        await fill(rig)
        assert len(await rig.service.list_sessions()) == everybody
        assert (await rig.service.stats()).total.sessions == everybody
        status = await rig.service.status()
        assert (status.sessions_asleep, status.sessions_awake) == (len(ASLEEP), len(AWAKE))
        for _ in range(2):  # the second finds all of them awake, and most of them as they slept
            assert len((await rig.service.warm(label="x")).sessions) == everybody
        assert len((await rig.service.clear(label="x")).sessions) == everybody
    # `stats` counts a session for the whole and for its label; the turn of a last piece begins the next work.
    assert 0 < max(counts) <= 3 * AT_ONCE


async def test_what_goes_round_all_sessions_by_itself_fetches_no_more_than_a_few_in_one_turn_of_the_loop(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0]

    def counting(fetch: Any) -> Any:
        def counted(*args: Any) -> Any:
            for page in fetch(*args):
                counts[-1] += len(page) if isinstance(page, list) else 1
                yield page

        return counted

    async with open_rig() as rig:
        await fill(rig)
        for name in AWAKE:
            await rig.sleep(name)
    for module in (scrubbing, reuse, heads):
        monkeypatch.setattr(module, "NAMES_AT_ONCE", AT_ONCE)
    for owner, name in ((Index, "iter_uris"), (Store, "iter_sessions")):
        monkeypatch.setattr(owner, name, counting(getattr(owner, name)))
    everybody = len(ASLEEP) + len(AWAKE)
    often = ScrubPolicy(1 << 40, idle_s=0.0, round_s=0.0)
    async with beginning_anew(counts), open_rig(scrub=often, prefix_reuse="exact") as rig:
        await until(lambda: rig.service._parts.store.scrub._sessions > everybody)
    assert sum(counts) >= 3 * everybody, "the scrub, and twice what is learnt of sessions that sleep"
    # Each of the three may have its turn in the same one, and the end of a page begins the next.
    assert max(counts) <= 3 * AT_ONCE


async def test_a_long_list_of_tokens_is_checked_a_few_in_one_turn_of_the_loop(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [0]

    class Token(int):
        def __ge__(self, other: int) -> bool:
            counts[-1] += 1
            return int(self) >= other

    monkeypatch.setattr(generation, "_CHECKED_AT_ONCE", AT_ONCE)
    async with open_rig() as rig, beginning_anew(counts):
        await rig.service.create("a")
        with pytest.raises(InvalidTokens):
            await rig.service.append("a", tokens=[*map(Token, range(1, 100)), -1])
    assert sum(counts) == 99
    assert max(counts) <= 2 * AT_ONCE


async def test_a_clear_looks_at_each_session_a_few_times_however_many_there_are(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(rig)
    looks = []
    whole = rig.service._parts.sessions.roll.infos
    monkeypatch.setattr(rig.service._parts.sessions.roll, "infos", lambda *args: looks.append(args) or whole(*args))
    assert len((await rig.service.clear(label="x")).sessions) == len(ASLEEP) + len(AWAKE)
    assert len(looks) == 2, "what is there, and whether more has come"


async def test_what_happens_between_two_pieces_is_seen_or_not_and_hides_no_other(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "SESSIONS_AT_ONCE", AT_ONCE)
    async with open_rig() as rig:
        await fill(rig)
        looking = rig.service._parts.sessions.roll.infos()
        next(looking)
        await rig.wake("c")  # comes into memory
        await rig.sleep("f")  # sleeps for the first time
        await rig.service.delete("g")
        await rig.service.delete("lab/e")
        found = {info.session: info for info in _rest_of(looking)}
        kept = {*ASLEEP, *AWAKE} - {"g", "lab/e"}
        assert {name.removeprefix("torpor://").removeprefix("default/") for name in found} == kept
        assert list(found) == sorted(found)
        assert (found["torpor://default/c"].state, found["torpor://default/f"].state) == ("awake", "asleep")
        within = await in_pieces(rig.service._parts.sessions.roll.infos("lab"))
        assert [info.name for info in within] == ["d", "j"]


async def test_a_count_of_the_sessions_asleep_takes_none_away_for_what_happens_between_two_pieces(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "NAMES_AT_ONCE", AT_ONCE)
    async with open_rig() as rig:
        await fill(rig)
        pieces = rig.service._parts.sessions.roll.count_asleep()
        next(pieces)  # a and b
        for name in ("c", "lab/d", "lab/e"):
            await rig.service.delete(name)
        for name in ("h", "i", "lab/j"):
            await rig.sleep(name)  # for the first time
        assert _rest_of(pieces) == 5
        for name in ("a", "b", "h"):
            await rig.wake(name)
        assert (await rig.service.status()).sessions_asleep == 2


def _rest_of(pieces: Pieces[Any]) -> Any:
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


async def test_others_are_served_behind_each_piece_and_only_one_of_all_such_work_is_done_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "_PAUSE_S", 0.02)  # pauses at the same time would end in the same turn of the loop
    done: list[str] = []

    def work(name: str) -> Pieces[str]:
        for _ in range(5):
            done.append(name)
            yield
        return name

    async def other() -> None:
        assert done == ["a", "b"]
        while len(done) < 10:
            done_before = len(done)
            await asyncio.sleep(0)
            assert len(done) - done_before <= 1, "behind the first pieces of both"

    assert await asyncio.gather(in_pieces(work("a")), in_pieces(work("b")), other()) == ["a", "b", None]
    assert done == ["a", "b"] * 5


async def test_what_a_piece_raises_is_raised_and_the_next_work_goes_on() -> None:
    def fails() -> Pieces[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await in_pieces(fails())
    assert await in_pieces(_nothing()) == 7


def _nothing() -> Pieces[int]:
    yield
    return 7
