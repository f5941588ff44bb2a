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
from session_rig import tokens_of
from torpor.daemon.api.process import MemoryInfo, StatusResult
from torpor.daemon.api.sampling import Sampling
from torpor.socket_api import Client, RemoteError

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


@pytest.mark.one_in(6)
@pytest.mark.timeout(180)
def test_two_models_that_do_not_fit_together_are_served_in_turn_as_if_they_did(
    tiny_model: Path, another_model: Path, tmp_path: Path
) -> None:
    def play_on_both(socket: Path) -> tuple[dict[str, list[tuple[int, ...]]], StatusResult]:
        said: dict[str, list[tuple[int, ...]]] = {}
        with Client(socket) as torpor:
            for model in ("tiny", "other"):
                torpor.create(model, model=model, sampling=SAMPLED)
                torpor.append(model, tokens=tokens_of(3, 60))
            for _ in range(TURNS):
                for name in ("tiny", "other"):
                    said.setdefault(name, []).append(torpor.generate(name, max_tokens=5).tokens)
            return said, torpor.status()

    both = ("--model", f"other={another_model}")
    with served(tmp_path, "large", tiny_model, *both) as socket:
        alone, status = play_on_both(socket)
        assert [model.loads for model in status.models] == [1, 1]
    weights = status.models[0].weights_bytes
    budget = weights + 400_000
    assert budget < status.memory.weights_bytes, "the other one does not fit beside"
    with served(tmp_path, "small", tiny_model, *both, "--memory-budget", str(budget)) as socket:
        replies, status = play_on_both(socket)
        assert replies == alone
        assert status.memory.weights_bytes + status.memory.sessions_bytes <= budget
        assert [model.resident for model in status.models] == [False, True]
        assert min(model.loads for model in status.models) >= TURNS
        with Client(socket) as torpor:
            assert torpor.load_model("tiny").resident
            assert not torpor.unload_model("tiny").resident
            assert torpor.status().memory.weights_bytes == 0


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


@pytest.mark.one_in(3)
@pytest.mark.timeout(180)
def test_a_client_cannot_tell_that_a_look_gave_way_to_a_request_that_fits_alone_qx18(
    tiny_model: Path, tmp_path: Path
) -> None:
    def look_and_go_on(socket: Path) -> tuple[object, StatusResult]:
        with Client(socket) as torpor:
            torpor.create("looked", sampling=SAMPLED)
            torpor.append("looked", tokens=tokens_of(1, 300))
            torpor.sleep("looked")
            look = torpor.wake("looked", at_token=280).look
            torpor.create("other")
            torpor.append("other", tokens=tokens_of(2, 700))
            status, listed = torpor.status(), {info.name: info for info in torpor.list_sessions()}
            assert listed["looked"].look == look
            assert listed["looked"].token_count == torpor.show("looked").info.token_count == 280
            written = torpor.generate("looked", max_tokens=5, prove=True)
            assert written.branched == look
            slept = torpor.sleep("looked")
            return (written.tokens, written.logits_blake3, written.final_logits_blake3, slept.version), status

    with served(tmp_path, "large", tiny_model) as socket:
        alone, status = look_and_go_on(socket)
        with Client(socket) as torpor:
            needed = torpor.show("other").info.resident_bytes
    budget = status.memory.weights_bytes + needed + 300 * 768
    with served(tmp_path, "small", tiny_model, "--memory-budget", str(budget)) as socket:
        answer, status = look_and_go_on(socket)
        assert answer == alone
        assert status.memory.slept_by_pressure == 1


@pytest.mark.one_in(2)
def test_an_idle_session_sleeps_and_a_request_wakes_it(tiny_model: Path, tmp_path: Path) -> None:
    with served(tmp_path, "idle", tiny_model, "--idle-sleep", "0.05") as socket, Client(socket) as torpor:
        torpor.create("a")
        torpor.append("a", tokens=tokens_of(1, 60))
        while torpor.status().memory.slept_by_idling == 0:
            pass
        woken = torpor.append("a", tokens=[1]).woken
        assert woken is not None
        assert woken.tokens_prefilled == 0
