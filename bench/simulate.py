"""Many machines with one remote, simulated at 100 to 100 million sessions; and two daemons beside their simulation.

- `simulated.py` is the simulation, `traffic.py` the agents, `stated.py` each number that they are fed with, and its
  source. `two_replicas.py` shows how far the simulation is to be believed: it runs two daemons, measures their rates in
  one part of the run, and predicts the other part.
- A session is one that a person began; its sub-agents come on top. As many are kept as began in the last 30 days.
- A machine gets so many sessions a day as keep its engine at work for 0.6 of the busiest hours. What is told of latency
  is of these hours; bytes, requests and money are of a mean day.
- Up to 8 machines are simulated whole. Of more, 4 are, with their share of the sessions: a session is placed among
  these alone. Machines have nothing in common but the remote, which is taken to be as fast at any rate of requests.
  What all machines together ask of it is multiplied, and compared with what is known of such stores.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from figures import OURS, PEER, panels, parser_for, rounds_of, save
from remote import PRICES
from scale_page import FOUND, tables, with_page
from simulated import Simulation, Told
from stated import Rates, Settings, h100, mac_studio, value
from torpor.memvid.remote.heads import READ_AT_ONCE
from traffic import DAY_S, Agents

SIZES: Final = (10**2, 10**4, 10**6, 10**8)
SAMPLE, WHOLE = 4, 8
ROUNDS: Final = 8
"""Of the real run."""
DAYS_OF_MONTH: Final = 30


@dataclass
class Run:
    """Machines that were simulated. daily: sessions that began a day. days: that were counted. seen: sessions whose
    heads a machine read, a day. kept_bytes: of a session at its end."""

    rates: Rates
    machines: int
    daily: float
    days: float
    busy: float
    told: Told
    seen: float
    kept_bytes: float

    @property
    def firsts(self) -> np.ndarray[Any, Any]:
        return np.array(self.told.firsts or [0.0])

    def a_session(self, count: float) -> float:
        """Of what was counted, the share of one session."""
        return count / (self.daily * self.days)


def simulate(
    rates: Rates,
    machines: int,
    daily: float,
    days: float,
    *,
    settings: Settings | None = None,
    keeps: bool = True,
    context: float = value("context"),
) -> Run:
    """As many days as are counted come before them."""
    simulation = Simulation(rates, settings or Settings(), machines, keeps=keeps)
    agents = Agents(simulation, daily, context=context)
    agents.run(days * DAY_S, days * DAY_S)
    seen = sum(len(each.seen) for each in simulation.machines) / machines / (2 * days)
    kept_bytes = agents.kept_tokens * rates.token_bytes
    return Run(rates, machines, daily, days, agents.busy, simulation.told, seen, kept_bytes)


def loaded(rates: Rates, days: float) -> Run:
    """A sample of machines with so many sessions as keep them busy."""
    run = simulate(rates, SAMPLE, SAMPLE * 10.0, days)
    for _ in range(2):
        run = simulate(rates, SAMPLE, run.daily * value("busy") / max(run.busy, 0.01), days)
    return run


def figures_of(run: Run) -> dict[str, Any]:
    """What is told of a run, for the JSON and the tables."""
    told = run.told
    return {
        "machines": run.machines,
        "sessions a machine and day": run.daily / run.machines,
        "busy": run.busy,
        "turns": told.turns,
        "found": {kind: told.found[kind] / max(told.turns, 1) for kind in FOUND},
        "first_s": {
            kind: {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}
            for kind, values in (("all", run.firsts), *((k, told.first_s.get(k) or [0.0]) for k in FOUND))
        },
        "read again over read": told.again_tokens / max(told.read_tokens, 1),
        "acts a session": {act: run.a_session(count) for act, count in sorted(told.acts.items())},
        "writes a session": run.a_session(told.requests["writes"]),
        "reads a session": run.a_session(told.requests["reads"]),
        "sent_bytes a session": run.a_session(told.sent_bytes),
        "kept_bytes a session": run.kept_bytes,
        "came_bytes a session": run.a_session(told.came_bytes),
        "heads a machine and day": run.seen,
    }


def needed(sessions: int, sample: Run) -> tuple[int, float]:
    """Machines for so many sessions, and how many begin a day at the peak."""
    peak = sessions / value("kept") * value("peak")
    return max(2, math.ceil(peak / (sample.daily / sample.machines))), peak


def at_size(sessions: int, sample: Run, whole: Run | None) -> dict[str, Any]:
    """What so many sessions take. whole: all machines, where they were simulated."""
    machines, peak = needed(sessions, sample)
    daily, run = sessions / value("kept"), whole or sample
    told = figures_of(run)
    monthly = daily * DAYS_OF_MONTH
    price = PRICES["S3 Standard"]
    dollars = {
        "machines": machines * sample.rates.dollars * 24 * DAYS_OF_MONTH,
        "requests": monthly
        * (told["writes a session"] * price["write"] + told["reads a session"] * price["read"])
        / 1e6,
        "stored": sessions * told["kept_bytes a session"] / 1e9 * price["stored"],
    }
    heads = ("take", "turn", "renewal", "version", "release", "wake", "ask")
    return {
        "sessions": sessions,
        "whole": whole is not None,
        "machines": machines,
        "begun a day": daily,
        "run": told,
        "stored_bytes": sessions * told["kept_bytes a session"],
        "sent_bytes a day": daily * told["sent_bytes a session"],
        "came_bytes a day": daily * told["came_bytes a session"],
        "writes/s, peak": peak * told["writes a session"] / DAY_S,
        "reads/s, peak": peak * told["reads a session"] / DAY_S,
        "head writes/s, peak": peak * sum(told["acts a session"].get(act, 0.0) for act in heads) / DAY_S,
        "turns/s, peak": peak * run.a_session(run.told.turns) / DAY_S,
        "dollars a month": dollars,
    }


def simulated(rates: Rates, days: float, pool: Executor) -> dict[str, Any]:
    """All that is told of one kind of machine. Each run that is changed has the sessions and machines of the sample."""
    sample = pool.submit(loaded, rates, days).result()
    small = replace(rates, token_bytes=rates.token_bytes // 4, write_context_s=rates.write_context_s / 4)
    same = partial(pool.submit, simulate, machines=sample.machines, daily=sample.daily, days=days)
    changed = {
        "nothing is kept: what leaves memory is read again": same(rates, keeps=False),
        "a wake and a sleep at 20 GB/s": same(replace(rates, wake_bytes_s=20e9, sleep_bytes_s=20e9)),
        "a quarter of the bytes a token": same(small),
        "both of these": same(replace(small, wake_bytes_s=20e9, sleep_bytes_s=20e9)),
        "sessions of 17,000 tokens on average": same(rates, context=2 * value("other context")),
        "a session sleeps after 60 s": same(rates, settings=Settings(idle_s=60.0)),
    }
    wholes = {
        sessions: pool.submit(simulate, rates, machines, peak, days)
        for sessions in SIZES
        for machines, peak in [needed(sessions, sample)]
        if machines <= WHOLE
    }
    sizes = [at_size(each, sample, wholes[each].result() if each in wholes else None) for each in SIZES]
    runs = {"as it is": sample} | {name: run.result() for name, run in changed.items()}
    return {
        "memory_bytes": rates.memory_bytes,
        "tokens_bytes": value("context") * rates.token_bytes,
        "sample": figures_of(sample),
        "sizes": [row | {"bends": bends(row)} for row in sizes],
        "changes": {name: figures_of(run) for name, run in runs.items()},
    }


def bends(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Of what all machines have in common: how much it is at a size, and from where on it does not do any more."""
    sessions, machines, run = row["sessions"], row["machines"], row["run"]
    month = run["heads a machine and day"] * DAYS_OF_MONTH
    return {
        "dollars a month for what is kept": {"is": row["dollars a month"]["stored"], "most": 1_000.0},
        "`ls --remote`, s": {"is": sessions * value("ask") / READ_AT_ONCE, "most": 30.0},
        "a start, s": {"is": month * value("ask") / READ_AT_ONCE, "most": 300.0},
        "heads that a store remembers, in a month": {"is": month, "most": 16_384.0},
        "versions in a store's index, in a month, two a session": {"is": month * 2, "most": 100_000.0},
        "writes of heads a second": {"is": row["head writes/s, peak"], "most": 3_500.0},
        "a collection of the remote, once a day, s": {
            "is": sessions * value("ask") * (1 / READ_AT_ONCE + 2),  # the places of two versions, one after the other
            "most": DAY_S,
        },
        "dollars a month for collections, one a day of each daemon": {
            "is": 3 * sessions * machines * DAYS_OF_MONTH * PRICES["S3 Standard"]["read"] / 1e6,
            "most": 1_000.0,
        },
        "replicas of Ray's controller": {"is": machines, "most": 2_000.0},
        "cores of Ray's proxies": {"is": row["turns/s, peak"] * 0.007, "most": 64.0},
    }


