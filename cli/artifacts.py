"""What a person says of an artifact (its kind, its labels, its file), and how a file of one is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..memvid.folder import open_existing_root
from ..memvid.targets import new_file
from ..socket_api.limits import MAX_KIND_CHARS, MAX_LABEL_CHARS, MAX_LABELS
from .errors import InvalidUsage


def _require_kind(value: str | None) -> str | None:
    if value is not None and not 1 <= len(value) <= MAX_KIND_CHARS:
        raise InvalidUsage(f"--kind takes 1 to {MAX_KIND_CHARS} characters.", option="--kind")
    return value


def _require_labels(value: list[str] | None) -> list[str] | None:
    labels = value or []
    if len(labels) > MAX_LABELS or not all(1 <= len(label) <= MAX_LABEL_CHARS for label in labels):
        raise InvalidUsage(
            f"--label takes 1 to {MAX_LABEL_CHARS} characters, and may be given {MAX_LABELS} times.", option="--label"
        )
    return value


KindOption = Annotated[
    str | None,
    typer.Option(
        "--kind", metavar="KIND", show_default=False, callback=_require_kind, help="What it is called, to be found by."
    ),
]
LabelOption = Annotated[
    list[str] | None,
    typer.Option(
        "--label",
        metavar="LABEL",
        show_default=False,
        callback=_require_labels,
        help="A label of it, instead of the session's, the model's name and the version. May be given several times.",
    ),
]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", show_default=False, help="Replace a file that is there already.")
]


def require_file(target: str, command: str) -> str:
    """Refuse standard output where a file gets its name once it is whole."""
    if target == "-":
        raise InvalidUsage(
            f"{command} writes a file that gets its name once it is whole, not to standard output. Name a file; ./- is "
            "one of that name."
        )
    return target


def write_artifact(data: bytes, target: str, store: Path, *, replacing: bool) -> str:
    """Write a small artifact, whole or not at all, anywhere but into the store; give its full path."""
    root_fd = open_existing_root(os.path.abspath(store))
    try:
        with new_file(root_fd, target, replacing=replacing) as temp:
            temp.append([data])
            temp.sync()
    finally:
        os.close(root_fd)
    return os.path.abspath(target)
