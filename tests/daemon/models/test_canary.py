"""A woken session serves only once it computes what the slept one did."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torpor.daemon.errors import GenerationFailed
from torpor.daemon.models import canary
from torpor.daemon.versions import writing
from torpor.snapshot.caches import arrays_of
from torpor.snapshot.canary import TOLERANCE
from torpor.snapshot.errors import CanaryFailed
from torpor.tests.daemon.session_rig import Rigged, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS
from mlx_lm.models.cache import QuantizedKVCache  # isort: skip

KINDS = ["qwen3", "quantised", "gemma3_text", "lfm2", "mamba2"]


async def asleep(rig: Rigged, count: int = 300) -> None:
    await rig.asleep("s", tokens_of(1, count))
    rig.network.reset()


def disturb(rig: Rigged, by: float) -> None:
    """The model now computes logits that are off for one token, as a bad state would make it."""
    rig.network.after = lambda _, logits: logits.at[..., 5].add(by)


def elsewhere(rig: Rigged, **circumstances: str) -> None:
    """Let the model say that it runs in another place."""
    model = rig.model
    rig.model = dataclasses.replace(model, backend={**model.backend, **circumstances})


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_wake_that_computes_the_same_bits_says_so_and_what_it_cost(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        report = await rig.wake("s")
        assert report.canary == "same_bits"
        assert report.canary_seconds > 0
        assert rig.network.calls == [1], "one token, once"
        assert report.tokens_prefilled == 0, "and it is not one of the session's"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_state_that_computes_something_else_is_refused_and_nothing_is_woken(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        disturb(rig, 1e-4)
        with pytest.raises(CanaryFailed) as refusal:
            await rig.wake("s")
        assert (refusal.value.tolerance, refusal.value.position) == (0.0, 300)
        assert "Wake an earlier version" in refusal.value.message
        assert not rig.is_awake("s")
        rig.network.reset()
        assert (await rig.wake("s")).canary == "same_bits"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["processor", "mlx", "blas", "device", "mlx_lm", "numpy"])
async def test_elsewhere_the_same_within_the_tolerance_is_enough(open_kind: Any, kind: str, part: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        elsewhere(rig, **{part: "another"})
        disturb(rig, TOLERANCE["float32"] / 10)
        report = await rig.wake("s")
        assert report.canary == "within_tolerance"
        assert [each.field for each in report.provenance.differs] == [part]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [3.0, float("nan")])
async def test_elsewhere_too_a_state_that_is_wrong_is_refused(open_kind: Any, kind: str, by: float) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        elsewhere(rig, processor="another")
        rig.network.after = lambda _, logits: logits + by * mx.arange(logits.shape[-1]) / 50
        with pytest.raises(CanaryFailed):
            await rig.wake("s")
        assert not rig.is_awake("s")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_state_whose_shape_the_model_cannot_use_is_refused(open_kind: Any, kind: str) -> None:
    async with open_kind(kind) as rig:
        await asleep(rig)
        rig.network.fail_at(1)
        with pytest.raises(GenerationFailed, match="canary"):
            await rig.wake("s")
        assert not rig.is_awake("s")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_values_that_are_no_numbers_are_refused_at_wake_threat_11(
    open_kind: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a bundle of another maker: ours are looked through when they are written."""
    from torpor.snapshot import capture

    async with open_kind(kind) as rig:
        await rig.read("s", tokens_of(1, 20))
        cut = writing.cut

        def spoilt(state: Any, *args: Any, **options: Any) -> Any:
            first = state.caches[0]
            if isinstance(first, QuantizedKVCache):
                first.keys[1][..., :1, :] = float("nan")
            elif hasattr(first, "keys"):
                first.keys[..., :1, :] = float("nan")
            else:
                first[0] = first[0] * float("nan")
            mx.eval(arrays_of(state.caches))
            return cut(state, *args, **options)

        monkeypatch.setattr(capture, "is_finite", lambda *_: True)
        monkeypatch.setattr(writing, "cut", spoilt)
        await rig.sleep("s")
        monkeypatch.undo()
        with pytest.raises(CanaryFailed):
            await rig.wake("s")
        assert not rig.is_awake("s")


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_canary_leaves_no_trace_in_a_session_that_goes_on(open_kind: Any, kind: str) -> None:
    """At a sleep that leaves the session awake as at a wake: it writes what it would have written."""
    async with open_kind(kind) as rig:
        await rig.read_each(("control", "s"), tokens_of(1, 300))
        session = rig.live("s")
        before = await rig.fingerprint("s")
        for _ in range(3):
            await rig.service._parts.models.engine.call(lambda: canary.take(session.model, session.state))
        assert await rig.fingerprint("s") == before
        await rig.sleep_and_wake("s")
        assert await rig.fingerprint("s") == before
        assert await rig.write("s", 16) == await rig.write("control", 16)


