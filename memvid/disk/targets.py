"""A new file that a user names, outside the store: written under another name, flushed, and there whole or not at all.

Owns where such a file may lie, and the errors if it cannot be made.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Final

from ..errors import DurabilityLost, NoSpace, NoTargetFolder, TargetExists, TargetInStore
from .durable import TempFile, describe_room
from .paths import io_error, whole_path

_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_PARENTS: Final = 1024
_SHOWN_CHARS: Final = 50
"""Of a target's name in that of its temporary file: at most 200 of the 255 bytes that a name may have."""


@contextlib.contextmanager
def new_file(root_fd: int, target: str | os.PathLike[str], *, replacing: bool = False) -> Iterator[TempFile]:
    """A temporary file beside the target; the block flushes it, and then it gets the target's name.

    root_fd: the store; the target may not lie in it. replacing: replace a file of that name; else it is left as it is.

    Raises:
        TargetExists, NoTargetFolder, TargetInStore: there is a file already, no such folder, or it lies in the store.
        NoSpace, StoreIoError, DurabilityLost: nothing is left of it.
    """
    with _usable_target(root_fd, target, replacing=replacing) as (folder_fd, path):
        folder_path, name = os.path.split(path)
        temp = TempFile(folder_fd, folder_path, f"{name[:_SHOWN_CHARS]}.torpor-")  # a kill leaves it to the user
        try:
            yield temp
            if replacing:
                temp.publish(name, replacing=True)
            else:
                temp.publish_new(name)
        except FileExistsError as error:
            raise _taken(path, replaceable=True) from error
        except NoSpace as error:  # deleting sessions, the advice for the store's disk, does not help here
            raise NoSpace(
                f"No room for {path}: {os.strerror(error.details['errno'])}.{describe_room(error.details)} Free some "
                "space there, or export to another disk. Nothing of the file is left, and the store is as it was.",
                **error.details,
            ) from error
        except DurabilityLost as error:
            consequence = "" if replacing else ", so it was removed"
            raise DurabilityLost(
                f"Flushing {path} to the disk failed: what the disk holds of it is unknown{consequence}. The store is "
                "as it was. Check the disk, or export to another one.",
                **error.details,
            ) from error
        finally:
            temp.close()


def require_target(root_fd: int, target: str | os.PathLike[str], *, replacing: bool = False) -> None:
    """Refuse early a target that `new_file` would refuse; that one asks again."""
    with _usable_target(root_fd, target, replacing=replacing):
        pass


def require_outside(root_fd: int, path: str) -> None:
    """Refuse a folder that is the store or lies in it, or would once it is made. Raises TargetInStore, StoreIoError."""
    above = path
    while not os.path.isdir(above) and above != os.path.dirname(above):  # where nothing can be looked at, / is none
        above = os.path.dirname(above)
    with _target_folder(root_fd, above, path):
        pass


@contextlib.contextmanager
def _usable_target(root_fd: int, target: str | os.PathLike[str], *, replacing: bool) -> Iterator[tuple[int, str]]:
    """The folder of a target, open, and the target's full path."""
    path = whole_path(target)
    folder_path, name = os.path.split(path)
    with _target_folder(root_fd, folder_path, path) as folder_fd:
        _require_usable(folder_fd, name, path, replacing=replacing)
        yield folder_fd, path


@contextlib.contextmanager
def _target_folder(root_fd: int, folder_path: str, path: str) -> Iterator[int]:
    """The folder of a file: any that the user names, also through links, but the store and the folders in it."""
    try:
        folder_fd = os.open(folder_path, _FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoTargetFolder(
            f"{folder_path} is no folder, so nothing can be exported into it. Make it first, or name another file.",
            path=path,
        ) from error
    except OSError as error:
        raise io_error(error, "open", folder_path) from error
    try:
        if _is_within(folder_fd, folder_path, root_fd):
            raise TargetInStore(
                f"{path} lies in the store. What is in there is the store's own; name another folder.",
                path=path,
                reason="it lies in the store",
            )
        yield folder_fd
    finally:
        os.close(folder_fd)


def _is_within(folder_fd: int, path: str, root_fd: int) -> bool:
    """Whether a folder is another one or lies in it, by inodes and not by names."""
    try:
        root = os.fstat(root_fd)
        here, up = os.fstat(folder_fd), ".."
        for _ in range(_MAX_PARENTS):
            if os.path.samestat(here, root):
                return True
            above = os.stat(up, dir_fd=folder_fd)
            if os.path.samestat(above, here):
                return False
            here, up = above, f"{up}/.."
    except OSError as error:
        raise io_error(error, "look at the folders above", path) from error
    return True  # unknown


def _require_usable(folder_fd: int, name: str, path: str, *, replacing: bool) -> None:
    """Say before hours of copying that the name is taken. Only a file is ever replaced."""
    if name in ("", ".", ".."):
        raise _taken(path, replaceable=False)
    try:
        status = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise io_error(error, "look at", path) from error
    is_file = stat.S_ISREG(status.st_mode)
    if not (replacing and is_file):
        raise _taken(path, replaceable=is_file)


def _taken(path: str, *, replaceable: bool) -> TargetExists:
    """`replaceable`: it is a file, and may be replaced if that is asked for."""
    if not replaceable:
        return TargetExists(f"{path} is there already and is no file that could be replaced. Name another.", path=path)
    return TargetExists(
        f"{path} is there already and is left as it is. Name another file, or let --overwrite replace it.", path=path
    )
