"""What HTTP costs: an empty request beside a bare echo, and the API's share of a streamed token.

An echo is a JSON body of 20 bytes, there and back, by a bare starlette application on uvicorn with httptools, on the
loopback port of a process of its own. Beside it, round by round over a kept connection: `/healthz` and, as the empty
request that reaches the service, `/v1/models` of a daemon on the demo model. The bound is 4 echoes.

The share of a token: our HTTP server before a service without a model, which has the next token as soon as the loop
comes back to it. So the processor time of the process, from before the request until the client has read the answer, is
the server's: the event, its JSON, and the socket. The bound is 50 microseconds a token.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, PEER, parser_for, plotted, rounds_of, save
from machine import spread

ROUNDS = 20
REQUESTS, QUICK_REQUESTS = 300, 20
"""Of each kind in a round."""
TOKENS, QUICK_TOKENS = 20_000, 500
ANSWER_S = 120.0
BOUND_ECHOES, BOUND_TOKEN_S = 4.0, 50e-6
_TORPOR = str(Path(sys.executable).with_name("torpor"))
_BODY = b'{"model":"demo","n":1}'
_SPAWN = multiprocessing.get_context("spawn")


def serve_echo(told: Connection) -> None:
    """A bare echo in this process, until it is killed. told: gets its port."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def echo(request: Request) -> JSONResponse:
        return JSONResponse(await request.json())

    async def run() -> None:
        app = Starlette(routes=[Route("/", echo, methods=["POST"])])
        kept = {"timeout_keep_alive": round(ANSWER_S)}  # while the others are asked
        config = uvicorn.Config(app, port=0, http="httptools", log_level="error", access_log=False, **kept)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        told.send(server.servers[0].sockets[0].getsockname()[1])
        await serving

    asyncio.run(run())


def serve_tokens(told: Connection, tokens: int, folder: Path) -> None:
    """Our HTTP server before a service that writes so many tokens at once, until it is killed. told: gets its port and
    a token of access, and then the processor seconds of the process for each thing that it sends."""
    from torpor.daemon.api.conversing import ConverseRequest, MeasureResult
    from torpor.daemon.api.events import TokenEvent
    from torpor.daemon.api.reading import GenerateResult
    from torpor.daemon.api.records import Request
    from torpor.daemon.api.verb import Verb
    from torpor.socket_api.http.server import HttpServer

    class Instant:
        async def ask(self, verb: Verb[Any, Any], request: Request) -> Any:
            if not isinstance(request, ConverseRequest):
                return MeasureResult(10, 0, 1 << 30, "instant")
            for _ in range(tokens):
                request.emit(TokenEvent(1, " token"))
                await asyncio.sleep(0)
            uri = f"torpor://default/{request.session}"
            return GenerateResult(uri, " token" * tokens, (1,) * tokens, "stop", 10 + tokens, 10, 0.0, 1.0)

    async def run() -> None:
        server = HttpServer(port=0, tokens_path=folder / "tokens")
        await server.start(Instant())  # type: ignore[arg-type]  # it is asked nothing else
        told.send((server.port, (folder / "tokens").read_text().split()[-1]))
        asyncio.get_running_loop().add_reader(told.fileno(), tell_processor_time)
        await asyncio.Event().wait()

    def tell_processor_time() -> None:
        told.recv()
        told.send(time.process_time())

    asyncio.run(run())


