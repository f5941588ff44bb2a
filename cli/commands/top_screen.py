"""The screen of `torpor top`, by textual: a list of which only the visible part is drawn, gauges above, and what
happened last below. Follows a daemon, also when it ends and comes back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Container
from textual.events import Paste
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input, Static

from ...daemon.api.events import NoticeEvent
from ...daemon.api.session import SessionInfo
from ...errors import TorporError
from ...memvid.units import format_bytes, format_count
from ...socket_api.client.aclient import AsyncClient
from ...socket_api.errors import DaemonUnreachable, RemoteError
from ..view.formatting import format_name
from ..view.live import READS, SORTS, Live
from ..view.live_lines import fitted, head, miss_line, move_line, panel, session_line, title_line
from ..view.output import plain

_DRAWN_S: Final = 0.25  # at most so often, however many events come
_ASKED_S: Final = 1.0
_STATUS_SHARE: Final = 0.2
_LISTED_SHARE: Final = 0.05
"""The part of the time that these answers may take: with many sessions they come rarely, and events tell what changes.
Where an event does not tell it all, a listing may come four times as soon."""
_RETRY_S: Final = 1.0
_MOST_WHY: Final = 5
_MOST_BEFORE: Final = 16  # sessions, used last, whose requests of before are asked for
_MOST_AT_WORK: Final = 1000
_SAID_S: Final = 8.0
_WIDE: Final = 110
_NO_ROOM: Final = 16  # lines of a screen that has the sessions alone


class Sessions(ScrollView, can_focus=True):
    """The list. Once somebody has chosen a session, it stays chosen wherever the order puts it."""

    BINDINGS: ClassVar = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home,g", "move(-1000000000)", show=False),
        Binding("end,G", "move(1000000000)", show=False),
    ]

    def __init__(self, live: Live, on_room: Callable[[], None]) -> None:
        """on_room: called when it has got another size."""
        super().__init__()
        self._live, self._on_room = live, on_room
        self._rows: list[SessionInfo] = []
        self._lines: list[Text] = []
        self._at = 0
        self._is_held = False

    @property
    def chosen(self) -> SessionInfo | None:
        """The session under the cursor."""
        return self._rows[self._at] if self._rows else None

    def on_resize(self) -> None:
        """Have the titles drawn for this width, too."""
        self._renew()
        self._on_room()

    def on_focus(self) -> None:
        """Show which session is chosen."""
        self._renew()

    def on_blur(self) -> None:
        """Show that keys go elsewhere."""
        self._renew()

    @property
    def columns(self) -> int:
        """The width of a line, beside the bar and a blank."""
        return max(1, self.scrollable_content_region.width - 1)

    def take(self, rows: list[SessionInfo]) -> None:
        """Show these, in this order."""
        chosen = self.chosen if self._is_held else None
        self._rows = rows
        if chosen is not None and (not rows or self._at >= len(rows) or rows[self._at].session != chosen.session):
            at = next((at for at, each in enumerate(rows) if each.session == chosen.session), self._at)
            self._at = max(0, min(at, len(rows) - 1))
        self.virtual_size = Size(0, len(rows))
        self._renew()

    def _visible(self) -> list[Text]:
        first, width = self.scroll_offset.y, self.columns
        lines = [session_line(self._live, each, width) for each in self._rows[first : first + self.size.height]]
        if self.has_focus and 0 <= self._at - first < len(lines):
            lines[self._at - first] = Text(lines[self._at - first].plain, style="reverse")
        return lines

    def _renew(self) -> None:
        """Have the visible part drawn; what is as it was is not sent to the terminal again."""
        lines = self._visible()
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Show another part."""
        super().watch_scroll_y(old_value, new_value)
        self._renew()

    def render_line(self, y: int) -> Strip:
        """One line of the visible part."""
        if y >= len(self._lines):
            return Strip.blank(self.size.width, self.rich_style)
        line = Strip(self._lines[y].render(self.app.console), self.columns).apply_style(self.rich_style)
        return line.extend_cell_length(self.size.width, self.rich_style)

    def action_move(self, by: int) -> None:
        """Choose another session."""
        self._is_held = True
        self._at = max(0, min(self._at + by, len(self._rows) - 1))
        self.scroll_to_region(Region(0, self._at, 1, 1), animate=False)
        self._renew()

    def action_page(self, by: int) -> None:
        """Choose one a page away."""
        self.action_move(by * max(1, self.size.height - 1))


