"""`torpor top` on a screen of its own without a terminal: what it draws, its keys, and a daemon that goes and comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.events import Key, Paste
from torpor.cli.commands import top_screen
from torpor.cli.commands.top_screen import Top
from torpor.cli.view.live import Live
from torpor.daemon.events.events import FirstToken, PrefillBegan, SleepEnded
from torpor.memvid.uri import SessionUri
from torpor.socket_api.client.client import Client
from torpor.tests.cli.cli_rig import Torpor, pretend_terminal
from torpor.tests.cli.live_rig import event, info, reuse, screen_of, status
from torpor.tests.socket_api.server_rig import ServerThread, poll


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_DRAWN_S", "_ASKED_S", "_RETRY_S"):
        monkeypatch.setattr(top_screen, name, 0.01)


async def shows(app: Top, what: str | Callable[[str], bool]) -> None:
    """Wait until the screen has a text."""
    found = what if callable(what) else lambda text: what in text
    try:
        await poll(lambda: found("\n".join(screen_of(app))))
    except TimeoutError:
        raise AssertionError(f"{what!r} is not on the screen:\n" + "\n".join(screen_of(app))) from None


def columns_of(text: str) -> list[str]:
    """The titles of the list."""
    titles = next((line for line in text.splitlines() if line.startswith("SESSION")), "")
    return titles.replace("LAST VERSION", "LAST_VERSION").split()


def a_live(sessions: int = 3) -> Live:
    live = Live()
    live.take_status(status())
    live.take_sessions([info(f"s{number:05}", token_count=number) for number in range(sessions)])
    live.take_event(event("sleep_ended", "s00001", cause="idle", version=2, bytes_written=2048, seconds=0.25))
    live.take_reuses("torpor://default/s00002", [reuse(5, "clock")])
    return live


@pytest.mark.parametrize(("size", "columns"), [((60, 20), 3), ((80, 24), 5), ((140, 40), 8)])
async def test_all_of_it_stands_on_screens_of_any_size(size: tuple[int, int], columns: int) -> None:
    app = Top(None, a_live(), follows=False)
    async with app.run_test(size=size):
        await shows(app, lambda text: "clock at token 10" in text and len(columns_of(text)) == columns + 1)
        lines = screen_of(app)
    assert (len(lines), {len(line) for line in lines}) == (size[1], {size[0]})
    text = "\n".join(lines)
    for part in ("memory  ━", "store   ━", "work    2 awake", "model   demo", "idle  2.00 KiB", "clock at token 10"):
        assert part in text
    assert lines[-1].startswith("s by activity  r reverse  / filter  z sleep  w wake  q quit")


async def test_of_ten_thousand_sessions_the_visible_ones_alone_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    line = top_screen.session_line
    monkeypatch.setattr(
        top_screen, "session_line", lambda live, row, width: drawn.append(row.name) or line(live, row, width)
    )
    app = Top(None, a_live(10_000), follows=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(app, "s00001")
        assert len(set(drawn)) < 24
        await pilot.press("s", "end")
        await shows(app, "s09999")
        await pilot.press("home", "pagedown")
        await shows(app, "s00005")
        assert len(set(drawn)) < 100


async def test_it_fits_itself_to_a_screen_that_changes() -> None:
    app = Top(None, a_live(), follows=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(app, "WRITTEN")
        await pilot.resize_terminal(60, 14)
        await shows(app, lambda text: "WRITTEN" not in text and "sleeps and wakes" not in text and "s00002" in text)
        assert {len(line) for line in screen_of(app)} == {60}
        await pilot.resize_terminal(150, 40)
        await shows(app, lambda text: "LABELS" in text and "sleeps and wakes" in text)


@pytest.mark.one_in(1)
async def test_keys_sort_reverse_and_filter_and_the_chosen_session_stays_chosen() -> None:
    app = Top(None, a_live(), follows=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(app, "s00001")
        await pilot.press("s", "s")
        await shows(app, "s by tokens")
        assert [line[8:14] for line in screen_of(app) if line.startswith("default/")] == ["s00002", "s00001", "s00000"]
        await pilot.press("down", "down")
        assert app._sessions.chosen == app._live.sessions["torpor://default/s00000"]
        await pilot.press("r")
        await shows(app, lambda text: text.index("s00000") < text.index("s00002"))
        assert app._sessions.chosen == app._live.sessions["torpor://default/s00000"]
        await pilot.press("slash", *"0002", "enter")
        await shows(app, "filter: 0002")
        assert [line[8:14] for line in screen_of(app) if line.startswith("default/")] == ["s00002"]
        await pilot.press("escape")
        await shows(app, "s00000")
        await pilot.press("slash", *"nothing", "enter")
        await shows(app, lambda text: "default/" not in text.partition("sleeps and wakes")[0])
        assert app._sessions.chosen is None
        await pilot.press("z", "w", "up", "end", "q")
    assert app.return_value is None


async def test_a_filter_is_taken_whole_however_fast_it_is_typed_or_pasted() -> None:
    app = Top(None, a_live(), follows=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await shows(app, "s00001")
        for key in ("slash", "t", "slash", "s", "0", "0", "0", "0", "1", "enter"):
            app.post_message(Key(key, "/" if key in ("slash", "/") else key if len(key) == 1 else None))
        await shows(app, "filter: t/s00001")
        await pilot.press("escape")
        app.post_message(Paste("/00002"))
        await shows(app, lambda text: "s00002" in text and "s00001" not in text.partition("sleeps and wakes")[0])
        await pilot.press("enter")
        await shows(app, "filter: 00002")


@pytest.mark.one_in(1)
async def test_it_follows_a_daemon_and_sleeps_and_wakes_what_is_chosen(daemon: ServerThread) -> None:
    with Client(daemon.socket_path) as client:
        client.append("agent", text="one two three", create=True)
        daemon.service.also("why", requests=(reuse(5, "clock", became="rewound"),))
        app = Top(daemon.socket_path)
        async with app.run_test(size=(100, 30)) as pilot:
            await shows(app, "clock at token 10")  # of before
            await shows(app, "default/agent")
            await pilot.press("z")
            await shows(app, "default/agent sleeps: version 1")
            await shows(app, lambda text: "asleep" in text.partition("sleeps and wakes")[0])
            await pilot.press("w")
            await shows(app, "default/agent is awake: 3 tokens")
            uri = SessionUri("default", "agent")
            daemon.do(lambda: daemon.service.bus.publish(SleepEnded(uri, "idle", 2, 3, 4096, 8192, 1, 0, 0.25)))
            await shows(app, "idle  4.00 KiB in 250 ms")
            daemon.do(lambda: daemon.service.bus.publish(FirstToken(uri, 0.1)))
            await shows(app, "writing")
            daemon.do(lambda: work_in_another(daemon, uri, SessionUri("default", "fork")))
            asked = [("why", {"session": "torpor://default/fork"})]
            await poll(lambda: asked == [each for each in daemon.service.calls if each in asked])
            client.delete("agent")
            await pilot.press("z")
            await shows(app, "default/agent: ")
    await asyncio.to_thread(daemon.wait_until, lambda: not daemon.service.bus.is_watched)


def work_in_another(daemon: ServerThread, named: SessionUri, other: SessionUri) -> None:
    """As a transcript whose request goes on in a fork."""
    with daemon.service.bus.request("converse", lambda: named):
        daemon.service.bus.publish(PrefillBegan(other, 3))


@pytest.mark.one_in(1)
async def test_a_daemon_that_is_lost_is_told_and_the_next_one_is_followed(short_path: Path) -> None:
    first = ServerThread(short_path / "x.sock")
    with Client(first.socket_path) as client:
        client.append("before", text="one", create=True)
    app = Top(first.socket_path)
    async with app.run_test(size=(100, 30)):
        await shows(app, "default/before")
        await asyncio.to_thread(first.stop)
        await shows(app, "no daemon since ")
        assert any("default/before" in line for line in screen_of(app)), "what was known stays"
        second = ServerThread(first.socket_path)
        try:
            await shows(app, lambda text: "no daemon" not in text and "default/before" not in text)
        finally:
            await asyncio.to_thread(second.stop)


def test_without_a_terminal_or_a_daemon_it_says_what_there_is(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = torpor("top")
    assert (ran.status, "torpor stats" in ran.err, "torpor events" in ran.err) == (2, True, True)
    pretend_terminal(monkeypatch, 80)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(Top, "run", fail)
    ran = torpor("top", "--socket", str(tmp_path / "nobody"))
    assert (ran.status, "torpor ensure" in ran.err or "torpor serve" in ran.err) == (12, True)


def fail(*_: Any) -> None:
    raise AssertionError("there is nothing to draw")
