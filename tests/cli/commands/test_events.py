"""`torpor events`: a line for each thing that happens, until Ctrl-C or the end of the daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torpor.daemon.events.events import Event, SleepEnded, WakeBegan, WakeVerified
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import WAIT_S, Torpor, pretend_terminal, unstyled
from torpor.tests.socket_api.server_rig import ServerThread

A = SessionUri("default", "a")
HAPPENING = (
    SleepEnded(A, "idle", 2, 1500, 4096, 8192, 1, 0, 0.25),
    WakeBegan(A, "asked", None),
    WakeVerified(A, 8192, 0.5),
)


def tell(daemon: ServerThread, *events: Event, end: bool = True) -> threading.Thread:
    """Publish once somebody listens, and then end."""

    def publish() -> None:
        bus = daemon.service.bus
        while not daemon.do(lambda: bus.is_watched):
            pass
        daemon.do(lambda: [bus.publish(event) for event in events] and None)
        if end:
            daemon.do(bus.close)

    thread = threading.Thread(target=publish)
    thread.start()
    return thread


def test_each_event_is_a_line_with_its_facts(torpor: Torpor, daemon: ServerThread) -> None:
    thread = tell(daemon, *HAPPENING)
    ran = torpor("events", "--session", "a", "--name", "sleep_ended", "--name", "wake_began")
    thread.join()
    assert (ran.status, ran.err) == (0, "")
    first, second = ran.out.splitlines()
    assert " ".join(first.split()[1:]) == (
        "sleep_ended torpor://default/a cause idle version 2 tokens 1,500 bytes_written 4,096 logical_bytes 8,192"
        " blocks_new 1 blocks_reused 0 seconds 0.250"
    )
    assert " ".join(second.split()[1:]) == "wake_began torpor://default/a cause asked version –"
    assert daemon.service.calls[-1][1]["names"] == ("sleep_ended", "wake_began")


def test_a_terminal_is_told_that_it_listens(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_terminal(monkeypatch, 80)
    thread = tell(daemon, *HAPPENING)
    ran = torpor("events", "--name", "wake_began")
    thread.join()
    assert unstyled(ran.err) == "listening until Ctrl-C\n"


def test_with_json_each_line_is_a_document(torpor: Torpor, daemon: ServerThread) -> None:
    thread = tell(daemon, *HAPPENING)
    ran = torpor("events", "--json")
    thread.join()
    documents = [json.loads(line) for line in ran.out.splitlines()]
    assert [document["name"] for document in documents] == ["sleep_ended", "wake_began", "wake_verified"]
    assert all(document["schema_version"] == 1 and document["command"] == "events" for document in documents)
    assert documents[2]["facts"] == {"bytes_read": 8192, "seconds": 0.5}
    assert documents[0]["session"] == "torpor://default/a"


@pytest.mark.one_in(3)
def test_ctrl_c_is_how_it_ends(daemon: ServerThread, short_path: Path) -> None:
    command = [sys.executable, "-m", "torpor.cli.main", "events", "--socket", str(daemon.socket_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        thread = tell(daemon, *HAPPENING, end=False)
        assert process.stdout is not None
        assert b"sleep_ended" in process.stdout.readline(), "a line is there as soon as it happens"
        thread.join()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (0, b"")


def test_a_trace_for_perfetto_goes_into_a_new_file_of_the_user_alone(
    torpor: Torpor, daemon: ServerThread, tmp_path: Path
) -> None:
    path = tmp_path / "run.pftrace"
    thread = tell(daemon, *HAPPENING)
    ran = torpor("events", "--perfetto", str(path))
    thread.join()
    assert (ran.status, ran.out) == (0, f"{path}  3 events; https://ui.perfetto.dev opens it\n")
    assert path.read_bytes().count(b"default/a") == 1, "one track for the session"
    assert path.stat().st_mode & 0o777 == 0o600
    again = torpor("events", "--perfetto", str(path))
    assert (again.status, "is there already" in again.err) == (2, True)
    assert "leave --name out" in torpor("events", "--perfetto", str(tmp_path / "b"), "--name", "lost").err
