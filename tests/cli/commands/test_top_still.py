"""The still of `torpor top` in the documents is what it draws."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from torpor.cli.commands.top_screen import Top
from torpor.cli.view.live import Live
from torpor.cli.view.live_lines import head
from torpor.daemon.api.process import DiskInfo, MemoryInfo, ModelInfo, QueueInfo
from torpor.tests.cli.live_rig import event, info, reuse, screen_of, status
from torpor.tests.socket_api.server_rig import poll

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "look-into-memory.md"
MIB = 1 << 20
AT_S = 1_796_056_200  # 2026-11-30 16:30 UTC


def a_daemon_at_work() -> Live:
    now_s = iter(range(100))
    live = Live(lambda: next(now_s))
    model = ModelInfo("demo", "/m", "id", "float32", 10, True, 2048, weights_bytes=22 * MIB, sessions_awake=6)
    live.take_status(
        status(
            version="0.1.0",
            pid=31488,
            store="/home/me/.local/share/torpor/store",
            uptime_s=1053.0,
            models=(model,),
            sessions_awake=6,
            sessions_asleep=4,
            memory=MemoryInfo(40 * MIB, 22 * MIB, 10 * MIB, 0, 0, 0, 0),
            disk=DiskInfo(23 << 30, 100 << 30, 10 << 30, None, 4 * MIB, 5 << 30),
            queue=QueueInfo(1, 0, 512),
            prefix_hits=2,
            cached_tokens=512,
        )
    )
    asleep = {"state": "asleep", "resident_bytes": 0}
    for tokens in (23, 104):
        live.take_sessions(
            [
                info("w1", token_count=tokens, resident_bytes=3 * MIB // 2),
                info("w2", token_count=105, resident_bytes=3 * MIB // 2),
                info("a", token_count=442, written_bytes=2740000, **asleep),
            ]
        )
        if tokens == 23:
            live.take_event(event("first_token", "w1", AT_S * 10**9))
    live.take_event(
        event("wake_ended", "w2", (AT_S - 48) * 10**9, cause="asked", tokens=105, bytes_read=1090000, seconds=0.126)
    )
    live.take_event(
        event(
            "sleep_ended",
            "a",
            (AT_S - 11) * 10**9,
            cause="pressure",
            version=2,
            tokens=442,
            bytes_written=2740000,
            seconds=0.0279,
        )
    )
    live.take_reuses("torpor://default/agent-7a3fab21", [reuse((AT_S - 1062) * 10**9, "system_text")])
    return live


async def test_the_still_in_the_documents_is_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    app = Top(None, a_daemon_at_work(), follows=False)
    async with app.run_test(size=(80, 18)):
        await poll(lambda: "system_text at token 10" in "\n".join(screen_of(app)))
        drawn = "\n".join(line.rstrip() for line in screen_of(app))
    (still,) = re.findall(r"<!-- top: .*?-->\n```\n(.*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    print(drawn)  # what the page should have, where it has not
    assert drawn == still


@pytest.mark.parametrize("width", range(60, 141, 4))
def test_no_figure_is_cut_on_a_narrow_screen(width: int) -> None:
    lines = [line.plain for line in head(a_daemon_at_work(), width)][1:]
    assert [line for line in lines if "…" in line or len(line) > width] == []
    assert ("sessions 10.0 MiB" in lines[0]) == (width >= 84)
