"""`torpor ls --remote`: what is said of each session, and of each word that is not plain."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.cli.commands import remote, sleep, wake
from torpor.cli.view.output import Output
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.api.remote import PullResult, PushResult, RemoteSession, RemoteSessionsResult
from torpor.daemon.api.session import Origin, Provenance
from torpor.daemon.api.waking import SleepResult, WakeResult
from torpor.memvid.answers import Finding
from torpor.socket_api.client.client import Client
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"place": "held", "here": "same"}, "held"),
        ({"here": "ahead"}, "ahead"),
        ({"here": "behind"}, "behind"),
        ({"here": "diverged"}, "diverged"),
        ({"here": "same"}, None),
        ({"here": "absent"}, None),
    ],
)
def test_each_word_that_is_not_plain_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], word: str | None
) -> None:
    facts = {
        "place": "asleep",
        "machine": "a",
        "versions": 1,
        "bundle_id": "0" * 64,
        "ours": False,
        "epoch": 1,
    } | fields
    told = RemoteSessionsResult("file:///r", (RemoteSession(session="torpor://default/s", **facts),))
    monkeypatch.setattr(remote, "connect", lambda _socket: nullcontext(SimpleNamespace(remote=lambda **_: told)))
    remote.list_remote(None, None, Output(as_json=False))
    shown = capsys.readouterr()
    assert word is None or word in shown.out
    assert "KEEPS" in shown.out
    assert "1 version" in shown.out
    explained = [line.split(":")[0] for line in shown.err.splitlines() if line.split(":")[0] in remote._LEGENDS]
    assert explained == ([word] if word else [])


@pytest.mark.parametrize("sealed", [True, False])
def test_a_listing_says_whether_the_remote_is_sealed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, sealed: bool
) -> None:
    told = RemoteSessionsResult("file:///r", (), sealed=sealed)
    monkeypatch.setattr(remote, "connect", lambda _socket: nullcontext(SimpleNamespace(remote=lambda **_: told)))
    remote.list_remote(None, None, Output(as_json=False))
    assert capsys.readouterr().err.splitlines()[0] == f"the sessions of file:///r{', sealed' if sealed else ''}"


def test_a_second_receipt_has_its_own_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    there = PushResult("torpor://default/s", 2, "ab" * 32, "file:///r", 3, 1, 4096, 0.5)
    here = SleepResult("torpor://default/s", 2, "ab" * 32, None, 9, 8192, 8192, 1, 2, 0.25, remote=there)
    daemon = SimpleNamespace(sleep=lambda _session, remote, **_: here if remote else None, save=None)
    monkeypatch.setattr(sleep, "connect", lambda _socket: nullcontext(daemon))
    assert sleep.sleep(["s"], remote=True) == 0
    receipt, second = capsys.readouterr().out.splitlines()
    assert "asleep as version 2" in receipt
    assert second == "torpor://default/s  remote: durable in file:///r as version 2, 4.00 KiB sent in 500 ms"


@pytest.mark.parametrize("words", [("sleep", "notes", "--remote"), ("save", "notes", "--remote"), ("push", "notes")])
def test_ctrl_c_in_a_wait_for_the_remote_says_what_is_durable_here(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """The first receipt is not lost with the second."""
    torpor("append", "notes", "one")
    torpor("save", "notes")

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, words[0], interrupted)
    ran, said = torpor(*words), "torpor://default/notes is awake, and version 1 is durable here. The daemon sends it"
    assert (ran.status, said in " ".join(ran.err.split())) == (130, True)
    ran, said = torpor(words[0], "other", *words[2:]), "other has no version here, so nothing of it is sent."
    assert (ran.status, said in " ".join(ran.err.split())) == (130, True)


def test_a_pull_says_that_a_session_has_gone_on_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = PullResult("torpor://default/s", 3, "ab" * 32, "file:///r", 0, 0.1, ahead=True)
    monkeypatch.setattr(remote, "connect", lambda _socket: nullcontext(SimpleNamespace(pull=lambda _session: pulled)))
    assert remote.pull(["s"]) == 0
    assert "has gone on here, and is left as it is: version 3," in capsys.readouterr().out


def test_a_wake_says_whom_it_asks_and_how_long_that_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What another machine takes is no reading."""

    def woken(_session: str, on_event: Any, **_: Any) -> WakeResult:
        for waited in (0, 1, 2):
            on_event(ProgressEvent("handover", waited, 90, "desk"))
        on_event(ProgressEvent("wake", 1, 1))
        facts = {"token_count": 9, "tokens_prefilled": 0, "bytes_read": 4096, "already_awake": False}
        moved = {"seconds": 20.5, "came_from": "desk", "waited_seconds": 20.0}
        origin, why = Origin("torpor://default/r", 1, "cd" * 32, 9), Finding("file:///r", "lease_held", "desk has it.")
        forked = {"provenance": Provenance(origin), "remote_problem": why}
        return WakeResult("torpor://default/s", 2, "ab" * 32, **facts, **moved, **forked)

    daemon = SimpleNamespace(wake=woken, status=lambda: SimpleNamespace(store="/no/store"))
    monkeypatch.setattr(wake, "connect", lambda _socket: nullcontext(daemon))
    wake.wake("s")
    shown = capsys.readouterr()
    assert "awake at version 2, from desk in 20.0 s: 9 tokens" in shown.out
    assert "read in 500 ms" in shown.out
    assert shown.err.count("asking desk for s") == 1
    assert "in 90.0 s at most" in " ".join(shown.err.split())
    assert "a fork of torpor://default/r at version 1, with 9 tokens: desk has it." in shown.err
