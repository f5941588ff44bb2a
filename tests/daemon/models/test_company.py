"""What is found out about a model before its sessions are read in one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.models import company
from torpor.daemon.models.company import Company
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel, load_model
from torpor.snapshot.digests import DigestCache

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], LoadedModel]:
    digests = DigestCache(tmp_path_factory.mktemp("company") / "digests")
    return lambda folder: load_model("one", str(folder), digests)


@pytest.fixture(scope="module")
def qwen3(loaded: Callable[[Path], LoadedModel], thin_qwen3: Path) -> LoadedModel:
    return loaded(thin_qwen3)


def found_for(model: LoadedModel) -> Company:
    found = Company()
    found.settle(model.network, model.new_caches, model.layout.vocabulary, model.compute_dtype)
    return found


def test_the_demo_model_is_read_in_rounds(loaded: Callable[[Path], LoadedModel]) -> None:
    assert found_for(loaded(DEMO_MODEL_FOLDER)).in_rounds


@pytest.mark.one_in(1)
@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2", "deepseek_v3", "qwen3_next", "olmo", "mistral3"])
def test_models_with_other_caches_or_an_attention_of_their_own_are_not(
    loaded: Callable[[Path], LoadedModel], models_of_kinds: Callable[[str], Path], kind: str
) -> None:
    assert not found_for(loaded(models_of_kinds(kind))).in_rounds


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any, Any, mx.array], mx.array]) -> None:
    """spoil: changes the logits of a round, given its tokens and its rows."""
    in_order = company.run_round

    def spoiling(network: Any, tokens: Any, states: Any, rows: int) -> mx.array:
        return spoil(tokens, rows, in_order(network, tokens, states, rows))

    monkeypatch.setattr(company, "run_round", spoiling)


@pytest.mark.one_in(1)
def test_a_model_that_says_something_else_beside_others_is_not(
    qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found_for(qwen3).in_rounds
    spoilt(monkeypatch, lambda _tokens, _rows, logits: logits[::-1])
    assert not found_for(qwen3).in_rounds


def test_a_model_that_raises_beside_others_is_not(qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> mx.array:
        raise RuntimeError("no rounds")

    monkeypatch.setattr(company, "run_round", fail)
    assert not found_for(qwen3).in_rounds


@pytest.mark.one_in(1)
@pytest.mark.parametrize("rows", [1, 3, 4, 16])
def test_last_bits_that_differ_in_any_row_of_a_call_are_found(
    qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    last_one = mx.array([1.0] * (rows - 1) + [1 + 1e-6])[:, None]
    spoilt(monkeypatch, lambda _tokens, count, logits: logits * last_one if count == rows else logits)
    found = found_for(qwen3)
    assert found.in_rounds
    assert not found.repeats(qwen3.network, rows)


def test_each_number_of_rows_is_tried_once(qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def watch(_tokens: Any, count: int, logits: mx.array) -> mx.array:
        tried.append(count)
        return logits

    spoilt(monkeypatch, watch)
    found = found_for(qwen3)
    assert tried == [2]
    assert [found.repeats(qwen3.network, 5) for _ in range(3)] == [found.repeats(qwen3.network, 5)] * 3
    assert set(tried[1:]) == {5}
    assert len(tried) <= 3
    assert not found.repeats(qwen3.network, 17), "more rows are not tried"
    assert 17 not in tried


@pytest.mark.one_in(1)
def test_bits_that_depend_on_what_the_others_say_are_found(qwen3: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the experts of one architecture do: rows that all read the same show nothing."""

    def leak(tokens: Any, _rows: int, logits: mx.array) -> mx.array:
        read = mx.array(list(tokens))
        return logits * (1 + 1e-6 * (read > mx.roll(read, 1)))[:, None]

    spoilt(monkeypatch, leak)
    assert not found_for(qwen3).repeats(qwen3.network, 4)


def test_where_each_row_has_experts_of_its_own_no_bits_are_promised(
    loaded: Callable[[Path], LoadedModel], models_of_kinds: Callable[[str], Path]
) -> None:
    model = loaded(models_of_kinds("qwen3_moe"))
    found = found_for(model)
    assert found.in_rounds
    assert not any(found.repeats(model.network, rows) for rows in (2, 4))
