"""What the simulation of many machines is fed with: each number with its source, and what kind of number it is.

- measured: of this code, by a benchmark of this project, on the machine that its document names.
- stated: by somebody else, of a real machine, a price list or a trace.
- calculated: from others of this table, as the source says.
- assumed: nobody measured it. Another value may turn a result round.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

BLOCK_TOKENS: Final = 256
DUE_TOKENS: Final = 512
"""So many tokens in full blocks behind its newest version make a session due to be written behind."""

LOOK_S: Final = 0.5
"""Between two looks at the head of a session that was asked for."""

MIB: Final = 2**20
PART_BYTES, PIECE_BYTES = 5 * MIB, 8 * MIB
"""Of a large object: what goes with one request, and what comes with one."""

REQUESTS: Final = {
    "start": (14, 7),
    "take": (1, 1),
    "turn": (2, 0),
    "renewal": (1, 0),
    "version": (4, 5),
    "release": (1, 0),
    "wake": (1, 4),
    "ask": (2, 2),
    "look": (0, 0),
}
"""Requests that write and that read, of each thing that a daemon does with the remote: `bench/remote.py` counts them on
the wire. A large version and a wake have more, one for each part of it. Ask: the head is read and
written, and so it is again by its holder, whose renewal finds it changed."""

Kind = Literal["measured", "stated", "calculated", "assumed"]


def requests_of(act: str) -> tuple[int, int]:
    return REQUESTS[act]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a machine with a model. Seconds: of a request beside its work (turn_s), of a token that is read (read_s), more
    for each token before it (read_context_s); of a round of tokens (write_s), more for each session in it (write_row_s)
    and each of its tokens (write_context_s); of a wake, a sleep, a fetch, an upload and a request of the remote beside
    their bytes (wake_s, sleep_s, fetch_s, send_s, ask_s). Bytes: of a token's state; of memory for sessions; of the
    store's budget. dollars: of an hour."""

    name: str
    token_bytes: int
    memory_bytes: int
    disk_bytes: int
    turn_s: float
    read_s: float
    read_context_s: float
    write_s: float
    write_row_s: float
    write_context_s: float
    wake_s: float
    wake_bytes_s: float
    sleep_s: float
    sleep_bytes_s: float
    ask_s: float
    fetch_s: float
    fetch_bytes_s: float
    send_s: float
    send_bytes_s: float
    dollars: float = 0.0

    def reading_s(self, tokens: int, before: int) -> float:
        """To read so many tokens behind so many others."""
        return tokens * (self.read_s + self.read_context_s * (before + tokens / 2))

    def row_s(self, tokens: int) -> float:
        return self.write_row_s + self.write_context_s * tokens

    def waking_s(self, tokens: int) -> float:
        return self.wake_s + tokens * self.token_bytes / self.wake_bytes_s

    def sleeping_s(self, tokens: int) -> float:
        return self.sleep_s + tokens * self.token_bytes / self.sleep_bytes_s


@dataclass(frozen=True, slots=True)
class Settings:
    """Of the daemons, in seconds: a lease, how long a turn waits to be sent, after how long without use a session
    sleeps. waiting_s: what placement takes for the time until memory is free."""

    lease_s: float = 60.0
    turns_s: float = 5.0
    idle_s: float = 900.0
    waiting_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Stated:
    """A number of the table. unit: also says of what."""

    value: float
    unit: str
    kind: Kind
    source: str


_GPU = "docs/performance.md, On a GPU"
_EPYC = "docs/performance.md, an EPYC"
_REMOTE = "docs/performance.md, Versions through a remote: a folder, 256 MiB"
_TRACE = "TraceLab, session_timing_distribution"
_RFC = "vLLM RFC 57103"
_M3 = "Rapid-MLX pull request 636: M3 Ultra, mlx 0.31.2"
_CARD = "its data sheet, by codesota.com/hardware/h100"

