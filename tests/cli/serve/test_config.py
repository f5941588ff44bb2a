"""`torpor config`: what holds, where it is from, and what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.cli.serve import last_options
from torpor.daemon.options.serve_options import SERVE_OPTIONS
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor, pretend_terminal, unstyled


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "torpor.toml"
    (tmp_path / "model").mkdir()
    path.write_text('idle_sleep = "15min"\nbatch = 4\n[models.qwen]\npath = "model"\npin = true\n')
    return path


def settings(document: Any) -> dict[str, tuple[Any, str]]:
    return {each["key"]: (each["value"], each["source"]) for each in document["settings"]}


def test_each_setting_is_shown_with_where_it_is_from(
    torpor: Torpor, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STORE", "/of/the/environment")
    found = settings(torpor("config", "show", file, "--json").document)
    assert found["idle_sleep"] == (900, str(file))
    assert found["max_waiting"] == (512, "default")
    assert found["models.qwen.pin"] == (True, str(file))
    assert found["store"] == ("/of/the/environment", "$TORPOR_STORE")
    assert {key for key, option in SERVE_OPTIONS.items() if option.option.changes is not None} <= found.keys()
    line = next(line for line in torpor("config", "show", file).out.splitlines() if line.startswith("batch"))
    assert line == f"batch\t4\t{file}"


def test_a_narrow_terminal_has_a_line_for_each_setting(
    torpor: Torpor, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is from stands in --json, and in a wider terminal."""
    monkeypatch.setenv("TORPOR_STORE", "/of/the/environment")
    file.write_text("batch = 4\n")
    pretend_terminal(monkeypatch, 60)
    shown = unstyled(torpor("config", "show", file, "--socket", "/of/it.sock").out).splitlines()
    assert shown[0].split() == ["SETTING", "VALUE"]
    assert len(shown) < 1.5 * len(SERVE_OPTIONS)
    assert "not shown, for want of room: FROM" in shown[-1]


def test_the_command_line_of_the_daemon_wins_over_its_file(torpor: Torpor, file: Path) -> None:
    socket = default_socket_path()
    socket.parent.mkdir(parents=True, exist_ok=True)
    last_options.remember(socket, {"batch": 2, "config": file, "store": "/a/store", "model": {"demo": "/m"}})
    try:
        found = settings(torpor("config", "show", "--json").document)
    finally:
        last_options.drop(socket)
    assert found["batch"] == (2, "command line")
    assert found["idle_sleep"] == (900, str(file))
    assert found["store"] == ("/a/store", "command line")
    assert found["models.demo.path"] == ("/m", "command line")
    assert not [key for key in found if key.startswith("models.qwen")], "models of the command line replace all"


def test_a_sound_file_is_called_so_and_nothing_starts(torpor: Torpor, file: Path) -> None:
    assert torpor("config", "check", file).out == f"{file} is sound: 2 settings, 1 model\n"
    assert not default_socket_path().exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("idle_sleeps = 1", "is wrong at idle_sleeps"),
        ("batch = 0", "is wrong at batch"),
        ('[models.a]\npath = "gone/from/here"', "is wrong at models.a.path: there is no folder"),
        ('[aliases]\nx = "y"\n[models.a]\npath = "model"', "'x' stands for 'y', and only 'a' are served"),
        ("batch", "is not TOML"),
    ],
)
def test_what_is_wrong_is_named(torpor: Torpor, file: Path, text: str, told: str) -> None:
    file.write_text(text)
    ran = torpor("config", "check", file)
    assert (ran.status, told in ran.err) == (2, True), ran.err


def test_without_a_file_it_says_how_to_name_one(torpor: Torpor) -> None:
    ran = torpor("config", "check")
    assert (ran.status, "`torpor config check FILE`" in ran.err) == (2, True)