def report(document: dict[str, Any], out: Path) -> None:
    """JSON, plot, and the tables for a person."""
    document = save("simulate", document, out)
    if document["kinds"]:
        title = "Kept bytes and machines cost, requests do not; a session that is awake has its token soonest"
        with panels(out / "simulate.png", document, title, (1, 3), (14.0, 4.2)) as axes:
            _draw(document, *axes)
    for name, table in tables(document).items():
        if name != "inputs":
            print(f"== {name}\n{table}")


def _draw(document: dict[str, Any], money: Any, firsts: Any, real: Any) -> None:
    for (kind, found), colour in zip(document["kinds"].items(), (OURS, PEER), strict=False):
        for part, line in (("machines", "-"), ("stored", "--"), ("requests", ":")):
            dollars = [row["dollars a month"][part] for row in found["sizes"]]
            money.plot(SIZES, dollars, line, color=colour, label=f"{kind}: {part}")
        names = [name for name in FOUND if found["sample"]["found"][name]]
        for which, mark in (("p50", "o"), ("p99", "x")):
            seconds = [found["sample"]["first_s"][name][which] for name in names]
            firsts.plot(names, seconds, mark, color=colour, label=f"{kind}: {which}")
    if told := document.get("two replicas"):
        for name, colour, label in (("was", OURS, "two daemons"), ("predicted", PEER, "simulated")):
            real.plot(told["hundredths"][name], range(100), color=colour, label=label)
    money.set(xlabel="sessions that are kept", ylabel="dollars a month", xscale="log", yscale="log")
    firsts.set(ylabel="seconds to the first token", yscale="log")
    real.set(xlabel="seconds to the first token, two daemons", ylabel="% of the turns", xscale="log")
    for axes in (money, firsts, real):
        if axes.lines:
            axes.legend(fontsize=6)


