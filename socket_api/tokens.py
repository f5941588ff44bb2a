"""The file of tokens, by which programs on the loopback port of HTTP are known: a line for each, with the namespace of
its sessions. The server lets in whom it names, and a launch gives an agent the user's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from ..places import NO_LINKS_ERRNOS, user_folder
from .errors import UnsafeTokenFile

MIN_TOKEN_CHARS: Final = 20
"""Of a token on the loopback port: enough random characters that none is guessed."""

MAX_TOKEN_CHARS: Final = 256

MAX_TOKEN_FILE_BYTES: Final = 256 * 1024
"""Room for two thousand tokens."""

_HEAD: Final = """\
# Clients of Torpor over HTTP: one line each, with the namespace of its sessions and its token.
# The token of `default` is yours: it is told figures of all namespaces (/metrics), and others are not.
# A client sends its token as `Authorization: Bearer TOKEN` or as `x-api-key: TOKEN`. A change holds at once.
"""
_LINE: Final = re.compile(
    rf"([A-Za-z0-9][A-Za-z0-9._-]*)[ \t]+([!-~]{{{MIN_TOKEN_CHARS},{MAX_TOKEN_CHARS}}})", re.ASCII
)
OWNERS: Final = "default"
"""The namespace of whoever starts the daemon: bare names are in it, and the first token is its."""


def default_tokens_path() -> Path:
    """The file of tokens."""
    return user_folder("config") / "http-tokens"


class Tokens:
    """The tokens of a file, which is read anew when it has changed. Only the digests stay in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._namespaces: dict[bytes, str] = {}

    def make(self) -> None:
        """Make the file with one token, if there is none, and read it. Raises UnsafeTokenFile."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.path.exists():
                self._write_first()
        except OSError as error:
            raise UnsafeTokenFile(
                f"The file of tokens {self.path} cannot be made: {error.strerror}. Make its folder yours, or serve on"
                " --http-socket alone.",
                path=str(self.path),
            ) from error
        self._read()

    def _write_first(self) -> None:
        # Linked, so that of two daemons that start at once each finds one whole file.
        aside = self.path.with_name(f"{self.path.name}.{secrets.token_hex(8)}")
        line = f"{OWNERS} {secrets.token_urlsafe(32)}\n"
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(_HEAD + line)
            self._name(aside)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(aside)

    def _name(self, aside: Path) -> None:
        try:
            os.link(aside, self.path)
        except FileExistsError:
            pass  # another daemon was first
        except OSError as error:
            if error.errno not in NO_LINKS_ERRNOS:
                raise
            os.rename(aside, self.path)  # of two daemons the later one's holds, and both read it anew

    def namespace_of(self, token: str) -> str | None:
        """The namespace of a token; None for an unknown one, and for every token while the file is not to be used."""
        try:
            status = os.stat(self.path)
            if _signature(status) != self._seen:
                self._read()
        except (OSError, UnsafeTokenFile):
            return None
        return self._namespaces.get(digest_of(token))

    def with_digest(self, digest: bytes) -> tuple[str, str] | None:
        """The namespace and the token with a digest, as the file has them now; None if it has none. Raises
        UnsafeTokenFile."""
        return next((line for line in self._load()[1] if digest_of(line[1]) == digest), None)

    def token_of(self, namespace: str) -> str | None:
        """The first token of a namespace in the file; None if it has none. Raises UnsafeTokenFile."""
        return next((token for its_namespace, token in self._load()[1] if its_namespace == namespace), None)

    def _read(self) -> None:
        self._seen, lines = self._load()
        self._namespaces = {digest_of(token): namespace for namespace, token in lines}

    def _load(self) -> tuple[tuple[int, ...], list[tuple[str, str]]]:
        """What tells this state of the file from others, and each line's namespace and token."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                self._require_ours_alone(status)
                text = file.read(MAX_TOKEN_FILE_BYTES + 1)
        except OSError as error:
            raise self._unsafe(f"cannot be read: {error.strerror}. Remove it, and start the daemon again") from error
        if len(text) > MAX_TOKEN_FILE_BYTES:
            raise self._unsafe(f"has more than {MAX_TOKEN_FILE_BYTES} bytes. Take lines out of it")
        return _signature(status), self._parsed(text.decode("utf-8", errors="replace"))

    def _parsed(self, text: str) -> list[tuple[str, str]]:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            parts = _LINE.fullmatch(line.strip())
            if parts is None:
                raise self._unsafe(
                    f"is wrong in line {number}. Write the namespace, a blank, and a token of {MIN_TOKEN_CHARS} to"
                    f" {MAX_TOKEN_CHARS} characters"
                )
            lines.append((parts[1], parts[2]))
        if not lines:
            raise self._unsafe("has no token. Remove it, and the daemon makes a new one")
        return lines

    def _require_ours_alone(self, found: os.stat_result) -> None:
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
            raise self._unsafe(
                f"is not a file that you alone can read (owner {found.st_uid}, mode {mode:04o}). If it is yours:"
                f" chmod 600 {self.path}"
            )

    def _unsafe(self, problem: str) -> UnsafeTokenFile:
        return UnsafeTokenFile(f"The file of tokens {self.path} {problem}.", path=str(self.path))


def digest_of(token: str) -> bytes:
    """By which a token, or a code for one, is known."""
    # Looked up by its digest: the time of the search tells nothing about a known token.
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _signature(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
