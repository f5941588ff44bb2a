"""The folder `damaged`: a small file of the store that cannot be used is moved there. Packs: `StoreFolder`."""

from __future__ import annotations

import os

from ..disk import durable
from ..disk.paths import list_names, opened_folder
from .store_file import DAMAGED


def move_small(root_fd: int, path: str, name: str) -> str | None:
    """Move a file of the store's own folder to `damaged`, durably; the path it has then, None if it was not there.
    Raises NoSpace, StoreIoError, DurabilityLost, UnsafePath."""
    durable.make_folder(root_fd, DAMAGED, path)
    with opened_folder(root_fd, DAMAGED, f"{path}/{DAMAGED}") as fd:
        new = free_name(name, list_names(fd, f"{path}/{DAMAGED}"))
        try:
            os.rename(name, new, src_dir_fd=root_fd, dst_dir_fd=fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise durable.write_error(error, "move", f"{path}/{name}") from error
        durable.sync_folder(fd, f"{path}/{DAMAGED}")
    durable.sync_folder(root_fd, path)
    return f"{path}/{DAMAGED}/{new}"


def free_name(name: str, taken: list[str]) -> str:
    """The name, with a number behind it if it is taken."""
    number, new = 1, name
    while new in taken:
        number, new = number + 1, f"{name}.{number + 1}"
    return new
