"""The options of the daemon on a socket, in a file beside it: after a crash `torpor ensure` starts it as it was.

A daemon writes the file when it answers, and removes it when it stops. So it is there beside a daemon that answers, or
one that ended without a stop, and nowhere else. What it says becomes a command line: a wrong value is refused as there.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

_SUFFIX: Final = ".options"
_MAX_BYTES: Final = 64 << 10


def remember(socket: Path, given: Mapping[str, Any]) -> None:
    """Write the options of the daemon that answers on this socket. A folder that takes no file is no reason not to
    serve."""
    options = {name: _written(value) for name, value in given.items()}
    aside = Path(f"{socket}{_SUFFIX}.{os.getpid()}")
    with contextlib.suppress(OSError):
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w") as file:
            json.dump(options, file)
        aside.replace(f"{socket}{_SUFFIX}")


def drop(socket: Path) -> None:
    """Remove them: the daemon has stopped."""
    with contextlib.suppress(OSError):
        Path(f"{socket}{_SUFFIX}").unlink()


def recall(socket: Path) -> dict[str, Any]:
    """The options that a daemon left beside its socket, some maybe of another release; empty where there are none."""
    try:
        with open(os.open(f"{socket}{_SUFFIX}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_size > _MAX_BYTES:
                return {}
            options = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return options if isinstance(options, dict) else {}


def _written(value: Any) -> Any:
    """What JSON has no word for is written as on a command line."""
    if isinstance(value, Mapping):
        return {name: _written(each) for name, each in value.items()}
    if isinstance(value, Path):
        return str(value.absolute())
    return value if isinstance(value, (str, int, float, list, tuple, type(None))) else str(value)
