"""No request holds the loop: everybody else's streams, health checks and requests wait as long as one does."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.socket_api.requests_at_limits import MANY_BYTES, MANY_MESSAGES, asked

MOST_S = 0.05
"""For which a request may keep the loop. What the loop's thread computed counts: not the wait for a core or for
another thread, which a machine with much to do makes long."""

CHEAP = ("messages/count_tokens", "many names", "10,000 tools")


@pytest.mark.one_in(1)
def test_no_large_body_holds_the_loop(short_path: Path) -> None:
    assert held(short_path, CHEAP, messages=MANY_MESSAGES, many_bytes=MANY_BYTES // 8) == []


@pytest.mark.heavy
def test_no_request_at_its_limits_holds_the_loop(short_path: Path) -> None:
    assert held(short_path, (), messages=MANY_MESSAGES, many_bytes=MANY_BYTES) == []


def held(folder: Path, steps: tuple[str, ...], *, messages: int, many_bytes: int) -> list[str]:
    """The steps that held the loop, each with the place."""
    with asked(folder, messages=messages, many_bytes=many_bytes) as requests:
        done = list(requests.done(steps))
    assert len(done) >= len(steps)
    return [
        f"{step.step}: {gap.computed_s:.3f} s in {gap.stack[-4:]}"
        for step in done
        for gap in step.gaps
        if min(gap.seconds, gap.computed_s) > MOST_S
    ]
