"""What a scenario does to the disk, as a list of operations, and the marks of its steps between them.

Owns the translation of calls into operations on inodes. Runs the scenario in this process, under a shim.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.tests.memvid.faults.shim import Call, Shim, repeatable
from torpor.tests.memvid.faults.worlds import Allowed, Tape

Inode = int
ROOT: Final[Inode] = 0


@dataclass(frozen=True, slots=True)
class Link:
    """A name that leads to an inode from now on: a file or folder made, or renamed to; `gone` is its former folder
    and name, which leave with the same stroke."""

    folder: Inode
    name: str
    inode: Inode
    is_folder: bool = False
    gone: tuple[Inode, str] | None = None


@dataclass(frozen=True, slots=True)
class Unlink:
    folder: Inode
    name: str


@dataclass(frozen=True, slots=True)
class Write:
    inode: Inode
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A file's size set."""

    inode: Inode
    size: int


@dataclass(frozen=True, slots=True)
class Sync:
    """A file's bytes, or a folder's names, are on the disk from now on."""

    inode: Inode


@dataclass(frozen=True, slots=True)
class Step:
    """From now on these worlds are allowed."""

    allowed: Allowed


Operation = Link | Unlink | Write | Cut | Sync | Step


@dataclass
class Disk:
    """Folders and files by inode. `ROOT` is the folder that holds the store's folder, and is always there."""

    folders: dict[Inode, dict[str, Inode]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[Inode, bytes] = field(default_factory=dict)

    def copy(self) -> Disk:
        return Disk(dict(self.folders), dict(self.files))


@dataclass
class Recording:
    """A scenario's operations from a disk on which everything was flushed."""

    before: Disk
    world: Allowed
    operations: list[Operation] = field(default_factory=list)


class _Recorder:
    """Handler of a shim: performs each call and notes what it did."""

    def __init__(self, root: Path, recording: Recording) -> None:
        self._root = root
        self._operations = recording.operations
        self._disk = recording.before
        self._next = 1
        self._inodes: dict[tuple[int, int], Inode] = {}
        self._learn(root, ROOT)

    def _learn(self, path: Path, inode: Inode) -> None:
        """Take over what is there before the scenario starts."""
        self._know(os.lstat(path), inode)
        names = self._disk.folders.setdefault(inode, {})
        for child in sorted(path.iterdir()):
            number = self._new()
            names[child.name] = number
            if child.is_dir():
                self._disk.folders[number] = {}
                self._learn(child, number)
            else:
                self._know(os.lstat(child), number)
                self._disk.files[number] = child.read_bytes()

    def _new(self) -> Inode:
        self._next += 1
        return self._next

    def _know(self, status: os.stat_result, inode: Inode) -> None:
        self._inodes[status.st_dev, status.st_ino] = inode

    def _of(self, status: os.stat_result) -> Inode:
        return self._inodes[status.st_dev, status.st_ino]

    def _folder_of(self, path: str, dir_fd: int | None) -> tuple[Inode, str]:
        if dir_fd is not None:
            return self._of(os.fstat(dir_fd)), path
        folder, name = os.path.split(os.fspath(path))
        return self._of(os.stat(folder)), name

    def mark(self, allowed: Allowed) -> None:
        self._operations.append(Step(allowed))

    # --- calls

    def __call__(self, call: Call) -> Any:
        plain = call.name.replace(".", "_")
        note: Callable[[Call], Any] | None = getattr(self, f"_call_{plain}", None)
        if note is None:
            if call.changes_state:
                raise AssertionError(f"the recorder does not know {call}: teach it, or power loss is not covered")
            return call.run()
        return note(call)

    def _call_open(self, call: Call) -> int:
        path, flags = call.args[0], call.args[1]
        if not call.changes_state:
            return int(call.run())
        if flags & os.O_TRUNC:
            raise AssertionError(f"the recorder does not know O_TRUNC: {call}")
        dir_fd = call.kwargs.get("dir_fd")
        there = _exists(path, dir_fd)
        fd = int(call.run())
        if not there:
            self._link(*self._folder_of(path, dir_fd), os.fstat(fd), is_folder=False)
        return fd

    def _call_mkdir(self, call: Call) -> None:
        dir_fd = call.kwargs.get("dir_fd")
        call.run()
        status = os.stat(call.args[0], dir_fd=dir_fd, follow_symlinks=False)
        self._link(*self._folder_of(call.args[0], dir_fd), status, is_folder=True)

    def _link(self, folder: Inode, name: str, status: os.stat_result, *, is_folder: bool) -> None:
        inode = self._new()
        self._know(status, inode)
        self._operations.append(Link(folder, name, inode, is_folder))

    def _call_write(self, call: Call) -> int:
        fd, data, *place = call.args
        offset = place[0] if place else os.lseek(fd, 0, os.SEEK_CUR)
        written = int(call.run())
        whole = b"".join(map(bytes, data)) if call.name == "writev" else bytes(data)
        self._operations.append(Write(self._of(os.fstat(fd)), offset, whole[:written]))
        return written

    _call_writev = _call_pwrite = _call_write

    def _call_ftruncate(self, call: Call) -> None:
        call.run()
        self._operations.append(Cut(self._of(os.fstat(call.args[0])), call.args[1]))

    def _call_fsync(self, call: Call) -> None:
        call.run()
        self._operations.append(Sync(self._of(os.fstat(call.args[0]))))

    _call_fdatasync = _call_fsync

    def _call_rename(self, call: Call) -> None:
        old, new = call.args
        source = call.kwargs.get("src_dir_fd")
        inode = self._of(os.stat(old, dir_fd=source, follow_symlinks=False))
        old_folder, old_name = self._folder_of(old, source)
        new_folder, new_name = self._folder_of(new, call.kwargs.get("dst_dir_fd"))
        call.run()
        self._operations.append(Link(new_folder, new_name, inode, gone=(old_folder, old_name)))

    _call_replace = _call_rename

    def _call_link(self, call: Call) -> None:
        old, new = call.args
        inode = self._of(os.stat(old, dir_fd=call.kwargs.get("src_dir_fd"), follow_symlinks=False))
        folder, name = self._folder_of(new, call.kwargs.get("dst_dir_fd"))
        call.run()
        self._operations.append(Link(folder, name, inode))

    def _call_unlink(self, call: Call) -> None:
        folder, name = self._folder_of(call.args[0], call.kwargs.get("dir_fd"))
        call.run()
        self._operations.append(Unlink(folder, name))

    _call_rmdir = _call_unlink


def _exists(path: str, dir_fd: int | None) -> bool:
    try:
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def record(run: Callable[[Path, Tape], None], path: Path, tape: Tape) -> Recording:
    """Run a scenario on the store at `path` and return what it did; the folder above stands for the disk."""
    recording = Recording(Disk(), Allowed(tape.world, tape.world))
    recorder = _Recorder(path.parent, recording)
    tape.on_event = recorder.mark
    with repeatable(seed=2), Shim(recorder):
        run(path, tape)
    return recording
