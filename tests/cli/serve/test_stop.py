"""`torpor stop` repeats what the daemon says of its stop, signals nobody, and returns when the process is gone."""

from __future__ import annotations

import subprocess
import sys
from typing import Self

import pytest
from torpor.cli.serve import service, stop
from torpor.daemon.api.process import ShutdownResult
from torpor.socket_api.errors import RemoteError, RequestTimeout
from torpor.tests.cli.cli_rig import Torpor


class StoppingClient:
    """A client whose daemon gives one report."""

    def __init__(self, report: ShutdownResult | Exception, pid: int | None = None) -> None:
        self.report = report
        self.peer_pid = pid
        self.forced: list[bool] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, *, force: bool) -> ShutdownResult:
        self.forced.append(force)
        if isinstance(self.report, Exception):
            raise self.report
        return self.report


def answer(
    monkeypatch: pytest.MonkeyPatch, report: ShutdownResult | Exception, pid: int | None = None
) -> StoppingClient:
    client = StoppingClient(report, pid)
    monkeypatch.setattr("torpor.cli.serve.stop.connect", lambda *_, **__: client)
    return client


def test_a_stop_names_what_the_remote_may_lack(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no failure: it is durable here, and the next start sends it."""
    answer(monkeypatch, ShutdownResult(("torpor://default/a",), {}, unsent=("torpor://default/a",)))
    ran = torpor("stop")
    assert ran.status == 0
    assert "torpor://default/a  not known to be in the remote; until a next start sends it" in ran.out
    assert torpor("stop", "--json").document["unsent"] == ["torpor://default/a"]


def test_a_session_that_could_not_be_slept_is_told_and_status_3(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = ShutdownResult(slept=("torpor://default/a",), failed={"torpor://default/b": "no [/] space"}, empty=())
    answer(monkeypatch, report)
    ran = torpor("stop")
    assert ran.status == 3
    assert "1 session put to sleep" in ran.out
    assert "torpor://default/a  asleep" in ran.out
    assert "stop_incomplete" in ran.err
    assert "torpor://default/b: no [/] space" in ran.err
    assert "The next start brings back what was answered" in " ".join(ran.err.split())
    as_json = torpor("stop", "--json")
    assert as_json.status == 3
    assert as_json.document["slept"] == ["torpor://default/a"]
    assert as_json.document["failed"] == {"torpor://default/b": "no [/] space"}


def test_a_stop_that_is_refused_is_status_3_and_says_why(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"torpor://default/b": "no_space: full"}
    answer(monkeypatch, RemoteError("stop_refused", "1 session cannot be put to sleep.", failed=failed), 1)
    ran = torpor("stop")
    assert (ran.status, ran.out) == (3, "")
    assert "stop_refused" in ran.err
    as_json = torpor("stop", "--json")
    assert (as_json.status, as_json.out) == (3, "")
    assert as_json.error["error"]["details"] == {"failed": failed}


def test_only_force_is_told_to_the_daemon_as_force(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    client = answer(monkeypatch, ShutdownResult(slept=(), failed={}))
    torpor("stop")
    assert "no session had changed since its last version" in " ".join(torpor("stop", "--force").out.split())
    assert client.forced == [False, True]


def test_an_empty_session_is_no_failure(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ShutdownResult(slept=(), failed={}, empty=("torpor://default/e",)))
    ran = torpor("stop")
    assert ran.status == 0
    assert "torpor://default/e  had read nothing" in ran.out
    assert torpor("stop", "--json").document["empty"] == ["torpor://default/e"]


def test_a_session_of_which_the_ledger_alone_is_kept_is_told_with_why_and_is_no_failure(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = {"torpor://default/l": "stop_deadline: no [/] time"}
    answer(monkeypatch, ShutdownResult(slept=(), failed={}, ledgers=ledgers))
    ran = torpor("stop")
    assert ran.status == 0
    assert "no session had changed" not in ran.out
    assert (
        "torpor://default/l  its ledger is kept; its tokens are read again when it is used (stop_deadline: no [/] time)"
        in ran.out
    )
    assert torpor("stop", "--json").document["ledgers"] == ledgers


def test_a_process_that_does_not_end_is_waited_for_and_not_killed(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        answer(monkeypatch, ShutdownResult(slept=(), failed={}), other.pid)
        ran = torpor("stop", "--timeout", "0.2", "--json")
        assert (ran.status, ran.error["error"]["code"]) == (8, "daemon_still_running")
        assert other.poll() is None, "nothing is signalled"
        other.communicate(b"\n", timeout=20)
    assert other.returncode == 0


def test_a_daemon_that_does_not_answer_in_time_is_still_running(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, RequestTimeout("silent"), 1)
    ran = torpor("stop", "--timeout", "0.2")
    assert ran.status == 8
    assert "daemon_still_running" in ran.err


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_a_pid_that_is_no_process_of_ours_is_not_waited_for(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch, pid: int
) -> None:
    answer(monkeypatch, ShutdownResult(slept=(), failed={}), pid)
    assert torpor("stop", "--timeout", "0.2").status == 0


def test_where_no_daemon_runs_there_is_nothing_to_stop_and_none_to_start(torpor: Torpor) -> None:
    ran = torpor("stop")
    assert (ran.status, ran.out) == (12, "")
    assert "so there is nothing to stop." in " ".join(ran.err.split())
    assert "ensure" not in ran.err
    as_json = torpor("stop", "--json")
    assert (as_json.out, as_json.error["error"]["code"]) == ("", "daemon_unreachable")
    assert "path" in as_json.error["error"]["details"]


def test_a_service_that_is_stopped_listens_no_more(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    answer(monkeypatch, ShutdownResult(slept=(), failed={}, empty=()), process.pid)
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(service, "_asked", lambda *words: asked.append(words) or "")
    for runs, told in ((process.pid + 1, []), (process.pid, [("systemctl", "--user", "stop", "torpor.socket")])):
        monkeypatch.setattr(stop, "main_pid", lambda runs=runs: runs)
        assert torpor("stop").status == 0
        assert asked == told
