"""A share of the sweep of `company.py`, all of it where that is asked for, and faults put back that it has to find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from torpor.tests.changed_copy import ROOT, require_once
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.company import kinds, swept
from torpor.tests.dialogues.comparing import DIFFERENCES
from torpor.tests.dialogues.planting import planted, printed
from torpor.tests.shares import share

KINDS = [pytest.param(family, flags, id=f"{family.name}-{flags}") for family, flags in kinds()]


@pytest.mark.one_in(16)
@pytest.mark.parametrize(("family", "flags"), KINDS)
def test_company_changes_no_answer(family: Family, flags: Any) -> None:
    first = share() % 1_000_000
    report = swept(family, flags, range(first, first + 2), turns=(1, 2))
    assert report.wrong == []
    assert report.dialogues == 2


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("family", "flags"), KINDS)
def test_company_changes_no_answer_in_many_dialogues(family: Family, flags: Any) -> None:
    report = swept(family, flags, range(40))
    assert report.wrong == []
    assert report.dialogues == 40
    assert report.cached_tokens > report.prompt_tokens // 4, "else nothing was shared, and nothing shown"
    assert report.differences.keys() <= DIFFERENCES.keys()


_GENERATES: Final = 'request = await self.caller.request_of(VERBS["generate"], params)'
_APPENDS: Final = """read = {"session": self.session, "tokens": tokens, "create": True}
        await self.backend.ask(VERBS["append"], await self.caller.request_of(VERBS["append"], read))
        params |= {"tokens": None, "create": False, "model": None, "labels": None}
        """
PLANTS: dict[str, tuple[int, str, str, str]] = {
    "an answer is compared behind its thinking": (
        24,
        "daemon/sessions/said.py",
        "core, thinking, calls = text.strip(),",
        'core, thinking, calls = text.rpartition("</think>")[2].strip(),',
    ),
    "an answer is compared up to its thinking": (
        32,
        "daemon/sessions/said.py",
        "core, thinking, calls = text.strip(),",
        'core, thinking, calls = text.partition("</think>")[0].strip(),',
    ),
    "a client's answer is a second turn behind an empty one": (
        0,
        "daemon/chat/conversing.py",
        "if dialogue.asked is not None:",
        "if False:",
    ),
    "a message that was read before its client left is read again": (
        0,
        "daemon/chat/prompt_io.py",
        "if count > held and known.request is not None:",
        "if held < count < begins + len(ids) and known.request is not None:",
    ),
    "prompts of two clients interleave": (0, "socket_api/http/completions.py", _GENERATES, _APPENDS + _GENERATES),
    "of what is taken over the second half is missing": (
        0,
        "snapshot/forking.py",
        "with_room(array, token_count, capacity)",
        "with_room(array, token_count // 2, capacity)",
    ),
}
"""Faults as they were in the code, or may come: the first of the dialogues that find it, a file, and what to put in
place of what."""


@pytest.mark.one_in(8)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_plant_is_found(tmp_path: Path, plant: str) -> None:
    first, *fault = PLANTS[plant]
    package = planted(tmp_path, *fault)
    of_one_kind = ("--only", "chatml", "--flags", "own", "--kills", "0", "--turns", "1")
    told = printed(package, "company.py", *of_one_kind, "--first", str(first), "--dialogues", "6")
    assert json.loads(told.splitlines()[0])["wrong"]


def test_each_plant_fits_the_code() -> None:
    for _, file, what, _ in PLANTS.values():
        require_once(ROOT / file, what)
