"""Each case of the transcripts, and that the runner sees what is not so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torpor.tests.cli.transcript import FOLDER, World, play
from torpor.tests.text_cases import Case, cases_in

CASES = [pytest.param(case, id=f"{case.file.stem}: {case.title}") for case in cases_in(FOLDER)]


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, short_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(request, monkeypatch, stack, {"TMP": str(short_path)})


@pytest.mark.one_in(1)
@pytest.mark.parametrize("case", CASES)
def test_what_is_told_is_what_the_transcript_says(world: World, case: Case) -> None:
    play(case, world)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("> default/agnet", "stdout has it not"),
        ("= default/agent", "stdout is not"),
        ("no> default/agent", "stdout has it"),
        ("! no daemon was asked", "stderr has it not"),
        ("!", "stderr has it not"),
        ("no! no daemon asked", "stderr has it"),
        ("[4]", "ended with status 0"),
        ("-> sleep {}", "sleep was not asked"),
    ],
)
def test_a_transcript_that_is_not_so_fails_at_its_line(world: World, line: str, fault: str) -> None:
    case = Case(Path("x.txt"), "", [(1, "store$ torpor ls"), (2, line), (3, "$ torpor --version")])
    with pytest.raises(AssertionError, match=rf"x.txt:[23]: (?s:.*){fault}"):
        play(case, world)
