"""The command line as a process: closed and full streams, odd encodings, foreign folders, interrupts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torpor.cli import detached
from torpor.cli.errors import DaemonStartFailed
from torpor.cli.reach import background
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.socket_api.server_rig import ServerThread

TORPOR = [sys.executable, "-m", "torpor.cli.main"]
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def run(*arguments: str | bytes, **options: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*TORPOR, *arguments], timeout=60, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_trace(daemon: ServerThread, closed: str) -> None:
    command = f'exec "$@" {closed}'
    for arguments in (("ls",), ("append", "notes")):
        done = subprocess.run(["sh", "-c", command, "sh", *TORPOR, *arguments], capture_output=True, timeout=60)
        assert b"Traceback" not in done.stderr
        assert done.returncode in (0, 2)


@pytest.mark.one_in(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [("--help",), ("ls", "--json"), ("ls",)])
def test_a_full_disk_is_one_line_and_status_1(made_store: MadeStore, arguments: tuple[str, ...]) -> None:
    environment = {**os.environ, "TORPOR_STORE": str(made_store.path)}
    with Path("/dev/full").open("wb") as full:
        done = run(*arguments, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert done.returncode == 1
    assert b"output_failed" in done.stderr
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    if "--json" in arguments:
        assert json.loads(done.stderr)["error"]["code"] == "output_failed"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["before", "within"])
def test_a_reader_that_hangs_up_changes_no_status(made_store: MadeStore, when: str) -> None:
    """Whether the pipe is closed before the first byte or behind it, the status is that of the work."""
    sound = {**os.environ, "TORPOR_STORE": str(made_store.path)}
    for arguments in (("--help",), ("du",), ("ls",), ("ls", "--json"), ("prune", "--keep-last", "1", "--dry-run")):
        assert _status_unread(when, *arguments, env=sound) == 0, arguments
    made_store.packs[0].unlink()
    assert _status_unread(when, "verify", env=sound) == 6


def _status_unread(when: str, *arguments: str, env: dict[str, str]) -> int:
    process = subprocess.Popen([*TORPOR, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    if when == "within":
        process.stdout.read(1)
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert b"error" not in err, arguments
    assert b"Traceback" not in err, arguments
    return process.returncode


@pytest.mark.one_in(2)
@pytest.mark.parametrize("when", ["while it is told", "at the very end"])
def test_an_interrupt_after_the_work_is_too_late(made_store: MadeStore, when: str) -> None:
    """Data that is whole and a status that says it was cut off would contradict each other."""
    interrupt = "import os, signal, sys\ndef interrupt(*_): os.kill(os.getpid(), signal.SIGINT)\n"
    hook = {
        "while it is told": "import torpor.cli.commands.maintenance_report as told\nsums = told._sums\n"
        "told._sums = lambda *these: interrupt() or sums(*these)\n",
        "at the very end": "class Last:\n def __del__(self, kill=os.kill, of=(os.getpid(), 2)): kill(*of)\n"
        "last = Last()\n",
    }[when]
    script = f"{interrupt}{hook}from torpor.cli.main import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", script, "repack", "--store", str(made_store.path)], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"nothing to do" in done.stdout


@pytest.mark.parametrize("name", [b"\xff", b"no\xffname"])
def test_bytes_that_are_no_text_are_refused_in_one_line(torpor: Torpor, daemon: ServerThread, name: bytes) -> None:
    text = os.fsdecode(name)  # as Python gives it to a program
    codes = {"no_store", "invalid_uri", "session_not_found", "unreadable_input", "invalid_request"}
    for arguments in (("ls", "--store", f"/{text}"), ("show", text), ("wake", text), ("append", "x", text)):
        ran = torpor(*arguments, "--json")
        assert (ran.status in (2, 4, 10), ran.error["error"]["code"] in codes) == (True, True), arguments
    done = run(b"show", name, capture_output=True)
    assert (done.returncode, b"Traceback" in done.stderr, done.stderr.count(b"\n")) == (2, False, 1)


@pytest.mark.one_in(2)
def test_a_terminal_of_ascii_is_no_trace_and_json_stays_json(daemon: ServerThread) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    daemon.do(lambda: daemon.service.create(session="notes", labels=("ü",)))
    assert run("ls", env=environment, capture_output=True).returncode == 0
    done = run("ls", "--json", env=environment, capture_output=True)
    assert json.loads(done.stdout)["sessions"][0]["labels"] == ["ü"]


@pytest.mark.parametrize("module", ["torpor.cli.registry", "torpor.cli.commands.ls"])
def test_an_interrupt_during_the_imports_is_status_130_and_is_told(module: str) -> None:
    """The first import past the entry point, or that of the command, raises what a Ctrl-C would."""
    hook = f"import sys\nclass H:\n def find_spec(self, name, *_):\n  if name == {module!r}: raise KeyboardInterrupt\n"
    script = f"{hook}sys.meta_path.insert(0, H())\nfrom torpor.cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", script, "ls", "--json"], capture_output=True, timeout=60)
    assert done.returncode == 130
    assert json.loads(done.stderr)["error"]["code"] == "cancelled"


@pytest.mark.one_in(3)
def test_the_current_folder_hijacks_no_child(tmp_path: Path, short_path: Path) -> None:
    """E5: a folder that someone else filled is not a place to take modules from."""
    (tmp_path / "torpor").mkdir()
    (tmp_path / "torpor" / "__init__.py").write_text("raise SystemExit('hijacked')")
    (tmp_path / "mlx.py").write_text("raise SystemExit('hijacked')")
    command = [sys.executable, "-P", "-m", "torpor.cli.main"]
    done = subprocess.run([*command, "doctor", "--json"], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    serve = [*command, "serve", "--detach", "--model", "x=/no/model", "--log", str(short_path / "log")]
    assert subprocess.run(serve, cwd=tmp_path, capture_output=True, timeout=120).returncode == 4


# --- a daemon that is there, and does not answer


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("examined_once")
def test_a_daemon_that_hangs_up_is_not_passed_over(
    torpor: Torpor, made_store: MadeStore, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORPOR_STORE", str(made_store.path))
    assert torpor("ls").status == 0, "nobody is there: the store's files"
    (short_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(short_path / "run" / "t.sock"))
        listening.listen(8)
        stop = threading.Event()

        def hang_up() -> None:
            while not stop.is_set():
                listening.accept()[0].close()

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        for arguments in (("ls",), ("show", "agent"), ("verify",)):
            assert torpor(*arguments).status == 12, arguments
        document = torpor("doctor", "--json").document["daemon"]
        assert document["answers"] is False
        assert "connection_lost" in document["problem"]
        stop.set()
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(short_path / "run" / "t.sock"))
        thread.join(20)


# --- the log of a daemon in the background


def test_the_log_is_appended_to_and_ours_alone(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "daemon.log"
    log.parent.mkdir()
    log.write_text("before\n")
    log.chmod(0o644)
    os.close(background.open_log(log))
    assert log.read_text() == "before\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_link_a_pipe_and_a_folder_are_no_log(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder"):
        with pytest.raises(DaemonStartFailed, match="--log"):
            background.open_log(tmp_path / name)
    os.close(reader)
    with pytest.raises(DaemonStartFailed, match="--log"):
        background.open_log(tmp_path / "fifo")
    assert target.read_text() == "mine"


@pytest.mark.one_in(3)
def test_a_refused_start_leaves_the_log_and_a_start_that_won_sets_a_long_one_aside(
    torpor: Torpor, short_path: Path, tiny_model: Path
) -> None:
    log = short_path / "daemon.log"
    log.write_bytes(b"x" * (2 << 20))
    where = ("--store", short_path / "s", "--log", log, "--json")
    assert torpor("serve", "--detach", "--model", f"x={short_path}/none", *where).status == 4
    assert log.stat().st_size > 2 << 20
    done = run("serve", "--detach", "--model", f"tiny={tiny_model}", *map(str, where), capture_output=True)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["log"] == str(log)
    try:
        assert (short_path / "daemon.log.1").stat().st_size > 2 << 20
        assert log.stat().st_size < 1 << 20
    finally:
        os.kill(document["pid"], signal.SIGTERM)
        background.wait_until_gone(document["pid"], time.monotonic() + 30, 30)
    assert b"stopped" in log.read_bytes()
    lines = log.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not re.match(TIME, line)] == [], "each line has its time"


def test_each_line_of_the_log_has_its_time_once_and_the_starter_reads_them_without(tmp_path: Path) -> None:
    read_end, write_end = os.pipe()
    with (tmp_path / "log").open("w+", encoding="utf-8") as log:
        stream = detached.Repeated(log, detached.Announcer(write_end, tmp_path / "log"))
        said = ["Traceback\n  here\n\nthere", " goes on\nnext", "\n", "2026-11-23 02:11:00,123 ERROR x\n", "end\n"]
        for text in said:
            assert stream.write(text) == len(text)
        lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    os.close(write_end)
    with open(read_end, encoding="utf-8") as pipe:
        assert pipe.read() == "".join(said)
    assert [re.sub(TIME, "", line, count=1) for line in lines] == [
        *("Traceback", "  here", "", "there goes on", "next", "ERROR x", "end")
    ]
    assert [len(re.findall(TIME, line)) for line in lines] == [1] * 7


@pytest.mark.one_in(4)
def test_a_start_in_the_background_tells_what_its_store_may_hold_and_how_many_warnings_it_gave_cause_to(
    made_store: MadeStore, short_path: Path, tiny_model: Path
) -> None:
    made_store.manifests[2].unlink()
    log = short_path / "daemon.log"
    where = ("--store", str(made_store.path), "--log", str(log), "--model", f"tiny={tiny_model}")
    for command in (("serve", "--detach"), ("serve", "--detach", "--json"), ("ensure",)):
        done = run(*command, *where, capture_output=True)
        assert done.returncode == 0, done.stderr
        try:
            if "--json" in command:
                assert json.loads(done.stdout)["warnings"] == 1
            else:
                told = " ".join(done.stderr.decode().split())
                assert f"1 warning about the store or the models, in {log}; torpor verify" in told
                assert re.match(r"the store may hold \d.*B \(--store-budget\) 1 warning", told)
            assert f"({made_store.manifests[2]}) is missing" in log.read_text()
        finally:
            stopped = run("stop", "--json", capture_output=True)
            assert stopped.returncode == 0, stopped.stderr


@pytest.mark.one_in(3)
def test_what_an_earlier_daemon_said_is_not_taken_for_an_answer(torpor: Torpor, short_path: Path) -> None:
    """E6: the log may hold any line, also one that says ready."""
    log = short_path / "daemon.log"
    log.write_text('{"event": "ready", "socket": "/elsewhere", "pid": 1}\n')
    ran = torpor("serve", "--detach", "--model", f"x={short_path}/none", "--store", short_path / "s", "--log", log)
    assert ran.status == 4
    assert "model_unavailable" in ran.err


def test_an_interrupted_start_ends_the_child(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    def interrupted(process: subprocess.Popen[bytes], *_: object) -> None:
        children.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(background, "_wait_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        background.start(["--store", str(short_path / "s")], short_path / "log")
    assert children[0].poll() is not None
