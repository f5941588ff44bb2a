"""The page that `bench/simulate.py` makes, `docs/scale.md`: its tables, and each sentence that tells a result."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

from stated import STATED

FOUND: Final = ("awake", "disk", "remote", "read again", "new")
GOAL: Final = 20
"""Within so many hundredths the simulation of two daemons is to agree with them."""


def number(amount: float) -> str:
    for unit, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}"
    return f"{amount:,.0f}" if amount >= 10 else f"{amount:.2g}"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [" | ".join(row) for row in (head, ["---"] * len(list(head)), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _seconds(found: dict[str, float]) -> str:
    return f"{found['p50']:.3g} / {found['p99']:.3g}"


def tables(document: dict[str, Any]) -> dict[str, str]:
    """The tables and results of docs/scale.md, by name."""
    kinds = document["kinds"]
    if not kinds:
        return _of_the_run(document) | {"inputs": _inputs()}
    scales, sizes = [], next(iter(kinds.values()))["sizes"]
    for kind, found in kinds.items():
        for row in found["sizes"]:
            dollars = row["dollars a month"]
            scales.append([
                kind, number(row["sessions"]), f"{row['machines']:,}" + (" (all)" if row["whole"] else ""),
                number(row["stored_bytes"]) + "B", number(row["sent_bytes a day"]) + "B",
                f"{number(row['writes/s, peak'])} + {number(row['reads/s, peak'])}",
                *(number(dollars[part]) for part in ("machines", "requests", "stored")),
                _seconds(row["run"]["first_s"]["all"]),
            ])  # fmt: skip
    hits = [
        [kind, name, f"{100 * sample['found'][name]:.1f} %", _seconds(sample["first_s"][name])]
        for kind, found in kinds.items()
        for sample in [found["sample"]]
        for name in FOUND
        if sample["found"][name]
    ]
    changed = [
        [
            kind, name, f"{100 * run['found']['awake']:.1f} %", _seconds(run["first_s"]["all"]), f"{run['busy']:.2f}",
            f"{run['read again over read']:.2f}", number(run["writes a session"]),
            number(run["sent_bytes a session"]) + "B",
        ]
        for kind, found in kinds.items()
        for name, run in found["changes"].items()
    ]  # fmt: skip
    bent = [
        [name, *(("**%s**" if each["is"] > each["most"] else "%s") % number(each["is"]) for each in row),
         number(row[0]["most"])]
        for found in list(kinds.values())[:1]
        for name in _by_bend(found["sizes"])
        for row in [[size["bends"][name] for size in found["sizes"]]]
    ]  # fmt: skip
    result = {
        "scales": _table(
            ("machine", "sessions", "machines", "kept", "sent a day", "writes + reads a second, peak", "$ machines",
             "$ requests", "$ kept", "first token, s, p50 / p99"), scales),
        "found": _table(("machine", "the session is", "of turns", "first token, s, p50 / p99"), hits),
        "changes": _table(
            ("machine", "changed", "awake", "first token, s, p50 / p99", "busy", "read again over read",
             "writes a session", "sent a session"), changed),
        "bends": _table(("on H100s", *(number(row["sessions"]) for row in sizes), "bends at"), bent),
        "inputs": _inputs(),
    }  # fmt: skip
    return result | {"results": _results(kinds)} | _of_the_run(document)


def _inputs() -> str:
    return _table(
        ("what", "value", "of what", "kind", "source"),
        ([name, f"{each.value:,.10g}", each.unit, each.kind, each.source] for name, each in STATED.items()),
    )


def _by_bend(sizes: list[dict[str, Any]]) -> list[str]:
    """What bends first stands first: by how far it is beyond what does, at a million sessions."""
    bends = next(row["bends"] for row in sizes if row["sessions"] == 10**6)
    return sorted(bends, key=lambda name: -bends[name]["is"] / bends[name]["most"])


def _of_the_run(document: dict[str, Any]) -> dict[str, str]:
    if not (real := document.get("two replicas")):
        return {}
    rows = (
        [
            name,
            f"{each['was']:.4g}",
            f"{each['predicted']:.4g}",
            f"{100 * (each['predicted'] / each['was'] - 1):+.0f} %",
        ]
        for name, each in real["figures"].items()
    )
    rates = ", ".join(f"{name} {each:.3g}" for name, each in real["rates"].items() if name.endswith("_s"))
    return {
        "agreement": f"{_table(('', 'two daemons', 'simulated', 'difference'), rows)}\n\n{_agreement(real)}",
        "rates": f"`{rates}`",
    }


def _agreement(real: dict[str, Any]) -> str:
    differences = {name: 100 * (each["predicted"] / each["was"] - 1) for name, each in real["figures"].items()}
    beyond = [f"{name} ({each:+.0f} %)" for name, each in differences.items() if abs(each) > GOAL]
    turns = real["turns"]
    return (
        f"{turns['predicted']} turns were predicted in {real['rounds']} parts, by {turns['measured']} others that were "
        f"measured before and behind them, with a load average of {real['load_average']:.1f}. Within {GOAL} % are "
        + (f"all {len(differences)} figures" if not beyond else f"all but {', '.join(beyond)}")
        + f"; the largest difference is {max(differences.values(), key=abs):+.0f} %."
    )


def _results(kinds: dict[str, Any]) -> str:
    lines = []
    for kind, found in kinds.items():
        sample, changes = found["sample"], found["changes"]
        all_s, disk_s = sample["first_s"]["all"], sample["first_s"]["disk"]
        bare, small = (
            changes[name]
            for name in ("nothing is kept: what leaves memory is read again", "a quarter of the bytes a token")
        )
        dollars = next(row["dollars a month"] for row in found["sizes"] if row["sessions"] == 10**6)
        whole = sum(dollars.values())
        lines.append(
            f"- **{kind}.** Beside the model there is memory for {found['memory_bytes'] / found['tokens_bytes']:.1f} "
            f"sessions at their end. {100 * sample['found']['awake']:.0f} % of the turns find their session awake. A "
            f"wake from the disk takes {disk_s['p50']:.3g} s to the first token at the median; the p99 of all turns is "
            f"{all_s['p99']:.3g} s. If nothing is kept, {bare['read again over read']:.2g} tokens are read again for "
            f"each new one, the engine works {100 * bare['busy']:.0f} % of the time, and the p99 is "
            f"{bare['first_s']['all']['p99'] / all_s['p99']:.2g} times as long. With a quarter of the bytes a token it "
            f"is {small['first_s']['all']['p99']:.3g} s. Of the money for a million sessions "
            f"{100 * dollars['machines'] / whole:.0f} % goes to machines, {100 * dollars['stored'] / whole:.0f} % to "
            f"kept bytes, {100 * dollars['requests'] / whole:.1g} % to requests."
        )
    return "\n".join(lines)


def with_page(page: str, made: dict[str, str]) -> str:
    """A page with its tables and results made anew; those that were not made stay."""
    region = re.compile(r"<!-- generated: (?P<name>[^>]+?) -->\n.*?<!-- end of (?P=name) -->", re.DOTALL)

    def table(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in made:
            return found[0]
        return f"<!-- generated: {name} -->\n{made[name]}\n<!-- end of {name} -->"

    return region.sub(table, page)
