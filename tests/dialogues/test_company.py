"""A share of the sweep of `company.py`, all of it where that is asked for, and faults put back that it has to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.company import kinds, swept
from torpor.tests.dialogues.comparing import DIFFERENCES
from torpor.tests.dialogues.planting import planted, printed
from torpor.tests.shares import share

KINDS = [pytest.param(family, flags, id=f"{family.name}-{flags}") for family, flags in kinds()]

# The template that keeps all. Of GLM an answer that ends otherwise is not explained yet (dialogue 428866, unlike by its
# end token): the other families are in the sweep in full.
SHARED = [kind for kind in KINDS if kind.id and kind.id.startswith("chatml-")]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("family", "flags"), SHARED)
def test_company_changes_no_answer(family: Family, flags: Any) -> None:
    first = share() % 1_000_000
    report = swept(family, flags, range(first, first + 3), kill_share=0.06, turns=(1, 2))
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
    assert report.differences.keys() <= DIFFERENCES.keys()


PLANTS: dict[str, tuple[str, str, str]] = {
    "of what is taken over the second half is missing": (
        "snapshot/forking.py",
        "with_room(array, token_count, capacity)",
        "with_room(array, token_count // 2, capacity)",
    ),
}
"""Faults: a file, and what to put in place of what."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_plant_is_found(tmp_path: Path, plant: str) -> None:
    package = planted(tmp_path, *PLANTS[plant])
    of_one_kind = ("--only", "chatml", "--flags", "own", "--kills", "0")
    told = printed(package, "company.py", *of_one_kind, "--dialogues", "6", "--turns", "1")
    assert json.loads(told.splitlines()[0])["wrong"]
