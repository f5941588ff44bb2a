"""Traces for Perfetto: its own classes read them back, slices nest, and each request is one flow. Where its trace
processor is at hand (TORPOR_TRACE_PROCESSOR names the program), its query gives the same."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb
from torpor.cli.view.perfetto import BEGINS, ENDS, Trace
from torpor.daemon.api.events import NoticeEvent
from torpor.daemon.events.events import EVENT_NAMES

_PROCESSOR: Final = os.environ.get("TORPOR_TRACE_PROCESSOR")
_QUERY: Final = """
select track.name as track, slice.name as name, slice.ts / 1000000 as ts, slice.dur / 1000000 as dur
from slice join track on slice.track_id = track.id
where slice.category = 'stage' order by slice.ts
"""


def notice(at_ms: int, name: str, session: str | None, request: int | None, **facts: Any) -> NoticeEvent:
    uri = session and f"torpor://default/{session}"
    return NoticeEvent(name, at_ms, at_ms / 1000, 1_700_000_000_000_000_000 + at_ms, request, uri, facts)


SCRIPT: Final = (
    notice(1000, "subscribed", None, None),
    notice(1000, "request_accepted", "a", 1, verb="sleep"),
    notice(1010, "sleep_began", "a", 1, cause="asked", tokens=9),
    notice(1030, "sleep_ended", "a", 1, cause="asked", version=1, tokens=9, seconds=0.02),
    notice(1031, "request_finished", "a", 1, verb="sleep", seconds=0.031),
    # a wake, for which another session has to sleep; a second request waits for its turn meanwhile
    notice(1100, "request_accepted", "a", 2, verb="chat"),
    notice(1101, "memory_awaited", "a", 2, wanted_bytes=10, free_bytes=1, ahead=0),
    notice(1102, "sleep_began", "b", 2, cause="pressure", tokens=5),
    notice(1103, "request_accepted", "a", 3, verb="chat"),
    notice(1103, "request_queued", "a", 3, ahead=1),
    notice(1120, "sleep_failed", "b", 2, cause="pressure", code="no_space", seconds=0.018),
    notice(1121, "memory_granted", "a", 2, wanted_bytes=10, granted=True, seconds=0.02),
    notice(1122, "wake_began", "a", 2, cause="asked", version=None),
    notice(1150, "wake_ended", "a", 2, cause="asked", version=1, canary="exact", seconds=0.028),
    notice(1160, "first_token", "a", 2, seconds=0.06),
    notice(1200, "decode_ended", "a", 2, tokens=4, seconds=0.045),
    notice(1201, "request_finished", "a", 2, verb="chat", seconds=0.1),
    notice(1202, "prefill_began", "a", 3, tokens=3),
    notice(1203, "prefill_progress", "a", 3, done_tokens=1, total_tokens=3),
    notice(1204, "prefill_ended", "a", 3, tokens=3, seconds=0.002),
    notice(1205, "request_failed", "a", 3, verb="chat", code="cancelled", seconds=0.1),
    notice(1300, "sleep_began", "a", None, cause="idle", tokens=20),
    notice(1310, "sleep_ended", "a", None, cause="idle", version=2, seconds=0.01),
)
STAGES: Final = [
    ("default/a", "sleep", 1010, 20),
    ("default/a", "wait for memory", 1101, 20),
    ("default/b", "sleep", 1102, 18),
    ("default/a", "wait for its turn", 1103, 99),
    ("default/a", "wake", 1122, 28),
    ("default/a", "write", 1155, 45),
    ("default/a", "read", 1202, 2),
    ("default/a", "sleep", 1300, 10),
]


def trace_of(*events: NoticeEvent) -> bytes:
    trace = Trace()
    return b"".join(trace.packets(event) for event in events)


class Read:
    """A trace as Perfetto's classes read it: its slices, which have to nest on each track."""

    def __init__(self, raw: bytes) -> None:
        self.trace = pb.Trace.FromString(raw)
        tracks = {
            each.track_descriptor.uuid: each.track_descriptor.name
            for each in self.trace.packet
            if each.HasField("track_descriptor")
        }
        self.slices: list[dict[str, Any]] = []
        self.instants: list[str] = []
        self.open: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for packet in sorted((each for each in self.trace.packet if each.HasField("track_event")), key=_when):
            event, at_ms = packet.track_event, packet.timestamp / 1e6
            if event.type == pb.TrackEvent.TYPE_INSTANT:
                assert list(event.categories) == ["event"]
                self.instants.append(event.name)
            elif event.type == pb.TrackEvent.TYPE_SLICE_BEGIN:
                begun = {"track": tracks[event.track_uuid], "name": event.name, "ts": at_ms, "flows": event.flow_ids}
                begun["category"] = event.categories[0]
                self.slices.append(begun)
                self.open[event.track_uuid].append(begun)
            else:
                ended = self.open[event.track_uuid].pop()
                ended["dur"] = at_ms - ended["ts"]
                ended["facts"] = {each.name: _value(each) for each in event.debug_annotations}

    def stages(self) -> list[tuple[str, str, int, int]]:
        found = [each for each in self.slices if each["category"] == "stage"]
        return [(each["track"], each["name"], round(each["ts"]), round(each["dur"])) for each in found]


