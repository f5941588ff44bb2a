"""The inspector's page in a headless Chromium, before a real daemon: when it is there, and what it holds after long.

Round by round, and for each number of sessions: a new tab signs in, and the page's own clock tells when it was painted
for the first time, when the list of sessions had come, and when its rows were drawn. Beside it, in the same round, a
program without a page asks for the same list: what the daemon alone takes of it. The limits are 1 s for the first paint
and 2 s for the rows of 10,000 sessions. Seconds of processor, of the daemon for that list and of the tab until its rows
are drawn, say what remains of it where nothing else runs.

Then the live view is left open, while a session is read into and saved over and over: what its scripts hold, without
what nothing refers to any more, and how many nodes it has.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import OURS, PEER, panels, parser_for, rounds_of, save
from machine import spread
from torpor.socket_api.client.client import Client
from torpor.tests.socket_api.http.inspector.browser import Browser, Tab, link_of
from torpor.tests.socket_api.http.serving import Served, serving

ROUNDS = 7
SESSIONS, QUICK_SESSIONS = (10, 100, 1000, 10_000), (10, 30)
MINUTES, QUICK_MINUTES = 10.0, 0.05
LOOKS = 60
"""How often the live view is looked at."""
PAINT_LIMIT_S, ROWS_LIMIT_S = 1.0, 2.0
_MIB = 2**20

_CLOCK = """new MutationObserver(() => {
  if (window.drawn || !document.querySelector('.height .row')) return;
  requestAnimationFrame(() => requestAnimationFrame(() => (window.drawn ??= performance.now())));
}).observe(document, { childList: true, subtree: true });"""
"""Before the page's own scripts: `drawn` is when rows were on the screen."""
_TOLD = """({ paint: performance.getEntriesByName('first-contentful-paint')[0].startTime, drawn: window.drawn,
  list: performance.getEntriesByType('resource').find(each => each.name.endsWith('/sessions')).responseEnd })"""


def opened(browser: Browser, there: Served) -> dict[str, float]:
    """Seconds from the address to the first paint, to the list, and to its rows, in a new tab."""
    tab = browser.open("about:blank")
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=_CLOCK)
    tab.go(link_of(there.url, there.token))
    tab.until("window.drawn")
    told: dict[str, float] = tab.get(_TOLD)
    metrics = {each["name"]: each["value"] for each in tab.call("Performance.getMetrics")["metrics"]}
    tab.close()
    return {name: milliseconds / 1000 for name, milliseconds in told.items()} | {"tab_cpu": metrics["TaskDuration"]}


def processor_s(pid: int) -> float:
    """Seconds of processor of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(there: Served) -> dict[str, float]:
    """Seconds of the list of sessions for a program, by the clock and of the daemon's processor."""
    request = urllib.request.Request(f"{there.url}/v1/sessions", headers={"x-api-key": there.token})
    begun, used = time.perf_counter(), processor_s(there.daemon.process.pid)
    with urllib.request.urlopen(request) as answer:
        answer.read()
    return {"alone": time.perf_counter() - begun, "daemon_cpu": processor_s(there.daemon.process.pid) - used}


def opening(browser: Browser, there: Served, numbers: tuple[int, ...], rounds: int) -> list[dict[str, Any]]:
    """The seconds of each step by the number of sessions. The daemon gets more of them on the way."""
    found, made = [], 1
    with Client(there.daemon.socket) as client:
        client.append("seed", text="some words", create=True)
        client.sleep("seed")
        for number in numbers:
            for each in range(made, number):
                client.fork("seed", f"fork-{each}")
            made = number
            taken = [opened(browser, there) | asked(there) for _ in range(rounds)]
            found.append(
                {"sessions": number, "seconds": {name: spread([each[name] for each in taken]) for name in taken[0]}}
            )
    return found


