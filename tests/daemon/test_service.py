"""The verbs: turn-taking, what is refused without side effects, and what a graceful stop does."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look
from torpor.daemon.engine.generation import DEFAULT_MAX_TOKENS
from torpor.daemon.errors import (
    ContextOverflow,
    EmptyContext,
    InvalidSampling,
    InvalidTokens,
    ServiceClosed,
    SessionAwake,
    SessionBusy,
    SessionExists,
    StopDeadline,
    UnknownModel,
)
from torpor.daemon.residency import stopping
from torpor.daemon.sessions.sessions import MAX_WAITING
from torpor.errors import TorporError
from torpor.memvid.errors import InvalidUri, SessionNotFound
from torpor.memvid.index.index import Index
from torpor.memvid.store import Store
from torpor.snapshot.errors import NoSuchPosition
from torpor.tests.daemon.session_rig import (
    DEADLINE_S,
    LOGITS,
    MODEL,
    ROW,
    SAMPLED,
    Rigged,
    Writing,
    cancelled,
    given_up,
    held_at,
    ignore,
    manifests,
    packs,
    tokens_of,
    until,
)

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


async def held(rig: Rigged, name: str, count: int = 3) -> Any:
    """A generation of that session that stands inside its first model call, and the gate that lets it go on."""
    rig.network.reset()
    return await held_at(rig, 1, rig.write(name, count))


# --- create


async def test_a_new_session_is_awake_and_empty_and_named_by_name_namespace_or_uri(rig: Rigged) -> None:
    info = await rig.service.create("a", labels=["x"], sampling=SAMPLED)
    assert (info.session, info.state, info.token_count, info.version) == ("torpor://default/a", "awake", 0, None)
    assert (info.labels, info.sampling, info.model) == (("x",), SAMPLED, MODEL)
    for name, uri in (("b", "default/b"), ("work/a", "work/a"), ("torpor://work/b.c-d_e", "work/b.c-d_e")):
        assert (await rig.service.create(name)).session == f"torpor://{uri}"


async def test_a_name_outside_the_syntax_is_refused_threat_19(rig: Rigged) -> None:
    for name in ("", "/a", "a/", "a/b/c", "../a", "a\0", "torpor://a", "http://a/b", "é", "a" * 129):
        with pytest.raises(InvalidUri):
            await rig.service.create(name)
    assert not await rig.service.list_sessions()


async def test_a_name_is_given_once_awake_or_asleep(rig: Rigged) -> None:
    await rig.read("a", [1, 2, 3])
    with pytest.raises(SessionExists):
        await rig.service.create("default/a")
    await rig.sleep("a")
    with pytest.raises(SessionExists):
        await rig.service.create("a")
    assert (await rig.wake("a")).token_count == 3


async def test_what_could_never_be_slept_is_refused_at_creation(rig: Rigged) -> None:
    """Otherwise the refusal comes with the sleep, when there is something to lose."""
    long_system = {"system": "x" * (4 * 1024 * 1024)}
    for options in (long_system, *({"labels": labels} for labels in (["x"] * 257, [""], ["x" * 257]))):
        with pytest.raises(TorporError):
            await rig.service.create("a", **options)
    with pytest.raises(UnknownModel) as refusal:
        await rig.service.create("a", model="other")
    assert refusal.value.served == [MODEL]
    assert not await rig.service.list_sessions()


# --- empty sessions


async def test_an_empty_session_cannot_write_or_sleep_and_nothing_is_stored_gm4(rig: Rigged, store: Any) -> None:
    await rig.service.create("a")
    for work in (rig.service.generate("a", max_tokens=3, sampling=SAMPLED), rig.sleep("a")):
        with pytest.raises(EmptyContext):
            await work
    assert rig.live("a").sampling == Sampling(), "a refusal changes nothing, the sampling included"
    assert [*rig.network.calls, *manifests(store), *packs(store)] == []
    assert (await rig.service.delete("a")).versions_deleted == 0
    assert not await rig.service.list_sessions()


# --- append


async def test_text_is_read_as_its_tokens(rig: Rigged) -> None:
    await rig.service.create("a")
    for neither in ({}, {"text": "x", "tokens": [1]}):
        with pytest.raises(InvalidTokens):
            await rig.service.append("a", **neither)
    result = await rig.service.append("a", text="héllo")
    assert (result.tokens_added, result.prefilled_tokens, result.token_count) == (6, 6, 6)
    assert rig.model.decode(rig.live("a").state.tokens) == "héllo"


async def test_prompts_of_two_clients_in_one_session_do_not_interleave(rig: Rigged) -> None:
    prompts = [tokens_of(at, 300) for at in range(4)]
    asked = [rig.service.generate("a", tokens=each, max_tokens=4, create=True, labels=("new",)) for each in prompts]
    told = await asyncio.gather(*asked)
    expected = [token for ids, each in zip(prompts, told, strict=True) for token in (*ids, *each.tokens)]
    assert list(rig.live("a").state.tokens) == expected
    assert rig.live("a").labels == ("new",)


@pytest.mark.parametrize("asked", [{"tokens": [1_000_000]}, {"tokens": [1] * 4000}, {"text": "a", "model": "nobody"}])
async def test_a_session_that_generate_was_to_make_is_not_there_if_nothing_was_read(rig: Rigged, asked: Any) -> None:
    with pytest.raises(TorporError):
        await rig.service.generate("a", create=True, max_tokens=4, **asked)
    assert not rig.service._parts.sessions.residency.awake


async def test_generate_reads_its_text_first(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 20))
    result = await rig.service.generate("a", text="more", max_tokens=5)
    await rig.service.append("control", text="more")
    assert result.prefilled_tokens == 4
    assert result.tokens == (await rig.service.generate("control", max_tokens=5)).tokens


# --- seeds and settings


async def test_the_sampling_of_a_request_holds_for_it_alone_and_overrides_what_it_names(rig: Rigged) -> None:
    """What it does not name is the session's own; a seed draws by random numbers beside those of the session."""
    own = Sampling(0.9, top_p=0.95, seed=11)
    asked = {"warm": Sampling(temperature=2.0), "seeded": Sampling(seed=7)}
    for name, named in asked.items():
        await rig.read("a", tokens_of(1, 20), sampling=own)
        await rig.read(name, tokens_of(1, 20), sampling=own.changed(named))
        before = (await rig.fingerprint("a")).random_key
        plain = await rig.write("a", 10)
        await rig.service.delete("a")
        await rig.read("a", tokens_of(1, 20), sampling=own)
        written = await rig.write("a", 10, sampling=named)
        assert written == await rig.write(name, 10) != plain
        assert rig.live("a").sampling == own
        assert (await rig.fingerprint("a")).random_key == before
        await rig.service.delete("a")


