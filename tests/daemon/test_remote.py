"""Sessions that move between machines by a remote: daemons, each with a store of its own, and one folder for all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torpor.daemon.disk.remote import Remote
from torpor.daemon.errors import SessionExists
from torpor.memvid.errors import Diverged, LeaseHeld, SessionNotFound
from torpor.memvid.uri import SessionUri
from torpor.tests.daemon.machines import OpenMachine, S, freed, remote_of, unreachable
from torpor.tests.daemon.session_rig import Rigged, tokens_of, until


async def _goes_on_elsewhere(one: Rigged, two: Rigged) -> None:
    """A session that is awake at `two`, and unchanged, is taken from it by `one`, which reads 50 tokens and sleeps."""
    await one.asleep("s", tokens_of(1, 300))
    await freed(one)
    await two.wake("s")
    remote_of(two).leases[S].release(asleep=True)  # as if it had run out
    await one.wake("s")
    await one.service.append("s", tokens=tokens_of(2, 50))
    await one.sleep("s")
    await freed(one)
    assert two.is_awake("s")


async def test_a_session_goes_on_at_another_machine_at_the_next_token(machine: OpenMachine) -> None:
    """To the bit, as at the machine where it slept; and back, with what was added."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 600))
        await one.sleep("s")
        await freed(one)
        report = await two.wake("s")
        assert (report.token_count, report.tokens_prefilled, report.version) == (600, 0, 1)
        state = await two.fingerprint("s")
        wrote = await two.write("s", 40)
        await two.sleep("s")
        await freed(two)
        report = await one.wake("s")
        assert (report.token_count, report.version) == (640, 2)
        grown = await one.fingerprint("s")
        await one.sleep("s")
        await freed(one)
        assert await one.woken_fingerprint("s", 1) == state
        await one.sleep("s")
        await one.service.fork("s@1", "control")
        await one.wake("control")
        assert await one.write("control", 40) == wrote
        assert await one.fingerprint("control") == grown


async def test_two_machines_never_have_one_session(machine: OpenMachine) -> None:
    """Who has it answers; the other one is told who that is, and makes no session of that name."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        with pytest.raises(SessionNotFound):
            await two.wake("other")
        for asked in (two.service.create("s"), two.service.append("s", tokens=[1], create=True)):
            with pytest.raises(LeaseHeld) as refused:
                await asked
        assert refused.value.details["store"] == remote_of(one).sessions.me.store
        await one.sleep("s")
        await freed(one)
        await two.wake("s")
        with pytest.raises(LeaseHeld):
            await one.service.append("s", tokens=[5])
        with pytest.raises(SessionExists):
            await two.service.create("s")


async def test_who_makes_no_new_session_goes_on_with_that_of_the_remote(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As commands do at first: they say that a session is new only once the daemon knows none."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 300))
        assert [each.place for each in (await two.service.remote()).sessions] == ["held"]
        with pytest.raises(LeaseHeld):
            await two.service.append("s", tokens=[5])
        await one.sleep("s")
        await freed(one)
        with monkeypatch.context() as patch:
            patch.setattr(Remote, "run", unreachable)
            with pytest.raises(SessionNotFound):
                await two.service.append("s", tokens=[5])
        assert (await two.service.append("s", tokens=[5])).token_count == 301


async def test_no_new_session_has_a_name_that_another_machine_has(machine: OpenMachine) -> None:
    """Whatever makes it: each would be there twice."""
    async with machine("one") as one, machine("two") as two:
        await one.read("s", tokens_of(1, 30))
        await two.asleep("other", tokens_of(2, 300))
        root = (await two.service.tree("other")).branch
        for asked in (
            two.service.keep(root, "s"),
            two.service.keep(root, "s", subtree=True),
            two.service.fold("other", name="s", summary="So far."),
            two.service.fork("other", name="s"),
            two.service.import_bundle(bundle_id="ab" * 32, session="s"),
        ):
            with pytest.raises(LeaseHeld):
                await asked
        assert (await two.service.keep(root, "kept")).state == "awake"
        assert remote_of(two).has(SessionUri("default", "kept"))


async def test_a_session_is_shown_at_the_machine_that_has_it(machine: OpenMachine) -> None:
    """As far as is known here without a question: from the start on, and from each refusal; until it is back."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
    async with machine("two") as two:
        await two.wake("s")
        there = remote_of(two).sessions.me.machine
        async with machine("one") as one:
            await until(lambda: remote_of(one).machine_of(S) is not None)
            (info,) = await one.service.list_sessions()
            shown, logged = await one.service.show("s"), await one.service.history(["s"])
            assert (info.machine, shown.info.machine, logged.machines) == (there, there, {str(S): there})
            (info,) = await two.service.list_sessions()
            assert info.machine is None
            await two.sleep("s")
            await freed(two)
            await one.wake("s")
            (info,) = await one.service.list_sessions()
            assert info.machine is None
            with pytest.raises(LeaseHeld):
                await two.service.append("s", tokens=[1])
            (info,) = await two.service.list_sessions()
            assert info.machine == there


