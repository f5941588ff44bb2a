"""A branch's numbers follow from its own tokens: never from who decodes beside it, or who shares memory with it.

Every branch is compared, bit for bit, with one that reads the same tokens in a state of its own, alone in every call.
`python -m pytest tests -k invariance` runs them; on other kernels of the BLAS in processes of their own.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torpor.daemon.engine.asking import Decode
from torpor.daemon.engine.decoding import Decoder
from torpor.daemon.engine.generation import read
from torpor.daemon.models import attention
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel, load_model
from torpor.snapshot.digests import DigestCache
from torpor.snapshot.forking import fork
from torpor.snapshot.passes import SEGMENTED, UNREPEATABLE
from torpor.snapshot.runs import SEGMENT_TOKENS
from torpor.snapshot.state import LiveState

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

STEPS = 3
_BEGUN: dict[tuple[str, int, int], LiveState] = {}
_KERNEL = "OPENBLAS_CORETYPE"


@pytest.fixture(scope="module", params=["demo", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The demo model, whose layers are so small that the BLAS has kernels of their own for them; and two of the 28
    layers of the Qwen3-0.6B shape, with random weights."""
    source = DEMO_MODEL_FOLDER if request.param == "demo" else request.getfixturevalue("thin_qwen3")
    digests = DigestCache(tmp_path_factory.mktemp("invariance") / "digests")
    loaded = load_model(str(request.param), str(source), digests)
    loaded.branch_caches()  # what can be shared is tried before a test breaks anything
    return loaded


def tokens_of(model: LoadedModel, seed: int, count: int) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(5, model.layout.vocabulary) for at in range(count)]


def read_into(model: LoadedModel, state: LiveState, tokens: Sequence[int]) -> LiveState:
    for _ in read(model, state, tokens, lambda *_: None):
        pass
    return state


def begun(model: LoadedModel, seed: int, count: int) -> LiveState:
    """A session that has read a prompt, in the form of sessions; it is read once for all tests."""
    if (model.name, seed, count) not in _BEGUN:
        state = model.new_state(mx.random.key(0))
        _BEGUN[model.name, seed, count] = read_into(model, state, tokens_of(model, seed, count))
    return fork(_BEGUN[model.name, seed, count], model.new_caches())


def branch_of(model: LoadedModel, state: LiveState) -> LiveState:
    return fork(state, model.branch_caches())


def decoded(
    model: LoadedModel, decoder: Decoder, states: Sequence[LiveState], tokens: Sequence[Sequence[int]]
) -> list[list[np.ndarray]]:
    """The bits of each branch's logits, step by step, all branches in one round."""
    found: list[list[np.ndarray]] = [[] for _ in states]
    for step in range(len(tokens[0])):
        asked = [Decode(model, state, mine[step]) for state, mine in zip(states, tokens, strict=True)]
        for state, mine, each, logits in zip(states, tokens, found, decoder.decode(asked), strict=True):
            assert isinstance(logits, mx.array), logits
            state.tokens.append(mine[step])
            state.last_logits = logits
            each.append(np.array(logits).view(np.uint32))
    return found


def alone(model: LoadedModel, prompt: LiveState, ways: Sequence[Sequence[int]], steps: Sequence[int]) -> Any:
    """As `decoded`, for one branch that shares nothing with anybody: it begins with a copy of a state."""
    state = branch_of(model, fork(prompt, model.new_caches()))
    for way in ways:
        read_into(model, state, way)
    return decoded(model, Decoder(1), [state], [steps])[0]


def differing(found: Sequence[Sequence[np.ndarray]], wanted: Sequence[Sequence[np.ndarray]]) -> list[int]:
    """The branches of which some bits differ."""
    pairs = enumerate(zip(found, wanted, strict=True))
    return [row for row, (mine, its) in pairs if any((a != b).any() for a, b in zip(mine, its, strict=True))]


