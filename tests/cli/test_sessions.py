"""The commands that talk to a daemon, on a real socket, with a service that has no model."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from torpor.daemon.api.causes import Costs, RequestCost, Reuse
from torpor.daemon.api.reading import AppendRequest
from torpor.daemon.engine.generation import DEFAULT_MAX_TOKENS
from torpor.tests.cli.cli_rig import WAIT_S, Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * ((15 << 20) + 1)], ids=["no text", "too long"])
def test_append_refuses_what_is_no_text_or_too_long(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    ran = torpor("append", "notes", "--json")
    assert (ran.status, ran.error["error"]["code"]) == (2, "unreadable_input")
    assert daemon.service.sessions == {}


def test_why_shows_where_requests_left_what_was_there(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "x")
    assert "no request is known" in torpor("why", "a").out
    uri, texts = "torpor://default/a", ("it is [red]6:30", "it is \x1b[31m7:45\n")
    reuses = (
        Reuse("append", 1, "none"),
        Reuse("generate", 2, "hit", uri, 7, 7),
        Reuse("chat", 3, "diverged", uri, 3, 9, 3, 1, *texts, "clock", "Say it later.", "rewound"),
        Reuse("append", 4, "hit", "torpor://default/b", 600, 600, cached_tokens=512),
        Reuse("append", 5, "hit", "torpor://default/b", 90, 600, not_taken="no_whole_block"),
        Reuse("append", 6, "hit", "torpor://default/b", 190, 600, not_taken="other_calls"),
    )
    daemon.service.also("why", requests=reuses)
    long, short, taken, *lines = torpor("why", "a").out.splitlines()
    assert long.endswith("none taken over: they were read in other calls than a new session makes")
    assert short.endswith("append  hit: 90 tokens of torpor://default/b; none taken over: only whole blocks of 256 are")
    assert taken.endswith("hit: 600 tokens of torpor://default/b; 512 of these taken over")
    assert lines[0].endswith("chat  clock: diverged at token 3 of 9, in message 1")
    assert lines[1:4] == ["    there  'it is [red]6:30'", "    asked  'it is \\x1b[31m7:45\\n'", "    Say it later."]
    assert lines[4] == "    The session went back to token 3, and went on from there."
    assert lines[5].endswith("generate  hit: 7 tokens of torpor://default/a")
    assert lines[6].endswith("append  none: no session began like this one")
    assert torpor("why", "a", "--json").document["requests"][2]["cause"] == "clock"
    assert torpor("why", "nobody").status == 4
    refused = Reuse("chat", 3, "diverged", uri, 3, 9, 3, 1, *texts, "clock", "Say it later.", "refused")
    daemon.service.also("why", requests=(refused,))
    assert torpor("why", "a").out.splitlines()[-1] == "    It was refused, and nothing was changed."
    daemon.service.also("why", requests=(Reuse("chat", 1, "none", volatile=("It is [red]12:00",)),))
    told = "    volatile, so it is said later: It is [red]12:00"
    assert torpor("why", "a").out.splitlines()[-1] == told
    cost = RequestCost(
        *(7, "chat", 5, "curl chat", "cancelled", "new", 30, 7, 3, "ledger"),
        written_tokens=4,
        seconds=2.0,
        wake_seconds=1.5,
        read_seconds=0.25,
    )
    daemon.service.also("why", requests=(Reuse("chat", 1, "none", cost=cost),), problem="It [red]cannot be read.")
    ran = torpor("why", "a")
    told = "    read 30 (7 again), wrote 4 in 2.00 s (woke 1.50 s, read 250 ms); cancelled; curl chat"
    first, again, last = ran.out.splitlines()
    assert first.endswith("chat  new: no session began like this one")
    assert again.startswith("    3 tokens recomputed: its last version ended in its ledger alone")
    assert (last, ran.err) == (told, "not all is told  It [red]cannot be read.\n")


def test_why_of_a_session_tells_its_requests_since_a_time(torpor: Torpor, daemon: ServerThread) -> None:
    now_ns = time.time_ns()
    torpor("append", "a", "x")
    old, new = Reuse("chat", now_ns - 7200 * 10**9, "none"), Reuse("append", now_ns - 10**9, "none")
    daemon.service.also("why", requests=(old, new))
    ran = torpor("why", "a", "--since", "1h", "--json")
    assert not ran.err
    assert [each["verb"] for each in ran.document["requests"]] == ["append"]
    assert "no request is known since " in torpor("why", "a", "--since", "2999-01-01").out


def test_why_counts_the_requests_of_all_sessions(torpor: Torpor, daemon: ServerThread) -> None:
    rows = (Costs("clock", 2, 1, 900, 800, 70, seconds=3.5), Costs("hit", 5, seconds=0.25), Costs("[red]x\n", 1))
    daemon.service.also("causes", rows=rows, total=Costs("", 8, 1, 900, 800, seconds=3.75), left_out=1)
    ran = torpor("why", "--all", "--since", "2h")
    head, clock, hit, odd, total = (line.split("\t") for line in ran.out.splitlines())
    assert head[:6] == ["CAUSE", "REQUESTS", "AGAIN", "READ", "REUSED", "WRITTEN"]
    assert (clock[:7], clock[-1]) == (["clock", "2", "800", "900", "70", "0", "3.50 s"], "1")
    assert (hit[0], hit[6], odd[0], odd[6], total[0], total[1]) == ("hit", "250 ms", "[red]x␊", "–", "all", "8")
    assert ran.err.splitlines()[:2] == ["requests since –", "1 row more (all counts them)"]
    assert "clock    Only a date or a time differs. Say it in the newest message, not at the beginning." in ran.err
    assert {line.split("  ")[0] for line in ran.err.splitlines()[2:]} == {"clock", "hit", "[red]x␊"}, (
        "each is explained"
    )
    assert daemon.service.calls[-1] == ("causes", {"since": "7200s"})
    for text, days in (("1w", 7.0), ("yesterday", 1.0)):
        torpor("why", "--since", text)
        assert days <= float(daemon.service.calls[-1][1]["since"].removesuffix("s")) / 86_400 < days + 1.1
    assert torpor("why", "--by", "hour", "--json").document["rows"][0]["read_again_tokens"] == 800
    rows = (Costs("torpor://lab/a", 1), Costs("", 1))
    daemon.service.also("causes", by="session", rows=rows, left_out=0)
    lines = torpor("why", "--by", "session").out.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["SESSION", "lab/a", "(deleted since)", "all"]
    daemon.service.also("causes", by="hour", rows=(Costs("3600", 1),))
    assert torpor("why", "--by", "hour").out.splitlines()[1].startswith("1970-01-01 ")
    daemon.service.also("causes", by="client", rows=(Costs("", 1),))
    assert torpor("why", "--by", "client").out.splitlines()[1].startswith("Unix socket\t")
    daemon.service.also("causes", rows=())
    assert torpor("why", "--since", "2026-11-30T14:05").out == "no request is known since 2026-11-30 14:05\n"
    for wrong in (["a", "--all"], ["a", "--by", "hour"], ["--since", "soon"], ["--since", "0"], ["--by", "color"]):
        assert torpor("why", *wrong).status == 2, wrong


def test_text_that_steers_terminals_is_shown_harmless(torpor: Torpor, daemon: ServerThread) -> None:
    """Threat 46: what a session holds was written by a model or a stranger."""
    torpor("append", "notes", "one")
    daemon.service.sessions["notes"].now(labels=("\x1b[2Jgone",))
    assert "\x1b" not in torpor("ls").out
    assert "␛[2Jgone" in torpor("ls").out


def _stopped_append(daemon: ServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come while an append is read; the daemon stops it then."""
    answer = daemon.service.answers[AppendRequest]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command before has set its own

    async def stopped(request: AppendRequest) -> Any:
        if request.create or "fresh" not in request.session:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # it waits for the answer
            await asyncio.wait_for(asyncio.Event().wait(), WAIT_S)
        return await answer(request)

    monkeypatch.setitem(daemon.service.answers, AppendRequest, stopped)


