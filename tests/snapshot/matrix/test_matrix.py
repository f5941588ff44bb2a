"""A share of the matrix of `docs/reference/cache-kinds.md`: one row for each way of keeping state. All heavy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torpor.snapshot.kinds import KINDS as ADAPTERS
from torpor.tests.snapshot.matrix.architectures import DTYPES, cases
from torpor.tests.snapshot.matrix.report import KINDS, document
from torpor.tests.snapshot.matrix.rows import Row, run_row

CASES = {case.name: case for case in cases()}
DOCUMENT = Path(__file__).parents[3] / "docs" / "reference" / "cache-kinds.md"
# Between them every stored kind, within lists of caches and outside, and an unused cache.
SHARE = (
    "llama",
    "llama4",
    "falcon_h1",
    "deepseek_v41",
    "nemotron-nas",
    "qwen3: ConcatenateKVCache",
    "qwen3: 4 bits, groups of 32",
)


def wrong_in(row: Row) -> str:
    """All that is not as it should be in a row, as text."""
    bad = [f"{check}: {found}" for check, found in row.checks.items() if not found.startswith("ok")]
    return "; ".join([row.failed, *bad])


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", SHARE)
def test_a_session_goes_on_in_a_new_process_as_if_it_had_never_slept(name: str) -> None:
    row = run_row(CASES[name], "bfloat16")
    assert row.is_right, wrong_in(row) or row.cannot_run
    assert len(row.checks) == 13


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_architecture_goes_on_as_if_it_had_never_slept(name: str, dtype: str) -> None:
    row = run_row(CASES[name], dtype)
    if row.cannot_run:
        # Only kernels that MLX has for Metal alone are beyond a machine without it.
        assert "Metal" in row.cannot_run
        pytest.skip(row.cannot_run)
    assert row.is_right, wrong_in(row)


def test_a_row_that_is_wrong_is_told_with_its_reason() -> None:
    facts = {"caches": [["0", "kv/1", True], ["1.0", "arrays/1", True], ["1.1", "kv/1", False]], "parameters": 7}
    text = document(
        [
            Row("a", "a", "float32", facts=facts, checks={"1": "ok", "2 of 3": "caches, logits differ"}),
            Row("a", "a", "bfloat16", failed="wake ended with -11: it said nothing"),
            Row("c", "c", "float32", facts=facts, checks={"1": "ok", "branches": "ok, shared, copied"}),
            Row("b", "b", "float32", cannot_run="RuntimeError: no back-end", facts={"classes": ["KVCache"]}),
        ]
    )
    caches = "kv/1, [arrays/1, kv/1 never filled]"
    assert f"| `a` | {caches} | 7 | **wrong** | float32: ok; bfloat16: **wrong** | **wrong** |" in text
    assert f"| `c` | {caches} | 7 | shared and copied | ok | **wrong** |" in text
    assert "- Branches: shared and copied: 1 rows." in text
    assert "- `a` in float32: 2 of 3: caches, logits differ" in text
    assert "- `a` in bfloat16: wake ended with -11: it said nothing" in text
    assert "| `b` | KVCache |  | cannot run | cannot run | cannot run |" in text
    assert "- `b` in float32: RuntimeError: no back-end" in text
    assert "1 right, 2 wrong, 1 that mlx-lm cannot run" in text


def test_a_kind_that_the_table_does_not_tell_of_makes_no_document() -> None:
    row = Row("a", "a", "float32", facts={"caches": [["0", "new/1", True]], "parameters": 7}, checks={"1": "ok"})
    with pytest.raises(ValueError, match="new/1"):
        document([row])


def test_the_table_of_kinds_says_what_the_adapters_do() -> None:
    assert sorted(kind[0] for kind in KINDS) == sorted(ADAPTERS), "a row of KINDS in matrix/report.py for each adapter"
    for stored, _, by_token, whole, _ in KINDS:
        assert ADAPTERS[stored].by_token is (whole == "-")
        assert (by_token == "-") is not (whole == "-")


def test_every_kind_has_an_architecture_in_the_matrix() -> None:
    """As `make cache-kinds` has met them; CASES are made in matrix/architectures.py."""
    (met,) = re.findall(r"^kept empty. Kinds met in the matrix: (.*)\.$", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(re.findall("`(.*?)`", met)) == sorted(ADAPTERS), "give it a case, and run `make cache-kinds`"
