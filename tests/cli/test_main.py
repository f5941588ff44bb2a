"""The command line as a whole: help that teaches, usage errors, and what failures look like."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.cli import registry
from torpor.cli.command_list import COMMANDS
from torpor.cli.exit_codes import STATUSES
from torpor.cli.registry import load_command
from torpor.tests.cli.cli_rig import MadeStore, Torpor

NAMES = [command.name for command in COMMANDS]
DOCS = Path(__file__).parents[2] / "docs" / "reference" / "commands.md"
NEEDING_A_DAEMON = [
    ("append", "x", "text"),
    ("chat", "x", "hello"),
    ("generate", "x"),
    ("set", "x", "--seed", "1"),
    ("sleep", "x"),
    ("wake", "x"),
    ("analyse", "x"),
    ("quantise", "x"),
]


def test_all_commands_of_the_issue_are_there() -> None:
    of_the_issue = {"serve", "chat", "sleep", "wake", "ls", "show", "verify", "rm", "doctor", "demo"}
    of_the_store = {"repack", "strip", "repair", "prune", "forget", "du", "export", "import", "backup"}
    of_artifacts = {"analyse", "export-kv"}
    of_versions = {"tag", "untag", "pin", "unpin"}
    of_sessions = {"append", "generate", "stop", "quantise", "fork", "fold", "events", "models", "why"}
    of_sessions |= {"stats", "warm", "clear", "set", "ensure", "save", "mcp"}
    assert set(NAMES) == of_the_issue | of_the_store | of_versions | of_artifacts | of_sessions


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", NAMES)
def test_help_of_each_command_teaches_by_example_and_offers_json(torpor: Torpor, name: str) -> None:
    ran = torpor(name, "--help")
    assert ran.status == 0
    assert "Example" in ran.out
    assert re.search(rf"^ torpor {name}\b", ran.out, re.MULTILINE), "an example begins a line"
    assert "--json" in ran.out or name == "mcp", "it speaks MCP alone"


def test_help_and_the_reference_show_the_name_of_an_extra_whole(torpor: Torpor) -> None:
    assert "pip install 'torpor[mcp]'" in " ".join(torpor("mcp", "--help").out.split())
    assert "pip install 'torpor[mcp]'" in DOCS.read_text()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*NAMES, None])
def test_help_shows_no_value_behind_a_flag(torpor: Torpor, name: str | None) -> None:
    ran = torpor(*([name] if name else []), "--help")
    assert re.search(r"--help +Show this message", ran.out)
    assert "<bool>" not in ran.out


@pytest.mark.parametrize("name", NAMES)
def test_a_command_has_each_option_once_and_shows_its_arguments_as_the_reference_does(name: str) -> None:
    command = load_command(name)
    options = [option for each in command.params for option in (*each.opts, *each.secondary_opts)]
    assert len(options) == len(set(options))
    first, *arguments = command.collect_usage_pieces(command.make_context(name, [], resilient_parsing=True))
    assert f"    {' '.join(('torpor', name, *arguments, first))}\n" in DOCS.read_text()


def test_help_lists_commands_and_exit_statuses(torpor: Torpor) -> None:
    ran = torpor("--help")
    assert ran.status == 0
    for name in NAMES:
        assert f" {name} " in ran.out
    for status in STATUSES:
        assert f"{status.number:>3}  {status.name}: {status.meaning}" in ran.out


def test_without_arguments_it_shows_its_help(torpor: Torpor) -> None:
    ran = torpor()
    assert ran.status == 0
    assert "First steps" in ran.out


def test_version(torpor: Torpor) -> None:
    from torpor import __version__

    assert torpor("--version").out == f"torpor {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("ls", "--no-such-option"),
        ("sleep",),
        ("generate", "x", "--max-tokens", "0"),
        ("generate", "x", "--max-tokens", "many"),
        ("demo", "--max-tokens", "63"),
    ],
)
def test_wrong_usage_ends_with_status_2_and_says_what_is_wrong(torpor: Torpor, arguments: tuple[str, ...]) -> None:
    ran = torpor(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    assert "error" in ran.err
    as_json = torpor(*arguments, "--json")
    assert as_json.status == 2
    assert as_json.error["exit_status"] == 2
    assert as_json.error["schema_version"] == 1


def test_shared_options_mean_the_same_before_the_command_and_after_it(
    torpor: Torpor, made_store: MadeStore, short_path: Path
) -> None:
    given = ("--json", "--store", made_store.path)
    assert torpor(*given, "ls") == torpor("ls", *given)
    assert len(torpor(*given, "ls").document["sessions"]) == 2
    nobody = short_path / "nobody"
    assert torpor("--socket", nobody, "--json", "ls").error["error"]["details"]["path"] == str(nobody)
    assert made_store("--store", short_path / "none", "ls").status == 0, "the later one holds"
    assert "No such option: --store" in made_store("chat", "x", "hello").err
    assert "version" in torpor("--json", "--version").document


@pytest.mark.parametrize(
    ("word", "meant"),
    [("verfiy", "verify"), ("slep", "sleep"), ("top", "events"), ("inspect", "show"), ("list", "ls"), ("nonsense", "")],
)
def test_a_word_that_is_no_command_is_answered_with_the_one_that_was_meant(
    torpor: Torpor, word: str, meant: str
) -> None:
    """Not with one of like letters that does something else, as `stop` for `top`."""
    asked = f" Did you mean '{meant}'? See torpor --help." if meant else ". See torpor --help."
    assert torpor(word).err.strip().endswith(asked)


def test_what_other_tools_call_a_command_is_none_here_and_leads_to_one() -> None:
    assert not registry._ELSEWHERE.keys() & set(NAMES)
    assert set(registry._ELSEWHERE.values()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_an_example_of_help_fits_a_terminal_of_80_columns(name: str) -> None:
    """Else it breaks in the midst of an option."""
    _, _, examples = load_command(name).help.partition("[bold]Examples[/]")
    lines = re.sub(r"\[/?\w*\]", "", examples).strip().splitlines()
    assert lines
    assert [line for line in lines if len(line) > 78] == []


@pytest.mark.parametrize("command", ["append", "generate"])
def test_a_text_that_is_the_name_of_a_file_is_refused_with_the_way_to_read_it(
    torpor: Torpor, tmp_path: Path, command: str
) -> None:
    note = tmp_path / "a note.md"
    note.write_text("what is in it")
    ran = torpor(command, "notes", str(note))
    assert (ran.status, f"--file '{note}'" in " ".join(ran.err.split())) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("generate", "x", "--temperature"),
            "Option '--temperature' requires an argument. See torpor generate --help.",
        ),
        (("prune", "--keep-last"), "Option '--keep-last' requires an argument. See torpor prune --help."),
        (("ls", "--no-such-option"), "No such option: --no-such-option. See torpor ls --help."),
        (("doctor", "--check-models"), "No such option: --check-models. `torpor serve --check-models` reads"),
        (("demo", "--repeats=3"), "No such option: --repeats. `bench/ttft.py` takes"),
        (("serve", "--prefix-reuse", "x"), "'--prefix-reuse': 'x' is not one of 'exact', 'longest', 'off'. See torpor"),
        (("serve", "--trusting"), "No such option: --trusting."),
        (("serve", "--canary", "always"), "No such option: --canary."),
        (("serve", "--recompute", "exact"), "No such option: --recompute."),
        (("quantise", "x", "--bits", "3"), "'--bits': '3' is not one of '8', '4'. See torpor quantise --help."),
    ],
)
def test_wrong_usage_points_to_the_help_of_its_command(
    torpor: Torpor, arguments: tuple[str, ...], sentence: str
) -> None:
    ran = torpor(*arguments)
    assert (ran.status, sentence in ran.err, "Value error" in ran.err) == (2, True, False), ran.err


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


@pytest.mark.parametrize("arguments", NEEDING_A_DAEMON)
def test_an_unreachable_daemon_is_status_12_with_a_hint_in_one_line_or_one_object(
    torpor: Torpor, arguments: tuple[str, ...]
) -> None:
    ran = torpor(*arguments)
    assert (ran.status, ran.out, ran.err.count("\n")) == (12, "", 1)
    assert "daemon_unreachable" in ran.err
    assert "torpor ensure" in ran.err
    as_json = torpor(*arguments, "--json")
    assert (as_json.out, as_json.error["exit_status"]) == ("", 12)
    assert as_json.error["error"]["code"] == "daemon_unreachable"
    assert "path" in as_json.error["error"]["details"]


@pytest.mark.parametrize(("command", "has_text"), [("chat", True), ("append", True), ("wake", False)])
def test_words_without_quotes_are_told_to_need_them(torpor: Torpor, command: str, has_text: bool) -> None:
    ran = torpor(command, "notes", "What", "is", "this?")
    assert ran.status == 2
    assert ("Put a text of several words in quotes." in " ".join(ran.err.split())) == has_text


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
