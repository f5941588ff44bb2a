"""What a tree of a hundred branches takes on the disk, and how it comes back.

A session of the demo model reads a base. A tree grows on it: each branch is forked from one that was drawn by lot among
all before it, and reads tokens of its own. The tree is put to sleep, the daemon gets SIGKILL, and another one begins
the tree again. Topology, positions, the logits of each branch, the tokens that each would write next, and the logits
behind these are compared with those of before. A difference ends the benchmark.

Beside the disk, from the sizes of the raw state: the base and what each branch has from the last full block before its
fork on; and whole copies of all branches. What the disk gives to a file (its blocks) is counted, not only its length.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, parser_for, plotted, rounds_of, save
from machine import spread
from synthetic import Shape, demo_shape
from torpor.memvid.format.blocks import BLOCK_TOKENS
from torpor.memvid.limits import MIB
from torpor.socket_api import Client

NEXT_TOKENS: Final = 8
ANSWER_S: Final = 600.0
SECTOR_BYTES: Final = 512
"""The unit of st_blocks, whatever the file system's own is."""
_TORPOR: Final = str(Path(sys.executable).parent / "torpor")


@dataclass(frozen=True, slots=True)
class Plan:
    """A tree, by lot. parents: of each branch but the root, its place in the list."""

    shape: Shape
    base_tokens: int
    own_tokens: int
    parents: tuple[int, ...]

    @classmethod
    def drawn(cls, base_tokens: int, own_tokens: int, branches: int) -> Plan:
        lot = random.Random(26)
        return cls(demo_shape(), base_tokens, own_tokens, tuple(lot.randrange(at) for at in range(1, branches)))

    def positions(self) -> list[int]:
        """How many tokens each branch has."""
        found = [self.base_tokens]
        for parent in self.parents:
            found.append(found[parent] + self.own_tokens)
        return found

    def state_bytes(self, tokens: int) -> int:
        """Raw state of so many tokens, and the record at their end."""
        return tokens * self.shape.token_bytes + sum(spec.size_bytes for spec in self.shape.state_slots())

    @property
    def base_and_tails(self) -> int:
        """Raw state, each token of it once. A branch needs its own copy of the block in which it was forked."""
        positions = self.positions()
        tails = [positions[parent] % BLOCK_TOKENS + self.own_tokens for parent in self.parents]
        return self.state_bytes(self.base_tokens) + sum(map(self.state_bytes, tails))

    @property
    def copies(self) -> int:
        """Raw state of each branch, whole."""
        return sum(map(self.state_bytes, self.positions()))


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Client]:
    """A daemon on the store in a folder, and a client of it. It ends with SIGKILL. options: more of `torpor serve`."""
    command = [_TORPOR, "serve", "--store", str(folder / "store"), "--socket", str(folder / "s"), "--json"]
    process = subprocess.Popen(
        [*command, "--prefix-reuse", "off", *options], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()), "it says when it is ready"
        with Client(folder / "s", timeout_s=ANSWER_S) as client:
            yield client
            process.kill()
            process.wait()
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def grow(client: Client, plan: Plan) -> list[int]:
    """The branches of the tree, the root first."""
    lot = random.Random(19)
    client.create("base")
    client.append("base", tokens=lot.choices(range(300, 4000), k=plan.base_tokens))
    numbers = [client.tree("base").branch]
    for parent in plan.parents:
        (child,) = client.branch(numbers[parent], seeds=[len(numbers)]).branches
        client.prefill([{"branch": child.branch, "tokens": lot.choices(range(300, 4000), k=plan.own_tokens)}])
        numbers.append(child.branch)
    return numbers


def facts_of(client: Client, root: int) -> list[tuple[Any, ...]]:
    """All that is compared, branch by branch. A child of each writes the next tokens, and is pruned."""
    there = client.branches(root).branches
    numbers = [each.branch for each in there]
    place = {number: at for at, number in enumerate(numbers)}
    now = client.produce(numbers, logits=True).produced
    children = [client.branch(number).branches[0].branch for number in numbers]
    written = client.advance(children, max_tokens=NEXT_TOKENS).written
    behind = client.produce(children, logits=True).produced
    client.prune(children)
    return [
        (
            None if one.parent is None else place[one.parent],
            *(one.position, one.fork_head, one.sampling, drawn.token, drawn.logits, text.tokens, then.logits),
        )
        for one, drawn, text, then in zip(there, now, written, behind, strict=True)
    ]


