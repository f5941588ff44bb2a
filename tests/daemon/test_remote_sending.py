"""What goes to a remote, so that it survives this machine: versions and turns, also where the daemon stops."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk.remote import Remote
from torpor.daemon.errors import StopDeadline
from torpor.daemon.tasks.door import Phase
from torpor.memvid.errors import BundleMissing, Corruption, NoSpace, OwnerMismatch
from torpor.memvid.remote.tails import put_record
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, dies, freed, remote_of, unreachable
from torpor.tests.daemon.session_rig import hold_calls, tokens_of, until


async def test_a_stop_whose_time_is_over_leaves_an_upload(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the next block: the daemon leaves within its time, and the next one sends the rest."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 600))
        remote, sending, goes_on = remote_of(one), threading.Event(), threading.Event()
        put_pack = remote.sessions._versions.put_pack

        def slow(stream: Any) -> Any:
            sending.set()
            assert goes_on.wait(60)
            return put_pack(stream)

        monkeypatch.setattr(remote.sessions._versions, "put_pack", slow)
        await one.sleep("s")
        await until(sending.is_set)
        one.service._parts.door.begin_to_stop(Phase.STOPPING, 0.0)
        goes_on.set()
        await one.service.close()
    assert not list((tmp_path / "shared").glob("versions/*.mvm"))
    async with machine("one") as one:
        await freed(one)


async def test_who_waits_for_the_remote_no_more_is_sent_behind(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C in a `sleep --remote` says."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        with monkeypatch.context() as patch:
            gate = hold_calls(patch, remote_of(one).sessions._versions, "put_pack")
            asked = asyncio.create_task(one.service.sleep("s", remote=True))
            await gate.reached()
            assert one.service._parts.store.disk.require_session(S).version == 1
            asked.cancel()
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await asked
        await freed(one)


async def test_a_stop_whose_time_is_over_leaves_a_version_that_comes(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 600))
        await freed(one)
        objects, coming, goes_on = remote_of(two).sessions._versions.objects, threading.Event(), threading.Event()
        get_ranges = objects.get_ranges

        def slow(*asked: Any) -> Any:
            coming.set()
            assert goes_on.wait(60)
            return get_ranges(*asked)

        monkeypatch.setattr(objects, "get_ranges", slow)
        waking = asyncio.create_task(two.wake("s"))
        await until(coming.is_set)
        two.service._parts.door.begin_to_stop(Phase.STOPPING, 0.0)
        goes_on.set()
        with pytest.raises(StopDeadline):
            await waking
        await two.service.close()
        assert (await one.wake("s")).token_count == 600


async def test_a_stop_sends_what_sleeps_then(machine: OpenMachine) -> None:
    """The next machine has it, without waiting for a lease."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.generate("s", max_tokens=5)
    async with machine("two") as two:
        assert (await two.wake("s")).token_count == 305


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("turns", "survive"), [(0.0, 345), (0.2, 345), (None, 300)])
async def test_what_was_answered_survives_the_loss_of_the_machine(
    machine: OpenMachine, turns: float | None, survive: int
) -> None:
    """Its store is gone for good. Each turn, or those of some time before; or what slept."""
    async with machine("one", close=False, remote_lease=1.0, remote_turns=turns) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        for more in (tokens_of(2, 30), tokens_of(3, 15)):
            await one.service.append("s", tokens=more)
        if turns:
            while not ((head := await remote_of(one).head(S)) and head.tail and len(one.live("s").state.tokens) == 345):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3)
        await dies(one)
    async with machine("two", remote_lease=1.0) as two:
        report = await two.wake("s")
        assert report.token_count == survive
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 30), *tokens_of(3, 15)][:survive]
        await two.service.append("s", tokens=[7])
        await two.sleep("s")
        await freed(two)
        head = await remote_of(two).head(S)
        assert head is not None
        assert not head.tail


@pytest.mark.one_in(1)
async def test_a_session_that_never_slept_survives_too(machine: OpenMachine) -> None:
    async with machine("one", close=False, remote_lease=1.0, remote_turns=0.0) as one:
        await one.read("s", tokens_of(1, 300))
        await one.service.append("s", tokens=[1, 2, 3])
        await dies(one)
    async with machine("two", remote_lease=1.0) as two:
        assert (await two.wake("s")).token_count == 303


async def test_a_turn_that_comes_while_a_version_is_sent_stays_in_the_remote(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands behind that version, and was told."""
    async with machine("one", remote_turns=0.0) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=[1])
        remote, sent, goes_on, pushing = remote_of(one), threading.Event(), threading.Event(), list[str]()
        lease = remote.leases[S]
        push, change = remote.sessions.push, lease.change

        def noted(of: Any, goes_on: Any, **named: Any) -> Any:
            pushing.append(threading.current_thread().name)
            return push(of, goes_on, **named)

        def held(edit: Any) -> Any:
            if pushing == [threading.current_thread().name]:
                sent.set()
                assert goes_on.wait(60)
            return change(edit)

        monkeypatch.setattr(remote.sessions, "push", noted)
        monkeypatch.setattr(lease, "change", held)
        await one.service.save("s")
        await until(sent.is_set)
        pushing.append("another thread may have its name from now on")
        await one.service.append("s", tokens=[2, 3])
        told = await remote.head(S)
        goes_on.set()
        assert told is not None
        while (head := await remote.head(S)) is None or head.newest == told.newest:
            await asyncio.sleep(0.01)
        assert head.tail == told.tail != ()


async def test_a_session_whose_turns_are_no_version_yet_is_kept(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took it then would go on without them."""
    async with machine("one", remote_turns=None) as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=[1, 2, 3])
        disk, tries = one.service._parts.store.disk, list[int]()

        def full(_: SessionUri) -> None:
            tries.append(1)
            raise NoSpace("It is full.", path="")

        with monkeypatch.context() as patch:
            patch.setattr(disk, "replay_turns", full)
            one.service._parts.sessions.awake.drop(S)
            await until(lambda: bool(tries))
            head = await remote_of(one).head(S)
        assert head is not None
        assert head.awake_at == remote_of(one).sessions.me
        assert (await one.wake("s")).token_count == 303


