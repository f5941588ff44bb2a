"""The key of a sealed remote: 64 hex digits, in a file that its owner alone may read, or told by a command.

Rule: neither the key nor what the command wrote is ever in a message or a log.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import stat
import subprocess
import time
from functools import partial
from typing import Final

from ..disk.paths import closing_fd, undoing
from ..errors import InvalidRemote

COMMAND_S: Final = 60.0
"""How long a command may take: it may ask a person, at a screen of its own."""

_DIGITS: Final = re.compile(rb"[0-9a-fA-F]{64}\s*", re.ASCII)
_MAX_BYTES: Final = 1024
_HOW: Final = "openssl rand -hex 32"
_NO_OTHER: Final = (
    "If the remote is sealed already, no other key than that of before opens it: put that one back, from another "
    "machine of the remote or a backup."
)


def remote_key(file: str | os.PathLike[str] | None, command: str | None) -> bytes | None:
    """The key that the options of a daemon name; None: the remote is plain. Raises InvalidRemote."""
    if file is not None and command is not None:
        raise _invalid("A file and a command are named for the remote's key. Name one (--remote-key).")
    if file is not None:
        return key_in_file(os.fspath(file))
    return None if command is None else key_of_command(command)


def key_in_file(path: str) -> bytes:
    """The key that a file has. Raises InvalidRemote: it cannot be read, others may read it, or it has no key."""
    try:
        with closing_fd(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            status = os.fstat(fd)
            text = os.read(fd, _MAX_BYTES) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        how = "See that you may read it."
        if isinstance(error, FileNotFoundError):
            how = f"{_NO_OTHER} For a new remote, this makes one: (umask 077; {_HOW} > {shlex.quote(path)})"
        raise _invalid(f"The file of the remote's key {path} cannot be read: {error.strerror}. {how}", path) from error
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or mode & 0o077:
        raise _invalid(
            f"The file of the remote's key {path} is not a file that you alone can read (owner {status.st_uid}, mode "
            f"{mode:04o}). If it is yours: chmod 600 {shlex.quote(path)}",
            path,
        )
    return _key_of(text, f"The file of the remote's key {path}", path)


def key_of_command(command: str, seconds: float = COMMAND_S) -> bytes:
    """The key that a command writes to its standard output. It is run without a shell, and ended after so long. Raises
    InvalidRemote: it cannot be run, fails, takes longer, or writes no key."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise _invalid(f"The command of the remote's key cannot be read: {error}. See its quotes.") from error
    name = f"The command of the remote's key, {words[0]!r}," if words else "The command of the remote's key"
    if not words:
        raise _invalid(f"{name} is empty. Name a program that writes the key.")
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it has a zero byte"
        raise _invalid(f"{name} cannot be run: {why}. Name a program of this machine.") from error
    with process, undoing(partial(os.killpg, process.pid, signal.SIGKILL)):
        text = _output_of(process, time.monotonic() + seconds)
        if text is None:
            raise _invalid(f"{name} did not end within {seconds:g} s. Run it yourself to see what it waits for.")
    if process.returncode:
        raise _invalid(f"{name} failed with status {process.returncode}. Run it yourself to see why.")
    return _key_of(text, f"What {name[0].lower()}{name[1:]} writes")


def _output_of(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    """The beginning of what a command writes until it ends; None: it has not ended in time."""
    assert process.stdout is not None
    text, chunk = b"", b"-"
    while chunk:
        if not select.select([process.stdout], [], [], max(until - time.monotonic(), 0))[0]:
            return None
        chunk = os.read(process.stdout.fileno(), _MAX_BYTES)
        text = (text + chunk)[:_MAX_BYTES]
    try:
        process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        return None
    return text


def _key_of(text: bytes, what: str, path: str | None = None) -> bytes:
    if not _DIGITS.fullmatch(text):
        raise _invalid(
            f"{what} is no key: it has to be 64 hex digits, and nothing else. {_NO_OTHER} For a new remote, this makes "
            f"one: {_HOW}",
            path,
        )
    return bytes.fromhex(text.decode("ascii"))


def _invalid(message: str, path: str | None = None) -> InvalidRemote:
    return InvalidRemote(message, path=path)
