"""Where the files of this user belong on this platform, and what some file systems lack. Creates nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

from .errors import NoHome

NO_LINKS_ERRNOS: Final = frozenset(
    {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
)
"""The error numbers of a file system without hard links."""


def user_folder(kind: Literal["data", "state", "config", "cache"]) -> Path:
    """Torpor's own folder for this user and what is of that kind. Raises NoHome."""
    import platformdirs  # where no setting names the place

    find: Callable[[str], Path] = getattr(platformdirs, f"user_{kind}_path")
    try:
        return find("torpor")
    except RuntimeError as error:
        raise NoHome(
            f"User {os.geteuid()} has no home folder, so Torpor has no place for its files. Set HOME to a folder of"
            " theirs.",
            user=os.geteuid(),
        ) from error


def default_log_path() -> Path:
    """The log of a daemon in the background, unless one is named. Raises NoHome."""
    return user_folder("state") / "daemon.log"


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` and `~USER` as folders. Raises NoHome."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoHome(
            f"{os.fspath(path)!r} begins with a home folder that this system does not know. Write the path out, or set"
            " HOME.",
            path=os.fspath(path),
        ) from error
