"""The folder `damaged`: files of the store that have to give way are moved there."""

from __future__ import annotations

from ..disk import durable
from ..disk.paths import list_names, opened_folder
from .store_file import DAMAGED


def move_aside(root_fd: int, path: str, from_fd: int, name: str, from_path: str) -> str:
    """Move a file to `damaged`, durably; the path it has then. root_fd, path: of the store; from_fd, from_path: of the
    folder that has the file. Raises FileNotFoundError, NoSpace, StoreIoError, DurabilityLost, UnsafePath."""
    damaged = f"{path}/{DAMAGED}"
    durable.make_folder(root_fd, DAMAGED, path)
    with opened_folder(root_fd, DAMAGED, damaged) as fd:
        new = free_name(name, list_names(fd, damaged))
        durable.move(from_fd, name, from_path, fd, new, damaged)
    return f"{damaged}/{new}"


def free_name(name: str, taken: list[str]) -> str:
    """The name, with a number behind it if it is taken."""
    number, new = 1, name
    while new in taken:
        number, new = number + 1, f"{name}.{number + 1}"
    return new