@pytest.mark.parametrize(
    ("verb", "asked"),
    [
        ("append", {"text": "hello"}),
        ("generate", {"text": "hello", "max_tokens": 2}),
        ("chat", {"message": "hello", "max_tokens": 2}),
    ],
)
async def test_what_reads_makes_its_session_if_it_is_told_to(rig: Rigged, verb: str, asked: dict[str, Any]) -> None:
    """It is gone again where nothing was read; one that is there, awake or asleep, is used as it is."""
    work = getattr(rig.service, verb)
    with pytest.raises(SessionNotFound):
        await work(session="a", on_event=ignore, **asked)
    rig.network.fail_at(1)
    with pytest.raises(TorporError):
        await work(session="a", create=True, on_event=ignore, **asked)
    assert not await rig.service.list_sessions()
    rig.network.reset()
    first = await asyncio.gather(*(work(session="a", create=True, on_event=ignore, **asked) for _ in range(3)))
    assert (await rig.service.show("a")).info.token_count == max(each.token_count for each in first)
    await rig.sleep("a")
    again = await work(session="a", create=True, on_event=ignore, **asked)
    assert again.woken is not None
    rig.network.fail_at(1)
    with pytest.raises(TorporError):
        await work(session="a", create=True, on_event=ignore, **asked)
    assert rig.is_awake("a")


@pytest.mark.one_in(3)
async def test_without_a_number_some_tokens_are_written_as_far_as_they_fit(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    context = rig.live("a").model.context_tokens
    assert len((await rig.service.generate("a")).tokens) == DEFAULT_MAX_TOKENS
    left = context - len(rig.live("a").state.tokens)
    await rig.service.append("a", tokens=tokens_of(2, left - 3))
    assert len((await rig.service.generate("a")).tokens) == 3
    with pytest.raises(ContextOverflow):
        await rig.service.generate("a")


async def test_set_changes_what_it_names_for_good(rig: Rigged) -> None:
    """A seed that it names begins the random numbers anew."""
    await rig.read("a", tokens_of(1, 20), sampling=Sampling(1.0, top_p=0.9, seed=1))
    await rig.write("a", 5)
    before = await rig.fingerprint("a")
    await rig.sleep("a")
    changed = await rig.service.set("a", sampling=Sampling(temperature=0.5))
    assert (changed.sampling, changed.dirty) == (Sampling(0.5, top_p=0.9, seed=1), True)
    assert await rig.fingerprint("a") == before, "the random key goes on"
    await rig.sleep_and_wake("a")
    assert rig.live("a").sampling == Sampling(0.5, top_p=0.9, seed=1)
    same = await rig.service.set("a", sampling=Sampling(temperature=0.5))
    assert not same.dirty
    rig.live("a").state.random_key = mx.array([1, 2], mx.uint32)  # that of a session of before goes on
    await rig.service.set("a", sampling=Sampling(seed=7))
    await rig.read("b", tokens_of(1, 20), sampling=Sampling(1.0, seed=7))
    assert (await rig.fingerprint("a")).random_key == (await rig.fingerprint("b")).random_key


async def test_settings_out_of_range_are_refused_before_anything_is_read(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    before = await rig.fingerprint("a")
    with pytest.raises(InvalidSampling):
        await rig.write("a", 5, text="hello", sampling=Sampling(temperature=1e-9))
    with pytest.raises(InvalidSampling):
        await rig.service.set("a", sampling=Sampling(top_p=2.0))
    assert await rig.fingerprint("a") == before


async def refused(rig: Rigged, verb: str) -> None:
    """A request for the session with other settings, which does not succeed."""
    request: dict[str, Any] = {
        "generate": {"max_tokens": 5},
        "generate after a text": {"max_tokens": 5, "text": "hello"},
        "chat": {"max_tokens": 5, "message": "hello"},
    }[verb]
    work = getattr(rig.service, verb.split()[0])
    with pytest.raises(TorporError):
        await work(session="a", sampling=SAMPLED, on_event=ignore, **request)


async def test_a_request_that_fails_or_is_given_up_before_anything_is_committed_leaves_the_session_as_it_was(
    rig: Rigged,
) -> None:
    """Its settings, its random key and its being clean included."""
    await rig.woken("a", tokens_of(1, 30))
    before = await rig.fingerprint("a")
    for verb in ("generate", "generate after a text", "chat", "given up"):
        rig.network.fail_at(1)
        if verb == "given up":
            with pytest.raises(asyncio.CancelledError):
                await given_up(rig, rig.write("a", 5, text="x" * 600, sampling=SAMPLED))
        else:
            await refused(rig, verb)
        assert await rig.fingerprint("a") == before
        assert (rig.live("a").sampling, rig.live("a").dirty) == (Sampling(), False)


async def test_a_write_that_fails_at_its_first_token_keeps_what_was_read_and_not_the_settings(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 30))
    await rig.service.append("control", text="hello")
    rig.network.fail_at(3)  # "hell", "o", the first token
    await refused(rig, "generate after a text")
    assert await rig.fingerprint("a") == await rig.fingerprint("control")
    assert rig.live("a").sampling == Sampling()


async def test_a_token_that_was_drawn_stays_though_the_next_fails(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 30))
    await rig.write("control", 1, sampling=SAMPLED)
    rig.network.fail_at(2)
    await refused(rig, "generate")
    assert await rig.fingerprint("a") == await rig.fingerprint("control")
    assert (rig.live("a").sampling, rig.live("a").dirty) == (Sampling(), True)


