"""The daemon's events as a trace that Perfetto opens (https://ui.perfetto.dev): a track a session, with a slice for
each request and what it did, and an arrow from slice to slice of one request. It has names and sizes, and no text.

Owns the few fields of Perfetto's protobuf that this takes, by their numbers in github.com/google/perfetto,
`protos/perfetto/trace/`: `trace_packet.proto`, `clock_snapshot.proto`, and of `track_event/` `track_event.proto`,
`track_descriptor.proto` and `debug_annotation.proto`. Pure: gives bytes, and writes nothing. A trace is whole behind
each event.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from ...daemon.api.events import NoticeEvent
from .formatting import format_name

Fact = str | int | float | bool | None

BEGINS: Final[Mapping[str, str]] = {
    "sleep_began": "sleep",
    "wake_began": "wake",
    "prefill_began": "read",
    "memory_awaited": "wait for memory",
    "model_load_began": "load model",
    "request_queued": "wait for its turn",
}
"""The events that begin a slice, and its name."""

ENDS: Final[Mapping[str, str]] = {
    "sleep_ended": "sleep",
    "sleep_failed": "sleep",
    "wake_ended": "wake",
    "wake_failed": "wake",
    "prefill_ended": "read",
    "memory_granted": "wait for memory",
    "model_loaded": "load model",
    "model_load_failed": "load model",
    "decode_ended": "write",
}
"""The events that end one. What has no beginning in the trace, as a writing, began so many `seconds` before."""

_TURN: Final = BEGINS["request_queued"]  # ended by whatever the request does next
_LAST: Final = frozenset(("request_finished", "request_failed"))
_LEFT_OUT: Final = frozenset(("prefill_progress", "model_download_progress"))
_PROCESS, _SEQUENCE = 1, 1
_BEGIN, _END, _INSTANT = 1, 2, 3
_REALTIME, _BOOTTIME = 1, 6


@dataclass(slots=True)
class _Lane:
    """One track, on which slices nest: that of a request in a session, or of what the daemon does with it by itself.
    The tracks of a session have one name, so that Perfetto draws them together. since_ns: from when on it has it;
    latest_ns: when a slice last began or ended."""

    track: int
    since_ns: int
    latest_ns: int
    open: list[str] = field(default_factory=list)


class Trace:
    """A trace as it grows. Times are the daemon's monotonic clock."""

    def __init__(self) -> None:
        self._began_ns: int | None = None
        self._free: dict[str, list[tuple[int, int]]] = {}  # by name: tracks, and since when nothing happens there
        self._lanes: dict[int | None, dict[str, _Lane]] = {}  # by request and name
        self._made = _PROCESS

    def packets(self, event: NoticeEvent) -> bytes:
        """The bytes that an event adds; the first bring the trace's beginning. `b""` where it adds none."""
        return b"".join(self._packets(event))

    def _packets(self, event: NoticeEvent) -> Iterator[bytes]:
        now_ns = round(event.monotonic_s * 1e9)
        if self._began_ns is None:
            self._began_ns = now_ns
            yield _beginning(now_ns, event.time_ns)
        if event.name in _LEFT_OUT:
            return
        model = event.facts.get("model")
        where = format_name(event.session) if event.session else f"model {model}" if model else "daemon"
        lane = self._lanes.setdefault(event.request, {}).get(where)
        if lane is None:
            made, lane = self._lane(where, event.request)
            yield made
        now_ns = max(now_ns, lane.latest_ns)
        if lane.open[-1:] == [_TURN]:
            lane.open.pop()
            yield _event(lane.track, now_ns, _END)
        yield from self._slices(event, lane, now_ns)
        if event.name in _LAST and event.request is not None:
            for name, ended in self._lanes.pop(event.request).items():
                self._free[name].append((ended.track, ended.latest_ns))

    def _slices(self, event: NoticeEvent, lane: _Lane, now_ns: int) -> Iterator[bytes]:
        flow, facts = event.request, event.facts
        began = str(facts["verb"]) if event.name == "request_accepted" else BEGINS.get(event.name)
        if began is not None:
            lane.open.append(began)
            category = "request" if event.name == "request_accepted" else "stage"
            yield _event(lane.track, now_ns, _BEGIN, began, flow, facts, category=category)
            lane.latest_ns = now_ns
        elif event.name in _LAST:
            yield from self._end(lane, now_ns, str(facts["verb"]), lane.since_ns, event)
        elif event.name in ENDS:
            yield from self._end(lane, now_ns, ENDS[event.name], lane.latest_ns, event)
        else:
            yield _event(lane.track, now_ns, _INSTANT, event.name, flow, facts, category="event")

    def _lane(self, where: str, request: int | None) -> tuple[bytes, _Lane]:
        """A track of that name where nothing happens now, and the packet that makes it, if it is new."""
        free = self._free.setdefault(where, [])
        made = b""
        if not free:
            assert self._began_ns is not None
            self._made += 1
            free.append((self._made, self._began_ns))
            made = _packet(_bytes(60, _number(1, self._made) + _text(2, where) + _number(5, _PROCESS)))
        track, since_ns = free.pop()
        lane = self._lanes[request][where] = _Lane(track, since_ns, since_ns)
        return made, lane

    def _end(self, lane: _Lane, now_ns: int, name: str, earliest_ns: int, event: NoticeEvent) -> Iterator[bytes]:
        """End a slice, and what is open within it. One that has not begun here began so many seconds before."""
        if name not in lane.open:
            seconds = event.facts.get("seconds")
            begun_ns = now_ns - round(seconds * 1e9) if isinstance(seconds, int | float) else now_ns
            category = "request" if event.name in _LAST else "stage"
            yield _event(lane.track, max(begun_ns, earliest_ns), _BEGIN, name, event.request, category=category)
            lane.open.append(name)
        while lane.open[-1] != name:
            lane.open.pop()
            yield _event(lane.track, now_ns, _END)
        lane.open.pop()
        yield _event(lane.track, now_ns, _END, facts=event.facts)
        lane.latest_ns = now_ns


