"""Wake and sleep of whole states in the shapes of real models, beside mlx-lm and plain system calls, in one run.

For each shape and size a state of random numbers is put to sleep, and then, round by round and each in a process of its
own (`bench/wake_child.py`), with the files in the page cache:

- verified: a wake as the daemon does it, from the opening of the store until the caches stand, every byte hashed;
- mlx_lm: `load_prompt_cache` of the same caches, evaluated, which verifies nothing;
- plain: `preadv` of as many bytes into memory from the system, on as many threads (two).

Each is taken into fresh memory, and once more into memory that the process has used before (MLX keeps it). The order
turns round with each round. Beside it, in one process: sleep until the receipt, and mlx-lm's `save_prompt_cache`
without and with a flush, first of the whole state and then of the same state with 200 tokens more. For all of them the
most memory that was resident beyond what was before.

Before each process as much memory as it will need is taken and given back: on a virtual machine whose host takes free
memory away, whoever comes first would else pay for getting it again (`--as-found` leaves that out).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, PEER, panels, parser_for, rounds_of, save
from machine import spread
from model_states import SHAPES

WAYS = ("verified", "mlx_lm", "plain")
MEMORY = ("fresh", "warm")
SIZES_MIB = (256, 512, 1024, 2048)
ROUNDS = 5
_MIB = 2**20
_CHILD = Path(__file__).parent / "wake_child.py"
_TOUCH = """
import ctypes, mmap, sys
size = int(sys.argv[1])
with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        taken.madvise(mmap.MADV_HUGEPAGE)
    memory = (ctypes.c_char * size).from_buffer(taken)
    ctypes.memset(memory, 1, size)
    del memory
