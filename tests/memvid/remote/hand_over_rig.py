"""What sweeps over a network that fails have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from torpor.memvid import errors
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.sessions import RemoteSessions
from torpor.memvid.store import Store
from torpor.tests.memvid.remote.fault_proxy import Fault

TRIES: Final = 4
Answer = TypeVar("Answer")


def again_if_it_fails(step: Callable[[], Answer]) -> Answer:
    """The answer of a step that is tried again after a refusal, as the daemon and people do."""
    for _ in range(TRIES - 1):
        try:
            return step()
        except errors.StoreError:
            pass
    return step()


def remote_of(store: Store, objects: Objects, machine: str) -> RemoteSessions:
    remote = RemoteSessions(store._core, objects, machine, lambda: 0.0)
    remote._proven = remote._objects.place()  # the probe has tests of its own, and more requests than all else
    return remote


def require_signed_only(fault: Fault, server: str) -> None:
    """These two take a body that is not the one that was signed. What was damaged so says it of itself: no more can be
    done once who wrote it has given the session away."""
    assert fault == "flipped_request"
    assert server in ("moto", "ministack")
