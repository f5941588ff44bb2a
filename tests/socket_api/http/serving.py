"""A real daemon on the demo model with its two HTTP addresses, and the clients that people use on them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
from torpor.tests.socket_api.real_daemon import RealDaemon, served

if TYPE_CHECKING:  # they take seconds, in each process that collects tests
    import anthropic
    import openai

QUESTIONS = [f"Question {at}: what does os.path.{name} do?" for at, name in enumerate(["join", "split"] * 5)]
"""Of ten turns."""


@dataclass
class Served:
    """A daemon with its two addresses."""

    daemon: RealDaemon
    url: str
    token: str
    socket: Path

    def openai(self, *, on_unix: bool = False) -> openai.OpenAI:
        from openai import OpenAI

        given = self._reached(on_unix)
        return OpenAI(**{**given, "base_url": f"{given['base_url']}/v1"})

    def anthropic(self, *, on_unix: bool = False) -> anthropic.Anthropic:
        from anthropic import Anthropic

        return Anthropic(**self._reached(on_unix))

    def _reached(self, on_unix: bool) -> dict[str, Any]:
        transport = httpx2.HTTPTransport(uds=str(self.socket)) if on_unix else None
        client = httpx2.Client(transport=transport, timeout=60)
        url, key = ("http://localhost", "none") if on_unix else (self.url, self.token)
        return {"base_url": url, "api_key": key, "http_client": client, "max_retries": 0}


def addresses_of(daemon: RealDaemon) -> Served:
    """Where it serves; to be read once."""
    assert daemon.process.stdout is not None
    found = re.fullmatch(r"HTTP on (http://\S+)/v1, with a token of (.*)\n", daemon.process.stdout.readline())
    assert found is not None
    return Served(daemon, found[1], Path(found[2]).read_text().split()[-1], daemon.folder / "h.sock")


@contextlib.contextmanager
def serving(folder: Path, *options: str, watched: bool = False) -> Iterator[Served]:
    """A daemon of one test, with both addresses. watched: as of `RealDaemon`."""
    with served(folder, "--http", "0", "--http-socket", str(folder / "h.sock"), *options, watched=watched) as daemon:
        yield addresses_of(daemon)


def working(served: Served) -> float:
    """How many requests the daemon carries out."""
    metrics = httpx2.get(f"{served.url}/metrics", headers={"x-api-key": served.token}).text
    return next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith("torpor_http_working "))
