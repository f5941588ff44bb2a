"""How a report is told: what was done or would be, what it freed, what stays wrong, and the exit status of it."""

from __future__ import annotations

import pytest
from torpor.cli.commands.maintenance_report import ROWS_SHOWN, write_report
from torpor.cli.view.output import Output
from torpor.memvid.answers import Action, Finding, MaintenanceReport

URI = "torpor://default/notes"
PACK = f"/store/packs/{'ab' * 32}.mvp"


def report(*actions: Action, problems: tuple[Finding, ...] = (), dry_run: bool = False) -> MaintenanceReport:
    return MaintenanceReport("repack", dry_run, actions, 0, 3 << 20, 1 << 20, problems)


def told(capsys: pytest.CaptureFixture[str], made: MaintenanceReport) -> tuple[int, str]:
    status = write_report(Output(as_json=False), "repack", made)
    return status, capsys.readouterr().out


@pytest.mark.parametrize(
    ("codes", "status"),
    [(("store_io",), 1), (("no_space",), 9), (("no_space", "truncated"), 6), (("of_a_later_version",), 6)],
)
def test_the_status_of_a_report_is_that_of_its_problems(
    capsys: pytest.CaptureFixture[str], codes: tuple[str, ...], status: int
) -> None:
    problems = tuple(Finding("/p", code, "m.") for code in codes)
    assert told(capsys, report(problems=problems))[0] == status


def test_a_plan_says_what_would_be_done_and_a_report_what_was(capsys: pytest.CaptureFixture[str]) -> None:
    rewrite = Action("rewrite", PACK, URI, 2, 3 << 20, "half of it is needed")
    move = Action("move", "/store/packs/x.mvp", None, None, 0, "It is damaged.")
    _, plan = told(capsys, report(rewrite, move, dry_run=True))
    assert "\nrewrite\t" in plan
    assert (
        "nothing done yet  planned: 3.00 MiB freed, 1.00 MiB written: 2.00 MiB less on disk; 1 rewrite, 1 move" in plan
    )
    _, done = told(capsys, report(rewrite, move))
    assert "rewritten" in done
    assert "default/notes@2" in done
    assert f"{'ab' * 6}.mvp" in done
    assert "done  3.00 MiB freed, 1.00 MiB written: 2.00 MiB less on disk; 1 rewritten, 1 moved" in done


def test_what_is_kept_is_a_reason_and_not_an_action(capsys: pytest.CaptureFixture[str]) -> None:
    keep = Action("keep", PACK, URI, 1, 0, "it has the tag before")
    status, text = told(capsys, report(keep))
    assert status == 0
    assert "it has the tag before" in text
    assert "nothing to do, 1 kept" in text


def test_a_long_report_is_cut_for_people_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    actions = [Action("remove", f"/store/{number}.tmp", None, None, 1, "unfinished") for number in range(100)]
    _, text = told(capsys, report(*actions))
    assert text.count("unfinished") == ROWS_SHOWN
    assert f"and {100 - ROWS_SHOWN} more" in text
    assert "100 removed" in text


def test_a_file_that_was_moved_away_is_named_as_short_as_any(capsys: pytest.CaptureFixture[str]) -> None:
    away = Action("move", PACK, None, None, 1, f"It is damaged, and moves to damaged/{'ab' * 32}.mvp.2.")
    _, text = told(capsys, report(away))
    assert f"moves to damaged/{'ab' * 6}.mvp.2." in text
    assert "ab" * 8 not in text


def test_a_reason_names_files_and_ids_as_short_as_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """A whole path takes five lines of a narrow terminal's last column."""
    other = "cd" * 32
    needed = Action("keep", PACK, URI, 1, 1, f"/my store/packs/{other}.mvp needs it, as {other} does.")
    _, text = told(capsys, report(needed))
    assert "cd" * 8 not in text
    assert f"{'cd' * 6}.mvp needs it, as {'cd' * 6} does." in text


def test_what_one_missing_pack_asks_for_is_told_once_of_many_versions(capsys: pytest.CaptureFixture[str]) -> None:
    advice = "Put the missing pack back."
    problems = tuple(Finding(f"/{number}.mvm", "block_missing", f"Version {number}. {advice}") for number in range(3))
    _, text = told(capsys, report(problems=problems))
    assert [f"Version {number}." in text for number in range(3)] == [True] * 3
    assert text.count(advice) == 1