# --- sessions beside each other


@pytest.mark.one_in(2)
async def test_two_sessions_at_the_same_time_write_what_each_writes_alone_qx1(rig: Rigged) -> None:
    for name, seed in (("a", 1), ("b", 2), ("a-alone", 1), ("b-alone", 2)):
        await rig.read(name, tokens_of(seed, 200 + seed), sampling=Sampling(0.8, seed=seed))
    together = await asyncio.gather(rig.write("a", 50), rig.write("b", 50))
    assert set(rig.network.rows) == {1}
    assert together == [await rig.write("a-alone", 50), await rig.write("b-alone", 50)]
    assert await rig.fingerprint("a") == await rig.fingerprint("a-alone")


@pytest.mark.one_in(2)
async def test_a_stream_goes_on_while_another_session_reads_a_long_text(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    await rig.service.create("b")
    order: list[str] = []
    reading = asyncio.ensure_future(
        rig.service.append("b", tokens=tokens_of(2, 2000), on_event=lambda _: order.append("chunk"))
    )
    await rig.service.generate("a", max_tokens=30, on_event=lambda _: order.append("token"))
    await reading
    first, last = order.index("chunk"), len(order) - 1 - order[::-1].index("chunk")
    assert "token" in order[first:last], "tokens come between the chunks of the other session"


async def test_the_random_numbers_of_the_process_do_not_touch_a_session(rig: Rigged) -> None:
    """Someone else who draws from mlx's global random state must not change what a seeded session writes."""
    await rig.read_each(("a", "control"), tokens_of(1, 20), sampling=SAMPLED)
    await rig.write("control", 20)
    for _ in range(4):
        await rig.service._parts.models.engine.call(lambda: mx.eval(mx.random.normal((3,))))
        await rig.write("a", 5)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")


async def test_requests_for_one_session_take_turns_in_the_order_of_their_coming(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 20))
    task, gate = await held(rig, "a")
    appending = asyncio.ensure_future(rig.service.append("a", tokens=[7, 8]))
    writing = asyncio.ensure_future(rig.write("a", 2))
    gate.open()
    await asyncio.gather(task, appending, writing)
    rig.network.reset()
    await rig.write("control", 3)
    await rig.service.append("control", tokens=[7, 8])
    await rig.write("control", 2)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")


