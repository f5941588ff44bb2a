"""Ledger, caches, logits and random key always describe one span, whatever fails and whenever it is given up.

Promise 6; QC1, QC8, QC9, QX7, QX15, QX16, LP7, LP10, MS11. After each failure the session is compared with a control
to which nothing happened: at once, and by what it writes next.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable
from typing import Any

import pytest
from torpor.daemon.api.events import ProgressEvent, TokenEvent
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.session import Look
from torpor.daemon.engine import generation
from torpor.daemon.engine.alone import decode_alone
from torpor.daemon.engine.generation import WriteOrder, Written, read, write
from torpor.daemon.errors import ContextOverflow, GenerationFailed, InvalidTokens
from torpor.daemon.tasks.cancellation import LeftMidway
from torpor.snapshot.caches import length
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, broken_at, cancelled, given_up, held_at, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

CHUNK = 256
# Two chunks, half a one, and the last token alone: four model calls.
LONG = tokens_of(9, 2 * CHUNK + CHUNK // 2 + 1)


@pytest.fixture(autouse=True)
def _same_chunks_on_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", CHUNK)


async def two_alike(rig: Rigged, count: int = 300) -> None:
    for name in ("a", "control"):
        await rig.read(name, tokens_of(8, count), sampling=SAMPLED)
        await rig.write(name, 6)


async def same_as_control(rig: Rigged) -> None:
    """The session's state, its consistency, and what it writes next are those of the control."""
    rig.network.reset()
    state = rig.live("a").state
    assert length(state.caches) == len(state.tokens)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")
    assert await rig.write("a", 12) == await rig.write("control", 12)
    assert await rig.fingerprint("a") == await rig.fingerprint("control")


# --- a model that fails


@pytest.mark.one_in(10)
@pytest.mark.parametrize("layers_grown", range(3))
@pytest.mark.parametrize("call", [1, 2, 3, 4])
async def test_a_model_that_fails_while_reading_leaves_the_session_as_it_was_qx7(
    rig: Rigged, call: int, layers_grown: int
) -> None:
    await two_alike(rig)
    rig.network.fail_at(call, layers_grown=layers_grown)
    with pytest.raises(GenerationFailed, match="the model broke"):
        await rig.service.append("a", tokens=LONG)
    await same_as_control(rig)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("layers_grown", range(3))
@pytest.mark.parametrize("call", [1, 2, 9])
async def test_a_model_that_fails_while_writing_keeps_what_was_committed_before_qc9(
    rig: Rigged, call: int, layers_grown: int
) -> None:
    await two_alike(rig)
    rig.network.fail_at(call, layers_grown=layers_grown)
    with pytest.raises(GenerationFailed) as failure:
        await rig.write("a", 20)
    assert failure.value.position == 306 + call - 1
    rig.network.reset()
    if call > 1:
        await rig.write("control", call - 1)
    await same_as_control(rig)


async def test_a_failure_changes_nothing_in_the_store_ms11(rig: Rigged) -> None:
    await two_alike(rig)
    slept = await rig.sleep("a")
    await rig.wake("a")
    await broken_at(rig, 2, rig.service.append("a", tokens=LONG))
    assert not rig.live("a").dirty
    again = await rig.sleep("a")
    assert (again.bundle_id, again.bytes_written) == (slept.bundle_id, 0)


async def test_a_session_that_failed_can_sleep_and_wakes_as_the_control(rig: Rigged) -> None:
    """What stands behind the caches' offsets after a rollback never reaches a bundle."""
    await two_alike(rig)
    rig.network.fail_at(3, layers_grown=2)
    with pytest.raises(GenerationFailed):
        await rig.service.append("a", tokens=LONG)
    rig.network.reset()
    await rig.sleep_and_wake("a")
    await same_as_control(rig)


