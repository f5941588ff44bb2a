"""What is removed here leaves a remote, and what another machine has gone on with stays."""

from __future__ import annotations

import pytest
from torpor.memvid.errors import Diverged, SessionNotFound
from torpor.tests.daemon.machines import OpenMachine, S, freed, remote_of
from torpor.tests.daemon.session_rig import tokens_of, until


async def test_what_is_removed_does_not_come_back(machine: OpenMachine) -> None:
    """Not from the remote, nor by a machine that slept over it; and a new session of the name is another one."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        await two.sleep("s")
        await freed(two)
        report = await one.service.delete("s")
        assert not report.problems
        with pytest.raises(SessionNotFound):
            await one.wake("s")
        head = await remote_of(one).head(S)
        assert head is not None
        assert not head.versions
        assert not await remote_of(two).is_behind(S)
    async with machine("two"):
        pass
    async with machine("one") as one:
        with pytest.raises(SessionNotFound):
            await one.wake("s")
        await one.asleep("s", tokens_of(2, 40))
        await freed(one)
    async with machine("two") as two:
        with pytest.raises(Diverged):
            await two.wake("s")


async def test_what_another_machine_has_gone_on_with_is_not_removed_with_a_copy(machine: OpenMachine) -> None:
    """What goes is what is here, and it is said what stays; who is offline is told so, too."""
    async with machine("one") as one, machine("two") as two:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await two.wake("s")
        await two.service.append("s", tokens=[1, 2, 3])
        await two.sleep("s")
        await freed(two)
        (problem,) = (await one.service.delete("s")).problems
        assert problem.code == "diverged"
        assert (await one.wake("s")).token_count == 303


async def test_a_session_that_was_never_here_is_not_removed_and_that_is_an_error(machine: OpenMachine) -> None:
    """It is told who has it; nothing has gone on anywhere."""
    async with machine("one") as one, machine("two") as two:
        await two.asleep("s", tokens_of(1, 30))
        await freed(two)
        with pytest.raises(SessionNotFound, match=r"It is not here; file:.* has it, at .*torpor pull"):
            await one.service.delete("s")
        await one.service.pull("s")
        assert (await one.service.delete("s")).remote_objects == 2


async def test_a_forget_leaves_no_mark_of_the_head_that_it_changed(machine: OpenMachine) -> None:
    """The drop from the remote writes the head once more."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await freed(one)
        await one.service.maintain("forget", session="s")
        assert not remote_of(one).sessions.is_known(S)


@pytest.mark.one_in(1)
async def test_what_no_journal_keeps_is_not_dropped_for_what_another_machine_has(machine: OpenMachine) -> None:
    """A turn that was told stays a version here, and the session is said to have gone on in both places."""
    async with machine("one", durability="sleep", remote_lease=1.0) as one, machine("two", remote_lease=1.0) as two:
        await one.read("s", tokens_of(1, 300))
        await one.service.save("s")
        await until(lambda: remote_of(one).leases[S].head.newest is not None)
        await one.service.append("s", tokens=[1, 2, 3])
        await one.service._parts.upkeep.loop.close()  # no renewal any more, as in a suspend
        await two.wake("s")
        await two.service.append("s", tokens=[9])
        await two.sleep("s")
        await freed(two)
        with pytest.raises(Diverged):
            await one.service.append("s", tokens=[4])
        assert one.service._parts.store.disk.require_session(S).token_count == 303


async def test_a_version_that_is_removed_does_not_come_back(machine: OpenMachine) -> None:
    """The newest one: the session is as the one before it, on each machine."""
    async with machine("one") as one:
        await one.asleep("s", tokens_of(1, 300))
        await one.wake("s")
        await one.service.append("s", tokens=[1, 2, 3])
        await one.sleep("s")
        await freed(one)
        await one.service.delete("s@2")
        assert (await one.wake("s")).token_count == 300
    async with machine("two") as two:
        assert (await two.wake("s")).token_count == 300