def _when(packet: Any) -> int:
    return int(packet.timestamp)


def _value(annotation: Any) -> Any:
    return getattr(annotation, annotation.WhichOneof("value"))


def test_a_scripted_run_has_its_sleeps_wakes_reads_writes_and_waits() -> None:
    read = Read(trace_of(*SCRIPT))
    assert read.stages() == STAGES
    assert not any(read.open.values())
    requests = [(each["name"], each["ts"], round(each["dur"])) for each in read.slices if each["category"] == "request"]
    assert requests == [("sleep", 1000, 31), ("chat", 1100, 101), ("chat", 1103, 102)]
    assert read.instants == ["subscribed", "first_token"]
    assert read.slices[1]["facts"] == {"cause": "asked", "version": 1, "tokens": 9, "seconds": 0.02}


def test_one_request_is_one_flow_also_where_another_session_sleeps_for_it() -> None:
    flows = {(each["track"], each["name"]) for each in Read(trace_of(*SCRIPT)).slices if list(each["flows"]) == [2]}
    assert flows == {
        *(("default/a", name) for name in ("chat", "wait for memory", "wake", "write")),
        ("default/b", "sleep"),
    }


def test_the_time_of_day_stands_beside_the_clock_and_the_tracks_are_of_one_process() -> None:
    packets = Read(trace_of(*SCRIPT)).trace.packet
    assert [(each.clock_id, each.timestamp) for each in packets[0].clock_snapshot.clocks] == [
        (pb.BUILTIN_CLOCK_BOOTTIME, 1_000_000_000),
        (pb.BUILTIN_CLOCK_REALTIME, 1_700_000_000_000_001_000),
    ]
    described = [each.track_descriptor for each in packets if each.HasField("track_descriptor")]
    assert described[0].process.process_name == "torpor"
    assert {each.parent_uuid for each in described[1:]} == {described[0].uuid}
    assert len([each for each in described if each.name == "default/a"]) == 2, "as many as work at once, and no more"


def test_a_trace_that_begins_in_the_midst_clips_what_had_begun() -> None:
    read = Read(trace_of(*SCRIPT[3:5], *SCRIPT[15:17]))
    assert [(each["name"], round(each["ts"]), round(each["dur"])) for each in read.slices] == [
        *(("sleep", 1030, 0), ("sleep", 1030, 1)),
        *(("chat", 1101, 100), ("write", 1155, 45)),
    ]
    assert not any(read.open.values())


def test_a_trace_is_whole_behind_each_event_and_tells_no_hostile_name_apart() -> None:
    raw = b""
    trace = Trace()
    for event in (*SCRIPT, notice(1400, "request_accepted", "\x1b[31m☃" * 40, 9, verb="chat")):
        raw += trace.packets(event)
        pb.Trace.FromString(raw)
    assert Read(raw).slices[-1]["track"] == "default/" + "\x1b[31m☃" * 40


def test_what_begins_and_ends_are_events_that_there_are() -> None:
    assert {*BEGINS, *ENDS} <= EVENT_NAMES
    assert set(ENDS.values()) - {"write"} == set(BEGINS.values()) - {"wait for its turn"}


@pytest.mark.skipif(_PROCESSOR is None, reason="TORPOR_TRACE_PROCESSOR names no trace_processor_shell")
def test_perfettos_own_trace_processor_gives_the_same(tmp_path: Path) -> None:
    from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

    path = tmp_path / "run.pftrace"
    path.write_bytes(trace_of(*SCRIPT))
    with TraceProcessor(trace=str(path), config=TraceProcessorConfig(bin_path=_PROCESSOR)) as processor:
        assert [(row.track, row.name, row.ts, row.dur) for row in processor.query(_QUERY)] == STAGES
