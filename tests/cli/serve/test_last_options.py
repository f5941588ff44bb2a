"""A daemon that ended without a stop starts as it was: its options lie beside its socket."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.serve import last_options
from torpor.cli.serve.serve_parameters import arguments_of
from torpor.daemon.options.kinds import Choice, Daily, Flag, Kind, Number, Place
from torpor.daemon.options.serve_options import GIVEN_OPTIONS

GIVEN = {"store": Path("/s/store"), "http": 0, "model": {"qwen": "/m/qwen"}, "keep_free": 1 << 20}


def test_what_is_remembered_is_what_is_recalled_until_it_is_dropped(tmp_path: Path) -> None:
    socket = tmp_path / "s.sock"
    assert last_options.recall(socket) == {}
    last_options.remember(socket, GIVEN)
    assert last_options.recall(socket) == {**GIVEN, "store": "/s/store"}
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    last_options.drop(socket)
    assert list(tmp_path.iterdir()) == []
    last_options.drop(socket)


def value_of(kind: Kind) -> Any:
    """A value as a command line gives it."""
    if isinstance(kind, Flag):
        return True
    if isinstance(kind, Choice):
        return kind.values[0]
    if isinstance(kind, Place):
        return Path("/s/place")
    if isinstance(kind, Daily):
        return kind.read_text("20GB, 10000 requests, $2")
    for text in ("7", "7d", "/m/qwen", "file:///mnt/share"):
        try:
            return kind.read_text(text)
        except ValueError:
            continue
    raise AssertionError(f"no value of {kind} is known here")


@pytest.mark.parametrize("name", GIVEN_OPTIONS)
def test_each_option_is_recalled_as_what_gives_it_again(tmp_path: Path, name: str) -> None:
    declared = GIVEN_OPTIONS[name]
    value = declared.kind.least or 1 if isinstance(declared.kind, Number) else value_of(declared.kind)
    given = {name: {"qwen": value} if declared.is_named else value}
    last_options.remember(tmp_path / "s.sock", given)
    assert arguments_of(last_options.recall(tmp_path / "s.sock")) == arguments_of(given) != []


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 20_000, '{"http": 1}' + " " * 70_000])
def test_what_no_daemon_wrote_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.sock.options").write_text(text)
    assert last_options.recall(tmp_path / "s.sock") == {}


def test_a_link_and_a_pipe_are_not_followed(tmp_path: Path) -> None:
    last_options.remember(tmp_path / "other", GIVEN)
    (tmp_path / "s.sock.options").symlink_to(tmp_path / "other.options")
    assert last_options.recall(tmp_path / "s.sock") == {}
    os.mkfifo(tmp_path / "p.sock.options")
    assert last_options.recall(tmp_path / "p.sock") == {}


def test_a_folder_that_takes_no_file_keeps_no_daemon_from_serving(tmp_path: Path) -> None:
    last_options.remember(tmp_path / "nowhere" / "s.sock", GIVEN)
    assert last_options.recall(tmp_path / "nowhere" / "s.sock") == {}
