"""The lines of `torpor top`, for any width: gauges, sessions, the last sleeps, wakes and misses. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from rich.cells import cell_len
from rich.text import Text

from ...daemon.api.events import NoticeEvent
from ...daemon.api.process import StatusResult
from ...daemon.api.session import SessionInfo
from ...memvid.units import format_bytes, format_count, format_plural
from .formatting import format_name, format_seconds, format_time
from .live import Live, Miss
from .output import plain

_FULL, _NEARLY = 0.95, 0.8
_BAR_CELLS: Final = 20
_STYLES: Final = {
    "writing": "bold green",
    "reading": "bold cyan",
    "waking": "cyan",
    "sleeping": "blue",
    "waiting": "yellow",
    "awake": "green",
    "asleep": "dim",
}


def head(live: Live, width: int, *, models: int = 2) -> list[Text]:
    """What holds for the whole daemon. models: how many of them have a line at most."""
    status = live.status
    if status is None:
        return [fitted(f"[yellow]{plain(live.trouble or '')}[/]", width)]
    up = format_seconds(status.uptime_s)
    first = f"[bold]torpor {plain(status.version)}[/]  {plain(status.store)}"
    right = f"[red]{plain(live.trouble)}[/]" if live.trouble else f"[dim]pid {status.pid}, up {up}[/]"
    lines = [_both(first, right, width), _memory(status, width)]
    if status.disk is not None:
        lines.append(_disk(status, width))
    lines.append(_work(live, status, width))
    return lines + [fitted(each, width) for each in _models(status, models)]


def _memory(status: StatusResult, width: int) -> Text:
    memory = status.memory
    used = memory.weights_bytes + memory.sessions_bytes + memory.branches_bytes + memory.reserved_bytes
    parts = {
        "models": memory.weights_bytes,
        "sessions": memory.sessions_bytes,
        "branches": memory.branches_bytes,
        "reserved": memory.reserved_bytes,
    }
    told = [f"{name} {format_bytes(size)}" for name, size in parts.items() if size]
    return _gauge("memory", used, memory.budget_bytes, told, width)


def _disk(status: StatusResult, width: int) -> Text:
    disk = status.disk
    assert disk is not None
    free = [f"{format_bytes(disk.free_bytes)} free on the disk"]
    if disk.store_budget_bytes is None or disk.held_bytes is None:
        return _gauge("disk", disk.total_bytes - disk.free_bytes, disk.total_bytes, free, width)
    return _gauge("store", disk.held_bytes, disk.store_budget_bytes, free, width)


def _gauge(name: str, used: int, most: int, told: Sequence[str], width: int) -> Text:
    share = used / most if most else 0.0
    color = "red" if share >= _FULL else "yellow" if share >= _NEARLY else "green"
    cells = max(6, min(_BAR_CELLS, width // 5))
    filled = min(cells, round(share * cells) or (1 if used else 0))
    bar = f"[{color}]{'━' * filled}[/][dim]{'─' * (cells - filled)}[/]"
    line = f"{name:<7} {bar} {format_bytes(used)} of {format_bytes(most)}"
    return _with_what_fits(line, told, width)


def _with_what_fits(line: str, parts: Sequence[str], width: int) -> Text:
    """A line with as many of the parts, dim, as it has room for: none is cut."""
    fits = fitted(line, width)
    for count in range(1, len(parts) + 1):
        longer = Text.from_markup(f"{line}  [dim]{', '.join(parts[:count])}[/]")
        if longer.cell_len > width:
            break
        fits = longer
    return fits


def _work(live: Live, status: StatusResult, width: int) -> Text:
    queue, memory = status.queue, status.memory
    pace = sum(live.pace_of(name) for name, doing in live.doing.items() if doing == "writing")
    waiting = f"[yellow]{queue.waiting} waiting[/]" if queue.waiting else "none waiting"
    parts = [
        f"{format_count(status.sessions_awake)} awake, {format_count(status.sessions_asleep)} asleep",
        waiting + (f" ({memory.waiting} for memory)" if memory.waiting else ""),
        f"{pace:,.0f} tokens/s" if pace else "",
    ]
    hits = [f"{format_count(status.prefix_hits)} hits", f"{format_count(status.cached_tokens)} tokens taken over"]
    if memory.slept_by_pressure:
        hits.append(f"{format_count(memory.slept_by_pressure)} slept to make room")
    return _with_what_fits("work    " + "  ".join(filter(None, parts)), hits, width)


def _models(status: StatusResult, most: int) -> Iterator[str]:
    shown = sorted(status.models, key=lambda each: (not each.resident, not each.loading))
    for each in shown[: most if len(shown) <= most else most - 1]:
        state = "loading" if each.loading else format_bytes(each.weights_bytes) if each.resident else "not loaded"
        awake = f"  {each.sessions_awake} awake" if each.sessions_awake else ""
        problem = f"  [red]{plain(each.problem)}[/]" if each.problem else ""
        yield f"model   {plain(each.name)}  {state}{awake}{problem}"
    if len(shown) > most:
        yield f"[dim]        and {format_plural(len(shown) - most + 1, 'other model')}[/]"


# --- sessions


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the sessions. cells: its width; from_width: the narrowest screen that has it. sort: its sort."""

    title: str
    cells: int
    from_width: int
    sort: str
    cell: Callable[[Live, SessionInfo], str]
    justify: Literal["left", "right"] = "right"


