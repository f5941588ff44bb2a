"""Whether a state holds what nothing can be computed from: one NaN in a key makes every later token of that head
garbage, and no exception says so (threat 11). Looked at beside the hashing, while the words are in the processor's
cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

# By dtype: the smallest word whose exponent is all ones, which it is in NaN and infinity only, without and with a sign.
_LOWEST_NOT_FINITE: Final[dict[str, tuple[np.signedinteger, np.unsignedinteger]]] = {
    "float16": (np.int16(0x7C00), np.uint16(0xFC00)),
    "bfloat16": (np.int16(0x7F80), np.uint16(0xFF80)),
    "float32": (np.int32(0x7F80_0000), np.uint32(0xFF80_0000)),
    "float64": (np.int64(0x7FF0_0000_0000_0000), np.uint64(0xFFF0_0000_0000_0000)),
}


def is_finite(runs: Iterable[memoryview], dtype: str) -> bool:
    """Whether all values in these bytes are numbers. Each run holds whole elements; integers always are.

    Read as signed integers, what has no sign bit and is not finite is larger than all else; read as unsigned ones,
    what has it and is not finite is. So two searches for a maximum tell, at the speed of the cache.
    """
    lowest = _LOWEST_NOT_FINITE.get(dtype)
    if lowest is None:
        return True
    for run in runs:
        for bound in lowest if run.nbytes else ():
            if np.frombuffer(run, dtype=bound.dtype).max() >= bound:
                return False
    return True


def is_drawable(logits: memoryview | bytes | bytearray) -> bool:
    """Whether a token can be drawn from these float32 logits: minus infinity forbids one, NaN or infinity all."""
    values = np.frombuffer(logits, dtype="<f4")
    return bool(values.size) and bool(np.isfinite(values.max()))