@pytest.mark.parametrize("kind", ["lfm2", "gemma3_text"])
async def test_a_snapshot_without_a_canary_wakes_and_says_that_none_was_run(
    open_kind: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions of Torpor could be told to keep none."""
    async with open_kind(kind) as rig:
        monkeypatch.setattr(canary, "take", lambda *_, **__: None)
        await asleep(rig)
        monkeypatch.undo()
    async with open_kind(kind) as rig:
        assert (await rig.wake("s")).canary == "not_run"
        await rig.service.append("s", tokens=[1])
        await rig.sleep("s")
        assert (await rig.wake("s")).canary == "same_bits"


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_that_only_passes_through_another_place_wakes_in_both(open_kind: Any, kind: str) -> None:
    """Slept here, woken elsewhere, slept there with nothing computed, or a little: nowhere are bits expected that
    another place computed."""
    async with open_kind(kind) as rig:
        await asleep(rig, 600)
        here = dict(rig.model.backend)
        elsewhere(rig, processor="another")
        disturb(rig, TOLERANCE["float32"] / 10)
        assert (await rig.wake("s", at_token=600)).canary == "within_tolerance"
        rig.live("s").dirty = True
        await rig.sleep("s")
        assert (await rig.wake("s")).canary in ("same_bits", "within_tolerance")
        await rig.service.append("s", tokens=[1, 2])
        await rig.sleep("s")
        assert (await rig.wake("s")).canary == "same_bits"
        await rig.sleep("s")
        assert (await rig.wake("s", at_token=512)).token_count == 512, "a checkpoint of before"
        await rig.service.delete("s")
        assert here["processor"] != "another"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
async def test_a_ledger_that_follows_a_checkpoint_of_another_place_wakes(open_kind: Any, kind: str) -> None:
    """The version's own end is that checkpoint; what the session map says of its end was computed here."""

    def move(rig: Rigged) -> None:
        elsewhere(rig, processor="another")
        disturb(rig, TOLERANCE["float32"] / 10)

    async with open_kind(kind) as rig:
        await asleep(rig, 1000)
        move(rig)
        await rig.wake("s")
        await rig.service.append("s", tokens=[1, 2])
        await rig.sleep("s")
    async with open_kind(kind, stop_within=0) as rig:
        move(rig)
        await rig.wake("s", at_token=520)
        await rig.service.append("s", tokens=[3, 4])
    async with open_kind(kind) as rig:
        move(rig)
        (info,) = await rig.service.list_sessions()
        assert (info.token_count, info.unread_tokens) == (522, 10)
        woken = await rig.wake("s")
        assert (woken.token_count, woken.canary) == (522, "within_tolerance")


async def test_a_write_whose_checkpoint_fails_has_not_written_that_token_qc9(open_kind: Any) -> None:
    """At token 512 a checkpoint is due, and its canary fails: the ledger ends before the token that nobody was told."""
    async with open_kind("lfm2") as rig:
        await rig.read("s", tokens_of(1, 510))
        rig.network.fail_at(3)  # two tokens come to 512, then the canary
        with pytest.raises(GenerationFailed):
            await rig.write("s", 4)
        assert len(rig.live("s").state.tokens) == 511
        rig.network.reset()
        before = await rig.fingerprint("s")
        await rig.sleep_and_wake("s")
        assert await rig.fingerprint("s") == before
