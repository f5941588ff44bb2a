"""A share of the sweep of `company.py`, of the template that keeps all that was said. The others are heavy: some drop
thinking or blanks of earlier answers, which a ledger keeps, and the sweep does not yet tell that from a fault."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.company import kinds, swept
from torpor.tests.shares import share

KINDS = [pytest.param(family, flags, id=f"{family.name}-{flags}") for family, flags in kinds()]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("family", "flags"), [each for each in KINDS if each.id.startswith("chatml-")])
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
