"""A session's model state as a value."""

from __future__ import annotations

from collections.abc import Callable

from torpor.snapshot.caches import truncate
from torpor.snapshot.state import LiveState, token_array


def test_a_ledger_holds_every_id_of_32_bits_and_comes_back_from_its_bytes() -> None:
    ledger = token_array()
    ledger.extend([0, 1, 2**32 - 1])
    assert ledger.tobytes() == b"\0\0\0\0\1\0\0\0\xff\xff\xff\xff"
    assert token_array(ledger.tobytes()) == ledger


def test_a_state_is_consistent_when_ledger_and_caches_have_one_length_qc8(make_state: Callable[..., LiveState]) -> None:
    state = make_state(5)
    assert state.is_consistent
    state.tokens.append(1)
    assert not state.is_consistent
    del state.tokens[4:]
    truncate(state.caches, 4)
    assert not state.is_consistent, "the passes still read 5"
    state.passes = state.passes.cut(4)
    assert state.is_consistent
