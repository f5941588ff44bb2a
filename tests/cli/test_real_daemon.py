"""The command line against a real daemon on a tiny model: a day in the life of two sessions, command by command."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.background import is_running, wait_until_gone
from torpor.tests.cli.cli_rig import Torpor, serve_in_background

pytestmark = pytest.mark.usefixtures("examined_once")


@pytest.fixture
def store(short_path: Path) -> Path:
    return short_path / "store"


@pytest.fixture
def serving(torpor: Torpor, tiny_model: Path, store: Path) -> Iterator[int]:
    """A daemon in the background on the default socket of this test; gives its pid."""
    pid = serve_in_background(store, tiny_model)
    yield pid
    torpor("stop", "--timeout", "30")
    left = is_running(pid)
    if left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.fixture(scope="module")
def lasting(tiny_model: Path) -> Iterator[tuple[int, Path]]:
    """A daemon for the tests that leave it as it was; its pid and its folder."""
    folder = Path(tempfile.mkdtemp(prefix="tw"))
    where = ("--socket", str(folder / "t.sock"), "--log", str(folder / "daemon.log"))
    pid = serve_in_background(folder / "store", tiny_model, *where)
    yield pid, folder
    os.kill(pid, signal.SIGTERM)
    wait_until_gone(pid, time.monotonic() + 30, 30)
    shutil.rmtree(folder)


@pytest.fixture
def served(torpor: Torpor, lasting: tuple[int, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The store of the lasting daemon, which is on the default socket of this test and has no session behind it."""
    folder = lasting[1]
    monkeypatch.setenv("TORPOR_SOCKET", str(folder / "t.sock"))
    yield folder / "store"
    monkeypatch.delenv("TORPOR_NAMESPACE", raising=False)  # it would show those of one namespace
    for info in torpor("ls", "--json").document["sessions"]:
        assert torpor("forget", info["session"], "--yes").status == 0


@pytest.mark.one_in(2)
def test_a_session_is_read_slept_listed_woken_and_deleted(torpor: Torpor, served: Path) -> None:
    assert torpor("append", "notes", "a text of thirty-odd bytes, to read").status == 0
    first = torpor("generate", "notes", "-n", "3", "--prove", "--json").document
    assert len(first["tokens"]) == len(first["logits_blake3"]) <= 3
    receipt = torpor("sleep", "notes", "--json").document["results"][0]
    assert receipt["token_count"] == first["token_count"]
    assert torpor("ls", "--json").document["sessions"][0]["state"] == "asleep"
    assert "default/notes" in torpor("ls").out
    shown = torpor("show", "notes", "--json").document
    assert shown["info"]["bundle_id"] == receipt["bundle_id"]
    assert shown["tail_text"].startswith("a text of thirty-odd bytes")
    assert torpor("verify", "--deep").status == 0, "it asks the daemon which store it has"
    woken = torpor("wake", "notes", "--json").document
    assert (woken["tokens_prefilled"], woken["already_awake"]) == (0, False)
    assert torpor("wake", "notes", "--json").document["already_awake"] is True
    assert torpor("rm", "notes", "--yes").status == 0
    assert torpor("ls", "--json").document["sessions"] == []


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("served")
def test_a_session_diverges_and_the_best_is_kept(torpor: Torpor) -> None:
    torpor("append", "notes", "a text of thirty-odd bytes, to read")
    torpor("save", "notes")
    made = torpor("diverge", "notes", "--count", "3", "-n", "4", "--keep", "best", "--json").document
    first, *others = made["attempts"]
    assert ([first["kept"], *(each["kept"] for each in others)], made["kept"]["name"]) == ([True, False, False], "best")
    assert made["kept"]["token_count"] == first["position"]
    shown = torpor("diverge", "notes", "--count", "3", "-n", "4")
    assert [line.split("\t")[0] for line in shown.out.splitlines()] == ["", "1", "2", "3"]
    assert "drawn at temperature 0.8" in shown.err
    taken = torpor("diverge", "notes", "--keep", "best")
    assert (taken.status, "best is there already" in taken.err) == (2, True)
    torpor("save", "best")
    assert "best@1 (awake)\tforked from notes@1 at 35" in torpor("log", "notes").out


@pytest.mark.one_in(3)
def test_stop_puts_sessions_to_sleep_and_the_next_daemon_has_them(
    torpor: Torpor, serving: int, store: Path, tiny_model: Path
) -> None:
    torpor("chat", "helper", "hello", "-n", "4")
    tokens = torpor("ls", "--json").document["sessions"][0]["token_count"]
    stopped = torpor("stop", "--json")
    assert stopped.status == 0
    assert stopped.document["pid"] == serving
    assert stopped.document["slept"] == ["torpor://default/helper"]
    assert (stopped.document["failed"], stopped.document["empty"]) == ({}, [])
    assert not is_running(serving)
    assert torpor("stop").status == 12
    stored = torpor("ls", "--store", store, "--json").document["sessions"][0]
    assert (stored["state"], stored["token_count"]) == ("stored", tokens)
    serve_in_background(store, tiny_model)
    again = torpor("chat", "helper", "again", "-n", "4", "--json").document
    assert again["token_count"] > tokens