async def test_one_request_too_many_is_told_that_the_session_is_busy_and_nothing_happens_qx18(rig: Rigged) -> None:
    await rig.read_each(("a", "control", "other"), tokens_of(1, 20))
    task, gate = await held(rig, "a", 1)
    waiting = [asyncio.ensure_future(rig.write("a", 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    for verb in (rig.write("a", 1), rig.sleep("a"), rig.wake("a"), rig.service.delete("a")):
        with pytest.raises(SessionBusy):
            await verb
    gate.open()
    await asyncio.gather(task, *waiting)
    rig.network.reset()
    await rig.write("control", MAX_WAITING + 1)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")
    assert await rig.write("a", 1) == await rig.write("control", 1)


# --- sleep


async def test_sleep_frees_the_memory_and_says_what_is_durable(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 300))
    events: list[Any] = []
    receipt = await rig.service.sleep("a", on_event=events.append)
    assert not rig.is_awake("a")
    (info,) = await rig.service.list_sessions()
    assert (info.state, info.resident_bytes, info.dirty) == ("asleep", 0, False)
    assert (info.version, info.bundle_id, info.token_count) == (receipt.version, receipt.bundle_id, 300)
    assert all(isinstance(event, ProgressEvent) and event.stage == "sleep" for event in events)
    assert events[-1].done == events[-1].total


async def test_sleeping_again_or_twice_at_once_gives_the_same_receipt_and_writes_nothing_threats_46_and_49(
    rig: Rigged,
) -> None:
    await rig.read("a", tokens_of(1, 600))
    for version in (1, 2):
        slept, asleep = await asyncio.gather(rig.sleep("a"), rig.sleep("a"))
        await rig.wake("a")
        clean = await rig.sleep("a")
        assert asleep == replace(clean, already_asleep=True)
        assert (clean.version, clean.bundle_id, clean.parent) == (version, slept.bundle_id, slept.parent)
        assert (clean.bytes_written, clean.blocks_new, clean.blocks_reused) == (0, 0, 4)
        assert (clean.logical_bytes, clean.token_count) == (slept.logical_bytes, slept.token_count)
        assert len((await rig.service.show("a")).versions) == version
        await rig.service.append("a", tokens=[1])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("folder", ["versions", "packs"])
@pytest.mark.parametrize("stop", [False, True])
async def test_an_unchanged_session_whose_file_is_gone_is_written_again_before_its_memory_is_freed(
    open_rig: Any, store: Any, stop: bool, folder: str
) -> None:
    async with open_rig() as rig:
        await rig.woken("a", tokens_of(1, 300))
        before = await rig.fingerprint("a")
        (lost,) = store.glob(f"{folder}/*")
        lost.unlink()
        if stop:
            assert (await rig.service.close()).slept == ("torpor://default/a",)
        else:
            assert (await rig.sleep("a")).version == 2
    async with open_rig() as rig:
        assert await rig.woken_fingerprint("a") == before


@pytest.mark.parametrize("verb", ["sleep", "wake", "delete"])
async def test_a_request_that_is_given_up_while_it_waits_for_its_turn_is_not_carried_out(
    rig: Rigged, verb: str
) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 20))
    if verb == "wake":
        await rig.sleep("a")
    uri = rig.service._parts.sessions.resolve("a")
    async with rig.service._parts.sessions.residency.turns.take(uri):
        options = {} if verb == "delete" else {"on_event": ignore}
        asking = asyncio.ensure_future(getattr(rig.service, verb)(session="a", **options))
        await asyncio.sleep(0)
        asking.cancel()
        # It is told at once: its turn has not come, and does not come within this block.
        assert await asyncio.wait([asking], timeout=DEADLINE_S) == ({asking}, set())
        assert asking.cancelled()
    assert rig.service._parts.sessions.residency.turns.in_use() == set()
    assert rig.is_awake("a") == (verb != "wake")
    assert [info.version for info in await rig.service.list_sessions(namespace="default")] == [
        1 if verb == "wake" else None,
        None,
    ]


async def test_a_sleep_waits_for_the_generation_that_is_running_threat_50(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 20))
    task, gate = await held(rig, "a", 10)
    sleeping = asyncio.ensure_future(rig.sleep("a"))
    await asyncio.sleep(0)
    gate.open()
    await task
    assert (await sleeping).token_count == 30
    rig.network.reset()
    await rig.write("control", 10)
    assert await rig.woken_fingerprint("a") == await rig.fingerprint("control")


async def test_a_request_during_a_sleep_waits_and_wakes_the_session_again_threat_50(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(1, 300))
    sleeping = asyncio.ensure_future(rig.sleep("a"))
    await until(lambda: bool(rig.service._parts.sessions.residency.turns.in_use()))
    written = await rig.write("a", 10)
    assert (await sleeping).token_count == 300
    assert written == await rig.write("control", 10)


async def test_a_sleep_runs_to_its_end_when_the_client_goes_away_threat_46(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 600))
    task = asyncio.ensure_future(rig.sleep("a"))
    await asyncio.sleep(0)
    task.cancel()
    await cancelled(task)
    assert not rig.is_awake("a")
    again = await rig.sleep("a")
    assert (again.version, again.token_count, again.bytes_written) == (1, 600, 0)


# --- wake


@pytest.mark.usefixtures("short_calls")
async def test_a_wake_reports_what_it_read_and_of_several_at_once_one_reads(rig: Rigged) -> None:
    receipt = await rig.asleep("a", tokens_of(1, 600))
    events: list[Any] = []
    reports = await asyncio.gather(rig.service.wake("a", on_event=events.append), rig.wake("a"), rig.wake("a"))
    report = reports[0]
    assert (report.version, report.bundle_id, report.token_count) == (1, receipt.bundle_id, 600)
    assert report.bytes_read == receipt.logical_bytes == 600 * ROW + LOGITS + 8 + 3 * 8
    assert [(each.already_awake, each.bytes_read) for each in reports[1:]] == [(True, 0)] * 2
    assert not report.already_awake
    assert [event.stage for event in events] == ["wake"] * 2
    assert (events[-1].done, events[-1].total) == (report.bytes_read, report.bytes_read)
    await rig.read("b", tokens_of(1, 30))
    before = await rig.fingerprint("b")
    report = await rig.wake("b")
    assert (report.already_awake, report.bytes_read, report.version) == (True, 0, None)
    assert await rig.fingerprint("b") == before