def _beginning(now_ns: int, time_ns: int) -> bytes:
    """The daemon's process, and which time of the day the first event has."""
    times = ((_BOOTTIME, now_ns), (_REALTIME, time_ns))
    clocks = [_bytes(1, _number(1, clock) + _number(2, at)) for clock, at in times]
    process = _number(1, 1) + _text(6, "torpor")
    return _packet(_number(13, 1) + _bytes(6, b"".join(clocks))) + _packet(
        _bytes(60, _number(1, _PROCESS) + _bytes(3, process))
    )


def _event(
    track: int,
    at_ns: int,
    kind: int,
    name: str | None = None,
    flow: int | None = None,
    facts: Mapping[str, Fact] | None = None,
    *,
    category: str = "stage",
) -> bytes:
    """A packet. category: `request`, `stage` or `event`, so that a verb `sleep` is told from the sleep within it."""
    fields = [_number(9, kind), _number(11, track)]
    if name is not None:
        fields += [_text(22, category), _text(23, name)]
    if flow is not None:
        fields.append(_tag(47, 1) + struct.pack("<Q", flow))
    fields += [_bytes(4, _text(10, each) + _fact(value)) for each, value in (facts or {}).items() if value is not None]
    return _packet(_number(8, at_ns) + _bytes(11, b"".join(fields)))


def _fact(value: Fact) -> bytes:
    if isinstance(value, bool):
        return _number(2, value)
    if isinstance(value, int):
        return _number(4, value)
    return _tag(5, 1) + struct.pack("<d", value) if isinstance(value, float) else _text(6, str(value))


def _packet(content: bytes) -> bytes:
    return _bytes(1, _number(10, _SEQUENCE) + content)


# --- protobuf's wire: https://protobuf.dev/programming-guides/encoding


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _number(number: int, value: int) -> bytes:
    return _tag(number, 0) + _varint(value)


def _bytes(number: int, value: bytes) -> bytes:
    return _tag(number, 2) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _bytes(number, value.encode())
