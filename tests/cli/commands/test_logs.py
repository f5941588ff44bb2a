"""`torpor logs`: the end of a daemon's log, wherever it writes, and what comes after it."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
from torpor.cli.commands import logs
from torpor.cli.commands.logs import Log, _opened
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "daemon.log"
    path.write_text("".join(f"line {number}\n" for number in range(200)))
    return path


def test_the_last_lines_are_told_and_no_text_steers_the_terminal(torpor: Torpor, log: Path) -> None:
    ran = torpor("logs", "--log", str(log))
    assert (ran.status, ran.out.splitlines()) == (0, [f"line {number}" for number in range(150, 200)])
    log.write_bytes(b"\x1b[2J[red]x[/]\r\xff\nlast, without an end")
    ran = torpor("logs", "--log", str(log), "-n", "9")
    assert ran.out == "\u241b[2J[red]x[/]\u240d\ufffd\nlast, without an end\n"
    told = [json.loads(line) for line in torpor("logs", "--log", str(log), "-n", "1", "--json").out.splitlines()]
    assert [(each["command"], each["line"], each["path"]) for each in told] == [
        ("logs", "last, without an end", str(log))
    ]


def test_of_a_long_log_only_the_end_is_read(torpor: Torpor, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_BYTES", 100)
    ran = torpor("logs", "--log", str(log))
    assert ran.out.splitlines() == [f"line {number}" for number in range(189, 200)]
    assert "is not read" in ran.err
    assert "is not read" not in torpor("logs", "--log", str(log), "-n", "3").err


def test_what_is_written_later_is_told_when_its_line_is_whole(log: Path) -> None:
    with Log(log, _opened(log)) as reading:
        assert reading.last(2) == ([b"line 198", b"line 199"], False)
        following = reading.following(0.001)
        with log.open("a") as file:
            file.write("one\ntwo, ")
            file.flush()
            assert next(following) == b"one"
            file.write("whole\n")
        assert next(following) == b"two, whole"
        log.write_text("cut\n")
        assert next(following) == b"cut"
        log.rename(log.with_suffix(".1"))
        log.write_text("of another file\n" + "x" * 200_000 + "\nlast\n")
        assert next(following) == b"of another file"
        pieces = list(itertools.takewhile(lambda each: each != b"last", following))
        assert sum(map(len, pieces)) == 200_000
        assert max(map(len, pieces)) <= 2 * logs._PIECE_BYTES, "a line without an end is told in pieces"


def test_a_line_that_is_still_written_is_followed_as_one(log: Path) -> None:
    with log.open("a") as file, Log(log, _opened(log)) as reading:
        file.write("half of a ")
        file.flush()
        assert reading.last(1) == ([b"half of a "], False)
        assert reading.last(1, whole=True) == ([b"line 199"], False)
        file.write("line\n")
        file.flush()
        assert next(reading.following(0.001)) == b"half of a line"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("socket:[4711]", "journalctl --user -u torpor"),
        ("/dev/pts/3", "writes to /dev/pts/3, which keeps nothing"),
        ("pipe:[12]", "writes to pipe:[12], which keeps nothing"),
    ],
)
def test_a_daemon_that_writes_elsewhere_is_said_to(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch, target: str, said: str
) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: target if path == f"/proc/{os.getpid()}/fd/2" else "")
    ran = torpor("logs")
    assert (ran.status, said in ran.err) == (2, True)


def test_the_log_is_that_of_the_daemon_and_else_the_default_one(
    torpor: Torpor, daemon: ServerThread, log: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: str(log))
    assert torpor("logs", "-n", "1").out == "line 199\n"
    monkeypatch.setattr(logs, "default_log_path", lambda: tmp_path / "none.log")
    ran = torpor("logs", "--socket", str(tmp_path / "nobody"))
    assert (ran.status, "torpor serve --detach" in ran.err) == (2, True)


def test_what_is_no_log_is_refused(torpor: Torpor, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        assert "is no file" in torpor("logs", "--log", str(path)).err
