"""Which share of a sweep is done where not all of it is: another one at each commit, so that many prove more than one.

`TORPOR_SHARE=NUMBER` chooses it, to run again what failed.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import pytest

_BEARS_AN_ID = re.compile(r"_((qc|qx|gm|ms|lp|lv|br|t)\d+|threats?)(_|$)")


@functools.cache
def share() -> int:
    """A number that follows from the commit, at which a sweep begins, modulo its step; 0 where there is no git."""
    chosen = os.environ.get("TORPOR_SHARE")
    if chosen is not None:
        return int(chosen)
    try:
        command = ["git", "rev-parse", "--short=6", "HEAD"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 0
    return int(done.stdout, 16) if done.returncode == 0 else 0


def leave_to_other_commits(items: Iterable[pytest.Item]) -> None:
    """Mark as heavy what other commits do: of a test marked `one_in(N)` all cases but every 6N-th where its name bears
    an id of an invariant or of a threat, and all but every 24N-th where it bears none.

    They are counted in an order by chance: in their own, a parameter of two values would have the same one in all of a
    commit's cases. Where a commit begins to count differs from test to test, so that none does all first cases.
    """
    cases: dict[str, list[tuple[pytest.Item, int]]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is not None:
            cases[item.nodeid.partition("[")[0]].append((item, marker.args[0]))
    for test, its in cases.items():
        begins_at = share() + crc32(test.encode())
        times = 6 if _BEARS_AN_ID.search(test) else 24
        for number, (item, one_in) in enumerate(sorted(its, key=lambda one: crc32(one[0].nodeid.encode())), begins_at):
            if number % (times * one_in):
                item.add_marker(pytest.mark.heavy)
