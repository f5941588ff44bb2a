"""Every architecture of the installed mlx-lm has a row, and a row is of what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.snapshot.matrix.architectures import MODELS_FOLDER, architectures, cases, digest_of_weights


@pytest.mark.one_in(2)
def test_no_architecture_is_left_out_and_none_is_made_up() -> None:
    assert sorted({case.module for case in cases()}) == architectures()
    assert len(architectures()) > 100


def test_the_document_has_every_row() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "cache-kinds.md").read_text(encoding="utf-8")
    matrix = text.split("\n## The matrix\n")[1].split("\n## ")[0]
    found = [line.split(" | ")[0].strip("| `") for line in matrix.splitlines() if line.startswith("| ")]
    assert found[2:] == [case.name for case in cases()]


@pytest.mark.one_in(2)
def test_only_what_offers_no_model_is_no_architecture() -> None:
    found = set(architectures())
    for path in MODELS_FOLDER.glob("*.py"):
        if path.stem not in found:
            text = path.read_text(encoding="utf-8")
            assert "\nclass Model(" not in text, path.name
            assert "import Model" not in text, path.name


def test_rows_have_names_of_their_own() -> None:
    names = [case.name for case in cases()]
    assert len(names) == len(set(names))


def test_a_network_is_the_same_whenever_it_is_built() -> None:
    case = next(case for case in cases() if case.name == "qwen3_next")
    first = digest_of_weights(case.build("bfloat16"))
    assert digest_of_weights(case.build("bfloat16")) == first
    assert digest_of_weights(case.build("float32")) != first


def test_a_network_is_not_in_training() -> None:
    """In training a row of dbrx shares products with others that have the same experts, and its bits depend on them."""
    network = next(case for case in cases() if case.name == "dbrx").build("float32")
    assert not any(part.training for part in network.modules())