async def test_an_earlier_version_that_was_woken_and_not_used_leaves_the_newest_the_newest(open_rig: Any) -> None:
    """Whoever puts it to sleep: a request, a stop, or nobody, for it is in the way of none."""
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        await rig.write("a", 3)
        at_version_2 = await rig.fingerprint("a")
        second = await rig.sleep("a")
        woken = await rig.wake("a", version=1)
        assert woken.look == (await rig.wake("a", version=1)).look == Look(1, 300, 2, 303)
        with pytest.raises(SessionAwake, match="with 300 tokens; put it to sleep"):
            await rig.wake("a", at_token=302)
        with pytest.raises(NoSuchPosition, match="from 1 to 303"):
            await rig.wake("a", at_token=100_000)
        receipt = await rig.sleep("a")
        assert (receipt.bundle_id, receipt.version, receipt.looked_at) == (second.bundle_id, 2, 300)
        await rig.wake("a", version=1)
    async with open_rig() as rig:
        assert (await rig.wake("a")).version == 2
        assert await rig.fingerprint("a") == at_version_2


async def test_a_generation_from_an_earlier_version_says_that_history_branches_there(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 30))
    await rig.write("a", 3)
    await rig.sleep("a")
    for verb, asked in (("generate", {}), ("chat", {"message": "hello"})):
        await rig.wake("a", version=1)
        forked = await rig.service.fork("a", name=verb)
        assert (forked.token_count, rig.live("a").is_mere_look) == (30, True), "what is looked at is forked"
        looks = {info.name: info.look for info in await rig.service.list_sessions()}
        assert (looks.pop("a").token_count, set(looks.values())) == (30, {None})
        written = await getattr(rig.service, verb)(session="a", max_tokens=2, on_event=ignore, **asked)
        assert written.branched is not None
        assert (written.branched.version, written.branched.token_count) == (1, 30)
        assert (await rig.service.list_sessions())[0].look is None
        again = await rig.service.generate("a", max_tokens=2)
        assert again.branched is None
        await rig.sleep("a")
    assert [info.version for info in await rig.service.list_sessions()] == [4, 1, 1]


async def test_another_version_of_a_session_that_is_awake_is_refused(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 30))
    with pytest.raises(SessionNotFound, match="version 9"):
        await rig.wake("a", version=9)
    await rig.write("a", 1)
    await rig.sleep_and_wake("a")
    assert (await rig.wake("a", version=2)).already_awake
    with pytest.raises(SessionAwake):
        await rig.wake("a", version=1)
    await rig.write("a", 1)
    with pytest.raises(SessionAwake, match="has changed"):
        await rig.wake("a", version=2)
    assert (await rig.fingerprint("a")).offsets == (32, 32)


async def test_a_wake_that_has_begun_runs_to_its_end_and_is_answered_as_done_when_it_is_cancelled(rig: Rigged) -> None:
    await rig.asleep("a", tokens_of(1, 300))
    task = asyncio.ensure_future(rig.wake("a"))
    await asyncio.sleep(0)
    task.cancel()
    woken = await task
    assert (woken.token_count, woken.already_awake) == (300, False)
    assert (await rig.wake("a")).already_awake


# --- delete