"""


@dataclass
class Case:
    """One shape at one size, and what was measured of it: of each way the answers of its processes, round by round."""

    shape: str
    mib: float
    wakes: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    sleep: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> dict[str, Any]:
        """Medians with spread, and each ratio taken round by round."""
        one = self.wakes["verified"][0]
        return {
            "shape": self.shape,
            "tokens": one["tokens"],
            "state_bytes": one["state_bytes"],
            "memory_bytes": one["memory_bytes"],
            "wake_seconds": self._spreads(lambda way, memory: self._taken(way, memory)),
            "wake_processor_seconds": self._spreads(lambda way, memory: self._taken(way, f"{memory}_processor")),
            "wake_speed_over_mlx_lm": self._spreads(lambda way, memory: self._ratios("mlx_lm", way, memory)),
            "wake_speed_over_plain": self._spreads(lambda way, memory: self._ratios("plain", way, memory)),
            "wake_peak_bytes": {way: spread(self._taken(way, "peak_bytes")) for way in WAYS if "peak_bytes" in one},
            "wake_stages": {
                memory: {
                    stage: statistics.median(run[f"{memory}_stages"][stage] for run in self.wakes["verified"])
                    for stage in one[f"{memory}_stages"]
                }
                for memory in MEMORY
            },
            "wake_parts": one["parts"],
            "sleep_seconds": {name: spread(values) for name, values in self.sleep["seconds"].items()},
            "sleep_speed_over": {
                f"{which}_{peer}": spread(
                    [
                        theirs / ours
                        for ours, theirs in zip(
                            self.sleep["seconds"][f"{which}_torpor"],
                            self.sleep["seconds"][f"{which}_{peer}"],
                            strict=True,
                        )
                    ]
                )
                for which in ("first", "second")
                for peer in ("mlx_lm", "mlx_lm_flushed")
            },
            "second_sleep_speed_over_first": spread(
                [
                    first / second
                    for first, second in zip(
                        self.sleep["seconds"]["first_torpor"], self.sleep["seconds"]["second_torpor"], strict=True
                    )
                ]
            ),
            "sleep_peak_bytes": {
                name.removeprefix("peak_bytes_"): value
                for name, value in self.sleep.items()
                if name.startswith("peak_bytes_")
            },
            "written_bytes": self.sleep["written_bytes"],
            "sleep_parts": self.sleep["parts"],
        }

    def _taken(self, way: str, name: str) -> list[float]:
        return [run[name] for run in self.wakes[way]]

    def _ratios(self, peer: str, way: str, memory: str) -> list[float]:
        pairs = zip(self._taken(way, memory), self._taken(peer, memory), strict=True)
        return [theirs / ours for ours, theirs in pairs]

    @staticmethod
    def _spreads(values: Callable[[str, str], list[float]]) -> dict[str, Any]:
        return {f"{way}_{memory}": spread(values(way, memory)) for way in WAYS for memory in MEMORY}


def measure(cases: Iterable[Case], rounds: int, folder: Path | None, *, as_found: bool) -> list[Case]:
    """Every case, in a folder of its own."""
    done = []
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as place:
            case.sleep = _child("sleep", place, case.shape, str(case.mib), str(rounds))
            for number in range(rounds):
                for way in WAYS if number % 2 else reversed(WAYS):
                    if not as_found:
                        _touch(int(1.25 * case.mib * _MIB))
                    case.wakes.setdefault(way, []).append(_child("wake", place, case.shape, way))
        print(f"{case.shape}, {case.mib:g} MiB: done", file=sys.stderr, flush=True)
        done.append(case)
    return done


def _child(*arguments: str) -> dict[str, Any]:
    """What one process has measured."""
    done = subprocess.run([sys.executable, _CHILD, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _touch(size_bytes: int) -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", _TOUCH, str(size_bytes)], check=True)


def report(cases: list[Case], out: Path, *, as_found: bool) -> None:
    """JSON, a plot, and tables for a person."""
    document = save("wake", {"as_found": as_found, "cases": [case.figures() for case in cases]}, out)
    shapes: dict[str, list[dict[str, Any]]] = {}
    for case in document["cases"]:
        shapes.setdefault(case["shape"], []).append(case)
    title = "A wake, which verifies, beside mlx-lm's load, which does not"
    with panels(out / "wake.png", document, title, (1, len(shapes)), (11, 4.6), sharex=True, sharey=True) as grid:
        for axes, cases in zip(grid, shapes.values(), strict=True):
            _draw(axes, cases)
        grid[0].set_xlim(left=0)
    for case in document["cases"]:
        print(f"== {case['shape']}, {case['tokens']} tokens, {case['state_bytes'] / _MIB:.0f} MiB")
        for memory in MEMORY:
            seconds = {way: case["wake_seconds"][f"{way}_{memory}"]["median"] for way in WAYS}
            print(f"  wake, {memory} memory   " + "   ".join(f"{way} {1e3 * s:.0f} ms" for way, s in seconds.items()))
            name = f"verified_{memory}"
            print(
                f"    over mlx-lm {_text(case['wake_speed_over_mlx_lm'][name])}"
                f"   over plain {_text(case['wake_speed_over_plain'][name])}"
            )
            stages = case["wake_stages"][memory]
            print("    stages: " + ", ".join(f"{name} {1e3 * s:.1f} ms" for name, s in stages.items()))
        for way, peak in case["wake_peak_bytes"].items():
            print(
                f"  most memory of a wake, {way}: {(peak['highest'] - case['memory_bytes']) / _MIB:+.1f} MiB beside KV"
            )
        for name, taken in case["sleep_seconds"].items():
            print(f"  sleep, {name:22} {1e3 * taken['median']:8.0f} ms")
        for name, ratio in case["sleep_speed_over"].items():
            print(f"    speed over {name:22} {_text(ratio)}")
        print(f"    speed of the second over the first {_text(case['second_sleep_speed_over_first'])}")
        for name, peak in case["sleep_peak_bytes"].items():
            print(f"  most memory of a sleep, {name}: {peak / _MIB:.1f} MiB")


def _text(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:6.2f} ({ratio['lowest']:.2f} to {ratio['highest']:.2f})"


def _draw(axes: Any, cases: list[dict[str, Any]]) -> None:
    """One shape: the median at each size, and from the lowest to the highest."""
    rows = [(memory, case) for memory in MEMORY for case in cases]
    for height, (memory, case) in enumerate(rows):
        ratio = case["wake_speed_over_mlx_lm"][f"verified_{memory}"]
        axes.plot([ratio["lowest"], ratio["highest"]], [-height] * 2, "-", color=OURS, linewidth=1)
        axes.plot(ratio["median"], -height, "o", color=OURS, markersize=4)
    axes.axvline(1.0, color=PEER, linewidth=0.8)
    labels = [f"{memory} memory, {case['state_bytes'] / 2**30:.1g} GiB" for memory, case in rows]
    axes.set_yticks([-height for height in range(len(rows))], labels, fontsize=7)
    axes.set_title(cases[0]["shape"], fontsize=9)
    axes.set(xlabel="mlx-lm's time / Torpor's time")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Each shape at each size."""
    sizes = options.mib or ((2, 4) if options.quick else SIZES_MIB)
    return [Case(shape, size) for shape in options.shapes for size in sorted(sizes)]


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--mib", type=float, nargs="+", help="sizes of the state")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="models' shapes")
    parser.add_argument("--as-found", action="store_true", help="do not touch memory before each process")
    options = parser.parse_args()
    done = measure(cases_of(options), rounds_of(options), options.folder, as_found=options.as_found)
    report(done, options.out, as_found=options.as_found)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
