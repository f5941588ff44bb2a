"""The log-probabilities of an answer: right in each type, of known order, and without effect on what is drawn."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from torpor.daemon.api.constraints import Constraint
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.api.logprobs import LOWEST_LOGPROB
from torpor.daemon.engine.logprobs import Logprobs, likeliest
from torpor.daemon.errors import GenerationFailed
from torpor.tests.daemon.session_rig import SAMPLED, Rigged, reply_with, tokens_of

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

VOCABULARY = 259


async def told(rig: Rigged, name: str = "a", top: int = 5, count: int = 4, **options: Any) -> Any:
    return await rig.service.generate(name, max_tokens=count, logprobs=top, **options)


def gives(rig: Rigged, logits: Any) -> None:
    """Let each model call give these logits, in their own type."""
    mx.eval(logits)
    rig.network.reset()
    rig.network.after = lambda _, found: mx.broadcast_to(logits, found.shape)


def reference(logits: mx.array) -> list[float]:
    """Log-probabilities in exact sums of float64."""
    values = [float(each) for each in np.array(logits.astype(mx.float32))]
    highest = max(values)
    whole = highest + math.log(math.fsum(math.exp(value - highest) for value in values))
    return [value - whole for value in values]


async def test_half_precision_is_made_wide_before_the_sum_lp1_lp9(rig: Rigged) -> None:
    mx.random.seed(3)
    wide = mx.random.normal((VOCABULARY,)) * 4
    await rig.read("a", tokens_of(1, 20))
    for kind, unit in ((mx.float32, 2**-23), (mx.float16, 2**-10), (mx.bfloat16, 2**-7)):
        gives(rig, wide.astype(kind))
        await told(rig, count=1)  # the logits before it are others
        found = (await told(rig, count=1)).logprobs[0]
        assert found.logprob == pytest.approx(reference(wide.astype(kind))[found.token], abs=1e-5)
        assert found.logprob == pytest.approx(reference(wide)[found.token], abs=unit * float(mx.abs(wide).max()))


async def test_five_of_bfloat16_come_in_order_lp2(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    logits = (mx.arange(VOCABULARY) * 7919 % VOCABULARY).astype(mx.bfloat16) * 0.125
    gives(rig, logits)
    await told(rig, count=1)
    (found,) = (await told(rig, count=1)).logprobs
    assert [each.logprob for each in found.top] == sorted((each.logprob for each in found.top), reverse=True)
    values = np.array(logits.astype(mx.float32))
    assert [each.token for each in found.top] == sorted(range(VOCABULARY), key=lambda at: (-values[at], at))[:5]


async def test_the_drawn_token_alone_is_as_it_is_among_others_lp3_lp6(rig: Rigged) -> None:
    await rig.read_each(("alone", "among"), tokens_of(1, 20), sampling=SAMPLED)
    alone, among = [(await told(rig, *each, count=20)).logprobs for each in (("alone", 0), ("among", 20))]
    assert all(not each.top for each in alone)
    assert [each.logprob for each in alone] == [each.logprob for each in among]
    entries = [(each, other) for each in among for other in each.top if other.token == each.token]
    assert len(entries) > 3
    assert all((each.logprob, each.text) == (other.logprob, other.text) for each, other in entries)


@pytest.mark.parametrize("size", [1, 5, 20])
@pytest.mark.parametrize("count", [0, 1, 5, 19, 20, 21, 1000])
def test_more_than_the_vocabulary_is_all_of_it_lp4(size: int, count: int) -> None:
    values = np.linspace(0, 1, size).astype(np.float32)
    assert likeliest(values, count) == list(range(size))[::-1][:count]


def test_equal_ones_come_by_the_lower_id_lp5() -> None:
    values = np.array([1, 3, 2, 3, 2, 2, 0, 2], np.float32)
    assert likeliest(values, 5) == [1, 3, 2, 4, 5]
    assert likeliest(np.full(9, -np.inf, np.float32), 3) == [0, 1, 2]
    chance = np.random.default_rng(5)
    for _ in range(200):
        values = chance.integers(0, 4, 30).astype(np.float32)
        count = int(chance.integers(1, 31))
        assert likeliest(values, count) == sorted(range(30), key=lambda at: (-values[at], at))[:count]


async def test_no_token_and_no_kv_differs_with_them_lp7(rig: Rigged) -> None:
    await rig.read_each(("with", "without"), tokens_of(1, 20), sampling=SAMPLED)
    found = await told(rig, "with", 20, 40)
    free = await rig.service.generate("without", max_tokens=40)
    assert free.tokens == found.tokens
    assert free.logprobs is None
    assert [each.token for each in found.logprobs] == list(found.tokens)
    assert await rig.fingerprint("with") == await rig.fingerprint("without")


async def test_what_cannot_be_a_number_of_json_has_the_lowest_lp8(rig: Rigged) -> None:
    await rig.read("a", tokens_of(1, 20))
    (likely,) = rig.model.encode("B", opening=False)
    for lowest in (-math.inf, -3e38, -1e5):
        gives(rig, mx.where(mx.arange(VOCABULARY) == likely, 0.0, lowest))
        await told(rig, count=1)
        result = await told(rig, count=2, constraint=Constraint(regex="AB"))
        impossible, certain = result.logprobs
        assert (impossible.text, impossible.logprob) == ("A", LOWEST_LOGPROB)
        assert (certain.text, certain.logprob) == ("B", 0.0)
        others = [(token, LOWEST_LOGPROB) for token in range(4)]
        assert [(each.token, each.logprob) for each in certain.top] == [(likely, 0.0), *others]
        json.dumps(asdict(result), allow_nan=False)


async def test_a_fault_in_one_request_leaves_the_other_lp10(open_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of = Logprobs.of
    left = iter(range(6))

    def fail(self: Logprobs, logits: mx.array, token: int) -> Any:
        if self._top == 7 and next(left, None) is None:
            raise MemoryError("no room to sort")
        return of(self, logits, token)

    async with open_rig(batch=4) as rig:
        await rig.read_each(("a", "b", "control"), tokens_of(1, 20))
        alone = await told(rig, "control", 3, 40)
        monkeypatch.setattr(Logprobs, "of", fail)
        failing = asyncio.ensure_future(told(rig, "a", 7, 40))
        other = await told(rig, "b", 3, 40)
        with pytest.raises(GenerationFailed, match="no room to sort"):
            await failing
        assert other.tokens == alone.tokens
        assert len(rig.live("a").state.tokens) == 26
        assert len((await told(rig, "a", 3, 2)).tokens) == 2


async def test_each_event_of_a_token_has_them_and_no_other(rig: Rigged) -> None:
    heard: list[Any] = []
    await rig.read("a", tokens_of(1, 20))
    result = await rig.service.generate("a", max_tokens=30, logprobs=2, on_event=heard.append)
    events = [each for each in heard if isinstance(each, TokenEvent)]
    assert tuple(each.logprobs for each in events if each.token is not None) == result.logprobs
    assert all(each.logprobs is None for each in events if each.token is None)


async def test_the_texts_make_up_the_answer_and_its_end_has_none(open_rig: Any) -> None:
    reply = "naïve  owl: 🦉"
    async with open_rig(endless=False) as rig:
        reply_with(rig, reply)
        result = await rig.service.chat("a", message="hi", create=True, max_tokens=60, logprobs=0)
        assert result.text == reply
        texts = [each.text for each in result.logprobs]
        assert (texts[0], texts[-1], len(texts)) == ("n", "", len(result.tokens))
        assert "".join(texts).replace("\N{REPLACEMENT CHARACTER}", "") == "nave  owl: "
        told = [each.text.encode() if each.part_bytes is None else each.part_bytes for each in result.logprobs]
        assert b"".join(told).decode() == reply
