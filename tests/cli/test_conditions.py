"""Every command that looks, on a store in every condition, in a pipe and on terminals: it tells what there is, or in a
sentence why not, and changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from rich.cells import cell_len
from torpor.cli.command_list import COMMANDS
from torpor.cli.reach.background import wait_until_gone
from torpor.memvid.index.index import INDEX_FILE
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.socket_api import Client
from torpor.tests.cli.cli_rig import MadeStore, serve_in_background, unstyled
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import tree
from torpor.tests.socket_api.server_rig import ServerThread

NOBODY: Final = 65534
MANY: Final = 10_000

OF_STORES: Final = (
    *("ls", "log", "log --graph", "log --oneline -n 2", "log --since 2h", "du", "why --all", "why --all --by session"),
    *(
        "prune --plan",
        "prune --keep-last 1 --dry-run",
        "repack --dry-run",
        "repair --dry-run",
        "verify",
        "verify --deep",
    ),
)
OF_SESSIONS: Final = (
    *(
        "log agent",
        "log --graph agent@1",
        "show agent",
        "show agent@1",
        "show ag",
        "blocks agent",
        "blocks agent --deep",
    ),
    *("who $BUNDLE", "diff agent~1 agent", "diff agent other --stat", "cat agent", "cat agent@1 --from 3 --to 9"),
    *("cat agent --tokens --roles --header", "cat agent --manifest", "du agent", "why agent", "why agent --since 1h"),
    *("strip agent --dry-run", "forget agent --dry-run"),
)
OF_DAEMONS: Final = (
    *("stats", "models", "top", "analyze agent", "wake agent --plan", "clear --label x --dry-run", "events"),
    *("quantize agent --bits 8 --dry-run",),
)
OF_NONE: Final = (
    *("logs", "config show", "config check $TMP/torpor.toml", "completion bash", "service status", "doctor"),
    *("service install --dry-run", "help", "help exit-status", "help log", "version"),
)
ALL: Final = (*OF_STORES, *OF_SESSIONS, *OF_DAEMONS, *OF_NONE)

WHOLE: Final = {"cat agent --manifest", "completion bash", "service install --dry-run", "logs"}
"""What is to be copied, or read by a program: no terminal may break its lines."""

AT_WORK: Final = {
    *("demo", "serve", "serve-ray", "ensure", "launch", "stop", "restart", "inspect", "mcp", "chat", "append"),
    *("generate", "set", "fork", "diverge", "fold", "rm", "sleep", "save", "warm", "export", "export-kv", "backup"),
    *("import", "tag", "untag", "pin", "unpin", "push", "pull"),
}
"""The commands that do not look."""

_LOOKS: Final = {
    "no store": (10, 10, 12, {}),
    "empty": (0, 4, 12, {}),
    "sound": (0, 0, 12, {}),
    "read-only": (0, 0, 12, {}),
    "read-only, without an index": (0, 0, 12, {}),
    "damaged": (
        *(0, 0, 12),
        dict.fromkeys(
            ("verify", "verify --deep", "show agent@1", "cat agent@1 --from 3 --to 9", "blocks agent --deep"), 6
        )
        | dict.fromkeys(("who $BUNDLE", "diff agent~1 agent"), 6),
    ),
    "of another user": (1, 1, 12, {}),
    "closed by another user": (1, 1, 12, {}),
    "beside another user's daemon": (12, 12, 12, {"config show": 12}),
    "with a daemon": (0, 0, 0, {}),
}
"""Of each condition the status of what looks at a store, at sessions, and at a daemon; and of single lines."""

FORMS: Final = {"piped": 0, "60": 60, "80": 80, "140": 140, "80, no color": 80}


def status_in(condition: str, line: str) -> int:
    """The exit status that a line has to have."""
    of_stores, of_sessions, of_daemons, others = _LOOKS[condition]
    if line == "top" or (line == "logs" and condition != "with a daemon"):
        return 2  # there is no terminal that it could listen to; there is no log
    if line in others:
        return others[line]
    table = ((OF_STORES, of_stores), (OF_SESSIONS, of_sessions), (OF_DAEMONS, of_daemons), (OF_NONE, 0))
    return next(status for lines, status in table if line in lines)


# --- the conditions


def _lock(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        path.chmod(0o500 if path.is_dir() else 0o400)


def _give_away(folder: Path, *, is_open: bool) -> None:
    for path in (*folder.rglob("*"), folder):
        os.chown(path, NOBODY, NOBODY)
        if is_open:
            path.chmod(0o755 if path.is_dir() else 0o644)


def _arrange(condition: str, made: MadeStore) -> None:
    match condition:
        case "no store":
            shutil.rmtree(made.path)
        case "empty":
            shutil.rmtree(made.path)
            Store.open(made.path, writable=True).close()
        case "read-only":
            _lock(made.path)
        case "read-only, without an index":
            (made.path / INDEX_FILE).unlink()
            _lock(made.path)
        case "damaged":
            made.cut(0)
            made.flip(1, 2)
        case "of another user" | "closed by another user":
            _give_away(made.path, is_open=condition.startswith("of"))


def _with_no_rights() -> list[str]:
    """What a command begins with that has to have no more rights than its user's: root has all."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root ignores modes and owners, and there is no setpriv to take that away")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


