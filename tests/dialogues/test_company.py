"""A share of the sweep of `company.py`: one family and tokenizer at a commit; all of them, with more dialogues, are
heavy."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.company import kinds, swept
from torpor.tests.shares import share

KINDS = [pytest.param(family, flags, id=f"{family.name}-{flags}") for family, flags in kinds()]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("family", "flags"), KINDS)
def test_company_changes_no_answer(family: Family, flags: Any) -> None:
    first = share() % 1_000_000
    report = swept(family, flags, range(first, first + 3), kill_share=0.06)
    assert report.wrong == []
    assert report.dialogues == 3


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "flags"), KINDS)
def test_company_changes_no_answer_in_many_dialogues(family: Family, flags: Any) -> None:
    report = swept(family, flags, range(40))
    assert report.wrong == []
    assert report.dialogues == 40
    assert report.cached_tokens > report.prompt_tokens // 4, "else nothing was shared, and nothing shown"