def living(browser: Browser, there: Served, minutes: float) -> list[dict[str, float]]:
    """What the live view holds, look by look."""
    tab = browser.open(link_of(there.url, there.token))
    tab.until("document.querySelectorAll('.height .row').length > 0")
    tab.get("location.hash = '#/live'")
    tab.until("document.body.innerText.includes('following')")
    looks, begun, events = [], time.perf_counter(), 0
    with Client(there.daemon.socket) as client:
        client.create("steady")
        for look in range(1, LOOKS + 1):
            while time.perf_counter() - begun < 60 * minutes * look / LOOKS:
                client.append("steady", text="x")
                client.save("steady")
                events += 2
                if events % 2000 == 0:  # before its context is full
                    client.delete("steady")
                    client.create("steady")
            looks.append(held(tab) | {"seconds": time.perf_counter() - begun, "events": events})
    return looks


def held(tab: Tab) -> dict[str, float]:
    """Bytes of the scripts, and nodes of the page."""
    held_bytes = tab.heap_bytes()
    return {"heap_bytes": held_bytes, "nodes": tab.get("document.querySelectorAll('*').length")}


def report(opens: list[dict[str, Any]], looks: list[dict[str, float]], version: str, out: Path) -> None:
    """The figures as JSON and as a plot, and a few lines for a person."""
    limits = {"paint_s": PAINT_LIMIT_S, "rows_s": ROWS_LIMIT_S}
    document = save("inspector", {"browser": version, "limits": limits, "opens": opens, "live": looks}, out)
    last = opens[-1]
    title = f"The rows of {last['sessions']:,} sessions are there after {last['seconds']['drawn']['median']:.2f} s"
    numbers = [each["sessions"] for each in opens]
    with panels(out / "inspector.png", document, title, (1, 2), (10.0, 4.2)) as (left, right):
        ways = (("drawn", OURS, "rows drawn"), ("paint", "tab:green", "first paint"), ("alone", PEER, "list alone"))
        for name, color, label in ways:
            told = [each["seconds"][name] for each in opens]
            left.plot(numbers, [each["median"] for each in told], "o-", color=color, label=label)
            left.fill_between(
                numbers, [each["lowest"] for each in told], [each["highest"] for each in told], color=color, alpha=0.15
            )
        left.axhline(PAINT_LIMIT_S, color="tab:green", linestyle=":")
        left.axhline(ROWS_LIMIT_S, color=OURS, linestyle=":")
        left.set(xlabel="sessions (dotted: the limits)", ylabel="seconds", xscale="log", yscale="log")
        left.legend()
        right.plot([each["seconds"] / 60 for each in looks], [each["heap_bytes"] / _MIB for each in looks], color=OURS)
        right.set(xlabel=f"minutes of the live view, {looks[-1]['events']:,.0f} requests", ylabel="MiB of its scripts")
        right.set_ylim(bottom=0)
    for each in opens:
        told = ", ".join(f"{name} {taken['median']:.3f}" for name, taken in each["seconds"].items())
        print(f"{each['sessions']:>6} sessions, s: {told}")
    half = [each["heap_bytes"] / _MIB for each in looks[len(looks) // 2 :]]
    print(f"live, second half of {looks[-1]['seconds']:.0f} s: {min(half):.2f} to {max(half):.2f} MiB; {version}")


def main() -> None:
    """Measure and report."""
    parser = parser_for(__doc__, ROUNDS)
    parser.add_argument("--minutes", type=float, help=f"of the live view ({MINUTES:g} unless told)")
    options = parser.parse_args()
    minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="tb", dir=options.folder)))
        there = ends.enter_context(serving(folder / "d", "--keep-free", "0"))
        browser = Browser(folder / "b")
        ends.callback(browser.end)
        version = browser.call("Browser.getVersion")["product"]
        opens = opening(browser, there, QUICK_SESSIONS if options.quick else SESSIONS, rounds_of(options))
        looks = living(browser, there, minutes)
    report(opens, looks, version, options.out)
    print(f"figures and plot in {options.out}")


if __name__ == "__main__":
    main()
