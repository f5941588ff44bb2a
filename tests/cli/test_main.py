"""The command line as a whole: help that teaches, usage errors, and what failures look like."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.cli.command_list import COMMANDS, DAILY, ELSEWHERE, UNBUILT
from torpor.cli.exit_codes import STATUSES
from torpor.cli.program import load_command
from torpor.tests.cli.cli_rig import Torpor, pretend_terminal, unstyled

NAMES = [command.name for command in COMMANDS]
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"


def test_no_command_vanishes() -> None:
    of_the_start = {"serve", "chat", "sleep", "wake", "ls", "show", "verify", "rm", "doctor", "demo"}
    of_the_store = {"repack", "strip", "repair", "prune", "forget", "du", "export", "import", "backup"}
    of_artifacts = {"analyze", "export-kv"}
    of_versions = {"tag", "untag", "pin", "unpin"}
    of_sessions = {"append", "generate", "stop", "quantize", "fork", "fold", "events", "models", "why"}
    of_sessions |= {"stats", "warm", "clear", "set", "ensure", "save", "mcp"}
    assert of_the_start | of_the_store | of_versions | of_artifacts | of_sessions <= set(NAMES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_help_of_each_command_teaches_by_example_and_offers_json(torpor: Torpor, name: str) -> None:
    ran = torpor(name, "--help")
    assert ran.status == 0
    assert "Example" in ran.out
    assert re.search(rf"^ torpor {name}\b", ran.out, re.MULTILINE), "an example begins a line"
    assert "--json" in ran.out or name in ("mcp", "top"), "one speaks MCP alone, the other draws a screen"


def test_help_and_the_reference_show_the_name_of_an_extra_whole(torpor: Torpor) -> None:
    assert "pip install 'torpor[mcp]'" in " ".join(torpor("mcp", "--help").out.split())
    assert "pip install 'torpor[mcp]'" in DOCS.read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_help_shows_no_value_behind_a_flag(torpor: Torpor, name: str) -> None:
    ran = torpor(name, "--help")
    assert re.search(r"--help +Show this message", ran.out)
    assert "<bool>" not in ran.out


@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_each_option_once_and_shows_its_arguments_as_the_reference_does(name: str) -> None:
    command = load_command(name)
    options = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
    assert len(options) == len(set(options))
    first, *arguments = command.collect_usage_pieces(command.make_context(name, [], resilient_parsing=True))
    assert f"    {' '.join(('torpor', name, *arguments, first))}\n" in DOCS.read_text()


def test_help_is_one_screen_with_the_commands_of_every_day_first_and_all_others_behind(torpor: Torpor) -> None:
    ran = torpor("--help")
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert len(lines) <= 40
    assert [line for line in lines if len(line) > 80] == []
    assert re.findall(r"^  ([a-z][a-z-]*)  +[A-Z]", ran.out, re.MULTILINE) == list(DAILY)
    assert {*NAMES} <= {*re.findall(r"(?<!\S)[a-z-]+(?!\S)", ran.out)}


@pytest.mark.parametrize("columns", [60, 80])
def test_help_breaks_its_lines_between_words(torpor: Torpor, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    piped = torpor("--help").out
    pretend_terminal(monkeypatch, columns)
    shown = unstyled(torpor("--help").out)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    assert sorted(shown.split()) == sorted(piped.split())


def test_help_is_asked_for_in_words_too(torpor: Torpor) -> None:
    assert torpor("help").out == torpor("--help").out
    assert torpor("help", "ls").out == torpor("ls", "--help").out
    statuses = torpor("help", "exit-status").out
    assert all(f"{status.number:>3}  {status.name}: {status.meaning}\n" in statuses for status in STATUSES)


def test_without_arguments_it_shows_its_help(torpor: Torpor) -> None:
    ran = torpor()
    assert ran.status == 0
    assert ran.out == torpor("--help").out


def test_version(torpor: Torpor) -> None:
    from torpor import __version__

    for way in ("--version", "version"):
        assert torpor(way).out == f"torpor {__version__}\n"
        assert torpor(way, "--json").document == {"schema_version": 1, "command": "version", "version": __version__}


def test_what_other_tools_call_a_command_is_none_here_and_leads_to_one() -> None:
    assert not (ELSEWHERE.keys() | UNBUILT.keys()) & set(NAMES)
    assert not ELSEWHERE.keys() & UNBUILT.keys()
    assert set(ELSEWHERE.values()) <= set(NAMES)
    told = re.findall(r"`torpor ([a-z]+)", " ".join(UNBUILT.values()))
    assert {*told} == {"fork", "rm", "wake", "log", "events", "top", "ls", "cat", "doctor"}


@pytest.mark.parametrize("name", NAMES)
def test_an_example_of_help_fits_a_terminal_of_80_columns(name: str) -> None:
    """Else it breaks in the midst of an option."""
    _, _, examples = load_command(name).help.partition("[bold]Examples[/]")
    lines = re.sub(r"\[/?\w*\]", "", examples).strip().splitlines()
    assert lines
    assert [line for line in lines if len(line) > 78] == []


def test_a_ctrl_c_at_a_question_is_told_on_a_line_of_its_own(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(io.StringIO):
        def isatty(self) -> bool:
            return True

        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    ran = torpor("forget", "notes")
    assert ran.status == 130
    assert "\nerror cancelled" in ran.err


def test_the_choices_of_an_argument_stand_in_one_line(torpor: Torpor) -> None:
    assert "Choose from: install, status, remove, uninstall." in " ".join(torpor("service").err.split())


def test_an_interrupt_is_status_130(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torpor.cli.commands.wake.connect", interrupted)
    assert torpor("wake", "x").status == 130


def test_documents_show_every_command_with_an_example() -> None:
    text = DOCS.read_text()
    for name in NAMES:
        assert re.search(rf"^## `torpor {name}", text, re.MULTILINE), name
        assert re.search(rf"^torpor {name}|\| torpor {name}", text, re.MULTILINE), name


def test_a_process_that_has_computed_ends_before_the_libraries_end_themselves() -> None:
    """MLX's end races with its own threads, and aborted daemons that had stopped in order."""
    program = (
        "import atexit, os, sys, types; from torpor.cli.view.streams import leave; atexit.register(os.abort); "
        "sys.modules['mlx.core'] = types.ModuleType('mlx.core'); print('told', end=''); leave(3)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (3, b"told")
