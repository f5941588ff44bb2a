"""Where the daemon's socket is, for server and clients alike, and how long its path may be.

Owns the choice of the path. Touches no files beyond looking at the runtime folder.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from ..errors import SocketPathTooLong

SOCKET_VARIABLE = "TORPOR_SOCKET"
SOCKET_NAME = "torpor.sock"


def default_socket_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return $TORPOR_SOCKET; else one in $XDG_RUNTIME_DIR if that is ours alone; else one under the user's state."""
    if chosen := environment.get(SOCKET_VARIABLE):
        return Path(chosen)
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_absolute() and _is_ours_alone(runtime):
        return Path(runtime) / "torpor" / SOCKET_NAME
    # Not platformdirs' runtime folder: where XDG_RUNTIME_DIR is unset that is a folder under /tmp, where all may write.
    return platformdirs.user_state_path("torpor", appauthor=False) / "run" / SOCKET_NAME


def max_socket_path_bytes(platform: str = sys.platform) -> int:
    """Return how many bytes a socket path may have, without its final NUL: of 108, and of 104 on BSD and macOS."""
    return 107 if platform == "linux" else 103


def require_path_fits(path: str | os.PathLike[str]) -> str:
    """Return the absolute path, checked against the kernel's limit.

    Raises:
        SocketPathTooLong: with `path_bytes` and `limit_bytes`; the kernel's own message names neither.
    """
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