class Top(App[None]):
    """The program. follows: whether it asks a daemon; a test gives it the state of its own."""

    CSS = """
    Screen { layout: vertical; background: ansi_default; color: ansi_default; }
    Static { height: auto; }
    #titles { height: 1; text-style: bold; margin-top: 1; }
    Sessions { height: 1fr; background: ansi_default; overflow-x: hidden; scrollbar-gutter: stable;
        scrollbar-size-vertical: 1; scrollbar-background: ansi_default; scrollbar-color: ansi_bright_black;
        scrollbar-background-hover: ansi_default; scrollbar-color-hover: ansi_white;
        scrollbar-background-active: ansi_default; scrollbar-color-active: ansi_white; }
    #below { height: auto; layout: vertical; }
    #below.wide { layout: horizontal; }
    #below Static { width: 1fr; }
    #below.wide #misses { margin-left: 2; }
    #keys { height: 1; }
    Input { display: none; height: 1; border: none; padding: 0; }
    Input.shown { display: block; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar = [
        Binding("q", "quit"),
        Binding("ctrl+c", "quit", priority=True),
        Binding("s", "sort"),
        Binding("r", "reverse"),
        Binding("slash", "filter", priority=True),  # before the next key is passed on
        Binding("escape", "unfilter"),
        Binding("z", "sleep"),
        Binding("w", "wake"),
    ]

    def __init__(self, socket: Path | None, live: Live | None = None, *, follows: bool = True) -> None:
        super().__init__(ansi_color=True)
        self._socket = socket
        self._live = live or Live()
        self._follows = follows
        self._changed = asyncio.Event()
        self._head, self._titles, self._keys = Static(), Static(id="titles"), Static(id="keys")
        self._moves, self._misses, self._below = Static(), Static(id="misses"), Container(id="below")
        self._sessions, self._filter = (
            Sessions(self._live, self._changed.set),
            Input(placeholder="part of a name, a label or a model"),
        )
        self._sort, self._reverse, self._holding = "activity", False, ""
        self._said: tuple[float, str] = (0.0, "")
        self._to_ask: dict[str, None] = {}
        self._knows_before = False
        self._at_work: dict[int, set[str]] = {}
        self._lists_now = asyncio.Event()

    def compose(self) -> ComposeResult:
        """Its parts, from above."""
        yield self._head
        yield self._titles
        yield self._sessions
        with self._below:
            yield self._moves
            yield self._misses
        yield self._filter
        yield self._keys

    def on_ready(self) -> None:
        """Begin to follow."""
        self._sessions.focus()
        self.run_worker(self._draw_on_change(), exclusive=False)
        if self._follows:
            self.run_worker(self._follow(), exclusive=False)
        self._changed.set()

    def on_resize(self) -> None:
        """Draw for another size."""
        self._changed.set()

    # --- drawing

    async def _draw_on_change(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self.draw()
            await asyncio.sleep(_DRAWN_S)

    def draw(self) -> None:
        """Draw what is known now."""
        width, height = self.size
        wide, small = width >= _WIDE, height < _NO_ROOM
        self._below.set_class(wide, "wide")
        self._below.display = not small
        _write(self._head, head(self._live, width, models=1 if height < 24 else 3))
        self._sessions.take(self._live.rows(self._sort, reverse=self._reverse, holding=self._holding))
        _write(self._titles, [title_line(self._sessions.columns or width, self._sort, reverse=self._reverse)])
        if not small:
            lines = max(3, min(8, height // (4 if wide else 6)))
            part = (width - 2) // 2 if wide else width
            moves = [move_line(each, part) for each in islice(self._live.moves, lines)]
            misses = [miss_line(each, part) for each in islice(self._live.misses, lines)]
            _write(self._moves, panel("sleeps and wakes", moves, lines, part, empty="none since this began"))
            _write(self._misses, panel("read again", misses, lines, part, empty="nothing that is known"))
        _write(self._keys, [self._last_line(width)])

    def _last_line(self, width: int) -> Text:
        at, said = self._said
        if time.monotonic() - at < _SAID_S and said:
            return fitted(said, width)
        keys = {"s": f"by {self._sort}", "r": "reverse", "/": "filter", "z": "sleep", "w": "wake", "q": "quit"}
        if self._holding:
            keys = {**keys, "/": f"filter: {plain(self._holding)}", "esc": "all"}
        return fitted("  ".join(f"[bold]{key}[/] [dim]{what}[/]" for key, what in keys.items() if what), width)

    def say(self, markup: str) -> None:
        """Tell something in the last line, for a while."""
        self._said = (time.monotonic(), markup)
        self._changed.set()
        self.set_timer(_SAID_S, self._changed.set)

    # --- keys

    def action_sort(self) -> None:
        """Sort by the next column."""
        names = list(SORTS)
        self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._changed.set()

    def action_reverse(self) -> None:
        """Sort the other way."""
        self._reverse = not self._reverse
        self._changed.set()

    def action_filter(self) -> None:
        """Ask for a part of a name."""
        self._filter.add_class("shown")
        self.screen.set_focus(self._filter)  # at once: what is typed behind it belongs to the filter

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A slash in the filter is a part of a name."""
        return action != "filter" or self.focused is not self._filter

    def on_paste(self, event: Paste) -> None:
        """Take a pasted slash for the key; in the filter, text is pasted by the filter itself."""
        first, *_ = event.text.splitlines() or [""]
        if first.startswith("/"):
            self.action_filter()
            self._filter.value = first[1:]

    def action_unfilter(self) -> None:
        """Show all sessions again."""
        self._filter.value = ""
        self._end_filter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Show what has this text."""
        self._holding = event.value
        self._changed.set()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Go back to the list."""
        self._end_filter()

    def _end_filter(self) -> None:
        self._filter.remove_class("shown")
        self._sessions.focus()
        self._changed.set()

    def action_sleep(self) -> None:
        """Put the chosen session to sleep."""
        self._act("sleep")

    def action_wake(self) -> None:
        """Wake the chosen session."""
        self._act("wake")

    def _act(self, verb: str) -> None:
        chosen = self._sessions.chosen
        if chosen is not None:
            self.say(f"{verb} {plain(format_name(chosen.session))} …")
            self.run_worker(self._ask_to(verb, chosen.session), exclusive=False)

    async def _ask_to(self, verb: str, session: str) -> None:
        name = plain(format_name(session))
        try:
            async with AsyncClient(self._socket) as client:
                if verb == "sleep":
                    slept = await client.sleep(session)
                    self.say(f"{name} sleeps: version {slept.version}, {format_bytes(slept.bytes_written)} written")
                else:
                    woken = await client.wake(session)
                    self.say(f"{name} is awake: {format_count(woken.token_count)} tokens")
        except (TorporError, OSError) as error:
            self.say(f"[red]{name}: {plain(error)}[/]")
        self._lists_now.set()

    # --- the daemon

    async def _follow(self) -> None:
        """Follow the daemon, and the next one on its socket, until the program ends."""
        while True:
            try:
                async with AsyncClient(self._socket) as client, client.events() as events:
                    self._live.take_status(await client.status())  # before a listing, which may take long
                    self._changed.set()
                    await self._until_one_ends(
                        self._listen(events), self._ask_status(client), self._ask_sessions(client)
                    )
                self._live.lose("no daemon")
            except DaemonUnreachable:
                self._live.lose("no daemon")
            except (TorporError, OSError) as error:
                self._live.lose(f"no answer ({error})")
            self._changed.set()
            await asyncio.sleep(_RETRY_S)

    async def _until_one_ends(self, *works: Coroutine[Any, Any, None]) -> None:
        """Do all until one ends. Raises as that one."""
        tasks = [asyncio.ensure_future(each) for each in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in tasks:
                each.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if isinstance(end, TorporError | OSError):
                raise end

    async def _listen(self, events: AsyncIterator[NoticeEvent]) -> None:
        async for event in events:
            if self._live.take_event(event):
                self._lists_now.set()
            self._note_request(event)
            self._changed.set()

    def _note_request(self, event: NoticeEvent) -> None:
        """Have the sessions asked that a request read or wrote: a transcript may go on in another than it named."""
        if event.request is None:
            return
        if event.session is not None:
            self._at_work.setdefault(event.request, set()).add(event.session)
        if event.name in ("request_finished", "request_failed"):
            worked = self._at_work.pop(event.request, set())
            if event.facts["verb"] in READS:
                self._to_ask |= dict.fromkeys(worked)
        while len(self._at_work) > _MOST_AT_WORK:
            del self._at_work[next(iter(self._at_work))]

    def _ask_of_before(self) -> None:
        """Have the sessions that were used last asked what they read again before this began; once."""
        if not self._knows_before:
            self._knows_before = True
            used = nlargest(
                _MOST_BEFORE, self._live.sessions.values(), key=lambda each: each.used_ns or each.slept_ns or 0
            )
            self._to_ask |= dict.fromkeys(each.session for each in used)

    async def _ask_status(self, client: AsyncClient) -> None:
        """Ask again and again for what holds now, and for what was read again."""
        while True:
            begun_s = time.monotonic()
            self._live.take_status(await client.status())
            pause_s = max(_ASKED_S, (time.monotonic() - begun_s) / _STATUS_SHARE)
            for session in list(self._to_ask)[:_MOST_WHY]:
                del self._to_ask[session]
                try:
                    self._live.take_reuses(session, (await client.why(session)).requests)
                except RemoteError as error:
                    if error.code != "session_not_found":  # it was deleted meanwhile
                        raise
            self._changed.set()
            await asyncio.sleep(pause_s)

    async def _ask_sessions(self, client: AsyncClient) -> None:
        """Ask again and again for all sessions, as often as their number lets; sooner if events tell too little."""
        while True:
            self._lists_now.clear()
            begun_s = time.monotonic()
            self._live.take_sessions(await client.list_sessions())
            self._ask_of_before()
            self._changed.set()
            pause_s = (time.monotonic() - begun_s) / _LISTED_SHARE
            await asyncio.sleep(max(_DRAWN_S, pause_s / 4))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(_ASKED_S, pause_s * 3 / 4)):
                    await self._lists_now.wait()


def _write(part: Static, lines: list[Text]) -> None:
    text = Text("\n").join(lines)
    if text != part.content:
        part.styles.height = len(lines)
        part.update(text)