async def test_a_head_that_changes_while_it_is_read_is_no_replayed_one(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen meanwhile is newer than what was asked for."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        objects, asked, goes_on = remote_of(one).sessions._objects, threading.Event(), threading.Event()
        get, reading = objects.get, list[str]()

        def held(key: str, most_bytes: int) -> Any:
            found = get(key, most_bytes)
            if reading == [threading.current_thread().name]:
                asked.set()
                assert goes_on.wait(60)
            return found

        def read() -> Any:
            reading.append(threading.current_thread().name)
            return remote_of(one).sessions.heads.read(S)

        monkeypatch.setattr(objects, "get", held)
        head = asyncio.create_task(asyncio.to_thread(read))
        await until(asked.is_set)
        await one.service.append("s", tokens=[1])  # takes the session: its head is a newer one
        goes_on.set()
        assert (await head).head.newest is not None


async def test_turns_stand_behind_no_version_of_another_session(machine: OpenMachine) -> None:
    """Who may write in the remote may name one: its tokens would be this session's, and it would be here, too."""
    async with machine("one", remote_turns=0.0) as one, machine("two") as two:
        for name in ("s", "other"):
            await one.asleep(name, tokens_of(1, 300))
            await freed(one, SessionUri("default", name))
        await one.service.append("s", tokens=[5])
        disk, remote = one.service._parts.store.disk, remote_of(one)
        turns, other = disk.acknowledged_turns(S), disk.require_session(SessionUri("default", "other"))
        assert turns is not None
        key = put_record(
            remote.sessions._versions, dataclasses.replace(turns, base=other.bundle_id), remote.sessions.me.store
        )
        remote.leases[S].change(lambda head: dataclasses.replace(head, tail=(key,)))
        remote.leases[S].release(asleep=True)
        with pytest.raises(OwnerMismatch):
            await two.wake("s")
        assert two.service._parts.store.disk.find_session(other.uri) is None


async def test_a_second_receipt_says_that_the_remote_has_it(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the remote the first one stands, and the next try gives the second."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        saved = await one.service.save("s", remote=True)
        head = await remote_of(one).head(S)
        assert head is not None
        assert saved.remote is not None
        assert head.newest == saved.remote.bundle_id == saved.bundle_id
        assert one.is_awake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "push", unreachable)
            slept = await one.service.sleep("s", remote=True)
        assert (slept.token_count, slept.remote) == (303, None)
        assert slept.remote_problem is not None
        assert slept.remote_problem.code == "remote_unreachable"
        assert "torpor push" in slept.remote_problem.message
        assert not one.is_awake("s")
        again = await one.service.sleep("s", remote=True)
        assert (again.already_asleep, again.remote_problem) == (True, None)
        assert again.remote is not None
        assert (again.remote.version, again.remote.bundle_id) == (slept.version, slept.bundle_id)
        head = await remote_of(one).head(S)
        assert head is not None
        assert (head.newest, head.awake_at) == (slept.bundle_id, None)


async def test_a_push_sends_again_what_is_missing_or_damaged(machine: OpenMachine, tmp_path: Path) -> None:
    """Of a version that the remote has, as far as is remembered here: that is what refusals advise."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        for what, damage in (("packs", None), ("versions", None), ("places", b"x")):
            for path in (tmp_path / "shared" / what).iterdir():
                path.unlink()
                if damage is not None:
                    path.write_bytes(damage)
        with pytest.raises(BundleMissing):
            await two.wake("s")
        assert (await one.service.push("s")).blocks_sent > 0
        assert (await two.wake("s")).token_count == 300


async def test_a_push_sends_again_a_pack_that_a_wake_found_to_be_other_bytes(
    machine: OpenMachine, tmp_path: Path
) -> None:
    """Its length is right, so who sends knows it by who reads alone."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        (pack,) = (tmp_path / "shared" / "packs").iterdir()
        data = pack.read_bytes()
        pack.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
        with pytest.raises(Corruption):
            await two.wake("s")
        assert (await one.service.push("s")).blocks_sent > 0
        assert (await two.wake("s")).token_count == 300


async def test_who_waits_to_send_what_another_request_has_sent_loses_nothing(machine: OpenMachine) -> None:
    """A sleep that waits for the remote has let the session go by then: that is no lost lease."""
    async with machine("one") as one:
        await one.read("s", tokens_of(1, 300))
        remote = remote_of(one)
        async with remote._moving:
            waiting = asyncio.create_task(remote.push(S))
            await asyncio.sleep(0)
            await remote.release(S)
        assert await waiting is None
