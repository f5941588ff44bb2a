"""Whether a state holds what nothing can be computed from: one NaN in a key makes every later token of that head
garbage, and no exception says so (threat 11). Looked at beside the hashing, while the words are in the processor's
cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

# By dtype: the bits of the exponent as a word of its size, which are all set in NaN and infinity only.
_EXPONENTS: Final[dict[str, np.unsignedinteger]] = {
    "float16": np.uint16(0x7C00),
    "bfloat16": np.uint16(0x7F80),
    "float32": np.uint32(0x7F80_0000),
    "float64": np.uint64(0x7FF0_0000_0000_0000),
}


def is_finite(runs: Iterable[memoryview], dtype: str) -> bool:
    """Whether all values in these bytes are numbers. Each run holds whole elements; integers always are."""
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return True
    for run in runs:
        words = np.frombuffer(run, dtype=exponent.dtype)
        if words.size and (words & exponent).max() == exponent:
            return False
    return True


def is_drawable(logits: memoryview | bytes | bytearray) -> bool:
    """Whether a token can be drawn from these float32 logits: minus infinity forbids one, NaN or infinity all."""
    values = np.frombuffer(logits, dtype="<f4")
    return bool(values.size) and bool(np.isfinite(values.max()))
