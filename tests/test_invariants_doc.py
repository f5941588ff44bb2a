"""docs/reference/invariants.md is true: each id stands in it once, beside a test that exists and bears the id."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([A-Z]{2}\d+) \| (.+) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "reference" / "invariants.md").read_text())
WANTED = [
    f"{family}{at}"
    for family, count in (("QC", 17), ("QX", 18), ("GM", 13), ("MS", 11), ("LP", 10), ("LV", 12), ("BR", 33))
    for at in range(1, count + 1)
]


@cache
def names_in(path: str) -> frozenset[str]:
    """The functions of a test file by which pytest finds tests."""
    tree = ast.parse((ROOT / path).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return frozenset(name for name in functions if name.startswith("test_"))


def test_each_id_has_a_row_and_no_other_has() -> None:
    assert [identifier for identifier, _, _ in ROWS] == WANTED


@pytest.mark.one_in(1)
def test_each_row_names_tests_that_there_are_and_that_bear_its_id() -> None:
    for identifier, _, tests in ROWS:
        for told in tests.split("<br>"):
            path, name = told.strip("`").split("::")
            assert name in names_in(path), told
            assert identifier.lower() in name.split("_"), told