@pytest.fixture
def walked(short_path: Path, made_store: MadeStore) -> Callable[..., list[dict[str, Any]]]:
    """What lines of a test tell on the made store, each as `walk.py` gives it."""

    def walked(lines: Sequence[str], form: str, store: Path = made_store.path) -> list[dict[str, Any]]:
        (short_path / "torpor.toml").write_text("batch = 8\n")
        newest = max(store.rglob("*.mvm"), key=lambda path: path.stat().st_mtime_ns, default=Path("0" * 64))
        places = {"$BUNDLE": newest.stem, "$TMP": str(short_path)}
        words = [[_placed(word, places) for word in line.split()] for line in lines]
        environment = _environment(short_path) | {"TORPOR_STORE": str(store)}
        environment |= {"NO_COLOR": "1"} if "no" in form else {}
        done = subprocess.run(
            [*_with_no_rights(), sys.executable, "-m", "torpor.tests.cli.walk"],
            input=json.dumps({"lines": words, "columns": FORMS[form]}),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [told | {"line": line} for told, line in zip(json.loads(done.stdout), lines, strict=True)]

    return walked


def _environment(home: Path) -> dict[str, str]:
    """A user of whom nothing is known."""
    return {"HOME": str(home)} | {f"XDG_{name}_HOME": str(home / name) for name in ("STATE", "CONFIG", "DATA", "CACHE")}


def _placed(word: str, places: dict[str, str]) -> str:
    for name, place in places.items():
        word = word.replace(name, place)
    return word


# --- what is held


def _judge(walked: Sequence[dict[str, Any]], condition: str, form: str) -> None:
    """Raise AssertionError with all that is wrong in what lines have told."""
    found = []
    for told in walked:
        shown = f"$ torpor {told['line']}\n{told['out']}{told['err']}"
        expected = status_in(condition, told["line"])
        found += [f"{fault}\n{shown}" for fault in _faults(told, expected, FORMS[form], no_color="no" in form)]
    assert not found, "\n\n".join(found)


def _faults(told: dict[str, Any], status: int, columns: int, *, no_color: bool) -> Iterator[str]:
    text = told["out"] + told["err"]
    if told["status"] != status:
        yield f"status {told['status']}, and not {status}"
    if status not in (0, 6) and not re.search(r"error [a-z_]+ .+\.", " ".join(unstyled(told["err"]).split())):
        yield "no sentence says why"
    if "Traceback" in text or "internal_error" in text:
        yield "a trace"
    if not columns and "\x1b" in text:
        yield f"escape codes in a pipe: {text!r}"
    if no_color and re.search(r"\x1b\[(?:[0-9;]*;)?[349][0-9]", text):
        yield f"colors: {text!r}"
    for line in re.split(r"[\r\n]+", unstyled(text)) if columns and told["line"] not in WHOLE else ():
        if len(line.split()) > 1 and cell_len(line.rstrip()) > columns:
            yield f"wider than the terminal: {line!r}"


@pytest.mark.one_in(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("condition", [each for each in _LOOKS if "daemon" not in each])
def test_a_look_at_a_store_in_any_condition(
    walked: Callable[..., list[dict[str, Any]]], made_store: MadeStore, short_path: Path, condition: str, form: str
) -> None:
    if "another" in condition and os.geteuid():
        pytest.skip("only root gives files away")
    _arrange(condition, made_store)
    before = _stamps(made_store.path)
    try:
        _judge(walked(ALL, form), condition, form)
        assert _stamps(made_store.path) == before, "a look has changed the store"
    finally:
        subprocess.run(["chmod", "-R", "u+rwX", short_path], check=True)  # so that it can be removed


def _stamps(folder: Path) -> dict[str, tuple[bytes, int]]:
    times = {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    return {name: (data, times.get(name, 0)) for name, data in (tree(folder) if folder.exists() else {}).items()}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_look_where_another_user_has_the_socket(
    walked: Callable[..., list[dict[str, Any]]], daemon: ServerThread, short_path: Path, form: str
) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(daemon.socket_path, NOBODY, NOBODY)
    _judge(walked(ALL, form), "beside another user's daemon", form)
    assert daemon.service.calls == []


@pytest.fixture
def served(short_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The store of a daemon with two sessions, which sleep, on the default socket of this test."""
    for name, place in _environment(short_path).items():
        monkeypatch.setenv(name, place)
    pid = serve_in_background(short_path / "served", tiny_model)
    with Client() as client:
        for name, text in (("agent", "A fox."), ("other", "A hare."), ("agent", " It sleeps.")):
            client.append(name, text=text, create=name not in {each.name for each in client.list_sessions()})
            client.sleep(name)
    yield short_path / "served"
    os.kill(pid, signal.SIGTERM)
    wait_until_gone(pid, time.monotonic() + 30, 30)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_look_beside_a_daemon(walked: Callable[..., list[dict[str, Any]]], served: Path, form: str) -> None:
    lines = [line for line in ALL if line != "events"]  # that goes on until somebody ends it
    _judge(walked(lines, form, served), "with a daemon", form)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_a_look_at_ten_thousand_sessions(
    walked: Callable[..., list[dict[str, Any]]], made_store: MadeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    with Store.open(made_store.path, writable=True) as store:
        for number in range(MANY):
            making.sleep(store, 5, uri=SessionUri("default", f"s-{number:05}"), seed=number)
    _judge(walked((*OF_STORES, *OF_SESSIONS), "80"), "sound", "80")


def test_every_command_that_looks_is_walked() -> None:
    names = {line.split()[0] for line in ALL} - {"help", "version"}
    assert names | AT_WORK == {command.name for command in COMMANDS}
    assert not names & AT_WORK