STATED: Final[dict[str, Stated]] = {
    # the traffic
    "turns": Stated(43, "turns of a session, median", "stated", _RFC),
    "turns, spread": Stated(1.0, "sigma of its lognormal", "assumed", "a mean of 71; TraceLab has 82"),
    "context": Stated(142_000, "tokens behind the last of 43 turns", "stated", f"{_RFC}; taken as the end"),
    "answer": Stated(444, "tokens of a turn that are written, median", "stated", _RFC),
    "answer, spread": Stated(0.8, "sigma of its lognormal, and of the tokens read", "assumed", ""),
    "most tokens": Stated(200_000, "tokens, then the agent sums up and begins again", "assumed", ""),
    "summed up": Stated(20_000, "tokens of that", "assumed", ""),
    "with sub-agents": Stated(0.44, "of sessions", "stated", _RFC),
    "sub-agents": Stated(3, "of such a session, each a session of its own", "assumed", ""),
    "their turns": Stated(10, "of each of them", "assumed", ""),
    "human": Stated(0.108, "of turns that a person begins", "stated", "TraceLab: 8.9 of 82.5 steps"),
    "human wait, p50": Stated(84, "s", "stated", _TRACE),
    "human wait, p90": Stated(1_236, "s", "stated", _TRACE),
    "human wait, p99": Stated(50_040, "s", "stated", _TRACE),
    "human wait, longest": Stated(604_800, "s", "assumed", "a week"),
    "tool, p50": Stated(0.3, "s", "stated", _TRACE),
    "tool, p90": Stated(13.6, "s", "stated", _TRACE),
    "tool, p99": Stated(300, "s", "assumed", "the trace's mean a step is 16.8 s"),
    "tool, longest": Stated(3_600, "s", "assumed", ""),
    "other context": Stated(17_000, "tokens on average, of another user", "stated", "Rapid-MLX 476"),
    "kept": Stated(30, "days that a session is kept", "assumed", ""),
    "peak": Stated(2.0, "times the mean of a day, in its busiest hours", "assumed", ""),
    "busy": Stated(0.6, "of these hours an engine works: machines are added beyond it", "assumed", ""),
    # the model, Qwen3-8B
    "token": Stated(147_456, "bytes of state a token, bfloat16", "calculated", "36 layers, 8 heads of 128, twice"),
    "flops": Stated(16.4e9, "operations a token", "calculated", "twice 8.2 billion weights"),
    "context flops": Stated(589_824, "operations a token, for each token before it", "calculated", "4 x 36 x 32 x 128"),
    # an H100
    "H100 memory": Stated(80e9, "bytes", "stated", _CARD),
    "H100 speed": Stated(989e12, "operations/s, bfloat16, dense", "stated", _CARD),
    "H100 share": Stated(0.26, "of that, while this code reads", "calculated", f"{_GPU}: Qwen3-0.6B, 59 ms"),
    "H100 bandwidth": Stated(3.35e12, "bytes/s of its memory", "stated", _CARD),
    "bandwidth share": Stated(0.6, "of that, while tokens are written", "assumed", ""),
    "H100 wake": Stated(1.8e9, "bytes/s, hashed", "measured", _GPU),
    "H100 canary": Stated(0.03, "s of a wake beside its bytes", "measured", f"{_GPU}: a wake of 22 MiB in parts"),
    "H100 disk": Stated(3.84e12, "bytes", "stated", "p5.48xlarge: 8 NVMe disks of 3.84 TB for 8 GPUs"),
    "H100 price": Stated(2.35, "dollars/h", "stated", "SemiAnalysis, a year reserved, March 2026; AWS on demand: 6.88"),
    # a Mac Studio
    "Mac memory": Stated(512e9, "bytes", "stated", "Rapid-MLX 476: ten instances on one of 512 GB"),
    "Mac read": Stated(1_093.5, "tokens/s, 2,048 tokens", "stated", _M3),
    "Mac write, short": Stated(112.9, "tokens/s, behind about 576 tokens", "stated", _M3),
    "Mac write, long": Stated(103.7, "tokens/s, behind about 2,304 tokens", "stated", _M3),
    "Mac weights": Stated(4.6e9, "bytes, 4 bits", "calculated", "8.2 billion weights of 4.5 bits"),
    "Mac wake": Stated(3.06e9, "bytes/s, hashed, fresh memory", "measured", f"{_EPYC}, Wake; no Mac was tried"),
    "Mac disk": Stated(4e12, "bytes", "assumed", ""),
    "Mac price": Stated(0.36, "dollars/h", "assumed", "9,499 dollars over three years, without power"),
    # both
    "memory share": Stated(0.7, "of what is available beside the model", "measured", "the default of --memory-budget"),
    "sleep": Stated(1.34e9, "bytes/s until the receipt", "measured", f"{_EPYC}, The store"),
    "sleep, least": Stated(0.011, "s of a sleep beside its bytes", "measured", f"{_EPYC}, A sleep"),
    "turn": Stated(0.02, "s of a request beside its work", "assumed", ""),
    "fetch": Stated(0.874e9, "bytes/s, proven and flushed, both tasks on 2 cores", "measured", f"{_REMOTE} in 307 ms"),
    "send": Stated(0.844e9, "bytes/s", "measured", f"{_REMOTE} in 318 ms"),
    "ask": Stated(0.1, "s of a request of S3", "stated", "AWS: 100 to 200 ms for small objects"),
    "line": Stated(1.25e9, "bytes/s to the remote, each way", "assumed", "10 Gbit/s; a fetch takes less"),
}  # fmt: skip


