"""What is found out about a model before its branches share memory and model calls."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.models import sharing
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, LoadedModel, load_model
from torpor.daemon.models.sharing import Sharing, difference
from torpor.snapshot.digests import DigestCache

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model("demo", str(DEMO_MODEL_FOLDER), DigestCache(tmp_path_factory.mktemp("sharing") / "digests"))


def found_for(model: LoadedModel) -> Sharing:
    found = Sharing()
    found.settle(model.network, model.new_caches, model.layout.vocabulary, model.compute_dtype)
    return found


def test_the_demo_model_shares_each_cache_and_decodes_in_rounds(demo: LoadedModel) -> None:
    found = found_for(demo)
    assert set(found.routes.values()) == {"shared"}
    assert found.in_rounds
    assert found.rows_for(demo.network, 20)[0] > 1


@pytest.mark.one_in(1)
def test_where_a_row_depends_on_what_others_say_each_branch_decodes_alone(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the experts of one architecture do, in calls of 13 rows and more: rows that all read the same show nothing."""
    alone = sharing.run_round

    def leaking(network: Any, tokens: Any, branches: Any, rows: int) -> mx.array:
        read = mx.array(tokens)
        beside = mx.abs(read - mx.roll(read, 1))[:, None]
        return alone(network, tokens, branches, rows) * (1 + 1e-6 * beside)

    monkeypatch.setattr(sharing, "run_round", leaking)
    assert found_for(demo).rows_for(demo.network, 20) == (1, 1)


def test_a_model_that_says_nothing_to_compare_shares_nothing(
    demo: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_said", lambda *_: [mx.array([float("nan"), 1.0])])
    assert set(found_for(demo).routes.values()) == {"copied"}


def test_equal_infinities_do_not_differ() -> None:
    """Some models rule out the ids that no token has."""
    assert difference(mx.array([-mx.inf, 1.0, 2.0]), mx.array([-mx.inf, 1.0, 2.0])) == 0
    assert difference(mx.array([-mx.inf, 1.0]), mx.array([1.0, 1.0])) == mx.inf
