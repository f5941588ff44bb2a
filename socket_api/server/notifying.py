"""Tells the supervisor that started this process where the daemon stands, as systemd's `sd_notify` does."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Literal


def tell_supervisor(state: Literal["READY=1", "STOPPING=1", "EXTEND_TIMEOUT_USEC=60000000"]) -> None:
    """Send a state to $NOTIFY_SOCKET, if there is one. A supervisor that cannot be reached is not waited for."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):  # a name of the kernel's, and no file
        address = f"\0{address[1:]}"
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.setblocking(False)
            supervisor.sendto(state.encode(), address)
