"""More sessions than fit, over the real socket: a client cannot tell that the others sleep."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from torpor.daemon.api.process import MemoryInfo
from torpor.daemon.api.sampling import Sampling
from torpor.socket_api import Client, RemoteError
from torpor.tests.daemon.session_rig import tokens_of

SESSIONS, TURNS, CLIENTS = 10, 4, 5
SAMPLED = Sampling(temperature=0.9, seed=7)


@contextmanager
def served(folder: Path, name: str, model: Path, *options: str) -> Iterator[Path]:
    """A daemon of its own process, as `torpor serve` starts it; its socket."""
    socket = folder / f"{name}.sock"
    arguments = ["--store", str(folder / name), "--socket", str(socket), "--model", f"tiny={model}", *options]
    command = [sys.executable, "-m", "torpor.cli.main", "serve", *arguments]
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        assert "serves" in daemon.stdout.readline()
        yield socket
    finally:
        daemon.terminate()
        daemon.communicate(timeout=60)


def play(socket: Path) -> tuple[dict[str, list[tuple[int, ...]]], MemoryInfo]:
    """Some clients at once, each with sessions of its own, whose turns come in a random order."""

    def client(number: int) -> dict[str, list[tuple[int, ...]]]:
        said: dict[str, list[tuple[int, ...]]] = {}
        with Client(socket) as torpor:
            names = [f"s{at}" for at in range(number, SESSIONS, CLIENTS)]
            for name in names:
                torpor.create(name, sampling=SAMPLED)
                torpor.append(name, tokens=tokens_of(number, 60))
                said[name] = []
            turns = names * TURNS
            random.Random(number).shuffle(turns)
            for name in turns:
                said[name].append(torpor.generate(name, max_tokens=5).tokens)
        return said

    with ThreadPoolExecutor(CLIENTS) as clients:
        replies = {name: said for each in clients.map(client, range(CLIENTS)) for name, said in each.items()}
    with Client(socket) as torpor:
        return replies, torpor.status().memory


@pytest.mark.one_in(3)
def test_a_hangup_has_the_configuration_read_anew_and_a_right_one_is_taken_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "torpor.toml"
    config.write_text('memory_budget = "64MiB"')
    with served(tmp_path, "configured", tiny_model, "--config", str(config)) as socket, Client(socket) as torpor:
        status = torpor.status()
        assert status.config is not None
        assert (status.config.path, status.config.reloads, status.memory.budget_bytes) == (str(config), 0, 64 << 20)
        os.kill(status.pid, signal.SIGHUP)
        poll(lambda: torpor.status().config.reloads == 1)  # type: ignore[union-attr]
        config.write_text('memory_budget = "32MiB"\nmemory_bugdet = "1MiB"')
        os.kill(status.pid, signal.SIGHUP)
        poll(lambda: "memory_bugdet" in (torpor.status().config.problem or ""))  # type: ignore[union-attr]
        assert torpor.status().memory.budget_bytes == 64 << 20
        config.write_text('memory_budget = "32MiB"')
        os.kill(status.pid, signal.SIGHUP)
        poll(lambda: torpor.status().memory.budget_bytes == 32 << 20)
        assert torpor.status().config.problem is None  # type: ignore[union-attr]


def poll(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


@pytest.mark.one_in(4)
@pytest.mark.timeout(180)
def test_a_client_cannot_tell_that_sessions_do_not_fit_qx1_qx18(tiny_model: Path, tmp_path: Path) -> None:
    with served(tmp_path, "large", tiny_model) as socket:
        alone, memory = play(socket)
        assert memory.slept_by_pressure == 0
    budget = memory.weights_bytes + 2 * memory.sessions_bytes // SESSIONS + 300 * 768
    with served(tmp_path, "small", tiny_model, "--memory-budget", str(budget)) as socket:
        replies, memory = play(socket)
        assert replies == alone
        assert memory.budget_bytes == budget
        assert memory.weights_bytes + memory.sessions_bytes <= budget
        assert (memory.reserved_bytes, memory.waiting) == (0, 0)
        assert memory.slept_by_pressure >= SESSIONS - 3
        with Client(socket) as torpor:
            with pytest.raises(RemoteError) as refusal:
                torpor.append("s0", tokens=tokens_of(1, 1500))
            assert refusal.value.code == "memory_budget_exceeded"
            assert refusal.value.details["budget_bytes"] == budget
            assert torpor.show("s0").info.token_count == 60 + 5 * TURNS
