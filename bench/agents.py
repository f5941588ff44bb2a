"""Agents at once, beside `mlx_lm.server` on the same weights, in one run.

Each agent holds a chat of about 4,000 tokens and takes turns: a message of a tool's size goes in, an answer of a few
dozen tokens is streamed back. The same chats go to both servers, one server after the other, with 1, 4, 8 and 16 agents
at once. Torpor is sent each new message, `mlx_lm.server` the transcript, as its interface has it; its cache of prompts
is made large enough for all of them. Both sample greedily, and batch as they do by default. So that it is the servers
that are compared, `mlx_lm.server` gets what Torpor chooses on a CPU: the weights in float32, the same BLAS, and prompts
read in chunks of the same size; left to itself it takes several times as long.

Then both are stopped and started again, and each agent takes one more turn: the time to the first token of a restart.

Figures: tokens a second over all agents while all of them take turns (without the first reading), and the time from a
request to its first token, p50 and p99.
"""

from __future__ import annotations

import contextlib
import http.client
import inspect
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent))

# In this order: torpor chooses the BLAS that MLX, which is imported after it, will use.
# isort: off
from torpor.daemon.engine.generation import PREFILL_CHUNK_TOKENS
from torpor.daemon.models.models import DEMO_MODEL_FOLDER, load_model
from torpor.snapshot.digests import DigestCache
from torpor.socket_api import Client
import mlx.core as mx
from figures import OURS, PEER, label_at_end, parser_for, plotted, rounds_of, save
from machine import spread
# isort: on

AGENTS = (1, 4, 8, 16)
QUICK_AGENTS = (1, 2)
CONTEXT_CHARACTERS = 15_000
QUICK_CONTEXT_CHARACTERS = 1_500
MESSAGE_CHARACTERS = 600
MOST_TOKENS = 48
TURNS = 3
DEADLINE_S = 300.0
ATTEMPTS = 5
_PEER = "import torpor.daemon.engine.engine, sys; from mlx_lm.server import main; sys.argv[0] = 'mlx_lm.server'; main()"


@dataclass
class Turn:
    """One answer. first_token_s: from the request to the first piece of text; None where there was none."""

    tokens: int
    first_token_s: float | None


class Server(Protocol):
    """What both are asked."""

    name: str

    def start(self) -> None:
        """Run, and answer."""

    def stop(self) -> None:
        """End, as a person would end it."""

    def turn(self, agent: str, message: str) -> Turn:
        """An agent's next message, answered."""


