"""What the tests of the command line are made of: how it is run, what a terminal shows, stores made of arithmetic."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.view.advice import advising_for, naming_store

TESTS = Path(__file__).parent.parent
WAIT_S = 20.0  # for another thread to do what takes milliseconds


@dataclass(frozen=True, slots=True)
class Ran:
    """What one command line wrote and how it ended."""

    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """The JSON error object on stderr."""
        return json.loads(self.err)


Torpor = Callable[..., Ran]


def pretend_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Let what this test runs believe that it writes to a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)


def unstyled(text: str) -> str:
    """What a terminal shows of it, without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@dataclass(frozen=True, slots=True)
class MadeStore:
    """A store on disk with two sessions: `agent`, which slept with 300 and with 600 tokens, and `other`. Of each of the
    three versions its manifest, and the pack with its new blocks: the second one has those from token 256 on. A call
    runs a command on it, as `made_store("ls", "--json")`."""

    path: Path
    manifests: tuple[Path, ...]
    packs: tuple[Path, ...]
    torpor: Torpor

    def __call__(self, *arguments: object) -> Ran:
        return self.torpor(*arguments, "--store", self.path)

    def advised(self, message: str) -> str:
        """A message as a call tells it: what it advises names this store."""
        with advising_for(self.path):
            return naming_store(message)

    def cut(self, number: int) -> Path:
        """Take the last byte from a version's manifest."""
        os.truncate(self.manifests[number], self.manifests[number].stat().st_size - 1)
        return self.manifests[number]

    def flip(self, number: int, share: int = 3) -> Path:
        """Flip a bit of a version's pack, at such a share of its bytes."""
        flip(self.packs[number], self.packs[number].stat().st_size // share)
        return self.packs[number]


def flip(file: Path, at: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def serve_in_background(store: Path, model: Path, *options: str) -> int:
    """Run `torpor serve --detach` as a process of its own: its child must not become the tests'."""
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--detach", "--json"]
    command += ["--store", str(store), "--model", f"tiny={model}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["pid"])
