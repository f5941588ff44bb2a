"""The demo told for real: processes, SIGKILL, sockets and files, on a tiny model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.demo import story
from torpor.cli.demo.daemon import DemoDaemon
from torpor.cli.demo.demo import DEFAULT_DOCUMENT
from torpor.cli.demo.report import ORDER_CHECK
from torpor.cli.demo.story import Demo, Settings
from torpor.cli.errors import DaemonStartFailed, DemoUnfit
from torpor.cli.reach.background import is_running
from torpor.cli.view.output import Output
from torpor.tests.cli.cli_rig import Torpor

TEXT = "".join(f"line {number} of a document that is long enough\n" for number in range(80))


@pytest.fixture(autouse=True)
def caches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pids of the daemons that a demo in this process has started."""
    pids: list[int] = []
    popen = subprocess.Popen

    def noting(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*arguments, **options)
        pids.append(process.pid)
        return process

    monkeypatch.setattr("torpor.cli.reach.background.subprocess.Popen", noting)
    return pids


def settings(folder: Path, model: Path, **changes: object) -> Settings:
    chosen: dict[str, object] = {
        "folder": folder,
        "name": "lines.txt",
        "text": TEXT,
        "tokens": 6,
        "target_document_tokens": 700,
        "minimum_document_tokens": 500,
        "models": {"tiny": str(model)},
    }
    return Settings(**{**chosen, **changes})  # type: ignore[arg-type]


def tell(chosen: Settings) -> story.Evidence:
    return Demo(chosen, Output(as_json=True)).tell()


@pytest.mark.one_in(6)
def test_a_woken_session_goes_on_bit_for_bit_after_sigkill(
    short_path: Path, tiny_model: Path, started: list[int]
) -> None:
    """Promises 1 and 2, as a stranger sees them."""
    evidence = tell(settings(short_path, tiny_model))
    # Which came first is for the clock to say, and no test's business.
    assert [name for name in evidence.failed if name != ORDER_CHECK] == []
    assert evidence.death.exit_signal == signal.SIGKILL
    assert len(evidence.after_wake.tokens) == 6
    assert evidence.cold_tokens == evidence.receipt.token_count
    assert started
    assert not any(map(is_running, started))


@pytest.mark.one_in(3)
def test_a_wake_that_changes_a_token_is_disproved(
    short_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is real: a session that reads one token more before it goes on is not the same."""
    wake = story.Demo._wake

    def tampered(self: Demo, client: story.Client) -> dict[str, Any]:
        client.append(story.READER, text="!")
        return wake(self, client)

    monkeypatch.setattr(story.Demo, "_wake", tampered)
    failed = tell(settings(short_path, tiny_model)).failed
    assert "woken: logits of every token, and after the last" in failed
    assert "woken: goes on from the very logits that slept" in failed


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"text": TEXT[:400]}, DemoUnfit, "at least 500"),
        ({"target_document_tokens": 9000, "minimum_document_tokens": 2000}, DemoUnfit, "do not fit"),
        ({"models": {"tiny": "/no/model"}}, DaemonStartFailed, "/no/model"),
    ],
    ids=["a document that is too short", "a context that is too short", "a daemon that does not start"],
)
def test_what_cannot_be_shown_is_refused_and_leaves_no_daemon(
    short_path: Path, tiny_model: Path, started: list[int], changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        tell(settings(short_path, tiny_model, **changes))
    assert started
    assert not any(map(is_running, started))


@pytest.mark.one_in(5)
def test_a_killed_daemon_is_dead_and_a_stopped_one_is_not_taken_for_killed(short_path: Path, tiny_model: Path) -> None:
    chosen = {"store": short_path / "store", "models": {"tiny": str(tiny_model)}, "log": short_path / "log"}
    socket_path = short_path / "run" / "t.sock"
    first = DemoDaemon(socket_path=socket_path, **chosen)  # type: ignore[arg-type]
    death = first.kill()
    assert death.proven
    assert socket_path.is_socket(), "a killed daemon cannot tidy up"
    second = DemoDaemon(socket_path=socket_path, **chosen)  # type: ignore[arg-type]
    second.stop()
    assert not socket_path.exists()


def test_the_default_document_is_long_and_there(torpor: Torpor, tmp_path: Path) -> None:
    assert DEFAULT_DOCUMENT.name == "argparse.py"
    assert len(DEFAULT_DOCUMENT.read_text()) > 60_000
    ran = torpor("demo", "--document", str(tmp_path / "none"), "--json")
    assert ran.error["error"]["code"] == "unreadable_input"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_demo_that_is_ended_leaves_no_daemon(short_path: Path, number: int, status: int) -> None:
    """Whatever ends it, SIGKILL included; the folder is removed wherever anything can still be done."""
    environment = {**os.environ, "TMPDIR": str(short_path)}
    command = [sys.executable, "-m", "torpor.cli.main", "demo"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        pid = _first_daemon(process)
        assert is_running(pid)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == status
    _wait_gone(pid)
    assert (list(short_path.glob("torpor-demo-*")) == []) == (number != signal.SIGKILL)


def test_a_temporary_folder_that_is_not_there_is_told_before_any_work(
    torpor: Torpor, started: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    monkeypatch.setattr(Demo, "tell", lambda _: pytest.fail("the work was begun"))
    ran = torpor("demo")
    assert (ran.status, started) == (2, [])
    assert "no such folder is there. Make it, or name another." in " ".join(ran.err.split())


@pytest.mark.heavy
def test_the_demo_as_a_stranger_runs_it(torpor: Torpor) -> None:
    ran = torpor("demo", "--json")
    assert ran.status == 0
    assert ran.document["passed"] is True
    assert ran.document["evidence"]["document_tokens"] >= 6000
    assert len(ran.document["evidence"]["after_wake"]["tokens"]) == 64


def _first_daemon(process: subprocess.Popen[bytes]) -> int:
    """The pid that the demo tells of its first daemon."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(rb"pid (\d+)", line):
            return int(found[1])
    raise AssertionError("the demo ended without a daemon")


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