async def test_a_delete_takes_its_turn_among_what_writes(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the store's writers, so it must not take a thread that wakes are read on."""
    await rig.asleep("a", [1, 2])
    delete, threads = Store.delete_session, []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return delete(*args)

    monkeypatch.setattr(Store, "delete_session", noted)
    await rig.service.delete("a")
    assert [name.rstrip("_0123456789") for name in threads] == ["torpor-write"]


async def test_a_request_that_waited_for_a_deleted_session_finds_none_threat_52(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    task, gate = await held(rig, "a", 1)
    deleting = asyncio.ensure_future(rig.service.delete("a"))
    await asyncio.sleep(0)
    late = [asyncio.ensure_future(work) for work in (rig.write("a", 1), rig.wake("a"), rig.sleep("a"))]
    gate.open()
    await task
    await deleting
    for each in late:
        with pytest.raises(SessionNotFound):
            await each


# --- asking


async def test_a_request_does_not_list_the_store_to_find_its_session(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "work/b"):
        await rig.asleep(name, [1, 2])
    await rig.read("c", [1, 2])
    for listing in (Index.iter_listed, Index.all_rows):
        monkeypatch.delattr(Index, listing.__name__)
    for name in ("a", "work/b", "torpor://default/c"):
        await rig.write(name, 1)
        await rig.sleep_and_wake(name)
        await rig.service.show(name)
    await rig.service.delete("a")


async def test_sessions_are_listed_by_name_and_by_namespace(rig: Rigged) -> None:
    await rig.read_each(("b/x", "a/y", "a/x"), [1, 2])
    await rig.sleep("a/y")
    listed = await rig.service.list_sessions()
    assert [(info.session, info.state) for info in listed] == [
        ("torpor://a/x", "awake"),
        ("torpor://a/y", "asleep"),
        ("torpor://b/x", "awake"),
    ]
    assert [info.name for info in await rig.service.list_sessions(namespace="a")] == ["x", "y"]
    assert not await rig.service.list_sessions(namespace="c")


async def test_status_counts_sessions_and_names_models(rig: Rigged, store: Any) -> None:
    await rig.read_each(("a", "b", "c"), [1, 2])
    await rig.sleep("a")
    await rig.sleep_and_wake("b")
    status = await rig.service.status()
    assert (status.sessions_awake, status.sessions_asleep) == (2, 1)
    assert status.store == str(store)
    (model,) = status.models
    assert (model.name, model.context_tokens, model.resident) == (MODEL, 2048, True)
    assert model.identity == rig.model.identity.digest.hex()


# --- stopping


async def test_a_stop_puts_every_changed_session_to_sleep(open_rig: Any) -> None:
    """One that has read nothing ends with the daemon, and is no failure."""
    async with open_rig() as rig:
        await rig.read_each(("a", "b", "clean"), tokens_of(1, 50), sampling=SAMPLED)
        await rig.service.create("empty", system="Be brief.")
        await rig.sleep_and_wake("clean")
        before = await rig.fingerprint("a")
        report = await rig.service.close()
        assert sorted(report.slept) == ["torpor://default/a", "torpor://default/b"]
        assert (report.failed, report.empty) == ({}, ("torpor://default/empty",))
    async with open_rig() as rig:
        assert await rig.woken_fingerprint("a") == before
        assert [info.version for info in await rig.service.list_sessions()] == [1, 1, 1]


async def test_a_stop_reports_the_sessions_that_could_not_be_kept_and_keeps_the_others(
    rig: Rigged, full_disk: Any
) -> None:
    await rig.read_each(("a", "b"), [1, 2, 3])
    full_disk("b")
    report = await rig.service.close()
    assert report.slept == ("torpor://default/a",)
    assert report.failed["torpor://default/b"].startswith("no_space: The disk is full")
    assert list(report.failed) == ["torpor://default/b"]


async def test_what_becomes_of_the_copy_of_the_index_meanwhile_harms_nothing(open_rig: Any, store: Path) -> None:
    async with open_rig() as rig:
        await rig.asleep("a", [1, 2, 3])
    async with open_rig() as rig:
        await rig.service.append("a", tokens=[4])
        await rig.read("b", [5, 6])
        wanted = [await rig.fingerprint(name) for name in "ab"]
        (store / "index.sqlite").write_bytes(b"garbage")
        assert len(await rig.service.list_sessions()) == 2
        report = await rig.service.close()
        assert (sorted(report.slept), report.failed) == (["torpor://default/a", "torpor://default/b"], {})
    async with open_rig() as rig:
        for name in "ab":
            await rig.wake(name)
        assert [await rig.fingerprint(name) for name in "ab"] == wanted


async def test_an_unforeseen_failure_of_one_sleep_does_not_cost_the_other_sessions_theirs(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torpor.daemon.versions import writing

    async with open_rig() as rig:
        await rig.read_each(("a", "b", "c"), [1, 2, 3])
        victim = rig.live("b").state
        cut = writing.cut

        def fail_for_b(state: Any, *args: Any, **options: Any) -> Any:
            if state is victim:
                raise MemoryError("no memory left")
            return cut(state, *args, **options)

        monkeypatch.setattr(writing, "cut", fail_for_b)
        report = await rig.service.close()
        assert sorted(report.slept) == ["torpor://default/a", "torpor://default/c"]
        assert report.failed == {}
        assert "no memory left" in report.ledgers["torpor://default/b"]
    async with open_rig() as rig:
        assert (await rig.wake("b")).token_count == 3


async def test_a_stop_waits_for_what_is_running_and_refuses_what_comes_after(open_rig: Any) -> None:
    async with open_rig() as rig:
        await rig.read_each(("a", "control"), tokens_of(1, 20))
        task, gate = await held(rig, "a", 5)
        waiting = [asyncio.ensure_future(rig.write("a", 1)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(rig.service.close())
        await asyncio.sleep(0)
        with pytest.raises(ServiceClosed):
            await rig.service.create("late")
        gate.open()
        assert len((await task)[0]) == 5
        report = await closing
        for each in waiting:
            with pytest.raises(ServiceClosed):
                await each
        assert sorted(report.slept) == ["torpor://default/a", "torpor://default/control"]
        assert report.failed == {}
    async with open_rig() as rig:
        assert (await rig.wake("a")).token_count == 25


async def test_a_session_woken_by_a_request_that_was_under_way_is_kept_by_the_stop(open_rig: Any) -> None:
    """What was acknowledged before the stop ended must not be lost, though the session slept when it began."""
    async with open_rig() as rig:
        await rig.asleep("a", tokens_of(1, 300))
        gate = rig.network.hold_at(2)
        writing = asyncio.ensure_future(rig.write("a", 5))
        await asyncio.sleep(0)
        assert not rig.is_awake("a")
        closing = asyncio.ensure_future(rig.service.close())
        gate.open()
        assert len((await writing)[0]) == 5
        assert (await closing).slept == ("torpor://default/a",)
    async with open_rig() as rig:
        assert (await rig.wake("a")).token_count == 305


async def test_stopping_twice_is_stopping_once(rig: Rigged) -> None:
    await rig.read("a", [1])
    reports = await asyncio.gather(rig.service.close(), rig.service.close())
    assert [report.slept for report in reports] == [("torpor://default/a",)] * 2
    assert await rig.service.close() == reports[0]


async def test_a_stop_runs_to_its_end_when_whoever_asked_is_cancelled(open_rig: Any) -> None:
    """The next to ask is told what became of the sessions, and not that there were none."""
    async with open_rig() as rig:
        await rig.read_each(("a", "b"), tokens_of(1, 300))
        writing, gate = await held(rig, "a", 2)
        closing = asyncio.ensure_future(rig.service.close())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.sleep(0)
        gate.open()
        await cancelled(closing)
        await writing
        report = await rig.service.close()
        assert sorted(report.slept) == ["torpor://default/a", "torpor://default/b"]
        assert report.failed == {}
    async with open_rig() as rig:
        assert (await rig.wake("a")).token_count == 302


@pytest.mark.one_in(2)
async def test_a_stop_that_would_lose_a_session_is_not_begun_and_all_go_on_bit_for_bit(
    open_rig: Any, full_disk: Any
) -> None:
    disk = full_disk("a")
    async with open_rig() as rig:
        await rig.read_each(("a", "b", "control"), tokens_of(1, 300), sampling=SAMPLED)
        await rig.service.create("empty", system="Be brief.")
        for _ in range(2):
            before = [await rig.fingerprint(name) for name in ("a", "b")]
            report = await rig.service.prepare_close()
            assert report.failed == {"torpor://default/a": "no_space: The disk is full."}
            assert report.empty == ("torpor://default/empty",)
            assert [await rig.fingerprint(name) for name in ("a", "b")] == before
            assert await rig.write("a", 5) == await rig.write("b", 5) == await rig.write("control", 5)
        assert [rig.is_awake(name) for name in ("a", "b", "control", "empty")] == [True] * 4
        before = [await rig.fingerprint("a")]
        disk.free()
        report = await rig.service.prepare_close()
        assert "torpor://default/a" in report.slept
        assert report.failed == {}
        assert sorted((await rig.service.close()).slept) == sorted(report.slept)
    async with open_rig() as rig:
        await rig.wake("a")
        assert [await rig.fingerprint("a")] == before


async def test_from_the_moment_that_all_are_kept_no_session_changes_any_more(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 300))
    assert (await rig.service.prepare_close()).slept == ("torpor://default/a",)
    for work in (rig.service.create("b"), rig.write("a", 1), rig.sleep("a"), rig.service.delete("a")):
        with pytest.raises(ServiceClosed):
            await work
    assert [info.name for info in await rig.service.list_sessions()] == ["a"]
    report = await rig.service.close()
    assert (report.slept, report.failed) == (("torpor://default/a",), {}), "who asked hears of all that it took"
    assert await rig.service.prepare_close() == report


async def test_before_a_stop_what_runs_is_waited_for_and_what_comes_is_refused_until_the_verdict(
    open_rig: Any, full_disk: Any
) -> None:
    disk = full_disk("a")
    async with open_rig() as rig:
        await rig.read("a", tokens_of(1, 20))
        task, gate = await held(rig, "a", 5)
        waiting = asyncio.ensure_future(rig.write("a", 1))
        await asyncio.sleep(0)
        preparing = [asyncio.ensure_future(rig.service.prepare_close()) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceClosed):
            await rig.service.create("late")
        assert (await rig.service.status()).sessions_awake == 1
        gate.open()
        assert len((await task)[0]) == 5
        with pytest.raises(ServiceClosed):
            await waiting
        for each in preparing:
            assert list((await each).failed) == ["torpor://default/a"]
        await rig.service.create("late")
        assert len((await rig.write("a", 1))[0]) == 1
        disk.free()


async def test_a_stop_that_overtakes_the_trying_waits_for_it_and_tells_of_what_it_put_to_sleep(
    open_rig: Any, full_disk: Any
) -> None:
    full_disk("full")
    async with open_rig() as rig:
        await rig.read_each(("a", "full"), tokens_of(1, 20))
        task, gate = await held(rig, "full", 2)
        preparing = asyncio.ensure_future(rig.service.prepare_close())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(rig.service.close())
        await asyncio.sleep(0)
        gate.open()
        await task
        report = await closing
        assert (report.slept, list(report.failed)) == (("torpor://default/a",), ["torpor://default/full"])
        assert list((await preparing).failed) == ["torpor://default/full"]


async def test_from_the_beginning_of_a_stop_its_time_runs_and_no_work_is_begun_though_some_is_under_way(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(stop_within=0) as rig:
        await rig.read_each(("a", "b"), tokens_of(1, 300))
        writing = Writing(monkeypatch, "a")
        sleeping = asyncio.ensure_future(rig.sleep("a"))
        await writing.gate.reached()
        beginning = asyncio.ensure_future(rig.service.begin_close())
        await asyncio.sleep(0)
        with pytest.raises(ServiceClosed):
            await rig.write("b", 1)
        assert len(await rig.service.list_sessions()) == 2, "who has begun is still served"
        writing.gate.open()
        with pytest.raises(StopDeadline):
            await sleeping
        await beginning
        report = await rig.service.close()
        assert set(report.ledgers) == {"torpor://default/a", "torpor://default/b"}
        assert (report.slept, report.failed) == ((), {})


async def test_a_stop_goes_before_the_rest_of_an_unloading(rig: Rigged, monkeypatch: pytest.MonkeyPatch) -> None:
    for count, name in ((300, "first"), (40, "shallow"), (600, "deep")):
        await rig.read(name, tokens_of(1, count))
    writing = Writing(monkeypatch, "first")
    unloading = asyncio.ensure_future(rig.service.unload_model(model=MODEL))
    beginning = await writing.meets_a_stop(rig)
    with pytest.raises(ServiceClosed):
        await unloading
    await beginning
    assert writing.begun == ["first", "deep", "shallow"]
    assert set((await rig.service.close()).slept) == {f"torpor://default/{name}" for name in ("deep", "shallow")}


@pytest.mark.parametrize(("patience_s", "order"), [(0.0, ["other", "deep"]), (DEADLINE_S, ["deep", "other"])])
async def test_who_is_held_for_long_keeps_no_other_from_its_sleep_and_who_is_held_for_a_moment_has_its_place(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch, patience_s: float, order: list[str]
) -> None:
    monkeypatch.setattr(stopping, "PATIENCE_S", patience_s)
    async with open_rig() as rig:
        await rig.read("deep", tokens_of(1, 600))
        await rig.read("other", tokens_of(2, 40))
        writing = Writing(monkeypatch, "nobody")
        async with rig.service._parts.sessions.residency.turns.take(rig.service._parts.sessions.resolve("deep")):
            beginning = asyncio.ensure_future(rig.service.begin_close())
            if patience_s:
                await until(lambda: rig.service._parts.door.stopping is not None)
            else:
                await until(lambda: not rig.live("other").dirty)
        await beginning
        assert writing.begun == order


async def test_a_version_that_nothing_is_lost_without_gives_its_time_to_the_stop(
    open_rig: Any, quantisable_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_rig(quantisable_model) as rig:
        for name in ("a", "b"):
            await rig.asleep(name, tokens_of(1, 600))
        await rig.read("awake", tokens_of(2, 40))
        writing = Writing(monkeypatch, "a")
        quantising = asyncio.ensure_future(rig.service.maintain(operation="quantize", session="a", bits=8))
        beginning = await writing.meets_a_stop(rig)
        with pytest.raises(ServiceClosed):
            await quantising
        await beginning
        assert writing.begun == ["a", "awake"]
        assert [each.version for each in await rig.service.list_sessions()] == [1, 1, 1]


async def test_nothing_goes_to_sleep_for_being_idle_while_the_daemon_stops(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    beginning = asyncio.ensure_future(rig.service.begin_close())
    await asyncio.sleep(0)
    await rig.service._parts.models.idle_sleeps.put_away_idle(rig.service._parts.sessions.resolve("a"))
    assert rig.is_awake("a")
    await beginning


async def test_a_refusal_of_a_stop_that_another_one_has_overtaken_gives_that_no_time_again(
    open_rig: Any, full_disk: Any
) -> None:
    full_disk("full")
    async with open_rig(stop_within=3600) as rig:
        await rig.read("full", tokens_of(1, 20))
        task, gate = await held(rig, "full", 2)
        preparing = asyncio.ensure_future(rig.service.prepare_close())
        await until(lambda: rig.service._parts.door.stopping is not None)
        order = rig.service._parts.door.stopping
        beginning = asyncio.ensure_future(rig.service.begin_close())
        await asyncio.sleep(0)
        gate.open()
        await task
        assert (await preparing).failed
        await beginning
        assert rig.service._parts.door.stopping is order


async def test_a_refusal_of_a_stop_opens_no_daemon_that_another_one_has_ended(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is told in the very moment of the refusal."""
    last_sleeps, ending = rig.service._parts.sessions.last_sleeps, list[asyncio.Task[Any]]()
    keep_all = last_sleeps.keep_all

    async def refused(order: Any, keeping: Any, *, give_up: bool) -> None:
        if give_up:
            await keep_all(order, keeping, give_up=give_up)
            return
        keeping.failed["a"] = "It cannot sleep."
        ending.append(asyncio.ensure_future(rig.service.close()))
        await asyncio.sleep(0)

    monkeypatch.setattr(last_sleeps, "keep_all", refused)
    assert (await rig.service.prepare_close()).failed
    with pytest.raises(ServiceClosed):
        await rig.service.status()
    await ending[0]


async def test_nothing_is_done_after_the_stop(rig: Rigged) -> None:
    await rig.read("a", [1])
    await rig.service.close()
    service = rig.service
    for work in (
        service.create("b"),
        rig.write("a", 1),
        rig.sleep("a"),
        rig.wake("a"),
        service.append("a", tokens=[1]),
        service.chat("a", message="x", max_tokens=1),
        service.show("a"),
        service.delete("a"),
        service.list_sessions(),
        service.status(),
    ):
        with pytest.raises(ServiceClosed):
            await work
