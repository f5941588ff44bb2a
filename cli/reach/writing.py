"""Files of a user that a command writes."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, mode: int | None = None) -> None:
    """Write a file so that whoever reads it finds all of the old text, or all of the new one. mode: under any umask;
    None: what the umask leaves. Raises OSError: nothing has changed."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, 0o666 if mode is None else 0o600), "w", encoding="utf-8") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