def measure(plan: Plan, folder: Path | None, seconds: dict[str, list[float]]) -> dict[str, int]:
    """One tree, in a store of its own: what it takes on the disk, and in memory before and after."""
    with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=folder) as place:
        with serving(Path(place)) as client:
            root = grow(client, plan)[0]
            before = facts_of(client, root)
            client.delete("base")
            memory = {"memory_before_bytes": client.status().memory.branches_bytes}
            seconds["sleep"].append(_timed(lambda: client.keep(root, "tree", subtree=True)))
        disk = _disk(Path(place) / "store")
        started = time.perf_counter()
        with serving(Path(place)) as client:
            seconds["start"].append(time.perf_counter() - started)
            started = time.perf_counter()
            root = client.tree("tree").branch
            seconds["wake"].append(time.perf_counter() - started)
            memory["memory_after_bytes"] = client.status().memory.branches_bytes
            _require_same(before, facts_of(client, root))
    return disk | memory


def _timed(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _require_same(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> None:
    wrong = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if wrong:
        sys.exit(f"branches {wrong[:8]} did not come back as they were, of {len(wrong)}")


def _disk(store: Path) -> dict[str, int]:
    files = [path.stat() for folder in ("packs", "versions") for path in store.joinpath(folder).iterdir()]
    return {
        "files": len(files),
        "file_bytes": sum(each.st_size for each in files),
        "disk_bytes": sum(each.st_blocks for each in files) * SECTOR_BYTES,
    }


def report(plan: Plan, disk: dict[str, int], seconds: dict[str, list[float]], out: Path) -> None:
    """JSON, plot, and a table for a person."""
    branches, taken = len(plan.parents) + 1, disk["disk_bytes"]
    figures: dict[str, Any] = {
        "branches": branches,
        "base_tokens": plan.base_tokens,
        "own_tokens": plan.own_tokens,
        "raw_base_and_tails_bytes": plan.base_and_tails,
        "raw_copies_bytes": plan.copies,
        **disk,
        "disk_over_raw_base_and_tails": taken / plan.base_and_tails,
        "copies_over_disk": plan.copies / taken,
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "same": ["topology", "positions", "logits", "next tokens", "logits behind them"],
    }
    document = save("tree", figures, out)
    rows = [("base and tails, raw", plan.base_and_tails), ("store", taken), ("whole copies, raw", plan.copies)]
    title = f"{branches} branches sleep in {plan.copies / taken:.0f} times less than copies"
    with plotted(out / "tree.png", document, title) as axes:
        bars = axes.barh([name for name, _ in rows][::-1], [size / MIB for _, size in rows][::-1], color=OURS)
        axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
        axes.set(xlabel=f"MiB on the disk: a base of {plan.base_tokens} tokens, {plan.own_tokens} more a branch")
    print(f"{branches} branches on a base of {plan.base_tokens} tokens, {plan.own_tokens} more each")
    for name, size in rows:
        print(f"  {name:22} {size / MIB:10.1f} MiB   {size / plan.base_and_tails:7.3f} of base and tails")
    print(f"  memory {disk['memory_before_bytes'] / MIB:.1f} MiB before, {disk['memory_after_bytes'] / MIB:.1f} after")
    for name, values in seconds.items():
        print(f"  {name:22} {spread(values)['median']:10.2f} s")
    print(f"  after a SIGKILL all came back the same: {', '.join(figures['same'])}")


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, 3)
    parser.add_argument("--base", type=int, help="tokens of the base")
    parser.add_argument("--branches", type=int, help="how many branches, the root among them")
    options = parser.parse_args()
    plan = Plan.drawn(
        options.base or (300 if options.quick else 4000),
        own_tokens=50,
        branches=options.branches or (10 if options.quick else 100),
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds_of(options)):
        disk = measure(plan, options.folder, seconds)
    report(plan, disk, seconds, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