def main() -> int:
    """Run the replicas, simulate, write, and print."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--days", type=float, help="that are counted, behind as many that are not (1 unless told)")
    parser.add_argument("--only", choices=["simulated", "real"], help="leave the other half out")
    parser.add_argument(
        "--document", type=Path, help="write this page's tables and results anew, and its plot beside it"
    )
    options = parser.parse_args()
    if options.document and options.only:
        parser.error("--document tells of both halves: leave --only out")
    days = options.days or (0.1 if options.quick else 1.0)
    found: dict[str, Any] = {"kinds": {}}
    if options.only != "simulated":
        from two_replicas import compare, run

        with tempfile.TemporaryDirectory(prefix="torpor-bench-", dir=options.folder) as at:
            found["two replicas"] = compare(*run(Path(at), rounds_of(options)))
    kinds = (h100(), mac_studio()) if options.only != "real" else ()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(mp_context=spawn) as pool, ThreadPoolExecutor() as waiting:
        results = waiting.map(lambda rates: simulated(rates, days, pool), kinds)
        found["kinds"] = {rates.name: result for rates, result in zip(kinds, results, strict=True)}
    report(found, options.out)
    if options.document:
        page = options.document.read_text(encoding="utf-8")
        options.document.write_text(with_page(page, tables(found)), encoding="utf-8")
        shutil.copy(options.out / "simulate.png", options.document.with_name("simulate.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
