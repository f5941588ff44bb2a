"""A folder that several machines share: changes on a condition between processes, and nothing half written."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.errors import RemoteError, RemoteRefused, RemoteTooLarge, RemoteUnclear, RemoteUnreachable
from torpor.memvid.remote.folder_objects import FolderObjects

KEY = "heads/default/x"
CALLS = ("open", "mkdir", "write", "fsync", "link", "rename", "unlink", "pread", "fstat", "stat")


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[FolderObjects]:
    opened = opened_at(tmp_path)
    yield opened
    opened.close()


def opened_at(path: Path) -> FolderObjects:
    objects = FolderObjects(str(path), path.as_uri())
    objects.place()
    return objects


def unfinished(path: Path) -> list[str]:
    return os.listdir(path / ".unfinished")


COUNTS = """
import sys
from torpor.memvid.remote.folder_objects import FolderObjects
objects = FolderObjects(sys.argv[1], "file:///")
done = 0
objects.create("heads/x", b"0")
while done < int(sys.argv[2]):
    there = objects.get("heads/x", 100)
    done += objects.replace("heads/x", b"%d" % (int(there.data) + 1), there.tag) is not None
"""


def test_processes_that_change_one_object_lose_no_change(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COUNTS, str(tmp_path), "40"]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert (tmp_path / "heads" / "x").read_bytes() == b"160"
    assert unfinished(tmp_path) == []


WRITES = """
import sys
from torpor.memvid.remote.folder_objects import FolderObjects
objects = FolderObjects(sys.argv[1], "file:///")
def parts():
    yield b"x" * 100_000
    print("half", flush=True)
    sys.stdin.read()
