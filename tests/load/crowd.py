"""Many clients of one daemon: some connect at once, ask and leave; others stay connected, and call again and again.

Each must be served. `Figures` say how many were, how often a client had to try again, and how long a call took, with
connecting where it connects. The clients share a few processes, so that they are at the door at once.

Run as a script: `python tests/load/crowd.py --help`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torpor.errors import TorporError
from torpor.socket_api import AsyncClient
from torpor.socket_api.client import link as connecting
from torpor.socket_api.server.descriptors import raise_limit

CALLS = 3
"""Of each client that stays."""


@dataclass
class Figures:
    """What became of the calls. again: attempts to connect beyond the first of a client. failed: how often, by code."""

    asked: int = 0
    served: int = 0
    again: int = 0
    seconds: list[float] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)

    def add(self, other: Figures) -> None:
        self.asked += other.asked
        self.served += other.served
        self.again += other.again
        self.seconds += other.seconds
        for code, count in other.failed.items():
            self.failed[code] = self.failed.get(code, 0) + count

    def told(self) -> dict[str, object]:
        """With the median and the 99th percentile in place of each call's seconds."""
        figures = asdict(self)
        figures["seconds"] = {
            "median": round(statistics.median(self.seconds), 4),
            "p99": round(statistics.quantiles(self.seconds, n=100)[98], 4),
            "most": round(max(self.seconds), 4),
        }
        return figures


async def crowd(socket: Path, clients: int, *, stay: bool) -> Figures:
    """So many clients at once, on this loop: each asks for one session of its own, and those that stay ask again."""
    figures, begun = Figures(), 0
    attempt = connecting.try_to_connect

    def counted(path: str) -> object:
        nonlocal begun
        begun += 1
        return attempt(path)

    connecting.try_to_connect = counted  # type: ignore[assignment]
    try:
        all_in = asyncio.Barrier(clients) if stay else None
        await asyncio.gather(*(_client(socket, figures, all_in) for _ in range(clients)))
    finally:
        connecting.try_to_connect = attempt
    figures.again = begun - clients
    return figures


async def _client(socket: Path, figures: Figures, all_in: asyncio.Barrier | None) -> None:
    begun = time.perf_counter()
    try:
        async with AsyncClient(socket) as client:
            for call in range(CALLS if all_in is not None else 1):
                figures.asked += 1
                begun = time.perf_counter() if call else begun
                await client.list_sessions("nobody")
                figures.served += 1
                figures.seconds.append(time.perf_counter() - begun)
                if all_in is not None:
                    await all_in.wait()  # now all are connected, and none works
    except TorporError as error:
        figures.failed[error.code] = figures.failed.get(error.code, 0) + 1
        if all_in is not None:
            await all_in.abort()
    except asyncio.BrokenBarrierError:
        pass  # another one has failed, and is counted


def _in_a_process(socket: str, clients: int, stay: bool) -> Figures:
    raise_limit()
    return asyncio.run(crowd(Path(socket), clients, stay=stay))


def run(socket: Path, clients: int, processes: int, *, stay: bool) -> Figures:
    """The crowd, spread over processes."""
    share = [clients // processes + (at < clients % processes) for at in range(processes)]
    figures = Figures()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for each in pool.starmap(_in_a_process, [(str(socket), count, stay) for count in share]):
            figures.add(each)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000, help="of each kind")
    parser.add_argument("--processes", type=int, default=4, help="that they share")
    options = parser.parse_args(arguments)
    raise_limit()
    with tempfile.TemporaryDirectory(prefix="tc") as folder:
        socket = Path(folder) / "t.sock"
        command = [
            sys.executable,
            "-m",
            "torpor.cli.main",
            "serve",
            "--store",
            f"{folder}/store",
            "--socket",
            str(socket),
        ]
        daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert daemon.stdout is not None
            daemon.stdout.readline()
            found = {
                "at once": run(socket, options.clients, options.processes, stay=False),
                "staying": run(socket, options.clients, options.processes, stay=True),
            }
        finally:
            daemon.terminate()
            daemon.wait(60)
    print(json.dumps({what: figures.told() for what, figures in found.items()}, indent=2))
    return 0 if all(each.served == each.asked and not each.failed for each in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
