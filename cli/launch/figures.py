"""What a daemon did for programs over HTTP, from one moment to another."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from ...memvid.units import format_count, format_plural
from ...socket_api.client.client import Client
from ...socket_api.tokens import OWNERS
from .filling import token_of

_TIMEOUT_S: Final = 30.0
_MAX_BYTES: Final = 4 << 20
_COUNT: Final = re.compile(r'^torpor_http_tokens_total\{.*?kind="(\w+)".*?\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the daemon `pid`: the sessions that it has, and the tokens of requests over HTTP since its start: those that a
    session had, so that nothing was computed; those that it had and that were computed again; those that were read,
    and those that were written."""

    pid: int
    sessions: int
    cached: int
    recomputed: int
    read: int
    written: int

    def since(self, before: Figures) -> Figures:
        """What came since then; of a daemon that has started since, all."""
        if self.pid != before.pid:
            before = Figures(self.pid, before.sessions, 0, 0, 0, 0)
        return Figures(
            self.pid,
            self.sessions - before.sessions,
            self.cached - before.cached,
            self.recomputed - before.recomputed,
            self.read - before.read,
            self.written - before.written,
        )

    def told(self, title: str) -> str:
        """A sentence of what came while a program ran."""
        if not self.cached + self.recomputed + self.read + self.written:
            return f"while {title} ran, no answer came to its end"
        again = f" ({format_count(self.recomputed)} of them computed again)" if self.recomputed else ""
        kept = f"; {format_plural(self.sessions, 'more session')} kept" if self.sessions > 0 else ""
        return (
            f"while {title} ran, {format_count(self.cached + self.recomputed)} tokens were there already{again},"
            f" {format_count(self.read)} were read and {format_count(self.written)} written{kept}"
        )


def figures_of(daemon: Client) -> Figures:
    """The figures of now. Raises InvalidUsage: the file of tokens lacks the owner's, which alone is told of them."""
    status = daemon.status()
    tokens: Counter[str] = Counter()
    http, metrics = status.http, ""
    if http and http.url and http.tokens:
        metrics = _metrics(http.url, token_of(Path(http.tokens), OWNERS))
    for kind, count in _COUNT.findall(metrics):
        tokens[kind] += int(float(count))
    sessions = status.sessions_awake + status.sessions_asleep
    return Figures(status.pid, sessions, tokens["cached"], tokens["recomputed"], tokens["read"], tokens["written"])


def _metrics(url: str, token: str) -> str:
    """The figures as the daemon tells them over HTTP; nothing if it does not."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().read(_MAX_BYTES).decode()
    except (OSError, HTTPException):
        return ""
    finally:
        connection.close()
