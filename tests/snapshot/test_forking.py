"""A fork of a state: the same to the bit, and from then on neither sees what the other reads."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.snapshot.forking import fork, held_bytes
from torpor.tests.snapshot.growers import GROWERS, Run, fingerprint

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

LENGTHS = [1, 16, 63, 64, 65, 200, 300]


def forked(run: Run) -> Run:
    child = Run(run.grower, run.dtype)
    child.state = fork(run.state, run.fresh())
    return child


@pytest.mark.one_in(2)
@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("kind", GROWERS)
def test_a_fork_has_the_state_of_its_source_and_neither_sees_the_other_go_on_br8(kind: str, count: int) -> None:
    run = Run(GROWERS[kind], mx.float32)
    run.read(count)
    before = fingerprint(run.state.caches)
    child = forked(run)
    assert fingerprint(child.state.caches) == before
    assert child.state.is_consistent
    assert mx.array_equal(child.state.last_logits, run.state.last_logits)
    controls = {step: control(kind, count, step) for step in (1, 3)}
    child.read(1)
    assert fingerprint(run.state.caches) == before
    run.read(3)
    assert fingerprint(child.state.caches) == controls[1]
    assert fingerprint(run.state.caches) == controls[3]


def control(kind: str, count: int, step: int) -> list[Any]:
    """What a state holds that was never forked."""
    run = Run(GROWERS[kind], mx.float32)
    run.read(count)
    run.read(step)
    return fingerprint(run.state.caches)


@pytest.mark.parametrize("kind", GROWERS)
def test_a_fork_goes_on_bit_for_bit_when_its_source_is_gone_br14(kind: str) -> None:
    run = Run(GROWERS[kind], mx.float32)
    run.read(70)
    child = forked(run)
    run.state.caches = []
    child.read(1)
    assert fingerprint(child.state.caches) == control(kind, 70, 1)


def test_an_empty_state_can_be_forked() -> None:
    run = Run(GROWERS["plain"], mx.float32)
    child = forked(run)
    assert not child.state.tokens
    assert child.state.last_logits is None
    assert held_bytes([run.state, child.state]) == 0