objects.put("packs/1", parts(), 200_000)
"""


def test_what_a_killed_writer_left_goes_when_the_folder_is_opened_and_no_more(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        opened = opened_at(tmp_path)
        assert len(unfinished(tmp_path)) == 1, "somebody writes it"
        assert opened.size("packs/1") is None
        assert list(opened.entries("")) == []
        opened.close()
        process.kill()
    assert len(unfinished(tmp_path)) == 1
    opened_at(tmp_path).close()
    assert unfinished(tmp_path) == []


def _write(objects: FolderObjects, verb: str) -> object:
    if verb == "create":
        return objects.create("heads/default/new", b"after")
    if verb == "replace":
        there = objects.get(KEY, 100)
        assert there is not None
        return objects.replace(KEY, b"after", there.tag)
    return objects.put("packs/new/1", iter([b"af", b"ter"]), 5) if verb == "put" else objects.remove(KEY)


class Failing:
    """The calls of the system, of which one fails."""

    def __init__(self, failing_at: int) -> None:
        self.calls = 0
        self._failing_at = failing_at

    def wrapped(self, name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self._failing_at:
                raise OSError(errno.EIO, f"{name} fails")
            return real(*args, **options)

        return call


@pytest.mark.parametrize("verb", ["create", "replace", "put", "remove"])
def test_whichever_call_fails_an_object_is_whole_or_not_there(verb: str, tmp_path: Path) -> None:
    """Each call of the system fails once: what was told is true, and what is there is one content or the other."""
    name = {"create": "heads/default/new", "put": "packs/new/1"}.get(verb, KEY)
    before, after = {"replace": (b"before", b"after"), "remove": (b"before", None)}.get(verb, (None, b"after"))
    for failing_at in itertools.count(1):
        folder = tmp_path / str(failing_at)
        folder.mkdir()
        objects = opened_at(folder)
        objects.create(KEY, b"before")
        failing = Failing(failing_at)
        with pytest.MonkeyPatch.context() as patched:
            for call in CALLS:
                patched.setattr(os, call, failing.wrapped(call))
            try:
                _write(objects, verb)
                may_be = [after]
            except RemoteUnclear:
                may_be = [before, after]
            except RemoteError:
                may_be = [before]
        path = folder / name
        assert (path.read_bytes() if path.exists() else None) in may_be, failing_at
        objects.close()
        opened_at(folder).close()
        assert unfinished(folder) == []
        if failing.calls < failing_at:
            break
    assert failing_at > 7


def test_a_content_is_flushed_before_it_has_its_name_and_the_name_before_it_is_told(
    objects: FolderObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    for name in ("fsync", "link", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name, **k: (order.append(_name), _real(*a, **k))[1])
    objects.put("torpor.json", [b"1"], 1)
    tag = objects.create("place", b"1")
    assert tag is not None
    objects.replace("place", b"2", tag)
    assert order == ["fsync", "rename", "fsync", "fsync", "link", "fsync", "fsync", "rename", "fsync"]


def test_no_link_is_followed_and_nothing_but_a_file_is_read(objects: FolderObjects, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "x").write_text("mine")
    root = tmp_path
    (root / "packs").mkdir()
    (root / "heads").symlink_to(secret)
    (root / "packs" / "link").symlink_to(secret / "x")
    os.mkfifo(root / "packs" / "pipe")
    (root / "packs" / "folder").mkdir()
    for key in ("heads/x", "packs/link", "packs/pipe", "packs/folder"):
        with pytest.raises(RemoteRefused):
            objects.get(key, 100)
        with pytest.raises(RemoteRefused):
            objects.size(key)
    for write in (lambda: objects.put("heads/y", [b"1"], 1), lambda: objects.create("heads/y", b"1")):
        with pytest.raises(RemoteRefused):
            write()
    with pytest.raises(RemoteRefused):
        list(objects.entries("heads/"))
    assert os.listdir(secret) == ["x"]
    assert list(objects.entries("packs/")) == []
    objects.put("packs/link", [b"new"], 3)
    assert (secret / "x").read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EPERM])
def test_without_hard_links_an_object_is_made_once_all_the_same(
    objects: FolderObjects, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_link(*args: object, **options: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", no_link)
    assert objects.create(KEY, b"first") is not None
    assert objects.create(KEY, b"second") is None
    found = objects.get(KEY, 10)
    assert found is not None
    assert found.data == b"first"


def test_without_locks_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*args: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    objects = opened_at(tmp_path)
    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(RemoteRefused, match="keeps no locks"):
        objects.create(KEY, b"1")
    assert objects.get(KEY, 10) is None
    objects.close()


def test_a_lock_that_is_not_let_go_is_waited_for_so_long(
    objects: FolderObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.memvid.remote.folder_objects._LOCK_S", 0.0)
    other = opened_at(tmp_path)
    with other._open() as folder, folder._locked(KEY), pytest.raises(RemoteUnreachable, match="lock"):
        objects.create(KEY, b"1")
    assert objects.create(KEY, b"1") is not None
    other.close()


def test_what_is_there_in_place_of_an_object_is_not_read_through(objects: FolderObjects, tmp_path: Path) -> None:
    """All wait for the lock meanwhile. Somebody put a file of a terabyte there, of which the disk has nothing."""
    tag = objects.create("heads/default/large", b"before")
    assert tag is not None
    os.truncate(tmp_path / "heads" / "default" / "large", 1 << 40)
    assert objects.replace("heads/default/large", b"after", tag) is None
    with pytest.raises(RemoteTooLarge):
        objects.get("heads/default/large", 100)


def test_a_lock_whose_file_was_replaced_is_taken_anew(objects: FolderObjects, tmp_path: Path) -> None:
    """Who waits has opened the earlier file: it would hold a lock that nobody else looks at."""
    with objects._open() as folder:
        taken = folder._take_lock()
        (tmp_path / ".lock").unlink()
        held = folder._take_lock()
    os.close(taken)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("torpor.memvid.remote.folder_objects._LOCK_S", 0.0)
        with pytest.raises(RemoteUnreachable):
            objects.create(KEY, b"1")
    os.close(held)


def test_a_full_disk_is_told(objects: FolderObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RemoteRefused, match="no room"):
        objects.put("packs/1", [b"1"], 1)


def test_it_closes_twice(tmp_path: Path) -> None:
    objects = opened_at(tmp_path)
    objects.close()
    objects.close()
    with pytest.raises(RemoteError):
        objects.get(KEY, 10)


def test_a_folder_that_is_gone_does_not_answer_and_one_that_came_back_does(tmp_path: Path) -> None:
    """Nothing that is open keeps it: neither what was moved away is used, nor is what was removed an empty remote."""
    share, away = tmp_path / "share", tmp_path / "away"
    share.mkdir()
    objects = opened_at(share)
    assert objects.create(KEY, b"1") is not None
    share.rename(away)
    asked: list[Callable[[], object]] = [
        objects.place,
        lambda: objects.get(KEY, 10),
        lambda: objects.size(KEY),
        lambda: list(objects.get_ranges([(KEY, 0, 1)])),
        lambda: list(objects.entries("")),
        *(lambda verb=verb: _write(objects, verb) for verb in ("create", "replace", "put", "remove")),  # type: ignore[misc]
    ]
    for ask in asked:
        with pytest.raises(RemoteUnreachable, match="could not open: No such file or directory"):
            ask()
    share.mkdir()  # where nothing is mounted, say
    for ask in asked:
        with pytest.raises(RemoteUnreachable, match="is another folder than before"):
            ask()
    assert os.listdir(share) == []
    share.rmdir()
    shutil.copytree(away, share)
    found = objects.get(KEY, 10)
    assert found is not None
    assert objects.replace(KEY, b"2", found.tag) is not None
    assert (away / KEY).read_bytes() == b"1"
    assert (share / KEY).read_bytes() == b"2"


def test_all_who_have_a_path_use_the_folder_that_is_there_now(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    before = opened_at(share)
    place = before.place()
    assert before.place() == place
    share.rename(tmp_path / "away")
    share.mkdir()
    assert opened_at(share).create(KEY, b"theirs") is not None
    assert before.create(KEY, b"mine") is None
    assert before.place() != place, "it has to be tried anew"


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RemoteRefused, match=r"file is no folder\. Name a folder that is there"):
        opened_at(tmp_path / "file")
