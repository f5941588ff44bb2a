"""Branches of every architecture, in one process: the column `branches` of `docs/reference/cache-kinds.md`."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.engine import generation
from torpor.daemon.models import attention
from torpor.snapshot.runs import SharedKVCache
from torpor.tests.snapshot.matrix import branching, live
from torpor.tests.snapshot.matrix.architectures import DTYPES, cases

from mlx_lm.models import ministral3  # isort: skip  # after torpor, which chooses the BLAS

CASES = {case.name: case for case in cases()}


@pytest.fixture(autouse=True)
def calls_of_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row sets the length of the calls; afterwards it is what it was."""
    monkeypatch.setattr(generation, "PREFILL_CHUNK_TOKENS", generation.PREFILL_CHUNK_TOKENS)


def found_for(name: str, dtype: str) -> str:
    try:
        return branching.found_in(live.model_of(CASES[name], dtype))
    except live.CannotRun as error:
        if "Metal" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.one_in(30)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_a_branch_says_what_the_network_says_alone_and_beside_another(name: str, dtype: str) -> None:
    assert found_for(name, dtype).split(", ")[0] == "ok"


def test_a_window_that_is_a_mask_over_a_plain_cache_is_gathered() -> None:
    assert found_for("mistral3", "float32") == "ok, shared, gathered"


def test_a_mask_that_is_dropped_is_found_though_it_begins_behind_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def maskless(*arrays: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        is_branch = isinstance(cache, (attention.RoundLayer, SharedKVCache)) and arrays[0].shape[2] == 1
        return attention.attend(*arrays, cache, scale, None if is_branch else mask, sinks)

    monkeypatch.setattr(ministral3, "scaled_dot_product_attention", maskless)
    monkeypatch.setattr(attention.RoundLayer, "make_mask", lambda *_, **__: None)
    assert found_for("mistral3", "float32").startswith("alone: branch 1 is off by")
