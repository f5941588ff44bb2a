"""What a press of Tab offers, of commands, options and names; and that the shells' scripts ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torpor.cli.command_list import COMMANDS
from torpor.cli.completing import candidates
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.memvid import store_making as making


@pytest.fixture
def store(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = short_path / "store"
    with Store.open(path, writable=True) as store:
        for number, name in enumerate(("notes", "notes-of-may", "writer")):
            making.sleep(store, 3, uri=SessionUri("default", name), seed=number)
        making.sleep(store, 4, uri=SessionUri("team", "elsewhere"), seed=9)
        store.tag(SessionUri("default", "notes"), None, "before-refactor")
    monkeypatch.setenv("TORPOR_STORE", str(path))
    return path


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sl", ["sleep"]),
        ("show no", ["notes", "notes-of-may"]),
        ("show ", ["notes", "notes-of-may", "team/", "writer"]),
        ("show team/", ["team/elsewhere"]),
        ("show --namespace team ", ["default/", "elsewhere"]),
        ("--namespace team show e", ["elsewhere"]),
        ("show torpor://default/w", ["torpor://default/writer"]),
        ("show notes@", ["notes@1", "notes@before-refactor"]),
        ("rm -y notes w", ["writer"]),
        ("rm notes writer n", ["notes", "notes-of-may"]),
        ("tag notes x", []),
        ("untag notes ", ["before-refactor"]),
        ("--namespace default untag notes be", ["before-refactor"]),
        ("untag writer ", []),
        ("fork notes ", []),
        ("ls --j", ["--json"]),
        ("ls ", ["default", "team"]),
        ("service st", ["status"]),
        ("serve --prefix-", ["--prefix-reuse"]),
        ("serve --prefix-reuse ", ["exact", "longest", "off"]),
        ("ls --store ", []),
        ("analyse n", ["notes", "notes-of-may"]),
    ],
)
def test_what_may_stand_there_is_offered(store: Path, line: str, offered: list[str]) -> None:
    assert candidates(line.split(" ")) == offered


def test_only_what_a_shell_takes_as_one_word_is_offered(store: Path) -> None:
    """bash puts it into the line as it is."""
    hostile = (
        "$(touch here)",
        "`date`",
        "a;b",
        "two words",
        "a\nb",
        "a\x1b[31mb",
        "~root",
        "#no",
        "a\u202eb",
        "'",
        "--yes ",
    )
    with Store.open(store, writable=True) as opened:
        making.write(opened, making.drafts(3), 3, session={"model": "demo", "labels": ["fine-1", *hostile]})
    assert candidates(["clear", "--label", ""]) == ["fine-1", "test"]
    assert candidates(["clear", "--label", "$"]) == []


def test_every_command_is_offered_and_its_help(store: Path) -> None:
    assert candidates([]) == sorted(command.name for command in COMMANDS)
    for command in COMMANDS:
        assert "--help" in candidates([command.name, "--"])


@pytest.fixture
def asked(store: Path, tmp_path: Path) -> Callable[[str, str], list[str]]:
    """What a shell script prints that has the completion, and a `torpor` to ask."""
    program = tmp_path / "torpor"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m torpor.cli.main "$@"\n')
    program.chmod(0o755)

    def ask(shell: str, script: str) -> list[str]:
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run([shell, "-c", script], capture_output=True, text=True, check=True, env=environment)
        assert done.stderr == ""
        return done.stdout.split()

    return ask


def test_bash_offers_it_also_behind_an_at_sign(asked: Callable[[str, str], list[str]]) -> None:
    for line, offered in (
        ("torpor show no", ["notes", "notes-of-may"]),
        ("torpor show notes@b", ["notes@before-refactor"]),
    ):
        script = f'. <(torpor completion bash); COMP_LINE="{line}" COMP_POINT={len(line)}; _torpor'
        assert asked("bash", f'{script}; echo "${{COMPREPLY[@]}}"') == offered


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish here")
def test_fish_offers_it(asked: Callable[[str, str], list[str]]) -> None:
    script = 'torpor completion fish | source; complete --do-complete "torpor show no"'
    assert asked("fish", script) == ["notes", "notes-of-may"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_takes_the_script(asked: Callable[[str, str], list[str]]) -> None:
    assert asked("zsh", 'compdef() { echo "$@"; }; eval "$(torpor completion zsh)"') == ["_torpor", "torpor"]


def test_a_store_that_is_not_there_offers_nothing_and_says_nothing(torpor: Torpor, short_path: Path) -> None:
    command = [sys.executable, "-m", "torpor.cli.main", "show", ""]
    environment = {**os.environ, "TORPOR_COMPLETING": "1", "TORPOR_STORE": str(short_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == ("", "")
