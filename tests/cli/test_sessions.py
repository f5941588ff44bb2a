"""The commands that talk to a daemon, on a real socket, with a service that has no model."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.reading import AppendRequest, GenerateRequest, GenerateResult, Reuse
from torpor.daemon.api.session import Look, Origin, Recomputed
from torpor.daemon.api.waking import PartDiffers
from torpor.daemon.engine.generation import DEFAULT_MAX_TOKENS
from torpor.errors import TorporError
from torpor.memvid.answers import Finding, Lossy
from torpor.tests.cli.cli_rig import WAIT_S, Torpor
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def asleep(torpor: Torpor, daemon: ServerThread) -> ServerThread:
    """A daemon with a session `a` of one token, which sleeps."""
    torpor("append", "a", "one")
    torpor("sleep", "a")
    return daemon


def test_append_makes_the_session_and_says_what_was_read(torpor: Torpor, daemon: ServerThread) -> None:
    ran = torpor("append", "notes", "one two three")
    assert ran.status == 0
    assert "read 3 tokens" in ran.out
    assert "new session torpor://default/notes" in ran.err
    again = torpor("append", "notes", "four", "--json")
    assert again.document["token_count"] == 4
    assert again.document["schema_version"] == 1
    assert again.err == ""


def test_append_reads_a_file_and_standard_input(
    torpor: Torpor, daemon: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "report.md"
    text.write_text("from a file")
    assert torpor("append", "notes", "--file", text, "--json").document["tokens_added"] == 3
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped text")))
    assert torpor("append", "notes", "--json").document["tokens_added"] == 2
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"text behind a dash")))
    assert torpor("append", "notes", "-", "--json").document["tokens_added"] == 4


@pytest.mark.parametrize(
    ("arguments", "content", "code", "status"),
    [
        ((), b"", "nothing_to_do", 2),
        (("text", "--file", "also.txt"), b"", "nothing_to_do", 2),
        (("--file", "not-there.txt"), b"", "unreadable_input", 2),
        ((), b"\xff\xfe", "unreadable_input", 2),
        ((), b"x" * ((15 << 20) + 1), "unreadable_input", 2),
    ],
)
def test_append_refuses_what_is_no_text(
    torpor: Torpor,
    daemon: ServerThread,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    content: bytes,
    code: str,
    status: int,
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    ran = torpor("append", "notes", *arguments, "--json")
    assert (ran.status, ran.error["error"]["code"]) == (status, code)
    assert daemon.service.sessions == {}


def test_generate_streams_text_to_stdout_and_remarks_to_stderr(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "notes", "one two")
    ran = torpor("generate", "notes", "-n", "3")
    assert ran.status == 0
    assert ran.out == "t2 t3 t4 \n"
    assert "3 tokens" in ran.err


def test_generate_with_json_is_one_document_and_nothing_else(torpor: Torpor, daemon: ServerThread) -> None:
    ran = torpor("generate", "tale", "once", "-n", "2", "--prove", "--json")
    assert ran.err == ""
    assert ran.document["tokens"] == [1, 2]
    assert len(ran.document["logits_blake3"]) == 2


def test_generate_says_what_to_do_where_the_model_ends_at_once(torpor: Torpor, daemon: ServerThread) -> None:
    async def ended(request: GenerateRequest) -> GenerateResult:
        return GenerateResult(
            request.session, "", (), "stop", token_count=3, prefilled_tokens=0, seconds=0.1, time_to_first_token_s=None
        )

    daemon.service.answers[GenerateRequest] = ended
    ran = torpor("generate", "notes")
    assert (ran.status, ran.out) == (0, "")
    assert "so it wrote nothing; give it a text to go on from" in " ".join(ran.err.split())


def test_generate_hands_on_every_option(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("generate", "x", "hi", "-n", "1", "-t", "0.5", "--top-p", "0.9", "--seed", "3", "--stop", "a", "--stop", "b")
    asked = daemon.service.calls[-1][1]
    assert asked["stop"] == ("a", "b")
    assert asked["sampling"] == {"temperature": 0.5, "top_p": 0.9, "seed": 3}


def test_generate_without_sampling_options_keeps_the_sessions_own(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("generate", "x", "hi", "-n", "1")
    assert "sampling" not in daemon.service.calls[-1][1]


def test_set_changes_what_is_named_and_nothing_else(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "x", "hi")
    assert "temperature 0.8, top_p 1," in torpor("set", "x", "--temperature", "0.8").out
    assert torpor("set", "x", "--top-k", "4", "--json").document["sampling"]["temperature"] == 0.8
    assert daemon.service.calls[-1] == ("set", {"session": "x", "sampling": {"top_k": 4}})
    assert torpor("set", "x").status == 2


def test_a_sampling_value_that_no_sampler_takes_is_wrong_usage(torpor: Torpor, daemon: ServerThread) -> None:
    ran = torpor("generate", "x", "hi", "--top-p", "0")
    assert ran.status == 2
    assert "--top-p" in ran.err


def test_generate_without_a_text_makes_no_session(torpor: Torpor, daemon: ServerThread) -> None:
    assert torpor("generate", "typo").status == 4
    assert daemon.service.sessions == {}


def test_chat_answers_a_message_once(torpor: Torpor, daemon: ServerThread) -> None:
    ran = torpor("chat", "helper", "hello", "-n", "2")
    assert ran.status == 0
    assert ran.out == "t1 t2 \n"
    assert daemon.service.calls[-1][1]["message"] == "hello"


def test_chat_takes_the_message_from_a_pipe(
    torpor: Torpor, daemon: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped question\n")))
    assert torpor("chat", "helper", "-n", "1", "--json").document["text"] == "t1 "
    assert daemon.service.calls[-1][1]["message"] == "piped question\n"


def test_what_is_not_in_a_hurry_says_so(torpor: Torpor, daemon: ServerThread, tmp_path: Path) -> None:
    said = tmp_path / "said.json"
    said.write_text(json.dumps([{"role": "user", "content": "hi"}]))
    asked = [
        ("append", "helper", "hello"),
        ("generate", "helper", "-n", "1"),
        ("chat", "helper", "hi", "-n", "1"),
        ("chat", "helper", "--transcript", said, "-n", "1"),
        ("fold", "helper", "smaller", "--summary", "s"),
    ]
    for verb, *rest in asked:
        for given in ([], ["--priority", "background"]):
            before = len(daemon.service.calls)
            rest = [f"{rest[1]}-2" if verb == "fold" and given and at == 1 else each for at, each in enumerate(rest)]
            assert torpor(verb, *rest, *given).status == 0
            told = [asked for method, asked in daemon.service.calls[before:] if method == verb]
            assert [asked.get("priority") for asked in told[-1:]] == ["background" if given else None]
    assert torpor("append", "helper", "x", "--priority", "urgent").status == 2


def test_chat_takes_a_whole_transcript(
    torpor: Torpor, daemon: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    file = tmp_path / "said.json"
    file.write_text(json.dumps(said))
    ran = torpor("chat", "helper", "--transcript", file, "-n", "2")
    assert (ran.status, ran.out) == (0, "t1 t2 \n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert torpor("chat", "helper", "--transcript", "-", "--on-divergence", "rewind", "-n", "1").status == 0
    asked = [given for method, given in daemon.service.calls if method == "chat" and "messages" in given]
    assert [(list(given["messages"]), given.get("on_divergence")) for given in asked[-2:]] == [
        (said, None),
        (said, "rewind"),
    ]


@pytest.mark.parametrize(
    ("arguments", "content", "code"),
    [
        (("--transcript", "said.json", "hello"), "[]", "invalid_usage"),
        (("hello", "--on-divergence", "rewind"), "[]", "invalid_usage"),
        (("--transcript", "said.json", "--on-divergence", "ignore"), "[]", "invalid_usage"),
        (("--transcript", "said.json"), "", "nothing_to_do"),
        (("--transcript", "said.json"), "not JSON", "unreadable_input"),
        (("--transcript", "said.json"), "[" * 100_000, "unreadable_input"),
        (("--transcript", "said.json"), '{"role": "user", "content": "x"}', "unreadable_input"),
        (("--transcript", "said.json"), '["x"]', "unreadable_input"),
        (("--transcript", "said.json"), "[]", "invalid_request"),
        (("--transcript", "said.json"), '[{"role": "user"}]', "invalid_request"),
        (("--transcript", "said.json"), '[{"role": "assistant", "content": "x"}]', "invalid_request"),
        (("--transcript", "missing.json"), "[]", "unreadable_input"),
    ],
)
def test_chat_refuses_what_is_no_transcript(
    torpor: Torpor,
    daemon: ServerThread,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    content: str,
    code: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "said.json").write_text(content)
    ran = torpor("chat", "helper", *arguments, "--json")
    assert (ran.status, ran.error["error"]["code"]) == (2, code)
    assert not [method for method, _ in daemon.service.calls if method == "chat"]


def test_sleep_shows_receipts_and_goes_on_after_a_failure(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one")
    torpor("append", "b", "two")
    ran = torpor("sleep", "a", "nobody", "b")
    assert ran.status == 3
    assert ran.out.count("asleep as version 1") == 2
    assert "session_not_found" in ran.err


def test_save_shows_receipts_and_leaves_the_sessions_awake(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one")
    ran = torpor("save", "a", "nobody")
    assert ran.status == 3
    assert "  saved as version 1, bundle 000000000000: 1 token, 4 B written (1 block new, 0 reused) in" in ran.out
    assert torpor("save", "a", "--json").document["results"][0]["version"] == 2
    assert daemon.service.sessions["a"].info.state == "awake"


def test_sleep_of_nothing_but_unknown_sessions_has_their_own_status(torpor: Torpor, daemon: ServerThread) -> None:
    ran = torpor("sleep", "x", "y", "--json")
    assert ran.status == 4
    assert [failure["session"] for failure in ran.document["failures"]] == ["x", "y"]
    assert ran.document["results"] == []


def test_ids_in_json_are_whole_and_short_in_text(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one")
    assert len(torpor("sleep", "a", "--json").document["results"][0]["bundle_id"]) == 64
    assert f"bundle {'0' * 12}:" in torpor("sleep", "a").out


def test_wake_says_that_nothing_was_prefilled(torpor: Torpor, asleep: ServerThread) -> None:
    ran = torpor("wake", "a")
    assert "awake at version 1" in ran.out
    assert "0 of them prefilled" in ran.out
    assert "was awake already" in torpor("wake", "a").out
    assert torpor("wake", "a", "--version", "1", "--json").document["tokens_prefilled"] == 0


DAMAGED = Finding("/store/versions/a.mvm", "corrupt_bundle", "It may be the newest.")
AGAIN = "1,276 tokens from token 1,024 of version 3 were"


@pytest.mark.parametrize(
    ("fact", "value", "told"),
    [
        (
            "differs",
            (PartDiffers("device", "metal", "cpu"), PartDiffers("mlx", None, "1.2")),
            "differs since it slept: device metal → cpu, mlx unknown → 1.2\n",
        ),
        ("recomputed", Recomputed(3, 1024, 1276, False, damaged=False), f"recomputed: {AGAIN} computed again;"),
        ("recomputed", Recomputed(3, 1024, 1276, True), f"healed: {AGAIN} damaged on the disk and computed again"),
        ("recomputed", Recomputed(3, 1024, 1276, True), "is the same to the bit"),
        ("recomputed", Recomputed(3, 1024, 1276, False), "is not the same to the bit"),
        ("lossy", Lossy(8, 7680), "lossy: keys and values of the first 7,680 tokens were kept in 8 bits; "),
        ("unreadable", (DAMAGED,), "there may be a newer version: It may be the newest.\n"),
        ("unreadable", (DAMAGED,) * 3, "It may be the newest. Likewise 2 more manifests: torpor ls names all.\n"),
    ],
)
def test_wake_tells_in_one_line_in_what_a_session_is_not_as_it_was(
    torpor: Torpor, asleep: ServerThread, fact: str, value: Any, told: str
) -> None:
    assert fact not in torpor("wake", "a").err
    setattr(asleep.service, fact, value)
    ran = torpor("wake", "a")
    assert told in ran.err
    assert ran.err.count("\n") == 1
    document = torpor("wake", "a", "--strict", "--json").document[fact]
    assert document == json.loads(json.dumps(value, default=dataclasses.asdict))
    assert asleep.service.calls[-1][1] == {"session": "a", "strict": True}


def test_a_wake_with_other_bits_does_not_say_that_it_has_the_same(torpor: Torpor, asleep: ServerThread) -> None:
    asleep.service.canary, asleep.service.recomputed = "same_bits", Recomputed(3, 1024, 1276, True)
    assert "to the bit" in torpor("wake", "a").out
    torpor("sleep", "a")
    asleep.service.recomputed = Recomputed(3, 1024, 1276, False)
    assert "to the bit" not in torpor("wake", "a").out


def test_wake_plan_tells_what_would_be_done_and_wakes_nothing(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one two")
    torpor("sleep", "a")
    ran = torpor("wake", "a", "--plan", "--at", "1", "--strict")
    assert (ran.status, ran.err) == (0, "")
    said = ran.out.splitlines()
    assert said[0] == "torpor://default/a  a plan to wake version 1, 2 tokens; nothing was done"
    assert said[1] == "  read    3.00 MiB of 5 blocks"
    assert said[2] == "  tokens  2 restored, 1 computed"
    assert said[3] == "  memory  4.00 MiB"
    asked = [(method, given) for method, given in daemon.service.calls if "wake" in method]
    assert asked == [("plan_wake", {"session": "a", "at_token": 1, "strict": True})]
    document = torpor("wake", "a", "--plan", "--json").document
    assert (document["command"], document["plan"], document["blocks"]) == ("wake", True, 5)
    daemon.service.model = dataclasses.replace(daemon.service.model, resident=False)
    assert "beside the model, which is not loaded" in torpor("wake", "a", "--plan").out
    daemon.service.differs = (PartDiffers("blas", "slow", "fast"),)
    assert "differs since it slept: blas slow → fast" in torpor("wake", "a", "--plan", "--version", "1").err
    torpor("wake", "a")
    assert "awake already, 2 tokens: a wake does nothing" in torpor("wake", "a", "--plan").out


def test_show_tells_what_a_session_has_lost(torpor: Torpor, asleep: ServerThread) -> None:
    asleep.service.lossy = Lossy(8, 7680)
    assert "lossy\tkeys and values of the first 7,680 tokens in 8 bits" in torpor("show", "a").out


@pytest.mark.parametrize(
    ("fact", "mark", "told", "legend"),
    [
        ("lossy", "≈", Lossy(8, 512), "≈ keys and values were kept in few bits: torpor show says of how many tokens\n"),
        ("look", "<", Look(1, 3, 2, 9), "< woken before its end, to look at: its newest version stays until it reads"),
    ],
)
def test_ls_marks_a_session_that_is_lossy_or_only_looked_at(
    torpor: Torpor, daemon: ServerThread, fact: str, mark: str, told: Lossy | Look, legend: str
) -> None:
    for name in ("a", "b"):
        torpor("append", name, "one")
        torpor("sleep", name)
    assert legend not in torpor("ls").err
    daemon.service.sessions["a"].now(**{fact: told})
    listed = torpor("ls")
    assert [line.split()[0] for line in listed.out.splitlines() if f"{mark}\t" in line] == ["default/a"]
    assert legend in listed.err
    sessions = torpor("ls", "--json").document["sessions"]
    assert [info[fact] for info in sessions] == [dataclasses.asdict(told), None]


def test_what_was_computed_again_is_told_once(torpor: Torpor, asleep: ServerThread) -> None:
    asleep.service.recomputed, asleep.service.prefilled_by_wakes = Recomputed(1, 0, 44, True, damaged=False), 44
    told = torpor("generate", "a", "--max-tokens", "1").err
    assert "recomputed: 44 tokens from token 0" in told
    assert "read again" not in told
    torpor("sleep", "a")
    asleep.service.prefilled_by_wakes = 50
    assert "read again: 6 tokens that were not restored" in torpor("generate", "a", "--max-tokens", "1").err


def test_ls_marks_a_session_whose_last_tokens_will_be_computed_again(torpor: Torpor, asleep: ServerThread) -> None:
    assert "+" not in torpor("ls").out
    asleep.service.sessions["a"].now(unread_tokens=1)
    listed = torpor("ls")
    assert "asleep+" in listed.out
    assert "+ the next use computes its last tokens again: torpor show says how many\n" in listed.err


@pytest.mark.parametrize("command", ["append", "chat", "generate"])
def test_a_command_that_wakes_a_session_tells_in_what_it_is_not_as_it_was(
    torpor: Torpor, asleep: ServerThread, command: str
) -> None:
    asleep.service.lossy, asleep.service.prefilled_by_wakes = Lossy(4, 256), 44
    asleep.service.differs = (PartDiffers("device", "metal", "cpu"),)
    told = [
        "read again: 44 tokens that were not restored, to wake torpor://default/a\n",
        "lossy: keys and values of the first 256 tokens were kept in 4 bits; ",
        "differs since it slept: device metal → cpu\n",
    ]
    waking, awake = torpor(command, "a", "two").err, torpor(command, "a", "three").err
    assert [each in waking for each in told] == [True] * 3
    assert [each in awake for each in told] == [False] * 3


@pytest.mark.parametrize("command", ["append", "chat", "generate"])
def test_a_command_gives_scripts_the_report_of_the_wake_that_it_made(
    torpor: Torpor, asleep: ServerThread, command: str
) -> None:
    woken = torpor(command, "a", "two", "--json").document["woken"]
    assert (woken["version"], woken["token_count"], woken["already_awake"]) == (1, 1, False)
    assert torpor(command, "a", "three", "--json").document["woken"] is None


def test_why_shows_where_requests_left_what_was_there(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "x")
    assert "no request since the daemon began" in torpor("why", "a").out
    uri, texts = "torpor://default/a", ("it is [red]6:30", "it is \x1b[31m7:45\n")
    daemon.service.reuses = (
        Reuse("append", 1, "none"),
        Reuse("generate", 2, "hit", uri, 7, 7),
        Reuse("chat", 3, "diverged", uri, 3, 9, 3, 1, *texts, "clock", "Say it later.", "rewound"),
        Reuse("append", 4, "hit", "torpor://default/b", 600, 600, cached_tokens=512),
        Reuse("append", 5, "hit", "torpor://default/b", 90, 600, not_taken="no_whole_block"),
        Reuse("append", 6, "hit", "torpor://default/b", 190, 600, not_taken="other_calls"),
    )
    long, short, taken, *lines = torpor("why", "a").out.splitlines()
    assert long.endswith("none taken over: they were read in other calls than a new session makes")
    assert short.endswith("hit: 90 tokens of torpor://default/b; none taken over: only whole blocks of 256 are")
    assert taken.endswith("hit: 600 tokens of torpor://default/b; 512 of them taken over")
    assert lines[0].endswith("chat  diverged at token 3 of 9, in message 1: clock")
    assert lines[1:4] == ["    there  'it is [red]6:30'", "    asked  'it is \\x1b[31m7:45\\n'", "    Say it later."]
    assert lines[4] == "    The session went back to token 3, and went on from there."
    assert lines[5].endswith("generate  hit: 7 tokens of torpor://default/a")
    assert lines[6].endswith("append  none: no session began like this one")
    assert torpor("why", "a", "--json").document["requests"][2]["cause"] == "clock"
    assert torpor("why", "nobody").status == 4
    refused = Reuse("chat", 3, "diverged", uri, 3, 9, 3, 1, *texts, "clock", "Say it later.", "refused")
    daemon.service.reuses = (refused,)
    assert torpor("why", "a").out.splitlines()[-1] == "    It was refused, and nothing was changed."
    daemon.service.reuses = (Reuse("chat", 1, "none", left_out=("a-[red]header",)),)
    told = "    not read, for it changes with each request: a-[red]header"
    assert torpor("why", "a").out.splitlines()[-1] == told


def test_fold_goes_on_in_a_smaller_session(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one two three four")
    ran = torpor("fold", "a", "b", "--summary", "We [did] it.", "--tail", "2", "--label", "x")
    assert ran.status == 0
    assert ran.out.startswith("torpor://default/b  folded from torpor://default/a at version 1: 4 tokens became 7, the")
    assert "We" not in ran.out, "who gives it knows it"
    assert torpor("fold", "a", "c", "--summarise", "9").out.splitlines()[1] == "    in short"
    assert torpor("fold", "a", "d", "--summarise", "9", "--json").document["folded_from"]["tokens"] == 4
    assert [given.get("labels") for method, given in daemon.service.calls if method == "fold"] == [("x",), None, None]
    assert torpor("fold", "a", "e").status == 2
    assert torpor("fold", "nobody", "e", "--summary", "x").status == 4
    assert "folded from" not in torpor("show", "a").out
    daemon.service.folded_from = Origin("torpor://default/full", 3, "ab" * 32, 7800)
    assert "folded from\ttorpor://default/full at version 3, a summary of 7,800 tokens" in torpor("show", "a").out


def test_fork_makes_a_session_of_a_version_and_says_what_it_has_in_common(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one two")
    torpor("sleep", "a")
    ran = torpor("fork", "a@1", "b", "--at", "1", "--label", "x", "--label", "y")
    assert ran.status == 0
    assert ran.out.startswith("torpor://default/b  forked from torpor://default/a at version 1 with 1 token: 2 blocks")
    assert daemon.service.calls[-1][1] == {"session": "a@1", "name": "b", "at_token": 1, "labels": ("x", "y")}
    assert torpor("fork", "a", "c", "--json").document["forked_from"]["session"] == "torpor://default/a"
    assert torpor("fork", "nobody", "d").status == 4
    assert torpor("fork", "a", "e", "--at", "0").status == 2


def test_models_whose_files_have_changed_are_named(torpor: Torpor, daemon: ServerThread) -> None:
    daemon.service.model = dataclasses.replace(daemon.service.model, changed=("weights", "config"), problem="it broke")
    listed = torpor("models")
    assert "changed since they were loaded (weights, config)" in " ".join(listed.err.split())
    assert "it broke" in listed.err


def test_models_are_listed_loaded_and_unloaded(torpor: Torpor, daemon: ServerThread) -> None:
    listed = torpor("models")
    assert "fake" in listed.out
    assert "loaded" in listed.out
    assert torpor("models", "--json").document["models"][0]["name"] == "fake"
    assert torpor("models", "load", "fake", "--json").document["models"][0]["loads"] == 1
    assert "not loaded" in torpor("models", "unload", "fake").out
    assert torpor("models", "unload").status == 2
    assert torpor("models", "drop", "fake").status == 2


def test_show_says_where_a_fork_comes_from(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one two")
    assert "forked from" not in torpor("show", "a").out
    daemon.service.forked_from = Origin("torpor://default/base", 3, "ab" * 32, 1500)
    assert "forked from\ttorpor://default/base at version 3, with 1,500 tokens" in torpor("show", "a").out


def test_rm_needs_yes_where_nobody_can_be_asked(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one")
    assert torpor("rm", "a").status == 2
    assert torpor("rm", "a", "--json").status == 2
    assert "a" in daemon.service.sessions
    ran = torpor("rm", "a", "nobody", "--yes")
    assert ran.status == 3
    assert daemon.service.sessions == {}


def test_rm_deletes_one_version(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "a", "one")
    for _ in range(2):
        torpor("sleep", "a")
    ran = torpor("rm", "a@1", "--yes")
    assert (ran.status, ran.out) == (0, "torpor://default/a  deleted: 1 version, 4 B freed\n")
    assert [each.version for each in daemon.service.sessions["a"].versions] == [2]


def test_rm_tells_of_the_branches_that_a_kept_tree_leaves(torpor: Torpor, daemon: ServerThread) -> None:
    for name in ("tree", "tree.1", "tree.10", "tree.2", "tree.x", "trees.3"):
        torpor("append", name, "one")
    said = torpor("rm", "tree", "--yes").err.split()
    assert said[:6] == ["3", "sessions", "named", "after", "tree", "stay,"]
    assert "torpor://default/tree.1 to torpor://default/tree.10." in " ".join(said)
    assert torpor("rm", "trees.3", "tree.x", "--yes").err == ""


def test_rm_tells_what_kept_it_from_removing_packs(torpor: Torpor, daemon: ServerThread) -> None:
    problem = Finding("/store/versions/x.mvm", "bundle_missing", "What it needs is unknown.")
    daemon.service.also("delete", problems=(problem,))
    torpor("append", "a", "one")
    torpor("append", "b", "one")
    ran = torpor("rm", "a", "--yes")
    assert (ran.status, "bundle_missing What it needs is unknown." in ran.err) == (0, True)
    (result,) = torpor("rm", "b", "--yes", "--json").document["results"]
    assert result["problems"][0]["path"] == "/store/versions/x.mvm"


def test_ls_and_show_ask_the_daemon(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "notes", "one two")
    listed = torpor("ls", "--json").document
    assert listed["source"] == "daemon"
    assert listed["sessions"][0]["state"] == "awake"
    assert "default/notes" in torpor("ls").out
    shown = torpor("show", "notes")
    assert "…tail" in shown.out
    assert torpor("show", "notes", "--json").document["source"] == "daemon"


def test_text_that_steers_terminals_is_shown_harmless(torpor: Torpor, daemon: ServerThread) -> None:
    """Threat 46: what a session holds was written by a model or a stranger."""
    torpor("append", "notes", "one")
    daemon.service.sessions["notes"].now(labels=("\x1b[2Jgone",))
    assert "\x1b" not in torpor("ls").out
    assert "␛[2Jgone" in torpor("ls").out


class FakeOverflow(TorporError):
    code = "context_overflow"


@pytest.mark.parametrize("command", ["append", "generate", "chat"])
def test_a_session_is_made_by_the_request_that_reads_and_gone_with_it(
    torpor: Torpor, daemon: ServerThread, command: str
) -> None:
    """Two requests would leave an empty session where the command ends between them."""
    daemon.service.fault = FakeOverflow("too long")
    ran = torpor(command, "fresh", "one", "--model", "fake", "--label", "nightly")
    assert (ran.status, "is deleted again" in ran.err, daemon.service.sessions) == (2, True, {})
    daemon.service.fault = None
    assert torpor(command, "fresh", "one", "--model", "fake", "--label", "nightly").status == 0
    assert daemon.service.sessions["fresh"].info.labels == ("nightly",)
    asked = [given for name, given in daemon.service.calls if name == command]
    assert [each.get("create", False) for each in asked] == [False, True] * 2
    assert asked[-1]["model"] == "fake"
    assert not [name for name, _ in daemon.service.calls if name in ("create", "delete")]


def test_an_unknown_model_makes_no_session(torpor: Torpor, daemon: ServerThread) -> None:
    daemon.service.fault = FakeOverflow("no such model")
    ran = torpor("append", "fresh", "one", "--model", "typo")
    assert (ran.status, "new session" in ran.err, "deleted again" in ran.err) == (2, False, False)


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


def test_an_existing_session_keeps_its_model(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "notes", "one", "--model", "fake")
    calls = len(daemon.service.calls)
    ran = torpor("append", "notes", "two", "--model", "other")
    assert ran.status == 2
    assert "is on model 'fake'" in ran.err
    assert [name for name, _ in daemon.service.calls[calls:]] == ["list"]
    assert torpor("append", "notes", "two", "--model", "fake").status == 0
    ran = torpor("generate", "notes", "--model", "other")
    assert (ran.status, "is on model 'fake'" in ran.err) == (2, True)
    assert torpor("generate", "notes", "--model", "fake").status == 0


def test_without_a_number_the_daemon_says_how_many_tokens_are_written(torpor: Torpor, daemon: ServerThread) -> None:
    for command in (("generate", "notes", "x"), ("chat", "notes", "x")):
        assert torpor(*command).status == 0
        assert "max_tokens" not in daemon.service.calls[-1][1]
        assert f"Default: {DEFAULT_MAX_TOKENS}, or" in " ".join(
            torpor(command[0], "--help").out.replace("│", "").split()
        )


def test_chat_ends_where_the_model_writes_a_stop_text(torpor: Torpor, daemon: ServerThread) -> None:
    assert torpor("chat", "notes", "x", "--stop", "END", "--stop", "\n\n").status == 0
    assert daemon.service.calls[-1][1]["stop"] == ("END", "\n\n")
    assert torpor("chat", "notes", "x", "--stop", "").status == 2


@pytest.mark.parametrize("options", [(), ("--summary", "x", "--summarise", "5")])
def test_a_fold_takes_one_way_to_its_summary_by_the_names_of_its_options(
    torpor: Torpor, daemon: ServerThread, options: tuple[str, ...]
) -> None:
    ran = torpor("fold", "notes", "more", *options)
    assert (ran.status, "either --summary TEXT or --summarise N" in ran.err) == (2, True)


def test_a_look_and_the_branch_that_ends_it_are_said_with_the_way_back(torpor: Torpor, daemon: ServerThread) -> None:
    torpor("append", "notes", "one")
    torpor("sleep", "notes")
    look = Look(1, 300, 2, 5000)
    daemon.service.also("wake", look=look)
    for verb in ("append", "generate", "chat"):
        daemon.service.also(verb, branched=look)
    said = " ".join(torpor("wake", "notes").err.split())
    assert "a look at version 1, token 300: version 2, with 5,000 tokens, stays the newest, unless" in said
    assert "To go back to it: torpor sleep notes, then torpor wake notes" in said, (
        "a wake of what is awake changes nothing"
    )
    for command in (("append", "notes", "x"), ("generate", "notes", "-n", "1"), ("chat", "notes", "x", "-n", "1")):
        said = " ".join(torpor(*command).err.split())
        assert "history branches here: torpor://default/notes goes on from version 1, token 300." in said
        assert "torpor sleep notes, then torpor wake notes@2; or torpor fork notes@2 NAME" in said


@pytest.mark.parametrize(
    ("verb", "kept", "said"),
    [
        ("sleep", {"already_asleep": True}, "  was asleep already as version 1, bundle {}: 1 token\n"),
        ("sleep", {}, "  asleep again as version 1, bundle {}: 1 token, nothing new to write\n"),
        ("sleep", {"looked_at": 1500}, "nothing new to write; the look at token 1,500 is dropped\n"),
        ("save", {"already_asleep": True}, "  was asleep already as version 1, bundle {}: 1 token\n"),
        ("save", {}, "  saved already as version 1, bundle {}: 1 token, nothing new to write\n"),
        ("save", {"looked_at": 1500}, "nothing new to write; the look at token 1,500 stays\n"),
    ],
)
def test_of_a_sleep_or_save_that_writes_nothing_it_is_said_why(
    torpor: Torpor, daemon: ServerThread, verb: str, kept: dict[str, Any], said: str
) -> None:
    torpor("append", "notes", "one")
    daemon.service.also(verb, bytes_written=0, blocks_new=0, **kept)
    assert torpor(verb, "notes").out.endswith(said.format("0" * 12))


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
