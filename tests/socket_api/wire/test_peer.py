"""Who is at the other end (threat 39)."""

from __future__ import annotations

import os
import socket
import struct
import sys

import pytest
from torpor.socket_api.errors import PeerRefused
from torpor.socket_api.wire.peer import peer_pid, peer_uid, require_own_peer


def test_the_kernel_names_our_own_uid() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_uid(one) == os.geteuid()
        require_own_peer(one, "/x", peer_uid)


class MacSocket:
    """Answers LOCAL_PEERCRED as macOS documents it (struct xucred); not tried on a Mac."""

    def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
        assert (level, name, size) == (0, 1, 76)
        return struct.pack("IIh2x16I", 0, 501, 1, *range(16))


def test_the_credentials_of_macos_are_read_as_documented() -> None:
    assert peer_uid(MacSocket(), platform="darwin") == 501


def test_the_kernel_names_our_own_process() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        assert peer_pid(one) == os.getpid()


@pytest.mark.parametrize(("platform", "asked"), [("linux", None), ("darwin", (0, 2, 4))])
@pytest.mark.parametrize(("pid", "found"), [(4711, 4711), (0, None)])
def test_a_process_that_the_kernel_does_not_see_is_none(
    platform: str, asked: tuple[int, int, int] | None, pid: int, found: int | None
) -> None:
    class Answers:
        def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
            assert asked is None or (level, name, size) == asked
            return struct.pack("3i", pid, 501, 20)[:size]

    assert peer_pid(Answers(), platform=platform) == found


def test_a_kernel_that_does_not_say_is_no_error() -> None:
    class Refuses:
        def getsockopt(self, level: int, name: int, size: int, /) -> bytes:
            raise OSError

    assert peer_pid(Refuses()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED")
def test_a_client_refuses_a_daemon_of_another_user() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other, pytest.raises(PeerRefused, match="Nothing was sent"):
        require_own_peer(one, "/x", lambda connected: os.geteuid() + 1)