@pytest.mark.one_in(3)
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, to take a process its room")
def test_a_stop_without_room_is_refused_and_loses_nothing(torpor: Torpor, serving: int, store: Path) -> None:
    text = "a text that is read " * 60
    limits = resource.prlimit(serving, resource.RLIMIT_FSIZE)
    resource.prlimit(serving, resource.RLIMIT_FSIZE, (200_000, limits[1]))
    for name in ("notes", "control"):
        torpor("append", name, text)
    refused = torpor("stop", "--json")
    assert (refused.status, refused.error["error"]["code"]) == (3, "stop_refused")
    failed = refused.error["error"]["details"]["failed"]
    assert sorted(failed) == ["torpor://default/control", "torpor://default/notes"]
    assert all(reason.startswith("no_space: ") for reason in failed.values())
    assert "torpor stop --force" in refused.error["error"]["message"]
    assert is_running(serving)
    assert [info["state"] for info in torpor("ls", "--json").document["sessions"]] == ["awake", "awake"]
    notes, control = (
        torpor("generate", name, "-n", "5", "--prove", "--json").document for name in ("notes", "control")
    )
    assert notes["tokens"]
    for proof in ("tokens", "logits_blake3", "final_logits_blake3"):
        assert notes[proof] == control[proof]
    resource.prlimit(serving, resource.RLIMIT_FSIZE, limits)
    stopped = torpor("stop", "--json")
    assert stopped.status == 0
    assert sorted(stopped.document["slept"]) == sorted(failed)
    assert not is_running(serving)
    (kept,) = torpor("ls", "--store", store, "--json").document["sessions"][1:]
    assert kept["token_count"] == notes["token_count"]


@pytest.mark.one_in(3)
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit, to take a process its room")
def test_what_was_answered_comes_back_where_a_forced_stop_could_not_even_keep_the_ledger(
    torpor: Torpor, serving: int, store: Path, tiny_model: Path
) -> None:
    read = torpor("append", "notes", "a text that is read", "--json").document["token_count"]
    resource.prlimit(serving, resource.RLIMIT_FSIZE, (1, resource.prlimit(serving, resource.RLIMIT_FSIZE)[1]))
    stopped = torpor("stop", "--force", "--json")
    assert (stopped.status, list(stopped.document["failed"])) == (3, ["torpor://default/notes"])
    serve_in_background(store, tiny_model)
    assert torpor("generate", "notes", "-n", "1", "--json").document["token_count"] == read + 1


@pytest.mark.one_in(4)
def test_a_daemon_whose_socket_is_gone_is_told_of_with_the_way_to_end_it(
    torpor: Torpor, serving: int, store: Path, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STORE", str(store))
    torpor("append", "notes", "a text to read")
    (short_path / "run" / "t.sock").unlink()
    way_out = f"`kill {serving}` puts its sessions to sleep and ends it"
    for arguments, status in ((("stop",), 12), (("serve", "--detach"), 11), (("ls",), 0), (("doctor",), 0)):
        ran = torpor(*arguments)
        assert ran.status == status, arguments
        assert way_out in " ".join((ran.out + ran.err).split()), arguments
    assert torpor("ls", "--json").document["locked_by"] == serving
    assert torpor("ls", "--store", store, "--json").document["locked_by"] is None, "a store that was named is no riddle"
    assert "kill" not in torpor("stop", "--socket", short_path / "none.sock").err, "it may have another store"
    os.kill(serving, signal.SIGTERM)
    wait_until_gone(serving, time.monotonic() + 30, 30)
    (kept,) = torpor("ls", "--json").document["sessions"]
    assert (kept["name"], kept["token_count"]) == ("notes", len("a text to read"))
    assert torpor("doctor", "--json").document["store"]["locked_by"] is None


@pytest.mark.one_in(4)
def test_a_second_daemon_is_refused_with_status_11(torpor: Torpor, served: Path, short_path: Path) -> None:
    same_socket = torpor("serve", "--detach", "--store", short_path / "other")
    assert same_socket.status == 11
    assert "socket_in_use" in same_socket.err
    same_store = torpor("serve", "--detach", "--store", served, "--socket", short_path / "u" / "t.sock", "--json")
    assert same_store.status == 11
    assert same_store.error["error"]["code"] == "store_locked"


def test_a_model_that_is_not_there_is_status_4(torpor: Torpor, short_path: Path) -> None:
    ran = torpor("serve", "--store", short_path / "store", "--model", f"x={short_path}/no-model")
    assert ran.status == 4
    assert "model_unavailable" in ran.err


@pytest.mark.one_in(4)
def test_doctor_tells_of_machine_daemon_and_store(torpor: Torpor, lasting: tuple[int, Path], served: Path) -> None:
    document = torpor("doctor", "--json").document
    assert document["machine"]["blas"]["gflops"] > 0
    assert document["daemon"]["pid"] == lasting[0]
    assert document["store"] == {
        "path": str(served),
        "locked_by": lasting[0],
        "readable": True,
        "problem": None,
        "sessions": 0,
        "journalled": 0,
    }
    text = torpor("doctor").out
    assert "GFLOP/s" in text
    assert str(served) in text


@pytest.mark.one_in(3)
def test_doctor_without_daemon_or_store_says_so(torpor: Torpor) -> None:
    ran = torpor("doctor")
    assert ran.status == 0
    assert "torpor ensure" in ran.out
    assert "no_store" in ran.out
