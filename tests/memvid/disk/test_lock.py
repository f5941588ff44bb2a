"""One writer for each store (threats 34 to 36, 38)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.disk import lock
from torpor.memvid.disk.lock import find_holder
from torpor.memvid.disk.paths import closing_fd
from torpor.memvid.errors import LockLost, StoreIoError, StoreLocked, UnsafePath
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, drafts, names, refusing, reopened, require_awake, sleep, write

HOLDER = """
import sys
from torpor.memvid.store import Store
store = Store.open(sys.argv[1], writable=True)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(store_path: Path):  # type: ignore[no-untyped-def]
    """Another process that has the store open for writing."""
    command = [sys.executable, "-c", HOLDER, str(store_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield process
    process.kill()
    process.communicate()


def find_it(store_path: Path) -> int | None:
    with closing_fd(os.open(store_path, os.O_RDONLY)) as root_fd:
        return find_holder(root_fd, str(store_path))


def test_threats_34_35_a_second_writer_is_refused_and_told_who_has_it_until_that_one_is_killed(
    store_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(StoreLocked, match=str(holder.pid)) as refusal:
        Store.open(store_path, writable=True)
    assert refusal.value.holder_pid == holder.pid
    assert f"`kill {holder.pid}` puts its sessions to sleep" in refusal.value.message
    with Store.open(store_path, writable=False) as reader:
        assert list(reader.iter_sessions()) == []
    for _ in range(2):
        assert find_it(store_path) == holder.pid, "it is found without taking anything from it"
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert find_it(store_path) is None
    with Store.open(store_path, writable=True) as store:
        sleep(store, 10)
        assert find_it(store_path) == os.getpid()
    assert find_it(store_path) is None, "the pid in the file is that of a process that runs, and has let go"


def test_a_closed_store_s_lock_is_free_although_a_child_that_is_being_forked_has_its_file(store_path: Path) -> None:
    store = Store.open(store_path, writable=True)
    (held,) = [fd for fd in os.listdir("/dev/fd") if _is_lock(int(fd), store_path)]
    inherited = os.dup(int(held))
    try:
        reopened(store).close()
    finally:
        os.close(inherited)


FORKED = """
import os, sys
from torpor.memvid.store import Store
from torpor.memvid.errors import LockLost
from torpor.tests.memvid.store_making import OTHER_URI, URI, sleep
path = sys.argv[1]
with Store.open(path, writable=True) as store:
    sleep(store, 20)
    begin, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.read(begin, 1)
        try:
            sleep(store, 20, uri=OTHER_URI)
        except LockLost as refusal:
            print("refused", "forked" in refusal.message, flush=True)
        store.close()
        os._exit(0)
    sleep(store, 40, seed=3)
    os.close(go_on)
    os.waitpid(child, 0)
    sleep(store, 60, seed=4)
with Store.open(path, writable=True) as store:
    print(store.opening.index_rebuilt, store.opening.rows_added, [row.version for row in store.versions(URI)])
"""


FORKER = """
import os, sys
from torpor.memvid.store import Store
from torpor.memvid.errors import StoreLocked
for how in ("close", "leave"):
    with Store.open(sys.argv[1], writable=True) as store:
        child = os.fork()
        if child == 0:
            if how == "close":
                store.close()
            sys.exit()  # leaves the block
        os.waitpid(child, 0)
        try:
            Store.open(sys.argv[1], writable=True)
        except StoreLocked as refusal:
            print("refused", refusal.holder_pid == os.getpid())
    Store.open(sys.argv[1], writable=True).close()
"""


def told_by(script: str, store_path: Path) -> str:
    command = [sys.executable, "-c", script, str(store_path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_forked_child_that_closes_the_store_or_leaves_it_leaves_its_parent_the_lock(store_path: Path) -> None:
    assert told_by(FORKER, store_path) == "refused True\n" * 2


def test_a_forked_child_writes_nothing_and_leaves_its_parent_the_index(store_path: Path) -> None:
    """It has a copy of the parent's index in memory, and would put that in the place of the parent's."""
    assert told_by(FORKED, store_path) == "refused True\nNone 0 [1, 2, 3]\n"


def _is_lock(fd: int, store_path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(store_path / "lock"))
    except OSError:
        return False


@pytest.mark.parametrize("written", ["", "no number", "0", "-1", "9" * 30, None])
def test_a_lock_file_that_names_nobody_has_no_holder(store: Store, store_path: Path, written: str | None) -> None:
    if written is None:
        (store_path / "lock").unlink()
    else:
        (store_path / "lock").write_text(written)
    assert find_it(store_path) is None


def test_a_link_in_place_of_the_lock_is_not_followed(store: Store, store_path: Path) -> None:
    (store_path / "lock").rename(store_path / "elsewhere")
    (store_path / "lock").symlink_to(store_path / "elsewhere")
    with pytest.raises(UnsafePath):
        find_it(store_path)


def test_threat_35_a_pid_in_the_file_decides_nothing(store: Store, store_path: Path) -> None:
    store.close()
    (store_path / "lock").write_text("1\n")
    Store.open(store_path, writable=True).close()


@pytest.mark.parametrize("replace", [True, False])
def test_threat_36_a_writer_whose_lock_file_was_taken_away_stops(store: Store, store_path: Path, replace: bool) -> None:
    sleep(store, 10)
    (store_path / "lock").unlink()
    if replace:
        (store_path / "lock").touch(0o600)
    before = names(store_path)
    for change in (lambda: sleep(store, 20), lambda: store.delete_session(URI)) * 2:
        with pytest.raises(LockLost):
            change()
    assert names(store_path) == before
    require_awake(store, 10)
    store.close()
    assert not (store_path / "index.sqlite").exists(), "another process may write by now"


def test_threat_36_a_lock_file_taken_away_during_a_sleep_stops_it_before_it_is_published(
    store: Store, store_path: Path
) -> None:
    def blocks():  # type: ignore[no-untyped-def]
        yield from drafts(20)
        (store_path / "lock").unlink()

    with pytest.raises(LockLost):
        write(store, blocks(), 20)
    assert names(store_path) == set()


def test_threat_38_a_started_program_does_not_inherit_the_lock(store: Store) -> None:
    command = [sys.executable, "-c", "import sys; print('on', flush=True); sys.stdin.read()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False, text=True)
    try:
        assert child.stdout.readline() == "on\n"
        reopened(store).close()
    finally:
        child.kill()
        child.communicate()


def test_a_lock_that_could_not_be_looked_at_is_let_go(store_path: Path) -> None:
    """Else this process would find its own store in use by itself."""
    with (
        mock.patch.object(lock, "is_named", refusing(StoreIoError("The system refused."))),
        pytest.raises(StoreIoError),
    ):
        Store.open(store_path, writable=True)
    Store.open(store_path, writable=True).close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EINVAL])
def test_a_file_system_without_locks_is_refused_with_another_place(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreIoError, match=r"Cannot lock .*without locks.*Choose a folder on a disk of this machine"):
        Store.open(store_path, writable=True)
