"""The command line against a real daemon on a tiny model: a day in the life of two sessions, command by command."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.background import is_running, wait_until_gone
from torpor.tests.cli.cli_rig import Torpor

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


def serve_in_background(store: Path, model: Path, *options: str) -> int:
    """Run `torpor serve --detach` as a process of its own: its child must not become the tests'."""
    command = [sys.executable, "-m", "torpor.cli.main", "serve", "--detach", "--json"]
    command += ["--store", str(store), "--model", f"tiny={model}", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(json.loads(done.stdout)["pid"])


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


@pytest.mark.one_in(3)
def test_a_chat_that_is_sent_in_full_is_read_once(torpor: Torpor, served: Path, short_path: Path) -> None:
    file, said = short_path / "said.json", [{"role": "system", "content": "Be brief. " * 20}]
    read = []
    for number in range(3):
        said.append({"role": "user", "content": f"question {number}?"})
        file.write_text(json.dumps(said))
        answered = torpor("chat", "helper", "--transcript", file, "-n", "6", "--json").document
        read.append(answered["prefilled_tokens"])
        said.append({"role": "assistant", "content": answered["text"]})
        if number == 1:
            torpor("sleep", "helper")
    assert read[0] > 200
    assert max(read[1:]) < 60
    file.write_text(json.dumps([*said[:3], {"role": "user", "content": "something else"}]))
    refused = torpor("chat", "helper", "--transcript", file, "-n", "2", "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "transcript_diverged")
    assert refused.error["error"]["details"]["message_index"] == 3
    back = torpor("chat", "helper", "--transcript", file, "-n", "2", "--on-divergence", "rewind")
    assert back.status == 0
    assert "went back to token" in back.err
    assert [each["version"] for each in torpor("show", "helper", "--json").document["versions"]] == [1, 2]


@pytest.mark.one_in(3)
def test_a_served_store_is_looked_after_by_its_daemon(torpor: Torpor, served: Path, short_path: Path) -> None:
    torpor("append", "other", "a text that is stripped below")
    torpor("sleep", "other")
    torpor("append", "notes", "a text of thirty-odd bytes, to read")
    first = torpor("sleep", "notes", "--json").document["results"][0]
    torpor("generate", "notes", "-n", "3")
    torpor("sleep", "notes")
    assert torpor("tag", "notes@1", "before").status == 0
    for command in (("prune", "--keep-last", "1"), ("repack",), ("repair",), ("strip", "other")):
        assert torpor(*command, "--store", served).status == 11, "the daemon has the lock"
        assert torpor(*command, "--dry-run").status == 0
        assert torpor(*command).status == 0
    shown = torpor("show", "notes", "--json").document
    assert [(each["version"], each["tags"]) for each in shown["versions"]] == [(1, ["before"]), (2, [])]
    assert torpor("wake", "notes@before", "--json").document["bundle_id"] == first["bundle_id"]
    assert torpor("export", "notes@before", short_path / "notes.mvb").status == 0
    assert torpor("import", short_path / "notes.mvb").status == 2, "it is awake"
    imported = torpor("import", short_path / "notes.mvb", "--as", "copy", "--json").document
    assert imported["token_count"] == first["token_count"]
    assert torpor("forget", "notes", "--yes").status == 0
    assert {info["name"] for info in torpor("ls", "--json").document["sessions"]} == {"copy", "other"}
    assert torpor("wake", "copy", "--json").document["tokens_prefilled"] == 0
    assert torpor("verify", "--deep").status == 0


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


@pytest.mark.one_in(2)
def test_a_stop_with_force_keeps_the_ledger_of_what_there_is_no_room_for(
    torpor: Torpor, store: Path, tiny_model: Path
) -> None:
    pid = serve_in_background(store, tiny_model, "--keep-free", str(1 << 50), "--durability", "sleep")
    try:
        torpor("append", "notes", "a text to read")
        refused = torpor("stop")
        assert refused.status == 3
        assert "budget_exceeded" in refused.err
        assert "--keep-free" in refused.err
        assert "torpor stop --force" in refused.err
        assert is_running(pid)
        forced = torpor("stop", "--force", "--json")
        assert (forced.status, forced.document["failed"]) == (0, {})
        assert forced.document["ledgers"]["torpor://default/notes"].startswith("budget_exceeded: ")
        assert not is_running(pid)
        (kept,) = torpor("ls", "--store", store, "--json").document["sessions"]
        assert kept["token_count"] == kept["unread_tokens"] == len("a text to read")
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


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


@pytest.mark.one_in(2)
def test_a_bare_name_reaches_no_session_of_another_namespace(torpor: Torpor, served: Path) -> None:
    torpor("append", "a/notes", "one")
    torpor("append", "b/notes", "two")
    missed = torpor("sleep", "notes")
    assert (missed.status, "torpor://a/notes" in missed.err, "torpor://b/notes" in missed.err) == (4, False, False)
    assert torpor("rm", "notes", "--yes").status == 4
    assert torpor("append", "notes", "mine", "--json").document["session"] == "torpor://default/notes"
    assert torpor("rm", "notes", "--yes", "--json").document["results"][0]["session"] == "torpor://default/notes"
    left = torpor("ls", "--json").document["sessions"]
    assert [info["session"] for info in left] == ["torpor://a/notes", "torpor://b/notes"]


@pytest.mark.one_in(3)
def test_a_namespace_that_is_set_is_where_bare_names_are(
    torpor: Torpor, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the command, behind it, or in the environment; what is typed last outdoes the rest."""
    append = ("append", "notes", "one two three", "--json")
    assert torpor("--namespace", "a", *append).document["session"] == "torpor://a/notes"
    assert torpor("--namespace", "a", *append, "--namespace", "b").document["session"] == "torpor://b/notes"
    monkeypatch.setenv("TORPOR_NAMESPACE", "c")
    assert torpor(*append).document["session"] == "torpor://c/notes"
    assert (
        torpor("--namespace", "a", "sleep", "notes", "--json").document["results"][0]["session"] == "torpor://a/notes"
    )
    assert torpor("sleep", "b/notes", "--json").document["results"][0]["session"] == "torpor://b/notes"
    assert torpor("fork", "notes", "other", "--json").document["session"] == "torpor://c/other"
    names = [info["session"] for info in torpor("ls", "--json").document["sessions"]]
    assert names == ["torpor://c/notes", "torpor://c/other"]
    unserved = ("--namespace", "b", "--store", served, "--json")
    assert torpor("show", "notes@1", *unserved).document["info"]["session"] == "torpor://b/notes"
    assert [info["name"] for info in torpor("ls", *unserved).document["sessions"]] == ["notes"]
    assert torpor("--namespace", "../x", "ls").status == 2


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