async def test_what_another_machine_has_removed_is_at_none_once_the_remote_was_listed(machine: OpenMachine) -> None:
    """And nothing here counts on its versions there."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        assert [each.machine for each in (await one.service.remote()).sessions] == [remote_of(two).sessions.me.machine]
        assert remote_of(one).machine_of(S) is not None
        await two.service.delete("s")
        assert not (await one.service.remote()).sessions
        (info,) = await one.service.list_sessions()
        assert info.machine is None
        assert S not in remote_of(one).sessions.versions_seen


async def test_who_names_what_is_not_here_is_told_where_the_remote_is_listed(machine: OpenMachine) -> None:
    """It may be spelled otherwise there. Of a session that is here, a version that it lacks is no such case."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        for asked in (one.wake("t"), one.service.append("t", tokens=[1]), one.service.show("t")):
            with pytest.raises(SessionNotFound, match="`torpor ls --remote`"):
                await asked
        with pytest.raises(SessionNotFound) as refused:
            await one.wake("s@7")
        assert "--remote" not in refused.value.message


async def test_what_has_gone_on_at_two_places_stays_at_both(machine: OpenMachine, tmp_path: Path) -> None:
    """A machine that was away too long has turns of its own: nothing of either is lost, and the way out is told."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
    async with machine("one", remote=None) as one:
        await one.service.append("s", tokens=tokens_of(2, 50))
        await one.sleep("s")
    async with machine("two") as two:
        await two.wake("s")
        await two.service.append("s", tokens=tokens_of(3, 20))
    async with machine("one") as one:
        with pytest.raises(Diverged, match=r"torpor fork.* the remote keeps its own"):
            await one.wake("s")
        await one.service.fork("s", "mine")
        assert (await one.wake("mine")).token_count == 350
        await one.service.delete("s")
        assert (await one.wake("s")).token_count == 320


@pytest.mark.one_in(1)
async def test_a_dialogue_goes_on_in_the_session_that_came_from_another_machine(machine: OpenMachine) -> None:
    """Found by what was said, which only the other machine has heard."""
    said = [{"role": "user", "content": "hello"}]
    async with machine("one") as one:
        first = await one.service.converse("s", said, max_tokens=4)
    said += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and?"}]
    async with machine("two") as two:
        await two.wake("s")
        then = await two.service.converse("s", said, max_tokens=4)
    assert then.session == first.session
    assert then.prefilled_tokens == then.token_count - len(then.tokens) - first.token_count


async def test_a_pull_leaves_no_older_state_in_memory(machine: OpenMachine) -> None:
    """The next turn goes on from what was pulled beneath the session."""
    async with machine("one") as one, machine("two") as two:
        await _goes_on_elsewhere(one, two)
        await two.service.pull("s")
        await two.service.append("s", tokens=[7])
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 50), 7]


async def test_a_request_that_was_given_up_leaves_no_older_state_in_memory(
    machine: OpenMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the newer version came for it."""
    async with machine("one") as one, machine("two") as two:
        await _goes_on_elsewhere(one, two)
        sessions, came, goes_on = remote_of(two).sessions, threading.Event(), threading.Event()
        pull = sessions.pull

        def held(head: Any, **options: Any) -> Any:
            pulled = pull(head, **options)
            came.set()
            assert goes_on.wait(60)
            return pulled

        monkeypatch.setattr(sessions, "pull", held)
        asked = asyncio.create_task(two.service.append("s", tokens=[9]))
        await until(came.is_set)
        asked.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await two.service.append("s", tokens=[7])
        assert list(two.live("s").state.tokens) == [*tokens_of(1, 300), *tokens_of(2, 50), 7]


async def test_a_pull_of_a_session_that_has_gone_on_here_leaves_it_as_it_is(machine: OpenMachine) -> None:
    """Also where what the remote has of it is no version here any more."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
    async with machine("one", remote=None) as one:
        await one.service.append("s", tokens=tokens_of(2, 50))
        slept = await one.sleep("s")
        await one.service.delete("s@1")
    async with machine("two") as two:
        await two.wake("s")
        async with machine("one") as one:
            pulled = await one.service.pull("s")
    assert (pulled.ahead, pulled.bundle_id, pulled.bytes_written) == (True, slept.bundle_id, 0)


async def test_a_pull_of_a_session_that_is_awake_elsewhere_keeps_it_from_nothing(machine: OpenMachine) -> None:
    """Turns behind the newest version become one where the session is: a version of another machine would diverge."""
    async with machine("one", remote_turns=0.0) as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.append("s", tokens=tokens_of(2, 50))
        assert (await two.service.pull("s")).version == 1
        await one.service.append("s", tokens=tokens_of(3, 50))
        await one.sleep("s")
        await freed(one)
        assert (await two.wake("s")).token_count == 400


async def test_one_bad_head_leaves_the_others_in_the_listing(machine: OpenMachine, tmp_path: Path) -> None:
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 30))
        await freed(one)
        (tmp_path / "shared" / "heads" / "default" / "bad").write_bytes(b"x")
        listed = await one.service.remote()
        assert [each.session for each in listed.sessions] == [str(S)]
        assert [each.code for each in listed.problems] == ["corrupt_head"]


@pytest.mark.one_in(1)
def test_a_daemon_without_a_remote_imports_nothing_of_one(tmp_path: Path) -> None:
    """But the records and the handlers of its verbs."""
    program = f"""
import asyncio, sys
from pathlib import Path
from torpor.daemon.options.serve_options import ServeOptions
from torpor.daemon.service import Service

async def serve():
    service = await Service.open(ServeOptions(store=Path({str(tmp_path)!r}) / "store"))
    await service.close()

asyncio.run(serve())
print(*[name for name in sys.modules if any(part in name for part in ("remote", "obstore", "cryptography"))])
"""
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | home, capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert set(told.split()) == {"torpor.daemon.api.remote", "torpor.daemon.verbs.remote"}
