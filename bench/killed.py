"""What a crash costs an agent that works without a pause, and what it costs others that it costs so little.

An agent takes turns on the demo model, each at once behind the answer to the one before: a first message of many
tokens, then short and long ones. Beside it another session streams. Behind the last answer the daemon is killed with
SIGKILL, and the agent's next turn on a new daemon tells how many tokens were computed again. Two ways, in turn and in
either order:

    behind     blocks are written while the agent works, as usual
    nothing    no blocks are written: all is computed again

The agent sends the same messages in both ways, on a store of its own each time.

Goals: at most 512 tokens and those of the last turn are computed again; the p99 of the gaps between two pieces of the
stream, of all rounds together, at most 10 % longer than where nothing is written.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import plain
from figures import OURS, PEER, panels, parser_for, rounds_of, save
from loop import Beside, Daemon
from machine import spread
from spawned import answering, serve
from torpor.errors import TorporError
from torpor.socket_api import Client

WAYS: Final = ("behind", "nothing")
ROUNDS: Final = 5
TURNS: Final = (800, 120, 400, 60, 500, 200, 40, 300)
"""Tokens that the agent reads."""
QUICK_TURNS: Final = (600, 40, 30)
MOST_TOKENS: Final = 24
"""Of an answer."""
ANSWER_S: Final = 300.0


@dataclass
class Way:
    """What was seen of one way, round by round. last: tokens of the last turn."""

    recomputed: list[int] = field(default_factory=list)
    worked_s: list[float] = field(default_factory=list)
    streams: list[Beside] = field(default_factory=list)
    held: int = 0
    last: int = 0

    def figures(self) -> dict[str, Any]:
        streams = [each.figures() for each in self.streams]
        together = Beside([gap for each in self.streams for gap in each.gaps]).figures()
        return {
            "held_tokens": self.held,
            "last_turn_tokens": self.last,
            "recomputed_tokens": spread([float(each) for each in self.recomputed]),
            "worked_s": spread(self.worked_s),
            "gaps": together["gaps"],
            "p50_s": spread([each["p50_s"] for each in streams]),
            "p99_s": spread([each["p99_s"] for each in streams]) | {"of_all": together["p99_s"]},
        }


def _serve(store: Path, socket: Path, *, behind: bool) -> None:
    """The daemon, in a process of its own."""
    from torpor.daemon.upkeep import writing_behind

    if not behind:
        writing_behind.BLOCKS_DUE = 1 << 20
    serve(store, socket)


def _stream(socket: Path, beside: Beside, is_over: threading.Event) -> None:
    """Until it is over, or the daemon is killed."""
    with suppress(TorporError, OSError):
        Daemon(Path(), socket).stream(beside, is_over.is_set, ANSWER_S)


def measure(way: Way, folder: Path, turns: tuple[int, ...], *, behind: bool) -> None:
    """One round of a way."""
    store, socket, beside, is_over = folder / "store", folder / "torpor.sock", Beside(), threading.Event()
    with (
        answering(_serve, store, socket, behind=behind),
        Client(socket, timeout_s=ANSWER_S) as client,
    ):
        client.create("warm")
        client.generate("warm", text="Warm up.", max_tokens=4)
        plain.settle()
        streaming = threading.Thread(target=_stream, args=(socket, beside, is_over))
        streaming.start()
        begun = time.perf_counter()
        client.create("agent")
        for turn, count in enumerate(turns):
            client.append("agent", tokens=[32 + (7 * at + turn) % 90 for at in range(count)])
            answer = client.generate("agent", max_tokens=MOST_TOKENS)
            way.last = answer.token_count - (way.held if turn else 0)
            way.held = answer.token_count
        way.worked_s.append(time.perf_counter() - begun)
        is_over.set()
    streaming.join()
    way.streams.append(beside)
    with answering(_serve, store, socket, behind=False), Client(socket, timeout_s=ANSWER_S) as client:
        again = client.generate("agent", text="And now?", max_tokens=1)
    way.recomputed.append(again.recomputed_tokens)


def report(figures: dict[str, Any], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    document = save("killed", figures, out)
    ways = figures["ways"]
    ours = ways["behind"]
    title = (
        f"Killed at work, an agent of {ours['held_tokens']:,} tokens has"
        f" {ours['recomputed_tokens']['median']:,.0f} to compute again; its last turn has {ours['last_turn_tokens']}"
    )
    with panels(out / "killed.png", document, title, (1, 2), (10, 2.8)) as grid:
        wanted = (("recomputed_tokens", "tokens computed again", 1), ("p99_s", "p99 of another's gaps, ms", 1000))
        for axes, (name, label, factor) in zip(grid, wanted, strict=True):
            for height, way in enumerate(reversed(WAYS)):
                taken, colour = ways[way][name], OURS if way == "behind" else PEER
                axes.plot([factor * taken["lowest"], factor * taken["highest"]], [height] * 2, "-", color=colour)
                axes.plot(factor * taken["median"], height, "o", color=colour)
            axes.set_yticks(range(len(WAYS)), reversed(WAYS))
            axes.set(xlabel=label)
            axes.set_xlim(left=0)
    for way in WAYS:
        each = ways[way]
        again, p99 = each["recomputed_tokens"], each["p99_s"]
        print(
            f"{way:>8}: {again['median']:,.0f} ({again['lowest']:,.0f} to {again['highest']:,.0f}) of"
            f" {each['held_tokens']:,} tokens computed again, {each['last_turn_tokens']} of them the last turn; worked"
            f" {each['worked_s']['median']:.1f} s; {each['gaps']:,} gaps, p99 {1000 * p99['median']:.1f}"
            f" ({1000 * p99['lowest']:.1f} to {1000 * p99['highest']:.1f}) ms, of all {1000 * p99['of_all']:.1f} ms"
        )
    print(f"p99 of all gaps over those where nothing is written: {figures['p99_over_nothing']:.3f}")
    print(f"p99 round by round: {_told(figures['p99_over_nothing_by_round'])}")


def _told(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.3f} ({ratio['lowest']:.3f} to {ratio['highest']:.3f})"


def figures_of(ways: dict[str, Way]) -> dict[str, Any]:
    """Each way's, and the p99 of one over the other's: of all gaps, and round by round."""
    found = {name: way.figures() for name, way in ways.items()}
    pairs = zip(ways["behind"].streams, ways["nothing"].streams, strict=True)
    by_round = [one.figures()["p99_s"] / other.figures()["p99_s"] for one, other in pairs]
    return {
        "ways": found,
        "p99_over_nothing": found["behind"]["p99_s"]["of_all"] / found["nothing"]["p99_s"]["of_all"],
        "p99_over_nothing_by_round": spread(by_round),
    }


def main() -> None:
    """Measure and report."""
    options = parser_for(__doc__, ROUNDS).parse_args()
    turns = QUICK_TURNS if options.quick else TURNS
    ways = {name: Way() for name in WAYS}
    for number in range(rounds_of(options)):
        for name in WAYS[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as place:
                measure(ways[name], Path(place), turns, behind=name == "behind")
    report(figures_of(ways), options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