@dataclass
class Torpor:
    """The daemon, in a process of its own."""

    folder: Path
    name: str = "torpor"
    _process: subprocess.Popen[str] | None = None
    _known: set[str] = field(default_factory=set)

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("torpor")),
            "serve",
            "--store",
            str(self.folder / "store"),
            "--json",
        ]
        command += ["--socket", str(self._socket), "--prefix-reuse", "off"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        assert json.loads(self._process.stdout.readline()), "it says when it is ready"

    def stop(self) -> None:
        assert self._process is not None
        with Client(self._socket) as client:
            client.shutdown()
        self._process.wait(DEADLINE_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def turn(self, agent: str, message: str) -> Turn:
        with Client(self._socket) as client:
            if agent not in self._known:
                client.create(agent)
                self._known.add(agent)
            started, first = time.perf_counter(), None
            with client.stream_chat(agent, message, max_tokens=MOST_TOKENS) as stream:
                for piece in stream:
                    if piece and first is None:
                        first = time.perf_counter() - started
                return Turn(len(stream.result.tokens), first)

    @property
    def _socket(self) -> Path:
        return self.folder / "torpor.sock"


@dataclass
class MlxLmServer:
    """`mlx_lm.server`, in a process of its own, and the transcripts that its clients keep."""

    agents: int
    model: Path
    name: str = "mlx_lm.server"
    port: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _transcripts: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def start(self) -> None:
        self.port = _free_port()
        command = [sys.executable, "-c", _PEER, "--model", str(self.model), "--port", str(self.port)]
        command += ["--prompt-cache-size", str(4 * self.agents), "--log-level", "ERROR"]
        command += ["--prefill-step-size", str(PREFILL_CHUNK_TOKENS)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE_S
        while not self._answers():
            assert time.monotonic() < deadline, "mlx_lm.server did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(DEADLINE_S)

    def turn(self, agent: str, message: str) -> Turn:
        transcript = self._transcripts.setdefault(agent, [])
        transcript.append({"role": "user", "content": message})
        body = {
            "messages": transcript,
            "max_tokens": MOST_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
        }
        started, first, text, tokens = time.perf_counter(), None, "", 0
        for event in self._events_of(body):
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                if piece and first is None:
                    first = time.perf_counter() - started
                text += piece
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        transcript.append({"role": "assistant", "content": text})
        return Turn(tokens, first)

    def _events_of(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The answer, event by event. Of many connections at once it may reset some before it has read the request;
        these are made again, within the time that is measured."""
        for attempt in range(ATTEMPTS):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
            try:
                connection.request(
                    "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
            except ConnectionResetError:
                connection.close()
                if attempt + 1 == ATTEMPTS:
                    raise
                continue
            try:
                yield from _events(response)
            finally:
                connection.close()
            return

    def _answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/v1/models")
                return connection.getresponse().status == http.HTTPStatus.OK
            finally:
                connection.close()
        return False


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    assert response.status == http.HTTPStatus.OK, response.read()
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data.startswith(b"{"):
            yield json.loads(data)


def computed_alike(folder: Path) -> Path:
    """The demo model with its weights in the type that the daemon computes with."""
    copy = shutil.copytree(DEMO_MODEL_FOLDER, folder / "model")
    dtype = getattr(mx, load_model("demo", str(copy), DigestCache(folder / "digests.json")).compute_dtype)
    weights = mx.load(str(copy / "model.safetensors"))
    mx.save_safetensors(str(copy / "model.safetensors"), {name: each.astype(dtype) for name, each in weights.items()})
    return copy


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- what the agents do


@dataclass
class Load:
    """What came of one server with so many agents. seconds: of all turns after the first."""

    agents: int
    seconds: float = 0.0
    tokens: int = 0
    first_tokens: list[float] = field(default_factory=list)
    after_restart: list[float] = field(default_factory=list)

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        return {
            "agents": self.agents,
            "tokens_a_second": self.tokens_a_second,
            "tokens": self.tokens,
            "first_token_s": _percentiles(self.first_tokens),
            "first_token_after_restart_s": _percentiles(self.after_restart),
        }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"p50": statistics.median(ordered), "p99": ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]}


def run_load(server: Server, agents: int, context: int, turns: int) -> Load:
    """All agents read their context, take turns at once, and one more turn each after the server was restarted."""
    load, names = Load(agents), [f"agent-{number}" for number in range(agents)]
    server.start()
    try:
        with ThreadPoolExecutor(agents) as pool:
            list(pool.map(lambda name: server.turn(name, text_of(name, context)), names))
            started = time.perf_counter()
            done = list(pool.map(lambda name: _turns(server, name, turns), names))
            load.seconds = time.perf_counter() - started
            load.tokens = sum(turn.tokens for each in done for turn in each)
            load.first_tokens = _first_tokens([turn for each in done for turn in each])
            server.stop()
            server.start()
            again = list(pool.map(lambda name: server.turn(name, text_of(f"{name}-again", MESSAGE_CHARACTERS)), names))
            load.after_restart = _first_tokens(again)
    finally:
        server.stop()
    return load


def _turns(server: Server, name: str, turns: int) -> list[Turn]:
    return [server.turn(name, text_of(f"{name}-{turn}", MESSAGE_CHARACTERS)) for turn in range(turns)]


def _first_tokens(turns: Sequence[Turn]) -> list[float]:
    found = [turn.first_token_s for turn in turns if turn.first_token_s is not None]
    assert found, "no answer had any text"
    return found


def text_of(name: str, characters: int) -> str:
    """A text that is on every machine with Python, and begins differently for each name."""
    import argparse as source

    whole = inspect.getsource(source)
    begin = sum(name.encode()) * 37 % (len(whole) - characters)
    return f"{name}: {whole[begin : begin + characters]}"


# --- report


def report(rounds: list[dict[str, list[Load]]], out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person. Ratios are taken round by round."""
    loads = [_compared(rounds, at) for at in range(len(rounds[0]["torpor"]))]
    figures = save("agents", {"model": "demo", "loads": loads}, out)
    most = loads[-1]
    title = f"{most['agents']} agents: {most['throughput_ratio']['median']:.2f} times the throughput of mlx_lm.server"
    with plotted(out / "agents.png", figures, title) as axes:
        agents = [each["agents"] for each in loads]
        for name, colour in zip(rounds[0], (OURS, PEER), strict=True):
            taken = [each[name]["tokens_a_second"]["median"] for each in loads]
            axes.plot(agents, taken, "o-", color=colour)
            label_at_end(axes, agents, taken, name, colour)
        axes.set(xlabel="agents at once, 4,000 tokens of context each", ylabel="tokens a second, all agents")
        axes.set(xlim=(0, 1.3 * agents[-1]), ylim=(0, None))
    for each in loads:
        print(f"== {each['agents']} agents")
        for name in rounds[0]:
            mine = each[name]
            first, again = mine["first_token_s"], mine["first_token_after_restart_s"]
            print(
                f"{name:>14} {mine['tokens_a_second']['median']:>7.1f} tokens/s   first token p50 {first['p50']:>7.3f} "
                f"p99 {first['p99']:>7.3f} s   after a restart p50 {again['p50']:>7.3f} p99 {again['p99']:>7.3f} s"
            )
        print(
            f"{'ratios':>14} throughput {each['throughput_ratio']['median']:.2f}   first token after a restart "
            f"{each['restart_ratio']['median']:.1f} times sooner"
        )


def _compared(rounds: list[dict[str, list[Load]]], at: int) -> dict[str, Any]:
    found: dict[str, Any] = {"agents": rounds[0]["torpor"][at].agents}
    for name in rounds[0]:
        loads = [each[name][at] for each in rounds]
        found[name] = {
            "tokens_a_second": spread([load.tokens_a_second for load in loads]),
            "tokens": [load.tokens for load in loads],
            "first_token_s": _percentiles([each for load in loads for each in load.first_tokens]),
            "first_token_after_restart_s": _percentiles([each for load in loads for each in load.after_restart]),
        }
    pairs = [(each["torpor"][at], each["mlx_lm.server"][at]) for each in rounds]
    found["throughput_ratio"] = spread([mine.tokens_a_second / peer.tokens_a_second for mine, peer in pairs])
    found["restart_ratio"] = spread(
        [statistics.median(peer.after_restart) / statistics.median(mine.after_restart) for mine, peer in pairs]
    )
    return found


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, 2)
    parser.add_argument("--agents", type=int, nargs="+", help="how many at once")
    options = parser.parse_args()
    agents = options.agents or (QUICK_AGENTS if options.quick else AGENTS)
    context = QUICK_CONTEXT_CHARACTERS if options.quick else CONTEXT_CHARACTERS
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rounds = []
    for _ in range(rounds_of(options)):
        found: dict[str, list[Load]] = {"torpor": [], "mlx_lm.server": []}
        for count in agents:
            with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as folder:
                model = computed_alike(Path(folder))
                servers: tuple[Server, ...] = (Torpor(Path(folder)), MlxLmServer(count, model))
                for server in servers:
                    found[server.name].append(run_load(server, count, context, TURNS))
                    print(f"{server.name}: {found[server.name][-1].figures()}", flush=True)
        rounds.append(found)
    report(rounds, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
