"""A file that a user names is there whole or not at all, and nothing that was there goes unasked."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.disk.targets import new_file, require_target
from torpor.memvid.errors import NoTargetFolder, StoreIoError, TargetExists, TargetInStore
from torpor.tests.memvid.store_making import meanwhile, refusing


@pytest.fixture
def root_fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "store").mkdir()
    with closing_fd(os.open(tmp_path / "store", os.O_RDONLY)) as fd:
        yield fd


@pytest.fixture(params=["links", "no links"])
def disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which a file may have two names, and one on which it may not."""
    if request.param == "no links":
        monkeypatch.setattr(os, "link", refusing(OSError(errno.EPERM, "no links here")))


def write(root_fd: int, target: Path, data: bytes, *, replacing: bool = False) -> None:
    with new_file(root_fd, target, replacing=replacing) as temp:
        temp.append([data])
        temp.sync()


def test_a_file_has_its_name_only_once_it_is_whole(root_fd: int, tmp_path: Path, disk: None) -> None:
    target = tmp_path / "x"
    with new_file(root_fd, target) as temp:
        temp.append([b"half"])
        assert not target.exists()
        (unfinished,) = set(os.listdir(tmp_path)) - {"store"}
        assert re.fullmatch(r"x\.torpor-[0-9a-f]{16}\.tmp", unfinished), "a kill leaves it, and it says whose it is"
        temp.append([b" whole"])
        temp.sync()
    assert target.read_bytes() == b"half whole"
    assert target.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["store", "x"]


@pytest.mark.parametrize("replacing", [False, True])
def test_what_fails_in_between_leaves_what_was_there(root_fd: int, tmp_path: Path, replacing: bool) -> None:
    target = tmp_path / "x"
    if replacing:
        target.write_bytes(b"mine")

    def fail() -> None:
        with new_file(root_fd, target, replacing=replacing) as temp:
            temp.append([b"half"])
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError):
        fail()
    assert sorted(os.listdir(tmp_path)) == (["store", "x"] if replacing else ["store"])
    assert not replacing or target.read_bytes() == b"mine"


def test_a_name_may_be_as_long_as_the_system_takes_it(root_fd: int, tmp_path: Path) -> None:
    for name in ("x" * 255, "\N{GRINNING FACE}" * 63):
        write(root_fd, tmp_path / name, b"whole")
        assert (tmp_path / name).read_bytes() == b"whole"


def test_a_file_that_comes_meanwhile_is_left_as_it_is(root_fd: int, tmp_path: Path, disk: None) -> None:
    target = tmp_path / "x"

    def write_while_another_does() -> None:
        with new_file(root_fd, target) as temp:
            target.write_bytes(b"theirs")
            temp.sync()

    with pytest.raises(TargetExists):
        write_while_another_does()
    assert target.read_bytes() == b"theirs"
    assert sorted(os.listdir(tmp_path)) == ["store", "x"]


def test_a_temporary_name_that_would_not_go_at_once_leaves_the_file_alone(root_fd: int, tmp_path: Path) -> None:
    with meanwhile(os, "unlink", refusing(OSError(errno.EIO, "once"))):
        write(root_fd, tmp_path / "x", b"whole")
    assert sorted(os.listdir(tmp_path)) == ["store", "x"]


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_only_a_regular_file_is_replaced(root_fd: int, tmp_path: Path, kind: str, replacing: bool) -> None:
    target = tmp_path / "x"
    if kind == "folder":
        target.mkdir()
    elif kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(target)
    with pytest.raises(TargetExists):
        write(root_fd, target, b"new", replacing=replacing)
    target_is_as_it_was = target.is_dir() if kind == "folder" else target.is_symlink() or target.is_fifo()
    assert target_is_as_it_was


def test_a_regular_file_is_replaced_where_that_was_asked_for(root_fd: int, tmp_path: Path) -> None:
    target = tmp_path / "x"
    for data in (b"first", b"second"):
        write(root_fd, target, data, replacing=True)
    assert target.read_bytes() == b"second"


def test_what_cannot_be_a_target_can_be_told_before_the_work(root_fd: int, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    require_target(root_fd, tmp_path / "free")
    require_target(root_fd, tmp_path / "there", replacing=True)
    for target, refusal in (
        (tmp_path / "there", TargetExists),
        (tmp_path / "none" / "x", NoTargetFolder),
        (tmp_path / "there" / "x", NoTargetFolder),
        (tmp_path / "store" / "x", TargetInStore),
        (Path("/"), TargetExists),
        (tmp_path / "a\0b", StoreIoError),
    ):
        with pytest.raises(refusal):
            require_target(root_fd, target)
