"""A daemon that ended without a stop starts as it was: its options lie beside its socket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torpor.cli.serve import last_options

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
