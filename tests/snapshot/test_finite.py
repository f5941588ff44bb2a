"""Every NaN and every infinity is found, wherever it stands, and nothing else is taken for one."""

from __future__ import annotations

import numpy as np
import pytest
from torpor.snapshot.capture import is_drawable, is_finite

EXPONENT_BITS = {"float16": (10, 5), "bfloat16": (7, 8), "float32": (23, 8), "float64": (52, 11)}
BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def words(dtype: str, values: list[int]) -> memoryview:
    return memoryview(np.array(values, dtype=f"u{BITS[dtype] // 8}")).cast("B")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_word_of_sixteen_bits_is_told_by_its_exponent(dtype: str) -> None:
    mantissa, exponent = EXPONENT_BITS[dtype]
    mask = ((1 << exponent) - 1) << mantissa
    for word in range(1 << 16):
        assert is_finite([words(dtype, [word])], dtype) == (word & mask != mask), hex(word)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_words_at_both_edges_of_what_is_no_number_are_told(dtype: str) -> None:
    mantissa, exponent = EXPONENT_BITS[dtype]
    sign, infinity = 1 << (BITS[dtype] - 1), ((1 << exponent) - 1) << mantissa
    numbers = [0, 1, infinity - 1, sign, sign + 1, sign + infinity - 1]
    others = [infinity, infinity + 1, sign - 1, sign + infinity, sign + infinity + 1, 2 * sign - 1]
    assert is_finite([words(dtype, numbers)], dtype)
    for word in others:
        assert not is_finite([words(dtype, [word])], dtype), hex(word)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
def test_one_among_many_is_found_in_whichever_run_it_stands(dtype: str, place: int) -> None:
    mantissa, exponent = EXPONENT_BITS[dtype]
    numbers = np.random.default_rng(place).integers(0, ((1 << exponent) - 1) << mantissa, 1000).tolist()
    assert is_finite([words(dtype, numbers), words(dtype, []), words(dtype, numbers)], dtype)
    for negative in (0, 1 << (BITS[dtype] - 1)):
        spoilt = [*numbers]
        spoilt[place] = negative | ((1 << exponent) - 1) << mantissa | 1
        assert not is_finite([words(dtype, numbers), words(dtype, spoilt)], dtype)
        assert not is_finite([words(dtype, spoilt), words(dtype, numbers)], dtype)


def test_integers_are_numbers_whatever_their_bits() -> None:
    assert is_finite([memoryview(b"\xff" * 64)], "uint32")


@pytest.mark.parametrize(
    ("logits", "drawable"),
    [([1.0, -np.inf], True), ([1.0, np.nan], False), ([1.0, np.inf], False), ([-np.inf, -np.inf], False), ([], False)],
)
def test_a_token_can_be_drawn_where_one_logit_is_a_number_and_none_is_nan_or_infinity(
    logits: list[float], drawable: bool
) -> None:
    assert is_drawable(np.array(logits, dtype="<f4").tobytes()) == drawable
