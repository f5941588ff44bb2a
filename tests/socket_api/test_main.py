"""What a daemon says before it serves, and at its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from torpor.daemon.api.process import ShutdownResult
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service
from torpor.socket_api.main import describe_stop


def test_the_end_is_told_in_a_sentence_that_counts_right() -> None:
    assert describe_stop(ShutdownResult(("a",), {}, ("b",))) == (
        "torpor stopped; 1 session was put to sleep; 1 had read nothing and is gone"
    )
    assert describe_stop(ShutdownResult((), {}, ("b", "c"))).endswith(
        "0 sessions were put to sleep; 2 had read nothing and are gone"
    )
    assert describe_stop(ShutdownResult(("a",), {}, unsent=("a", "b"))) == (
        "torpor stopped; 1 session was put to sleep; the remote may lack the newest version of 2"
    )


@pytest.mark.one_in(2)
def test_a_bundle_that_cannot_be_read_is_named_before_the_daemon_serves(tiny_model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"

    async def sleep_one() -> None:
        service = await Service.open(ServeOptions(store=store), models={"tiny": str(tiny_model)})
        await service.create(session="kept")
        await service.append(session="kept", text="a few words", on_event=lambda _event: None)
        await service.close()

    asyncio.run(sleep_one())
    (manifest,) = (store / "versions").iterdir()
    os.truncate(manifest, manifest.stat().st_size - 1)
    for file in store.glob("index.sqlite*"):
        file.unlink()

    socket = Path(tempfile.mkdtemp(prefix="torpor-")) / "t.sock"
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--json", "--model", f"tiny={tiny_model}"]
    daemon = subprocess.Popen(
        [*command, "--store", str(store), "--socket", str(socket)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert daemon.stdout is not None
        ready = json.loads(daemon.stdout.readline())
        assert (ready["event"], ready["warnings"]) == ("ready", 2)
        daemon.send_signal(signal.SIGTERM)
        _, said = daemon.communicate(timeout=60)
    finally:
        daemon.kill()
        daemon.wait()
        socket.parent.rmdir()
    assert "warning" in said
    assert manifest.name in said


def test_a_sound_store_is_opened_without_a_warning(tiny_model: Path, tmp_path: Path) -> None:
    async def open_twice() -> list[tuple[str, ...]]:
        found = []
        for _ in range(2):
            service = await Service.open(ServeOptions(store=tmp_path / "store"), models={"tiny": str(tiny_model)})
            found.append(service.warnings)
            await service.create(session=f"s{time.monotonic_ns()}")
            await service.close()
        return found

    assert asyncio.run(open_twice()) == [(), ()]


@pytest.mark.one_in(3)
def test_what_a_daemon_logs_has_its_time(tmp_path: Path) -> None:
    script = (
        "import logging, sys; from torpor.cli.registry import run; run(['serve', *sys.argv[1:]]); "
        "logging.getLogger('torpor.daemon').warning('a word')"
    )
    command = [sys.executable, "-c", script, "--socket", str(tmp_path / "s"), "--store", str(tmp_path / "store")]
    done = subprocess.run([*command, "--model", "m=/nowhere"], capture_output=True, text=True, timeout=60, check=True)
    refused, logged = done.stderr.splitlines()
    assert refused.startswith("error model_unavailable  ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING a word", logged)
