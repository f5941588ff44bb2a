"""The threads beside the event loop and the engine: how many pools there are, and how they end."""

from __future__ import annotations

import ast
import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk import store_threads
from torpor.daemon.disk.store_threads import StoreThreads, fill_threads
from torpor.tests.daemon.session_rig import Gate, cancelled, until

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

DAEMON = Path(store_threads.__file__).parents[1]


@pytest.mark.one_in(1)
def test_the_daemon_has_seven_pools_with_that_of_asyncio_and_one_for_a_remote() -> None:
    made = [
        node.lineno
        for file in sorted(DAEMON.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ThreadPoolExecutor"
    ]
    assert len(made) + 1 == 7 + 1, "each costs a sentence that says why work of its kind cannot wait for other work"


@pytest.mark.parametrize(
    ("device", "cores", "threads"),
    [(mx.cpu, 1, 2), (mx.cpu, 2, 2), (mx.cpu, 8, 4), (mx.cpu, 64, 8), (mx.gpu, 1, 2), (mx.gpu, 4, 4), (mx.gpu, 16, 8)],
)
def test_threads_that_fill_a_wake_follow_the_cores_that_the_engine_leaves(
    monkeypatch: pytest.MonkeyPatch, device: Any, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    assert fill_threads() == threads


async def test_an_end_waits_for_a_read_that_nobody_waits_for_any_more(caplog: pytest.LogCaptureFixture) -> None:
    threads, gate, read = StoreThreads(), Gate(), list[str]()

    def work() -> None:
        gate.pass_through()
        read.append("all")
        raise ZeroDivisionError

    reading = asyncio.ensure_future(threads.on_io(work))
    await gate.reached()
    reading.cancel()
    await cancelled(reading)
    closing = asyncio.ensure_future(threads.close())
    await until(lambda: threads._write._shutdown)
    await asyncio.sleep(0.05)
    assert not closing.done()
    gate.open()
    await closing
    assert read == ["all"]
    assert caplog.text == "", "nobody wants its error"


async def test_many_reads_run_at_once_and_writes_one_after_the_other() -> None:
    threads, together = StoreThreads(), threading.Barrier(4)
    await asyncio.gather(*(threads.on_io(lambda: together.wait(30)) for _ in range(4)))
    names = await asyncio.gather(*(threads.on_writer(lambda: threading.current_thread().name) for _ in range(3)))
    assert set(names) == {"torpor-write_0"}
    await threads.close()
