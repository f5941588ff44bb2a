"""Invariants of docs/reference/invariants.md, by their ids, where something fails inside the daemon: a real
one, with doors that make a model call, an allocation or a write fail, or hold it until the daemon is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.api.events import TokenEvent
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.api.sampling import Sampling
from torpor.socket_api import Client, RemoteError
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api.errors import ConnectionLost, LocalProtocolError
from torpor.tests.socket_api.real_daemon import Asked, RealDaemon, served, tokens_of, until

pytestmark = pytest.mark.timeout(180)

SAMPLED = Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=11)


def written(result: GenerateResult) -> tuple[Any, ...]:
    """What a generation gave, to the bit."""
    return result.tokens, result.text, result.logits_blake3, result.final_logits_blake3


def two_alike(torpor: Client, name: str, seed: int) -> tuple[str, str]:
    """A session to which something will happen, and one to which nothing does."""
    for each in (name, f"{name}-control"):
        torpor.create(each, sampling=SAMPLED)
        torpor.append(each, tokens=tokens_of(seed, 60))
    return name, f"{name}-control"


def go_on_alike(torpor: Client, *names: str) -> bool:
    replies = [written(torpor.generate(name, max_tokens=8, prove=True)) for name in names]
    return replies[0] == replies[1]


@pytest.mark.one_in(3)
def test_qc9_qx7_a_generation_that_fails_ends_at_its_last_committed_token(daemon: RealDaemon, torpor: Client) -> None:
    """The ledger is what was shown; the session goes on as one that was asked for just so many."""
    name, control = two_alike(torpor, "fails", 9)
    daemon.doors.fail("network", after=5)
    stream = torpor.stream_generate(name, max_tokens=40)
    with pytest.raises(RemoteError) as failure:
        list(stream)
    assert failure.value.code == "generation_failed"
    held = torpor.show(name).info.token_count
    assert 60 < held < 100
    torpor.generate(control, max_tokens=held - 60)
    assert go_on_alike(torpor, name, control)


@pytest.mark.one_in(2)
def test_qc9_a_reading_that_fails_is_none_at_all(daemon: RealDaemon, torpor: Client) -> None:
    name, control = two_alike(torpor, "half", 90)
    daemon.doors.fail("network", after=1)
    with pytest.raises(RemoteError) as failure:
        torpor.append(name, tokens=tokens_of(91, 700))
    assert failure.value.code == "generation_failed"
    assert torpor.show(name).info.token_count == 60
    assert go_on_alike(torpor, name, control)


@pytest.mark.one_in(1)
def test_qc11_a_session_that_could_not_be_made_is_not_there_and_can_be_made_again(
    daemon: RealDaemon, torpor: Client
) -> None:
    """No name, no memory and no row of it stays behind an allocation that failed."""
    before = torpor.status()
    daemon.doors.fail("state")
    with pytest.raises(RemoteError) as failure:
        torpor.create("unmade", sampling=SAMPLED)
    assert not daemon.doors.is_armed("state")
    assert failure.value.code == "internal_error"
    after = torpor.status()
    assert (after.memory, after.sessions_awake) == (before.memory, before.sessions_awake)
    assert "torpor://default/unmade" not in [info.session for info in torpor.list_sessions()]
    with pytest.raises(RemoteError) as missing:
        torpor.append("unmade", tokens=[400])
    assert missing.value.code == "session_not_found"
    name, control = two_alike(torpor, "unmade", 11)
    assert go_on_alike(torpor, name, control)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("chat", [True, False])
def test_qc13_qx17_a_stream_that_fails_ends_in_an_error_and_in_no_word_of_the_assistant(
    daemon: RealDaemon, torpor: Client, chat: bool
) -> None:
    """There is no result, so no `finish_reason`; what was shown is what was committed, and the error is none of it."""
    name, control = two_alike(torpor, f"mid-{chat}", 13)
    shown: list[TokenEvent] = []

    def note(event: object) -> None:
        if isinstance(event, TokenEvent):
            shown.append(event)

    if chat:
        torpor.chat(name, "Tell me of the sea.", max_tokens=4)
        torpor.chat(control, "Tell me of the sea.", max_tokens=4)
    held = torpor.show(name).info.token_count
    daemon.doors.fail("network", after=9)
    stream = (
        torpor.stream_chat(name, "And then?", max_tokens=40, on_event=note)
        if chat
        else torpor.stream_generate(name, max_tokens=40, on_event=note)
    )
    pieces: list[str] = []
    with pytest.raises(RemoteError) as failure:
        pieces.extend(stream)
    assert failure.value.code == "generation_failed"
    with pytest.raises(LocalProtocolError):
        _ = stream.result
    text = "".join(event.text for event in shown)
    assert failure.value.message not in text
    assert "broke" not in text
    detail = torpor.show(name)
    committed = detail.info.token_count
    assert committed > held
    assert "broke" not in detail.tail_text
    if chat:
        torpor.chat(control, "And then?", max_tokens=len(shown))
        assert torpor.show(control).info.token_count == committed
    else:
        assert committed == held + len(shown)
        torpor.generate(control, max_tokens=len(shown))
    assert go_on_alike(torpor, name, control)


@pytest.mark.one_in(1)
def test_qx11_a_reset_that_fails_leaves_a_session_that_answers(daemon: RealDaemon, torpor: Client) -> None:
    """Going back to the beginning needs a new state. Where there is no memory for it, the session is what it was, and
    the next request is served; so is the same one again."""
    name, control = two_alike(torpor, "back", 11)
    anew = [{"role": "user", "content": "Let us begin anew."}]
    daemon.doors.fail("state")
    with pytest.raises(RemoteError) as failure:
        torpor.chat(name, messages=anew, max_tokens=4, on_divergence="rewind")
    assert failure.value.code == "internal_error"
    assert not daemon.doors.is_armed("state")
    assert torpor.show(name).info.token_count == 60
    assert go_on_alike(torpor, name, control)
    again = [torpor.chat(each, messages=anew, max_tokens=4, on_divergence="rewind") for each in (name, control)]
    assert [each.rewound_to for each in again] == [0, 0]
    assert written(again[0]) == written(again[1])


def test_qx11_a_reset_by_delete_and_create_that_fails_can_be_done_again(daemon: RealDaemon, torpor: Client) -> None:
    """The name is free, and neither taken by half a session nor given to the old one."""
    name, _ = two_alike(torpor, "swept", 12)
    torpor.delete(name)
    daemon.doors.fail("state")
    with pytest.raises(RemoteError):
        torpor.create(name)
    assert not daemon.doors.is_armed("state")
    assert torpor.create(name).token_count == 0


@pytest.mark.one_in(4)
def test_qx13_a_save_that_finds_no_room_is_an_error_and_the_old_version_stays(
    daemon: RealDaemon, torpor: Client
) -> None:
    """The session stays awake and serves; the pack of the version before is what it was; and the next save succeeds."""
    name, control = two_alike(torpor, "room", 13)
    before = set((daemon.store / "packs").iterdir())
    first = torpor.sleep(name)
    (file,) = set((daemon.store / "packs").iterdir()) - before
    stored = file.read_bytes()
    torpor.generate(name, max_tokens=300)
    daemon.doors.fail("write")
    with pytest.raises(RemoteError) as failure:
        torpor.sleep(name)
    assert failure.value.code == "no_space"
    assert torpor.show(name).info.state == "awake"
    assert file.read_bytes() == stored
    assert not list(daemon.store.rglob("*.tmp"))
    torpor.generate(control, max_tokens=300)
    assert torpor.sleep(name).version > first.version
    assert go_on_alike(torpor, name, control)


@pytest.mark.one_in(4)
def test_qx13_a_save_that_is_killed_leaves_the_version_before(tmp_path: Path) -> None:
    """Whatever of the new one was written is no version: behind a restart the session is what was last acknowledged."""
    with served(tmp_path / "k", "--durability", "sleep", doors=True) as daemon, Client(daemon.socket) as torpor:
        name, control = two_alike(torpor, "killed", 14)
        torpor.sleep(name)
        expected = written(torpor.generate(control, max_tokens=8, prove=True))
        torpor.append(name, tokens=tokens_of(15, 300))
        daemon.doors.fail("hold", after=1)
        link = blocking_link(daemon.socket, timeout_s=120)
        saving = Asked(link, "sleep", {"session": name})
        until(lambda: not daemon.doors.is_armed("hold"))
        daemon.end(kill=True)
        with pytest.raises(ConnectionLost):
            saving.answer()
        wait(link.close())
    with served(tmp_path / "k") as daemon, Client(daemon.socket) as torpor:
        detail = torpor.show(name)
        assert (detail.info.token_count, [each.version for each in detail.versions]) == (60, [1])
        assert written(torpor.generate(name, max_tokens=8, prove=True)) == expected
        assert torpor.sleep(name).version > 1
