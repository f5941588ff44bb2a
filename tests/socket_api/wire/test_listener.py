"""The socket's file: who may put one where, and who may take one away (threats 22, 34, 35, 39, 40; measured trap 5)."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.socket_api.errors import SocketInUse, SocketPathTooLong, UnsafeSocketPath
from torpor.socket_api.server.server import ApiServer
from torpor.socket_api.wire import listener
from torpor.socket_api.wire.address import default_socket_path, max_socket_path_bytes, require_path_fits
from torpor.socket_api.wire.listener import Listener, open_listener, require_free
from torpor.tests.socket_api.fake_service import FakeService


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "run" / "t.sock"


@pytest.fixture
def opened(path: Path) -> Iterator[Listener]:
    made = open_listener(path)
    yield made
    made.remove()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o777])
def test_folder_and_socket_are_ours_alone_whatever_the_umask(path: Path, umask: int) -> None:
    path.parent.parent.chmod(0o755)
    previous = os.umask(umask if umask != 0o777 else 0o277)
    try:
        made = open_listener(path)
        assert os.umask(previous) == (umask if umask != 0o777 else 0o277)  # the process keeps its own
    finally:
        os.umask(previous)
    assert mode_of(path.parent) & 0o077 == 0
    assert mode_of(path) == 0o600
    made.remove()


NOBODY = 1577


@pytest.mark.one_in(1)
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o277, 0o777])
def test_a_user_who_is_not_root_gets_a_folder_that_he_can_use_whatever_the_umask(path: Path, umask: int) -> None:
    """Root opens a folder of any mode, so the file's tests, run as root, would not see one that shuts its owner out."""
    deep = path.parent / "deeper" / "t.sock"
    if os.geteuid() == 0:
        os.chown(path.parent.parent, NOBODY, NOBODY)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            os.umask(umask)
            made = open_listener(deep)
            modes = [mode_of(deep), mode_of(deep.parent), mode_of(deep.parent.parent)]
            made.remove()
            status = 0 if modes == [0o600, 0o700, 0o700] and os.umask(0) == umask else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_folder_that_others_may_read_is_taken_as_it_is(path: Path) -> None:
    """The socket's own mode keeps them out; what they must not do is put another in its place."""
    path.parent.mkdir()
    path.parent.chmod(0o755)
    made = open_listener(path)
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o755)
    made.remove()


def test_a_socket_that_changed_hands_while_it_was_looked_at_is_not_removed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found dead and what would be removed must be the same file."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    aside = path.with_name("aside")
    with socket.socket(socket.AF_UNIX) as other:

        def swap(looked_at: str) -> bool:
            path.rename(aside)
            other.bind(looked_at)
            return False

        monkeypatch.setattr(listener, "_answers", swap)
        with pytest.raises(UnsafeSocketPath):
            open_listener(path)
        assert path.lstat().st_ino != aside.lstat().st_ino


