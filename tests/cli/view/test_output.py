"""Where words go: plain where nobody looks, harmless always, one document with --json."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.cli.reach.daemon_link import STAGE_NAMES
from torpor.cli.view.output import PIPED_WIDTH, Output, neutralise, report_error, rows_table
from torpor.cli.view.progress import Amount
from torpor.errors import TorporError
from torpor.tests.cli.cli_rig import Torpor, pretend_terminal, unstyled
from torpor.tests.socket_api.server_rig import ServerThread


def test_piped_output_has_no_escape_sequences_and_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(as_json=False)
    output.line("[bold green]sound[/] " + "x" * (2 * PIPED_WIDTH))
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.count("\n") == 1


@pytest.mark.parametrize("columns", ["20", "400"])
def test_a_piped_table_is_one_line_a_row_whatever_the_environment_says(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    name = "a-session-of-some-" + "length-" * 12 + "indeed"
    torpor("append", name, "one two three")
    monkeypatch.setenv("COLUMNS", columns)
    header, row = (line.split("\t") for line in torpor("ls").out.splitlines())
    cells = dict(zip(header, row, strict=True))
    assert (cells["SESSION"], cells["MODEL"]) == (f"default/{name}", "fake")
    assert not [cell for cell in header + row if cell != cell.strip()]
    assert f"torpor://default/{name}\n" in torpor("show", name).out
    assert "state\tawake, changed since its last version\n" in torpor("show", name).out


def remark(words: str) -> None:
    Output(as_json=False).remark(words)


def fail(words: str) -> None:
    report_error(TorporError(words), as_json=False)


def tell(words: str) -> None:
    Output(as_json=False).line(words)


@pytest.mark.parametrize("say", [remark, fail, tell])
def test_no_sentence_is_broken_inside_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    words = "There is no store at /a/path/that/is/longer/than/a/terminal/may/be/wide. Name another, or make one there."
    say(words)
    whole = "".join(capsys.readouterr())
    assert whole.count("\n") == 1, "piped, none is broken at all"
    for columns in range(10, len(whole)):
        pretend_terminal(monkeypatch, columns)
        say(words)
        lines = unstyled("".join(capsys.readouterr())).splitlines()
        assert " ".join(lines).split() == whole.split()
        assert [line for line in lines if len(line) > columns and " " in line] == []


def test_what_is_broken_goes_on_where_its_line_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch, 20)
    tell("a headline of five words\n    and below it what it says")
    assert unstyled(capsys.readouterr().out) == "a headline of five\nwords\n    and below it\n    what it says\n"


def test_progress_is_silent_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    for as_json in (False, True):
        with Output(as_json=as_json).progress("reading") as report:
            report(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("unit", "amount"), [("tokens", "1,024 of 4,096 tokens"), ("bytes", "1.00 KiB of 4.00 KiB"), ("", "1,024 of 4,096")]
)
def test_progress_tells_how_much_of_how_much_and_how_long_it_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, unit: str, amount: str
) -> None:
    pretend_terminal(monkeypatch, 200)
    with Output(as_json=False).progress("reading", unit=unit) as report:
        report(1024, 4096)
    shown = unstyled(capsys.readouterr().err)
    assert amount in shown
    assert "25%" in shown
    assert "0:00:00 -:--:--" in shown, "how long it has taken, and how long it will, as far as that is known"


@pytest.mark.parametrize("columns", [50, 72, 80, 104])
def test_a_narrow_terminal_is_shown_the_figures_of_progress_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pretend_terminal(monkeypatch, columns)
    with Output(as_json=False).progress("verifying", unit="bytes") as report:
        report(123 << 20, 256 << 20)
    lines = [line for line in re.split(r"[\r\n]", unstyled(capsys.readouterr().err)) if line.strip()]
    assert all(len(line) <= columns for line in lines)
    assert "verifying" in lines[-1]
    assert "123 MiB of 256 MiB" in lines[-1]
    assert "0:00:00" in lines[-1]
    assert ("48%" in lines[-1], "━" in lines[-1]) == (columns >= 72, columns >= 80)


@pytest.mark.parametrize("columns", [28, 33, 34, 60])
def test_a_narrow_terminal_is_shown_each_cell_of_a_table_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    pretend_terminal(monkeypatch, columns)
    table = rows_table("MODEL", "TOKENS", "SLEPT", right=("TOKENS",), whole=("SLEPT",))
    table.add_row("small", "1,234,567", "2026-11-23 04:48")
    table.add_row("large", "", "–")
    Output(as_json=False).show(table)
    shown = [line.strip() for line in unstyled(capsys.readouterr().out).splitlines()]
    if columns >= 5 + 2 + 9 + 2 + 16:
        assert shown[1].split() == ["small", "1,234,567", "2026-11-23", "04:48"]
    else:
        assert [line.split(maxsplit=1) for line in shown[:3]] == [
            ["MODEL", "small"],
            ["TOKENS", "1,234,567"],
            ["SLEPT", "2026-11-23 04:48"],
        ]
        assert [" ".join(line.split()) for line in shown[3:]] == ["", "MODEL large", "SLEPT –"]


@pytest.mark.parametrize(
    ("unit", "shown"),
    [
        ("tokens", "1,024 of 4,096 tokens, 512/s"),
        ("bytes", "1.00 KiB of 4.00 KiB, 512 B/s"),
        ("", "1,024 of 4,096, 512/s"),
    ],
)
def test_progress_tells_how_much_of_it_is_done_in_a_second(unit: str, shown: str) -> None:
    task: Any = SimpleNamespace(completed=1024, total=4096, speed=512.0, fields={"unit": unit})
    assert Amount().render(task).plain == shown


@pytest.mark.parametrize("speed", [17.6 * 2**30, 1024 / 0.4, 0.0, None])
def test_progress_tells_no_rate_of_what_took_no_time(speed: float | None) -> None:
    task: Any = SimpleNamespace(completed=1024, total=4096, speed=speed, fields={"unit": "tokens"})
    assert Amount().render(task).plain == "1,024 of 4,096 tokens"


def test_remarks_are_silent_with_json(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).remark("hello")
    assert capsys.readouterr() == ("", "")


def test_a_document_is_one_line_and_carries_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).document("ls", {"sessions": ["ü\n"]})
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == {"schema_version": 1, "command": "ls", "sessions": ["ü\n"]}


@pytest.mark.parametrize("hostile", ["\x1b]0;title\x07", "\x9b2J", "\x00", "\x7f", "\r"])
def test_control_characters_become_visible(hostile: str) -> None:
    """Threat 46."""
    shown = neutralise(f"a{hostile}b\n\tc")
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    assert shown.endswith("b\n\tc")


def test_markup_in_an_error_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    report_error(TorporError("no [bold]session[/] \x1b[2J"), as_json=False)
    assert "[bold]session[/]" in capsys.readouterr().err


def test_a_sleep_is_counted_in_tokens_as_the_daemon_counts_it() -> None:
    assert STAGE_NAMES["sleep"] == ("sleeping", "tokens")


@pytest.mark.parametrize(("columns", "gone"), [(100, ""), (80, "LABELS"), (72, "LABELS, MODEL")])
def test_a_column_that_finds_no_room_is_left_out_with_a_sign(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int, gone: str
) -> None:
    pretend_terminal(monkeypatch, columns)
    name = "default/a-session-with-a-name-of-more-than-fifty-letters"
    table = rows_table("SESSION", "TOKENS", "MODEL", "LABELS", whole=("SESSION",), first_to_go=("LABELS", "MODEL"))
    table.add_row(name, "1,234,567", "demo", "nightly-run http")
    Output(as_json=False).show(table)
    header, row, *sign = unstyled(capsys.readouterr().out).strip().splitlines()
    assert name in row, "a name is never broken"
    assert [each for each in ("MODEL", "LABELS") if each not in header] == [
        each for each in ("MODEL", "LABELS") if each in gone
    ]
    assert sign == ([f"not shown, for want of room: {gone} (--json has all)"] if gone else [])
