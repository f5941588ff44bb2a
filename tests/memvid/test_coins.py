"""The four coins add up on stores after random histories: the sums of the usage are the disk, to the byte, also after
crashes and refusals and while files are damaged or away; and the blocks of a session are what the usage tells of it.
"""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant
from torpor.memvid.errors import StoreError
from torpor.tests.memvid.maintenance.test_needers import places, shared_bytes, stored_bytes
from torpor.tests.memvid.maintenance.test_usage import require_even
from torpor.tests.memvid.test_state_machine import DamagedStore, SoundStore, run_machine

LENGTH = 30


def require_the_same_in_blocks(machine: SoundStore) -> None:
    """Of each session with one version, its blocks have the bytes that the usage tells of it."""
    store = machine.store
    usage = store.usage()
    require_even(store, usage)
    for uri in {row.uri for row in store.index.all_rows()}:
        told = next(one for one in usage.sessions if one.session == str(uri))
        if told.versions != 1:
            continue
        try:
            found = places(store, uri)
        except StoreError:
            assert not machine.is_sound
            continue
        assert (stored_bytes(found), shared_bytes(found)) == (told.stored_bytes, told.shared_bytes), uri
        assert machine.is_sound <= all(each.condition in ("whole", "stripped") for each in found.blocks)


class CountedStore(SoundStore):
    @invariant()
    def the_coins_add_up(self) -> None:
        require_the_same_in_blocks(self)


class CountedDamagedStore(DamagedStore):
    @invariant()
    def the_coins_add_up(self) -> None:
        require_the_same_in_blocks(self)


MACHINES: list[type[RuleBasedStateMachine]] = [CountedStore, CountedDamagedStore]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_coins_add_up_after_some_histories(machine: type[RuleBasedStateMachine]) -> None:
    assert run_machine(machine, 8, LENGTH) >= 8


@pytest.mark.heavy
@pytest.mark.timeout(0)
@pytest.mark.parametrize("machine", MACHINES)
def test_the_coins_add_up_after_two_hundred_histories(machine: type[RuleBasedStateMachine]) -> None:
    steps = run_machine(machine, 200, LENGTH, fixed=False)
    print(f"{machine.__name__}: {steps} steps")
    assert steps >= 10 * 200
