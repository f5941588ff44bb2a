"""The key of a sealed remote, from a file or a command: what is none is refused, and never told."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
import time
import traceback
from pathlib import Path

import pytest
from torpor.memvid.errors import InvalidRemote
from torpor.memvid.remote.remote_key import key_in_file, key_of_command, remote_key

DIGITS = "0123456789abcDEF" * 4
KEY = bytes.fromhex(DIGITS)


def key_file(folder: Path, text: str = DIGITS + "\n", mode: int = 0o600) -> Path:
    path = folder / "a key"
    path.write_text(text)
    path.chmod(mode)
    return path


# --- a file


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_its_owner_alone_may_read_has_the_key(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    assert key_in_file(str(path)) == KEY
    (tmp_path / "link").symlink_to(path)
    assert remote_key(str(tmp_path / "link"), None) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602, 0o601])
def test_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(InvalidRemote, match=f"mode {mode:04o}.*chmod 600 '{path}'") as refused:
        key_in_file(str(path))
    assert refused.value.path == str(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidRemote, match="you alone"):
        key_in_file(str(path))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(InvalidRemote, match=r"not a file|cannot be read"):
            key_in_file(str(path))


def test_a_file_that_is_not_there_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(InvalidRemote, match="this makes one: ") as refused:
        key_in_file(str(path))
    assert "put that one back" in refused.value.message, "to another key, a sealed remote is lost"
    command = refused.value.message.partition("this makes one: ")[2].replace("openssl rand -hex 32", f"echo {DIGITS}")
    os.system(command)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_in_file(str(path)) == KEY


def test_no_advice_writes_over_a_key_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path)

    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(InvalidRemote, match="cannot be read: Permission denied") as told:
        key_in_file(str(path))
    assert "openssl" not in told.value.message


NO_KEYS = ("", "\n", DIGITS[1:], DIGITS + "0", " " + DIGITS, DIGITS[:-1] + "g", DIGITS + "\n" + DIGITS, DIGITS * 10_000)


@pytest.mark.parametrize("text", NO_KEYS)
def test_what_is_no_key_is_refused_and_not_told(tmp_path: Path, text: str) -> None:
    path = key_file(tmp_path, text)
    with pytest.raises(InvalidRemote, match=r"64 hex digits.*that one back.*openssl rand -hex 32") as refused:
        key_in_file(str(path))
    assert DIGITS[1:20] not in "".join(traceback.format_exception(refused.value))


# --- a command


def told_by(program: str) -> str:
    return shlex.join([sys.executable, "-I", "-S", "-c", program])


def test_a_command_tells_the_key_without_a_shell(tmp_path: Path) -> None:
    assert key_of_command(f"echo '{DIGITS}'") == KEY
    assert remote_key(None, f"cat {shlex.quote(str(key_file(tmp_path)))}") == KEY
    with pytest.raises(InvalidRemote, match="64 hex digits"):
        key_of_command(f"echo {DIGITS} ; touch {tmp_path}/shell")
    assert not (tmp_path / "shell").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "is empty"),
        ("no-such-program-at-all", "cannot be run: No such file"),
        ("echo 'a", "No closing quotation"),
        ("false", "failed with status 1"),
        ("echo nothing", "64 hex digits"),
        ("echo a\0b", "zero byte"),
    ],
)
def test_a_command_that_tells_no_key_is_refused(command: str, says: str) -> None:
    with pytest.raises(InvalidRemote, match=says):
        key_of_command(command)


@pytest.mark.parametrize("program", [f"print('{DIGITS}' * 10_000)", f"print('{DIGITS}'); raise SystemExit(3)"])
def test_what_a_command_writes_is_never_told(
    program: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidRemote) as refused:
        key_of_command(told_by(f"import sys; print('{DIGITS}', file=sys.stderr); {program}"))
    told = "".join([*traceback.format_exception(refused.value), *capfd.readouterr(), caplog.text])
    told = told.replace(program, "")  # our own text, where pytest shows it
    assert DIGITS not in told


@pytest.mark.parametrize("program", ["sleep 60", "yes"])
def test_a_command_that_does_not_end_is_ended_with_all_that_it_began(program: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    pid_file = tmp_path / "pid"
    with pytest.raises(InvalidRemote, match=r"did not end within 0.3 s"):
        key_of_command(f"sh -c '{program} & echo $! > {pid_file}; wait'", 0.3)
    assert time.monotonic() - begun < 30
    pid = int(pid_file.read_text())
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() - begun < 30
        time.sleep(0.01)


def test_a_file_and_a_command_are_one_too_many() -> None:
    with pytest.raises(InvalidRemote, match="Name one"):
        remote_key("file", "echo")
    assert remote_key(None, None) is None
