"""A daemon that is not asked for HTTP imports nothing for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

NEW = {"starlette", "uvicorn", "httptools", "prometheus_client", "torpor.socket_api.http"}
NEVER = {"mcp", "mcp_types", "opentelemetry"}


def imported_by(folder: Path, *options: str) -> set[str]:
    """All modules that a daemon imports from its start to its end."""
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "DATA", "STATE", "CONFIG")}
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--store", str(folder / "store")]
    log = folder / "imports"
    with log.open("w") as stderr:
        daemon = subprocess.Popen(
            [*command, "--socket", str(folder / "t.sock"), *options],
            env={**os.environ, **homes, "PYTHONPROFILEIMPORTTIME": "1"},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        with daemon:
            assert daemon.stdout is not None
            assert "serves" in daemon.stdout.readline()
            daemon.send_signal(signal.SIGTERM)
            daemon.communicate(timeout=60)
    return {line.rpartition("|")[2].strip() for line in log.read_text().splitlines() if line.startswith("import time:")}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asks", [False, True])
def test_no_new_module_is_imported_unless_http_is_asked_for(short_path: Path, asks: bool) -> None:
    found = imported_by(short_path, *(["--http-socket", str(short_path / "h.sock")] if asks else []))
    assert "torpor.daemon.service" in found, "the list means something"
    assert found & NEW == (NEW if asks else set())
    assert not found & NEVER, "they come with the first request that needs them"
