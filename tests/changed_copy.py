"""A copy of the package with code put into it, for tests of the code that an addition costs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_package(folder: Path, layers: Iterable[str] = ("memvid", "snapshot", "daemon", "socket_api", "cli")) -> Path:
    """Copy the package, or some layers of it, into a folder, from which Python imports it as `torpor`."""
    package = folder / "torpor"
    for name in layers:
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py", "places.py", "records.py", "spellings.py"):
        shutil.copy(ROOT / name, package)
    return package


def put(file: Path, what: str, *, before: str = "", instead: bool = False) -> None:
    """Write something into a file: before a text that stands there once, or instead of it, or at the end."""
    text = file.read_text()
    if not before:
        file.write_text(text + what)
        return
    assert text.count(before) == 1, f"{before!r} stands in {file} {text.count(before)} times"
    file.write_text(text.replace(before, what if instead else what + before))