def value(name: str) -> float:
    """A number of the table."""
    return STATED[name].value


def h100() -> Rates:
    """One H100 with Qwen3-8B in bfloat16."""
    speed = value("H100 speed") * value("H100 share")
    bandwidth = value("H100 bandwidth") * value("bandwidth share")
    weights = value("flops")  # two bytes a weight, as two operations
    return _rates(
        "H100 80 GB",
        memory_bytes=value("H100 memory") - weights,
        disk_bytes=value("H100 disk"),
        read_s=value("flops") / speed,
        read_context_s=value("context flops") / speed,
        write_s=weights / bandwidth,
        write_context_s=value("token") / bandwidth,
        wake_s=value("H100 canary"),
        wake_bytes_s=value("H100 wake"),
        dollars=value("H100 price"),
    )


def mac_studio() -> Rates:
    """A Mac Studio with an M3 Ultra, 512 GB, and Qwen3-8B in 4 bits."""
    read_s = 1 / value("Mac read")
    short_s, long_s = 1 / value("Mac write, short"), 1 / value("Mac write, long")
    context_s = (long_s - short_s) / (2_304 - 576)
    return _rates(
        "Mac Studio, M3 Ultra, 512 GB",
        memory_bytes=value("Mac memory") - value("Mac weights"),
        disk_bytes=value("Mac disk"),
        read_s=read_s,
        read_context_s=read_s * value("context flops") / value("flops"),
        write_s=short_s - 576 * context_s,
        write_context_s=context_s,
        wake_s=1 / value("Mac write, short"),
        wake_bytes_s=value("Mac wake"),
        dollars=value("Mac price"),
    )


def _rates(name: str, *, memory_bytes: float, disk_bytes: float, **more: float) -> Rates:
    return Rates(
        name,
        token_bytes=int(value("token")),
        memory_bytes=int(value("memory share") * memory_bytes),
        disk_bytes=int(disk_bytes),
        turn_s=value("turn"),
        write_row_s=0.0,
        sleep_s=value("sleep, least"),
        sleep_bytes_s=value("sleep"),
        ask_s=value("ask"),
        fetch_s=4 * value("ask"),
        fetch_bytes_s=min(value("fetch"), value("line")),
        send_s=4 * value("ask"),
        send_bytes_s=min(value("send"), value("line")),
        **more,
    )


def drawn_between(chance: random.Random, points: Sequence[tuple[float, float]]) -> float:
    """A number whose quantiles are `points`, from 0 to 1; between two of them its logarithm is even."""
    at = chance.random()
    for (low, least), (high, most) in itertools.pairwise(points):
        if at <= high:
            share = (at - low) / (high - low)
            return math.exp(math.log(least) + share * (math.log(most) - math.log(least)))
    return points[-1][1]


HUMAN: Final = (
    (0.0, 5.0),
    (0.5, value("human wait, p50")),
    (0.9, value("human wait, p90")),
    (0.99, value("human wait, p99")),
    (1.0, value("human wait, longest")),
)
TOOL: Final = (
    (0.0, 0.02),
    (0.5, value("tool, p50")),
    (0.9, value("tool, p90")),
    (0.99, value("tool, p99")),
    (1.0, value("tool, longest")),
)
"""Quantiles of what passes between two turns, in seconds: a person's waits, and a tool's."""