@contextmanager
def beside(target: Any, *arguments: Any) -> Iterator[Connection]:
    """A server in a process of its own, and what it tells."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        assert ours.poll(ANSWER_S), "it says when it is ready"
        yield ours
    finally:
        process.kill()
        process.join()


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[int, str]]:
    """A daemon on the demo model: its port and a token of access."""
    command = [_TORPOR, "serve", "--store", str(folder / "store"), "--socket", str(folder / "t.sock"), "--http", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        process.stdout.readline()
        found = re.fullmatch(r"HTTP on http://127.0.0.1:(\d+)/v1, with a token of (.*)\n", process.stdout.readline())
        assert found is not None
        yield int(found[1]), Path(found[2]).read_text(encoding="ascii").split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=ANSWER_S)


class Asker:
    """A kept connection, and one kind of request on it."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None = None, token: str = "") -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        self._asked = method, path, body, {"x-api-key": token} if token else {}

    def seconds(self, times: int) -> float:
        """The median of so many requests, one after the other."""
        found = []
        for _ in range(times):
            begun = time.perf_counter()
            self._connection.request(*self._asked)
            answer = self._connection.getresponse()
            answer.read()
            found.append(time.perf_counter() - begun)
            assert answer.status == 200, answer.status
        return statistics.median(found)


def requests(rounds: int, times: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of a request of each kind, round by round."""
    with beside(serve_echo) as echo, daemon(folder) as (port, token):
        kinds = {
            "echo": Asker(echo.recv(), "POST", "/", _BODY),
            "/healthz": Asker(port, "GET", "/healthz", token=token),
            "/v1/models": Asker(port, "GET", "/v1/models", token=token),
        }
        found: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, asker in kinds.items():
                found[name].append(asker.seconds(times))
    return found


def shares(rounds: int, tokens: int, folder: Path) -> list[float]:
    """Processor seconds of the server for one streamed token, round by round."""
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "model": "instant", "stream": True})
    found = []
    with beside(serve_tokens, tokens, folder) as server:

        def processor_seconds() -> float:
            server.send(None)
            taken: float = server.recv()
            return taken

        port, token = server.recv()
        for _ in range(rounds):
            before = processor_seconds()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
            connection.request("POST", "/v1/chat/completions", body.encode(), {"x-api-key": token})
            answer = connection.getresponse()
            assert answer.status == 200, answer.status
            while answer.read1(65536):
                pass
            found.append((processor_seconds() - before) / tokens)
            connection.close()
    return found


def report(asked: dict[str, list[float]], share: list[float], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    ratios = {
        name: spread([ours / echo for ours, echo in zip(taken, asked["echo"], strict=True)])
        for name, taken in asked.items()
        if name != "echo"
    }
    found = {
        "seconds": {name: spread(taken) for name, taken in asked.items()},
        "echoes": ratios,
        "token_share_s": spread(share),
        "bounds": {"echoes": BOUND_ECHOES, "token_share_s": BOUND_TOKEN_S},
    }
    figures = save("over_http", found, out)
    empty = ratios["/v1/models"]["median"]
    with plotted(out / "over_http.png", figures, f"An empty request takes {empty:.1f} bare echoes") as axes:
        bars = axes.bar(list(asked), [1e6 * statistics.median(taken) for taken in asked.values()], color=OURS)
        bars[0].set_color(PEER)
        axes.set(ylabel="microseconds", ylim=(0, None))
    for name, taken in figures["seconds"].items():
        told = f", {_told(ratios[name])} echoes (at most {BOUND_ECHOES:g})" if name in ratios else ""
        print(f"{name:>12} {_told(taken, 1e6)} us{told}")
    share_us = _told(figures["token_share_s"], 1e6)
    print(f"a streamed token takes {share_us} us of the server's processor time (at most {1e6 * BOUND_TOKEN_S:g})")


def _told(taken: dict[str, float | int], unit: float = 1.0) -> str:
    """The median of a spread, and its ends."""
    median, lowest, highest = (f"{unit * taken[name]:.4g}" for name in ("median", "lowest", "highest"))
    return f"{median} ({lowest} to {highest})"


def main() -> None:
    """Measure and report."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    rounds = rounds_of(options)
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
        asked = requests(rounds, QUICK_REQUESTS if options.quick else REQUESTS, Path(folder))
        share = shares(rounds, QUICK_TOKENS if options.quick else TOKENS, Path(folder))
    report(asked, share, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