@pytest.mark.one_in(2)
async def test_a_failure_in_one_session_leaves_another_that_writes_alone_lp10(rig: Rigged) -> None:
    await two_alike(rig)
    await rig.read_each(("other", "other-control"), tokens_of(3, 100))
    rig.network.reset()
    writing = asyncio.ensure_future(rig.write("other", 60))
    victim = rig.live("a").state.caches

    def fail(_number: int, _tokens: Any, cache: Any) -> None:
        if cache is victim and cache[0].offset > 310:
            raise RuntimeError("the model broke")

    rig.network.before = fail
    with pytest.raises(GenerationFailed):
        await rig.write("a", 60)
    other = await writing
    rig.network.reset()
    assert other == await rig.write("other-control", 60)
    assert rig.live("a").state.caches[0].offset == 311
    await rig.write("control", 5)
    await same_as_control(rig)


async def test_a_tokenizer_that_fails_loses_no_committed_token_qc10(
    rig: Rigged, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_alike(rig)
    await rig.sleep_and_wake("a")

    def refuse(*_args: object, **_options: object) -> str:
        raise RuntimeError("no such token")

    monkeypatch.setattr(type(rig.model.tokenizer), "decode", refuse, raising=False)
    with pytest.raises(RuntimeError, match="no such token"):
        await rig.write("a", 5)
    monkeypatch.undo()
    held = len(rig.live("a").state.tokens)
    assert rig.live("a").dirty == (held > 306), "a token that was committed must not be lost by the next sleep"
    if held > 306:
        await rig.write("control", held - 306)
    await same_as_control(rig)


# --- numbers that are none


def spoiled(logits: mx.array) -> mx.array:
    return mx.full(logits.shape, float("nan"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
async def test_logits_that_are_nan_fail_the_generation_instead_of_giving_token_0(
    rig: Rigged, sampling: Sampling
) -> None:
    await rig.read_each(("a", "control"), tokens_of(8, 20), sampling=sampling)
    rig.network.reset()
    rig.network.after = lambda number, logits: spoiled(logits) if number == 4 else logits
    with pytest.raises(GenerationFailed, match="NaN"):
        await rig.write("a", 20)
    rig.network.reset()
    assert len(rig.live("a").state.tokens) == 23, "the token whose logits are broken is not committed"
    await rig.write("control", 3)
    await same_as_control(rig)


async def test_logits_that_are_nan_after_reading_leave_the_session_as_it_was(rig: Rigged) -> None:
    await two_alike(rig)
    rig.network.reset()
    rig.network.after = lambda number, logits: spoiled(logits) if number == 2 else logits
    with pytest.raises(GenerationFailed, match="NaN"):
        await rig.service.append("a", tokens=[1, 2, 3])
    await same_as_control(rig)


# --- giving up


async def cancelled_inside(rig: Rigged, work: Awaitable[Any], call: int) -> asyncio.CancelledError:
    rig.network.reset()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await given_up(rig, work, call)
    return cancelled.value


@pytest.mark.one_in(3)
@pytest.mark.parametrize("call", [1, 2, 3])
async def test_giving_up_while_reading_leaves_the_session_as_it_was_qx16(rig: Rigged, call: int) -> None:
    await two_alike(rig)
    await cancelled_inside(rig, rig.service.append("a", tokens=LONG), call)
    assert len(rig.network.calls) == call, "nothing is computed after the step at which it was given up"
    await same_as_control(rig)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("call", [1, 5])
async def test_giving_up_while_writing_keeps_whole_tokens_and_stops_within_one_qx16(rig: Rigged, call: int) -> None:
    await two_alike(rig)
    await cancelled_inside(rig, rig.write("a", 50), call)
    assert len(rig.network.calls) == call
    assert len(rig.live("a").state.tokens) == 306 + call
    rig.network.reset()
    await rig.write("control", call)
    await same_as_control(rig)


async def test_a_reading_that_was_complete_when_it_was_given_up_is_answered_as_done_qx16(rig: Rigged) -> None:
    """The last step cannot be taken back once it is done: whoever took it for undone would send the text twice."""
    await two_alike(rig)
    await rig.sleep_and_wake("a")
    appended = await given_up(rig, rig.service.append("a", tokens=[1, 2, 3]), 2)
    assert (appended.tokens_added, appended.token_count) == (3, 309)
    rig.network.reset()
    assert len(rig.live("a").state.tokens) == 309
    assert rig.live("a").dirty
    assert (await rig.sleep("a")).token_count == 309
    await rig.wake("a")
    await rig.service.append("control", tokens=[1, 2, 3])
    await same_as_control(rig)


async def test_a_turn_that_was_complete_when_it_was_given_up_is_open(rig: Rigged) -> None:
    await rig.read("a", tokens_of(8, 20))
    await cancelled_inside(rig, rig.service.chat("a", message="hello", max_tokens=5), 2)
    assert rig.live("a").chat.turn_open


async def test_a_generation_given_up_behind_its_reading_says_that_it_has_read_qx16(rig: Rigged) -> None:
    """A short text takes two model calls. The cancel comes inside the second, so the reading is whole."""
    await two_alike(rig)
    left = await cancelled_inside(rig, rig.service.generate("a", text="four", max_tokens=5), 2)
    assert isinstance(left, LeftMidway)
    assert (left.was_read, left.tokens, left.text) == (True, (), "")
    assert left.token_count == len(rig.live("a").state.tokens) > 306
    assert len(rig.network.calls) == 2, "nothing is written behind it"


async def test_a_generation_given_up_in_the_middle_names_the_tokens_that_stay_qx16(rig: Rigged) -> None:
    await two_alike(rig)
    left = await cancelled_inside(rig, rig.write("a", 50), 4)
    assert isinstance(left, LeftMidway)
    assert (left.was_read, left.token_count) == (False, 310)
    assert list(left.tokens) == list(rig.live("a").state.tokens[306:])


async def test_a_generation_from_a_look_that_is_given_up_midway_says_that_history_branches(rig: Rigged) -> None:
    await two_alike(rig)
    await rig.sleep("a")
    await rig.wake("a", at_token=300)
    for branched in (Look(1, 300, 1, 306), None):  # it is said once
        rig.network.reset()
        left = await cancelled_inside(rig, rig.write("a", 50), 4)
        assert isinstance(left, LeftMidway)
        assert left.branched == branched


async def test_a_generation_given_up_in_its_last_token_is_answered_as_done_qx16(rig: Rigged) -> None:
    await two_alike(rig)
    written = await given_up(rig, rig.service.generate("a", max_tokens=4), 4)
    assert (len(written.tokens), written.token_count, written.finish_reason) == (4, 310, "length")
    assert list(written.tokens) == list(rig.live("a").state.tokens[306:])


async def test_a_request_given_up_while_it_waits_for_its_turn_does_nothing(rig: Rigged) -> None:
    await two_alike(rig)
    rig.network.reset()
    first, gate = await held_at(rig, 1, rig.write("a", 3))
    second = asyncio.ensure_future(rig.write("a", 3))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    gate.open()
    await first
    await cancelled(second)
    assert len(rig.network.calls) == 3
    rig.network.reset()
    await rig.write("control", 3)
    await same_as_control(rig)


# --- what does not fit, and what is no token


async def test_a_text_that_does_not_fit_is_refused_with_both_sizes_qc1_qc8(rig: Rigged) -> None:
    await two_alike(rig)
    rig.network.reset()
    with pytest.raises(ContextOverflow) as refusal:
        await rig.service.append("a", tokens=tokens_of(1, 2048 - 306 + 1))
    error = refusal.value
    assert (error.token_count, error.wanted_tokens, error.context_tokens) == (306, 1743, 2048)
    assert "1,742" in error.message
    assert rig.network.calls == []
    await same_as_control(rig)


@pytest.mark.one_in(2)
async def test_a_text_that_just_fits_is_read_and_the_full_session_still_answers(rig: Rigged) -> None:
    await two_alike(rig)
    await rig.service.append("a", tokens=tokens_of(1, 2048 - 306))
    with pytest.raises(ContextOverflow):
        await rig.write("a", 1)
    assert (await rig.sleep("a")).token_count == 2048
    assert (await rig.wake("a")).token_count == 2048


@pytest.mark.one_in(2)
async def test_every_way_in_checks_the_room_before_it_computes_qx15(rig: Rigged) -> None:
    await rig.read_each(("a", "control"), tokens_of(8, 2040), sampling=SAMPLED)
    before, service, other = await rig.fingerprint("a"), rig.service, Sampling(seed=5)
    rig.network.reset()
    for request in (
        service.generate("a", max_tokens=9, sampling=other),
        service.generate("a", max_tokens=5, text="four", sampling=other),
        service.chat("a", max_tokens=1, message="hi", sampling=other),
    ):
        with pytest.raises(ContextOverflow):
            await request
        assert rig.network.calls == []
        assert await rig.fingerprint("a") == before
        assert rig.live("a").sampling == SAMPLED, "a refusal changes nothing, the sampling included"
    assert await rig.write("a", 8) == await rig.write("control", 8)


async def test_ids_outside_the_vocabulary_are_refused_before_they_are_read_threat_10(rig: Rigged) -> None:
    await two_alike(rig)
    rig.network.reset()
    for tokens in ([], [259], [5, -1], [1, 2**40], [3, 258, 259]):
        with pytest.raises(InvalidTokens):
            await rig.service.append("a", tokens=tokens)
        assert rig.network.calls == []
    await same_as_control(rig)
    await rig.read("last", [258, 0])
    assert list(rig.live("last").state.tokens) == [258, 0], "the last row of the vocabulary is a token"


# --- what is told on the way


async def test_reading_is_done_in_fixed_chunks_with_the_last_token_alone(rig: Rigged) -> None:
    await rig.service.create("a")
    events: list[Any] = []
    await rig.service.append("a", tokens=LONG, on_event=events.append)
    assert rig.network.calls == [CHUNK, CHUNK, CHUNK // 2, 1]
    assert events == [ProgressEvent("prefill", done, len(LONG)) for done in (256, 512, 640, 641)]


async def test_every_committed_token_is_told_in_order(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 10))
    events: list[Any] = []
    result = await rig.service.generate("a", max_tokens=12, on_event=events.append)
    told = [event.token for event in events if isinstance(event, TokenEvent) and event.token is not None]
    assert told == list(result.tokens)
    assert list(rig.live("a").state.tokens[10:]) == list(result.tokens)
    assert result.finish_reason == "length"


async def test_proofs_change_no_token_lp7(rig: Rigged) -> None:
    await two_alike(rig)
    proved = await rig.service.generate("a", max_tokens=30, prove=True)
    plain = await rig.service.generate("control", max_tokens=30)
    assert (proved.tokens, proved.text) == (plain.tokens, plain.text)
    assert plain.logits_blake3 is None
    assert proved.logits_blake3 is not None
    assert len(set(proved.logits_blake3)) == 30
    assert await rig.fingerprint("a") == await rig.fingerprint("control")


async def test_the_proof_of_a_token_is_of_the_logits_that_it_was_drawn_from(rig: Rigged) -> None:
    """LV3: greedy tokens are the argmax of the logits whose digest is reported."""
    await rig.read("a", tokens_of(1, 10))
    before = await rig.fingerprint("a")
    best = int(mx.argmax(rig.live("a").state.last_logits).item())
    tokens, proofs, final = await rig.write("a", 1)
    assert (tokens, proofs) == ((best,), (before.logits,))
    assert final == (await rig.fingerprint("a")).logits


async def test_of_a_session_of_before_every_draw_takes_a_key_of_its_own_and_greedy_ones_none_br1(rig: Rigged) -> None:
    key = mx.random.key(5)
    mx.eval(key)
    await rig.read("a", tokens_of(1, 10), sampling=Sampling(1.0, seed=5))
    await rig.read("greedy", tokens_of(1, 10), sampling=Sampling(seed=5))
    for name in ("a", "greedy"):
        rig.live(name).state.random_key = key
    for _ in range(4):
        assert (await rig.fingerprint("a")).random_key == tuple(key.tolist())
        await rig.write("a", 1)
        await rig.sleep_and_wake("a")
        key = mx.random.split(key)[0]
    await rig.write("greedy", 4)
    assert (await rig.fingerprint("greedy")).random_key == tuple(mx.random.key(5).tolist())


@pytest.mark.one_in(1)
async def test_a_session_that_goes_back_draws_what_it_drew_and_so_does_a_fork_br10(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 300), sampling=SAMPLED)
    drawn = (await rig.write("a", 40))[0]
    await rig.sleep("a")
    await rig.service.fork("a", name="b", at_token=320)
    await rig.wake("a", at_token=310)
    assert (await rig.write("a", 30))[0] == drawn[10:]
    assert (await rig.write("b", 20))[0] == drawn[20:]
    await rig.service.fork("b", name="c", at_token=320)
    assert (await rig.write("c", 20, sampling=Sampling(seed=1)))[0] != drawn[20:]


# --- ends


def endings(rig: Rigged, token: int) -> None:
    """Make the model's next drawn token an end token, whatever it is."""
    import dataclasses

    model = dataclasses.replace(rig.model, end_tokens=frozenset({token}))
    rig.model = model
    for session in rig.service._parts.sessions.residency.awake.values():
        session.model = model


async def test_an_end_token_ends_the_generation_and_stays_out_of_the_ledger(rig: Rigged) -> None:
    await two_alike(rig)
    tokens, _, _ = await rig.write("control", 10)
    end = next(token for index, token in enumerate(tokens) if index >= 3 and token not in tokens[:index])
    at = tokens.index(end)
    endings(rig, end)
    result = await rig.service.generate("a", max_tokens=10)
    assert (result.tokens, result.finish_reason) == (tokens[:at], "stop")
    assert len(rig.live("a").state.tokens) == 306 + at
    again = await rig.service.generate("a", max_tokens=10)
    assert (again.tokens, again.finish_reason) == ((), "stop"), "an end that was not kept is drawn again"


async def test_a_stop_string_ends_the_generation_and_is_never_shown(rig: Rigged) -> None:
    text = "abcdefgh"
    await rig.read("a", [rig.model.encode(letter, opening=False)[0] for letter in text])
    ids = rig.model.encode("one, two; three", opening=False)

    def script(number: int, logits: mx.array) -> mx.array:
        wanted = ids[min(number, len(ids) - 1)]
        return mx.broadcast_to((mx.arange(logits.shape[-1]) == wanted) * 50.0, logits.shape)

    rig.network.reset()
    rig.network.after = script
    rig.live("a").state.last_logits = (mx.arange(259) == ids[0]) * 50.0
    mx.eval(rig.live("a").state.last_logits)
    events: list[Any] = []
    result = await rig.service.generate("a", max_tokens=100, stop=["; t", "never"], on_event=events.append)
    assert (result.text, result.finish_reason, result.stopped_by) == ("one, two", "stop", "; t")
    assert "".join(event.text for event in events) == "one, two"
    assert rig.model.decode(result.tokens) == "one, two; t", "the ledger has what was sampled (QX8)"


async def test_the_streamed_pieces_make_up_the_whole_text_even_when_its_end_had_been_held_back(rig: Rigged) -> None:
    """The last characters could be the beginning of the stop string, and no token comes after them to tell."""
    await rig.read("a", tokens_of(1, 10))
    plain = await rig.service.generate("a", max_tokens=24)
    await rig.service.delete("a")
    await rig.read("a", tokens_of(1, 10))
    events: list[Any] = []
    stop = plain.text[-2:] + "never comes"
    result = await rig.service.generate("a", max_tokens=24, stop=[stop], on_event=events.append)
    assert result.text == plain.text
    assert "".join(event.text for event in events) == result.text
    assert events[-1].token is None


# --- the steps themselves


async def test_steps_that_are_closed_between_two_pieces_truncate_the_caches(rig: Rigged) -> None:
    await two_alike(rig)
    state = rig.live("a").state

    def half() -> int:
        steps = read(rig.model, state, LONG, lambda *_: None)
        next(steps)
        grown = state.caches[0].offset
        steps.close()
        return int(grown)

    assert await rig.service._parts.models.engine.call(half) == 306 + CHUNK
    await same_as_control(rig)


async def test_what_was_written_is_known_when_the_steps_are_closed(rig: Rigged) -> None:
    await two_alike(rig)
    session = rig.live("a")
    written = Written()

    def some() -> None:
        steps = write(rig.model, session.state, WriteOrder(20, SAMPLED), written, lambda *_: None)
        asked = next(steps)
        for _ in range(3):
            assert asked is not None
            asked = steps.send(decode_alone(asked))
        steps.close()

    await rig.service._parts.models.engine.call(some)
    assert session.state.tokens[306:] == array("I", written.tokens)
    await rig.write("control", 3)
    await same_as_control(rig)
