"""The path of the daemon's socket, for server and clients, and its greatest length.

Touches no files, but looks at the runtime folder.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from ...places import user_folder
from ..errors import SocketPathTooLong

SOCKET_VARIABLE = "TORPOR_SOCKET"
SOCKET_NAME = "torpor.sock"


def default_socket_path(environment: Mapping[str, str] = os.environ) -> Path:
    """$TORPOR_SOCKET; else a path in $XDG_RUNTIME_DIR if that is ours alone; else one under the user's state."""
    if chosen := environment.get(SOCKET_VARIABLE):
        return Path(chosen)
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute() and _is_ours_alone(runtime):
        return Path(runtime) / "torpor" / SOCKET_NAME
    # Not platformdirs' runtime folder: without XDG_RUNTIME_DIR that is under /tmp, where all users may write.
    return user_folder("state") / "run" / SOCKET_NAME


def max_socket_path_bytes(platform: str = sys.platform) -> int:
    """The most bytes of a socket path without its final NUL: the system has 108, on BSD and macOS 104."""
    return 107 if platform == "linux" else 103


def require_path_fits(path: str | os.PathLike[str]) -> str:
    """Return the absolute path, checked against the kernel's limit. Raises SocketPathTooLong: with `path_bytes` and
    `limit_bytes`."""
    absolute = os.path.abspath(path)
    size, limit = len(os.fsencode(absolute)), max_socket_path_bytes()
    if size > limit:
        raise SocketPathTooLong(
            f"The socket path has {size} bytes, and this system takes at most {limit}: {absolute}."
            f" Choose a shorter one with --socket or ${SOCKET_VARIABLE}.",
            path=absolute,
            path_bytes=size,
            limit_bytes=limit,
        )
    return absolute


def _is_ours_alone(folder: str) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