def test_a_stopped_append_says_where_the_session_stands(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    torpor("append", "notes", "one two three")
    _stopped_append(daemon, monkeypatch)
    ran = torpor("append", "notes", "four")
    assert (ran.status, "torpor://default/notes has 3 tokens, and can go on." in ran.err) == (130, True)
    ran = torpor("append", "fresh", "four")
    assert (ran.status, "Stopped. Nothing was read." in ran.err, "deleted again" in ran.err) == (130, True, True)
    assert list(daemon.service.sessions) == ["notes"]


def test_without_a_number_the_daemon_says_how_many_tokens_are_written(torpor: Torpor, daemon: ServerThread) -> None:
    for command in (("generate", "notes", "x"), ("chat", "notes", "x")):
        assert torpor(*command).status == 0
        assert "max_tokens" not in daemon.service.calls[-1][1]
        assert f"Default: {DEFAULT_MAX_TOKENS}, or" in " ".join(
            torpor(command[0], "--help").out.replace("│", "").split()
        )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_cancels_the_generation_and_the_session_stays_usable(
    torpor: Torpor, daemon: ServerThread, as_json: bool
) -> None:
    torpor("append", "notes", "one")
    daemon.do(daemon.service.hold)
    command = [sys.executable, "-m", "torpor.cli.main", "generate", "notes", "-n", "100"]
    with subprocess.Popen(
        command + ["--json"] * as_json, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        daemon.wait_until(lambda: daemon.service.running == 1)
        process.send_signal(signal.SIGINT)
        daemon.wait_until(lambda: daemon.service.cancelled == 1)
        out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert (json.loads(err)["error"]["code"] if as_json else err.split()[1]) == "cancelled"
    if as_json:
        assert json.loads(err)["error"]["details"] == {}, "nothing was committed"
    daemon.do(daemon.service.release)
    assert torpor("generate", "notes", "-n", "1", "--json").document["tokens"] == [1]


@pytest.mark.one_in(1)
def test_a_reader_that_goes_away_ends_the_command_quietly(daemon: ServerThread, torpor: Torpor) -> None:
    torpor("append", "notes", "one")
    command = [sys.executable, "-m", "torpor.cli.main", "generate", "notes", "-n", "5"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (0, "")