def together(model: LoadedModel, count: int, prompt: int) -> list[int]:
    """Branches of one prompt with tails of unlike lengths, some of them forks of forks, and strangers between them.
    Gives those whose bits are not the ones that each has alone."""
    prompts = begun(model, 1, prompt), begun(model, 2, 90)
    root, stranger = (branch_of(model, each) for each in prompts)
    spine = tokens_of(model, 3, 80)
    deep = read_into(model, branch_of(model, root), spine)
    states, controls = [], []
    for row in range(count):
        own, steps = tokens_of(model, 100 + row, 1 + (67 * row) % 200), tokens_of(model, 200 + row, STEPS)
        source, ways, of = [(root, [own], 0), (deep, [spine, own], 0), (stranger, [own], 1)][row % 3]
        states.append((read_into(model, branch_of(model, source), own), steps))
        controls.append(alone(model, prompts[of], ways, steps))
    decoder = Decoder(32)
    found = decoded(model, decoder, [state for state, _ in states], [steps for _, steps in states])
    assert decoder.batched_tokens == (STEPS * count if count > 1 else 0)
    assert all(list(state.passes)[-STEPS:] == [SEGMENTED] * STEPS for state, _ in states)
    assert all(UNREPEATABLE not in list(state.passes) for state, _ in states)
    return differing(found, controls)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_invariance_of_branches_with_unlike_tails_beside_strangers(model: LoadedModel, count: int) -> None:
    assert together(model, count, 130) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("every", [13, pytest.param(1, marks=pytest.mark.heavy)])
def test_invariance_of_forks_at_every_offset_of_a_segment(model: LoadedModel, every: int) -> None:
    prompt, way = 100, tokens_of(model, 4, SEGMENT_TOKENS + every)
    trunk = branch_of(model, begun(model, 1, prompt))
    forks, at = {}, list(range(0, len(way), every))
    for place, token in enumerate(way):
        if place in at:
            forks[place] = branch_of(model, trunk)
        decoded(model, Decoder(1), [trunk], [[token]])
    found = decoded(model, Decoder(32), list(forks.values()), [way[place : place + 1] for place in forks])
    never_forked = branch_of(model, begun(model, 1, prompt))
    wanted = decoded(model, Decoder(1), [never_forked], [way])[0]
    assert differing(found, [[wanted[place]] for place in forks]) == []


@pytest.mark.one_in(2)
def test_invariance_fails_where_parts_are_not_added_in_their_order(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum of each run first, then the sums: as good a number, and another one wherever a run ends elsewhere."""

    def by_run(in_order: Any) -> Any:
        def added(self: Any, before: mx.array, parts: mx.array, **_: bool) -> mx.array:
            return before + in_order(self, mx.zeros(before.shape), parts, is_first=True)

        return added

    for kind in (attention._Group, attention._Ends):
        monkeypatch.setattr(kind, "added", by_run(kind.added))
    assert together(model, 5, 130) != []


@pytest.mark.one_in(1)
def test_invariance_of_a_branch_beside_one_that_fails(model: LoadedModel) -> None:
    """The failing one gets its error, and is as before; the others get the bits that they get alone (BR3, LP10)."""
    states = [branch_of(model, begun(model, 1, 150)) for _ in range(3)]
    steps = [tokens_of(model, 300 + row, 1) for row in range(3)]
    controls = [alone(model, begun(model, 1, 150), [], each) for each in steps]
    broken = states[1].caches[0]
    broken.tail_keys = mx.full(broken.tail_keys.shape, float("nan"))
    outcomes = Decoder(32).decode([Decode(model, state, each[0]) for state, each in zip(states, steps, strict=True)])
    assert isinstance(outcomes[1], Exception)
    assert [cache.offset for state in states for cache in state.caches[:1]] == [151, 150, 151]
    found = [[np.array(outcomes[row]).view(np.uint32)] for row in (0, 2)]
    assert differing(found, [controls[0], controls[2]]) == []


@pytest.mark.skipif(_KERNEL in os.environ, reason="in such a process")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("core", ["Haswell", pytest.param("Zen", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("name", ["demo", pytest.param("qwen3", marks=pytest.mark.heavy)])
def test_invariance_on_other_kernels_of_the_blas(core: str, name: str) -> None:
    chosen = f"{name} and (unlike_tails or fails_where)"
    run = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", chosen]
    told = subprocess.run(
        [*run, str(Path(__file__))], env={**os.environ, _KERNEL: core}, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout[-3000:]
    assert "passed" in told.stdout