def _state(live: Live, info: SessionInfo) -> str:
    state = live.doing.get(info.session, info.state)
    return f"[{_STYLES.get(state, 'default')}]{plain(state)}[/]"


def _pace(live: Live, info: SessionInfo) -> str:
    pace = live.pace_of(info.session)
    style = "bold" if live.doing.get(info.session) == "writing" else "dim"
    return f"[{style}]{pace:,.0f}[/]" if pace else ""


def _size(size: int) -> str:
    return format_bytes(size) if size else "[dim]–[/]"


COLUMNS: Final = (
    Column("STATE", 8, 0, "activity", _state, "left"),
    Column("TOK/S", 6, 0, "rate", _pace),
    Column("TOKENS", 9, 0, "tokens", lambda _, info: format_count(info.token_count)),
    Column("MEMORY", 9, 61, "memory", lambda _, info: _size(info.resident_bytes)),
    Column("WRITTEN", 9, 73, "disk", lambda _, info: _size(info.written_bytes)),
    Column("MODEL", 16, 97, "", lambda _, info: plain(info.model), "left"),
    Column("LAST VERSION", 16, 115, "", lambda _, info: format_time(info.slept_ns), "left"),
    Column("LABELS", 20, 137, "", lambda _, info: plain(" ".join(info.labels)), "left"),
)


def title_line(width: int, sort: str, *, reverse: bool) -> Text:
    """The titles of the columns; the one that sorts has an arrow."""
    arrow = "▴" if reverse != (sort == "name") else "▾"
    name = f"SESSION{arrow if sort == 'name' else ''}"
    return _row(name, width, lambda column: f"{column.title}{arrow if column.sort == sort else ''}")


def session_line(live: Live, info: SessionInfo, width: int) -> Text:
    """A session."""
    return _row(plain(format_name(info.session)), width, lambda column: column.cell(live, info))


def _row(name: str, width: int, cell: Callable[[Column], str]) -> Text:
    columns = [column for column in COLUMNS if width >= column.from_width]
    rest = sum(column.cells + 1 for column in columns)
    line = _cell(name, max(8, width - rest), "left")
    for column in columns:
        line.append(" ")
        line.append_text(_cell(cell(column), column.cells, column.justify))
    line.truncate(width, pad=True)
    return line


def _cell(markup: str, cells: int, justify: Literal["left", "right"]) -> Text:
    text = Text.from_markup(markup)
    text.truncate(cells, overflow="ellipsis")
    text.pad_left(cells - text.cell_len) if justify == "right" else text.pad_right(cells - text.cell_len)
    return text


# --- what happened


def move_line(event: NoticeEvent, width: int) -> Text:
    """A sleep or a wake that has ended."""
    facts, when = event.facts, _clock(event.time_ns)
    stage, _, end = event.name.partition("_")
    seconds = format_seconds(float(facts.get("seconds") or 0))
    what = f"[{'blue' if stage == 'sleep' else 'cyan'}]{stage:<5}[/]"
    if end == "failed":
        told = f"[red]failed: {plain(facts.get('code'))}[/]"
    else:
        size = facts.get("bytes_written" if stage == "sleep" else "bytes_read")
        told = f"{format_bytes(int(size or 0))} in {seconds}"
    cause = plain(facts.get("cause"))
    return fitted(f"[dim]{when}[/] {what} {plain(format_name(event.session or ''))}  [dim]{cause}[/]  {told}", width)


def miss_line(miss: Miss, width: int) -> Text:
    """A request that read again."""
    tokens = f"{format_plural(miss.tokens, 'token')}  " if miss.tokens else ""
    when, name = _clock(miss.at_ns), plain(format_name(miss.session))
    return fitted(f"[dim]{when}[/] {name}  {tokens}[yellow]{plain(miss.cause)}[/]", width)


def panel(title: str, lines: list[Text], height: int, width: int, *, empty: str) -> list[Text]:
    """A title with a rule, and so many of the lines as there is room for; always of that height."""
    rule = Text(f"{title} ", style="bold")
    rule.append("─" * max(0, width - rule.cell_len), style="dim")
    shown = lines[: height - 1] or [fitted(f"[dim]{empty}[/]", width)]
    return [rule, *shown, *[Text()] * (height - 1 - len(shown))]


def fitted(markup: str, width: int) -> Text:
    """A line that is cut at a width."""
    text = Text.from_markup(markup)
    text.truncate(width, overflow="ellipsis")
    return text


def _both(left: str, right: str, width: int) -> Text:
    """Two texts at both ends of a line; the left one is cut first."""
    last = fitted(right, width)
    room = width - last.cell_len - 1
    if room < cell_len("torpor"):
        return last
    first = fitted(left, room)
    first.pad_right(room + 1 - first.cell_len)
    return first.append_text(last)


def _clock(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).astimezone().strftime("%H:%M:%S")