def test_the_mode_is_right_from_the_first_instant_threat_40(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 40: looked at between bind and listen; a chmod afterwards would come too late."""
    seen: list[int] = []
    real = socket.socket.listen

    def look(self: socket.socket, backlog: int) -> None:
        seen.append(mode_of(path))
        real(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", look)
    open_listener(path).remove()
    assert seen == [0o600]


def test_a_live_socket_is_never_taken_over(opened: Listener, path: Path) -> None:
    """Threat 34; asyncio itself unlinks it without a word."""
    before = path.lstat().st_ino
    with pytest.raises(SocketInUse, match="already"):
        open_listener(path)
    with pytest.raises(SocketInUse):
        require_free(path)
    assert path.lstat().st_ino == before
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_socket_with_a_full_backlog_is_alive(path: Path) -> None:
    """Trap 5: a full backlog answers EAGAIN, which is not the answer of the dead."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        while True:
            client = socket.socket(socket.AF_UNIX)
            client.setblocking(False)
            waiting.append(client)
            if client.connect_ex(str(path)) != 0:
                break
        with pytest.raises(SocketInUse):
            open_listener(path)
        for client in waiting:
            client.close()


def test_a_stale_socket_is_replaced(path: Path) -> None:
    """Threat 35."""
    path.parent.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    require_free(path)
    made = open_listener(path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    made.remove()


@pytest.mark.parametrize("kind", ["file", "folder", "fifo", "link to a socket", "dangling link"])
def test_what_is_no_socket_is_left_alone_and_refused(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    elsewhere = path.with_name("other")
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        if kind == "link to a socket":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(elsewhere))
        path.symlink_to(elsewhere)
    before = path.lstat()
    with pytest.raises(UnsafeSocketPath, match="not a socket of yours"):
        open_listener(path)
    assert path.lstat() == before or path.lstat().st_ino == before.st_ino


@pytest.mark.parametrize(
    ("mode", "remedy"),
    [
        (0o770, "chmod 700"),
        (0o720, "chmod 700"),
        (0o702, "chmod 700"),
        (0o777, "chmod 700"),
        (0o1777, "a folder in it"),
    ],
)
def test_a_folder_that_others_may_write_is_refused(path: Path, mode: int, remedy: str) -> None:
    """Threat 22. To close a shared folder, as /tmp is one, would break what others do there."""
    path.parent.mkdir()
    path.parent.chmod(mode)
    with pytest.raises(UnsafeSocketPath, match=remedy):
        open_listener(path)
    assert not path.exists()


@pytest.mark.parametrize(("mode", "is_safe"), [(0o755, True), (0o1777, True), (0o775, False), (0o757, False)])
def test_a_folder_that_others_could_rename_away_is_refused_however_far_above(
    path: Path, mode: int, is_safe: bool
) -> None:
    """Threat 22. Where it is sticky, as /tmp is, each can only rename its own."""
    shared = path.parent / "shared"
    below = shared / "a" / "b" / "t.sock"
    below.parent.mkdir(mode=0o700, parents=True)
    path.parent.chmod(0o755)
    shared.chmod(mode)
    linked = path.parent / "linked"
    linked.symlink_to(shared / "a", target_is_directory=True)
    for chosen in (below, linked / "b" / "t.sock"):
        if is_safe:
            open_listener(chosen).remove()
            continue
        with pytest.raises(UnsafeSocketPath, match="chmod go-w") as refusal:
            open_listener(chosen)
        assert refusal.value.path == str(shared)
        assert not chosen.exists()


def test_a_link_that_others_could_replace_is_refused_wherever_it_stands_on_the_way(path: Path) -> None:
    """Threat 22. Neither the name nor where it ends lies in the folder that is shared."""
    path.parent.mkdir(mode=0o755)
    shared, real = path.parent / "shared", path.parent / "real"
    for folder in (shared, real):
        folder.mkdir(mode=0o700)
    (shared / "inner").symlink_to("../real")
    (path.parent / "outer").symlink_to("shared/inner")
    chosen = path.parent / "outer" / "run" / "t.sock"
    open_listener(chosen).remove()
    shared.chmod(0o777)
    with pytest.raises(UnsafeSocketPath, match="on the way to the socket") as refusal:
        open_listener(chosen)
    assert refusal.value.path == str(shared)


def test_a_folder_below_another_user_s_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 22."""
    path.parent.mkdir(mode=0o700)
    real = os.lstat

    def foreign(target: str, **options: int) -> object:
        found = list(real(target, **options))
        found[4] = 4_000_000 if target == str(path.parent.parent) else found[4]  # st_uid
        return os.stat_result(found)

    monkeypatch.setattr("torpor.socket_api.wire.listener.os.lstat", foreign)
    with pytest.raises(UnsafeSocketPath, match="belongs to user 4000000"):
        open_listener(path)


def test_a_folder_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threat 22."""
    path.parent.mkdir(mode=0o700)
    monkeypatch.setattr("torpor.socket_api.wire.listener.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeSocketPath, match="not yours alone"):
        open_listener(path)


def test_a_socket_of_another_user_is_not_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    real = os.lstat

    def foreign(target: str, **options: int) -> object:
        fields = list(real(target, **options))
        fields[4] += target == str(path)  # st_uid
        return os.stat_result(fields)

    monkeypatch.setattr("torpor.socket_api.wire.listener.os.lstat", foreign)
    with pytest.raises(UnsafeSocketPath, match="not a socket of yours"):
        open_listener(path)
    monkeypatch.undo()
    assert path.exists()


def test_a_link_in_place_of_the_folder_is_refused(path: Path) -> None:
    real = path.parent.with_name("real")
    real.mkdir(mode=0o700)
    path.parent.symlink_to(real)
    with pytest.raises(UnsafeSocketPath):
        open_listener(path)


def test_a_path_too_long_names_both_lengths_and_a_way_out(short_path: Path) -> None:
    long = short_path / ("x" * 120)
    with pytest.raises(SocketPathTooLong, match="--socket") as caught:
        open_listener(long)
    assert caught.value.path_bytes == len(os.fsencode(long))
    assert caught.value.limit_bytes == max_socket_path_bytes()
    assert str(caught.value.path_bytes) in str(caught.value)


def test_the_longest_path_that_is_allowed_really_binds(short_path: Path) -> None:
    name = "x" * (max_socket_path_bytes() - len(os.fsencode(short_path)) - 1)
    assert len(require_path_fits(short_path / name)) == max_socket_path_bytes()
    open_listener(short_path / name).remove()
    with pytest.raises(SocketPathTooLong):
        require_path_fits(short_path / (name + "x"))
    two_bytes_each = short_path / ("é" * (len(name) // 2 + 1))
    with pytest.raises(SocketPathTooLong):
        require_path_fits(two_bytes_each)


def test_only_the_own_socket_is_removed(opened: Listener, path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        opened.remove()
        assert path.exists()
    path.unlink()
    opened.remove()  # nothing there: nothing to do


def test_of_many_that_start_at_once_on_a_stale_socket_one_gets_it(path: Path) -> None:
    """Without the folder's lock, two could find the dead socket, and the second unlink the first one's."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    won: list[Listener] = []
    lost: list[SocketInUse] = []
    start = threading.Barrier(8)

    def run() -> None:
        start.wait()
        try:
            won.append(open_listener(path))
        except SocketInUse as error:
            lost.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert path.lstat().st_ino == won[0].inode
    won[0].remove()


def test_a_start_waits_for_the_folders_lock_and_gives_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_LOCK_TIMEOUT_S", 0.05)
    path.parent.mkdir(mode=0o700)
    held = os.open(path.parent, os.O_RDONLY)
    listener.fcntl.flock(held, listener.fcntl.LOCK_EX)
    with pytest.raises(SocketInUse, match="starting"):
        open_listener(path)

    monkeypatch.setattr(listener, "_LOCK_TIMEOUT_S", 20)

    async def start() -> None:
        server = ApiServer(FakeService(), path)
        starting = asyncio.create_task(server.start())
        await asyncio.to_thread(waiting.wait, 10)  # the loop goes on while the start waits
        os.close(held)
        await starting
        await server.stop()

    waiting = threading.Event()
    try_lock = listener._try_lock

    def watched(descriptor: int, folder: str) -> bool:
        locked = try_lock(descriptor, folder)
        if not locked:
            assert threading.current_thread() is not threading.main_thread()
            waiting.set()
        return locked

    monkeypatch.setattr(listener, "_try_lock", watched)
    asyncio.run(start())
    open_listener(path).remove()


# --- where the socket is by default


def test_the_environment_variable_decides(short_path: Path) -> None:
    assert default_socket_path({"TORPOR_SOCKET": "/x/y.sock", "XDG_RUNTIME_DIR": str(short_path)}) == Path("/x/y.sock")


def test_the_runtime_folder_is_used_when_it_is_ours_alone(short_path: Path) -> None:
    assert default_socket_path({"XDG_RUNTIME_DIR": str(short_path)}) == short_path / "torpor" / "torpor.sock"


@pytest.mark.parametrize("value", ["", "relative", "/nowhere/at/all"])
def test_a_runtime_folder_that_is_none_is_passed_over(value: str) -> None:
    chosen = default_socket_path({"XDG_RUNTIME_DIR": value, "TORPOR_SOCKET": ""})
    assert chosen.parts[-2:] == ("run", "torpor.sock")
    assert chosen.is_absolute()


def test_a_runtime_folder_that_others_may_write_is_passed_over(short_path: Path) -> None:
    short_path.chmod(0o777)
    assert short_path not in default_socket_path({"XDG_RUNTIME_DIR": str(short_path)}).parents


def test_the_limits_are_those_of_the_systems() -> None:
    assert (max_socket_path_bytes("linux"), max_socket_path_bytes("darwin")) == (107, 103)


def test_a_folder_on_a_file_system_without_locks_is_refused_with_another_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UnsafeSocketPath, match=r"cannot be locked: No locks available.*with --socket"):
        open_listener(path)


@pytest.fixture
def handed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket at the path that a supervisor has made for this process."""
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(path))
        path.chmod(0o600)
        made.listen(1)
        monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
        monkeypatch.setenv("LISTEN_FDS", "1")
        monkeypatch.setattr(listener, "_FIRST_HANDED_OVER", made.fileno())
        yield made


def test_a_socket_that_a_supervisor_hands_over_is_used_and_its_file_stays(
    handed_over: socket.socket, path: Path
) -> None:
    require_free(path)
    made = open_listener(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))
        made.socket.accept()[0].close()
    made.remove()
    assert path.is_socket()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as early:
        early.connect(str(path))  # it waits for the next daemon
        again = open_listener(path)
        again.socket.accept()[0].close()
        again.remove()


@pytest.mark.parametrize(
    ("name", "value"), [("LISTEN_PID", "1"), ("LISTEN_PID", ""), ("LISTEN_FDS", "x"), ("LISTEN_FDS", "0")]
)
def test_a_socket_that_is_handed_to_another_process_is_one_in_use(
    handed_over: socket.socket, path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    for take in (require_free, open_listener):
        with pytest.raises(SocketInUse):
            take(path)


def test_another_socket_than_that_at_the_path_is_not_taken(handed_over: socket.socket, path: Path) -> None:
    other = path.with_name("other.sock")
    made = open_listener(other)
    made.remove()
    assert path.is_socket()
    assert not other.exists()


def test_a_socket_that_others_may_use_is_not_taken_over(handed_over: socket.socket, path: Path) -> None:
    path.chmod(0o666)
    with pytest.raises(UnsafeSocketPath, match="SocketMode=0600"):
        open_listener(path)
