"""Who is at the other end (threat 39)."""

from __future__ import annotations

import os
import socket
import struct
import sys

import pytest
from torpor.socket_api.errors import PeerRefused
from torpor.socket_api.peer import peer_uid, require_own_peer


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


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED")
def test_a_client_refuses_a_daemon_of_another_user() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other, pytest.raises(PeerRefused, match="Nothing was sent"):
        require_own_peer(one, "/x", lambda connected: os.geteuid() + 1)
