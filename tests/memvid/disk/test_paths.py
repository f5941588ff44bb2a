"""What may not stand in a store: links, FIFOs, second names, foreign owners, open folders (threats 20 to 22)."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torpor.memvid.disk.paths import closing_fd, list_names, require_own_regular
from torpor.memvid.errors import StoreIoError, UnsafePath
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import HARMS, OTHER_URI, URI, contents, manifest_path, require_awake, sleep


def as_socket(path: Path, aside: Path) -> None:
    path.rename(aside)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(path.parent):  # a socket's path is short
        listener.bind(path.name)


def as_device(path: Path, aside: Path) -> None:
    path.rename(aside)
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # endless zeros
    except PermissionError:
        pytest.skip("only root makes devices")


REPLACEMENTS = [*(HARMS[name] for name in ("link", "hard link", "fifo", "folder")), as_socket, as_device]
NAMES = ["link", "hard link", "fifo", "folder", "socket", "device"]


@pytest.mark.parametrize("kind", ["manifest", "pack"])
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=NAMES)
@pytest.mark.timeout(20)
def test_threats_20_21_a_manifest_or_pack_that_is_no_plain_file_is_refused(
    store: Store, tmp_path: Path, replace: Callable[[Path, Path], object], kind: str
) -> None:
    """Opening a FIFO would wait for ever; a link could lead anywhere."""
    sleep(store, 20, uri=OTHER_URI)
    receipt = sleep(store, 300)
    file = manifest_path(store, receipt.bundle_id) if kind == "manifest" else making.pack_of(store, receipt)
    replace(file, tmp_path / "aside")
    with pytest.raises(UnsafePath, match=file.name), store.open_session(URI) as reader:
        contents(reader)
    assert "unsafe_path" in {finding.code for finding in store.verify(deep=True).findings}
    require_awake(store, 20, uri=OTHER_URI)


@pytest.mark.parametrize("name", ["store.json", "lock", "index.sqlite", "marks.json"])
@pytest.mark.parametrize("replace", REPLACEMENTS, ids=NAMES)
@pytest.mark.timeout(20)
def test_threats_20_21_a_file_of_the_store_that_is_no_plain_file_is_refused(
    store: Store, store_path: Path, tmp_path: Path, name: str, replace: Callable[[Path, Path], object]
) -> None:
    sleep(store, 20)
    store.close()
    replace(store_path / name, tmp_path / "aside")
    for writable in (True,) if name == "lock" else (True, False):  # a reader has no lock
        with pytest.raises(UnsafePath, match=name), Store.open(store_path, writable=writable) as again:
            again.marks(URI)  # read where they are asked for


@pytest.mark.parametrize("name", ["versions", "packs"])
def test_threat_20_a_linked_folder_is_refused(store: Store, store_path: Path, tmp_path: Path, name: str) -> None:
    sleep(store, 20)
    store.close()
    HARMS["link"](store_path / name, tmp_path / "aside")
    with pytest.raises(UnsafePath):
        Store.open(store_path, writable=True)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("folder", ["", "versions", "packs"])
def test_threat_22_a_folder_that_others_may_write_is_refused(
    store: Store, store_path: Path, folder: str, mode: int
) -> None:
    store.close()
    (store_path / folder).chmod(mode)
    for writable in (True, False):
        with pytest.raises(UnsafePath, match="chmod -R go-w"):
            Store.open(store_path, writable=writable)


def test_threat_22_a_store_that_its_group_may_write_in_is_right_after_one_advice(
    store: Store, store_path: Path
) -> None:
    """As a volume that was made writable for a group: every folder in it is."""
    store.close()
    subprocess.run(["chmod", "-R", "g+w", store_path], check=True)
    with pytest.raises(UnsafePath, match=r"chmod -R go-w") as refused:
        Store.open(store_path, writable=True)
    subprocess.run(refused.value.message[refused.value.message.index("chmod") :].split(), check=True)
    Store.open(store_path, writable=True).close()


def test_threat_22_a_foreign_owner_is_refused(store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.close()
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(UnsafePath, match=f"{store_path} is refused: it belongs to user"):
        Store.open(store_path, writable=False)


@pytest.mark.parametrize(
    ("user", "advice"),
    [
        (4_000_000, r"it belongs to user \d+, who alone may open it\. Work as user"),
        (None, "Give user .* the right to read"),
    ],
)
def test_a_store_that_may_not_be_opened_says_whose_it_is_or_what_it_lacks(
    store: Store, store_path: Path, monkeypatch: pytest.MonkeyPatch, user: int | None, advice: str
) -> None:
    store.close()

    def refuse(path: str, *_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "geteuid", lambda: user or store_path.stat().st_uid)
    monkeypatch.setattr(os, "open", refuse)
    for writable in (True, False):
        with pytest.raises((UnsafePath, StoreIoError), match=advice):
            Store.open(store_path, writable=writable)


def test_threat_22_a_file_of_a_foreign_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    status = (tmp_path / "file").stat()
    require_own_regular(status, "file")
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    with pytest.raises(UnsafePath, match="belongs to user"):
        require_own_regular(status, "file")


def test_a_link_above_the_store_is_the_user_s_choice(store: Store, store_path: Path, tmp_path: Path) -> None:
    sleep(store, 20)
    store.close()
    (tmp_path / "link").symlink_to(store_path)
    with Store.open(tmp_path / "link", writable=True) as opened:
        require_awake(opened, 20)


def test_threads_that_list_one_folder_at_once_each_get_every_name(tmp_path: Path) -> None:
    names = sorted(f"{number:05}" for number in range(3000))
    for name in names:
        (tmp_path / name).touch()
    with closing_fd(os.open(tmp_path, os.O_RDONLY)) as fd, ThreadPoolExecutor(4) as pool:
        listed = list(pool.map(lambda _: list_names(fd, str(tmp_path)), range(40)))
    assert all(found == names for found in listed)
