"""Shell sessions as text: what somebody types, what must be told, and in which exit status it ends.

    == what the case proves
    -- lose $MANIFEST_1
    store$ torpor verify
    > version 2: manifest missing
    [6]

`$ ` is a command line, run in this process; behind `store$ ` it is given the store, by `--store`. What stands below is
asked of what came of it:

    > text    stdout has this, behind what the line above found       = text    stdout is this, and no more
    ! text    stderr has this                                         no> text, no! text    it has not
    {...}     the JSON document, or the error, has at least this      [6]     the exit status, 0 where none stands
    -> verb {...}     the daemon was asked this, with these facts     -> nothing     it was asked for no work

How words are divided into lines and columns is not compared. `<<< text` behind a command is its standard input. A line
`-- ` arranges something, by ARRANGEMENTS. Places have names: $TMP, $SOCKET, $STORE, and of its versions
$MANIFEST_0 to _2, $PACK_0 to _2, $BUNDLE_0 to _2 (their ids). `text_cases.py` has what else such a file may say.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any, Final, get_type_hints

import pytest
from pydantic import TypeAdapter
from torpor.daemon.api.causes import REMEDIES, RequestCost, Reuse
from torpor.daemon.api.process import ModelInfo
from torpor.daemon.api.session import SessionInfo
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.views import causes as views
from torpor.errors import TorporError
from torpor.memvid.store import Store
from torpor.memvid.uri import SessionUri
from torpor.tests.cli.cli_rig import MadeStore, Ran, Torpor, flip, unstyled
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread
from torpor.tests.text_cases import Case, at_line, has_at_least

FOLDER: Final = Path(__file__).parent / "transcripts"
_LOOKS: Final = frozenset({"status", "list", "show"})  # what a command may ask before it does anything


@dataclass
class World:
    """Where a case happens: its store and its daemon are made once a line names them."""

    request: pytest.FixtureRequest
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack
    places: dict[str, str]
    has_daemon: bool = False
    before: dict[str, bytes] = field(default_factory=dict)
    told: Told = field(default_factory=lambda: Told(Ran(0, "", "")))

    @property
    def torpor(self) -> Torpor:
        found: Torpor = self.request.getfixturevalue("torpor")
        return found

    @property
    def daemon(self) -> ServerThread:
        found: ServerThread = self.request.getfixturevalue("daemon")
        self.has_daemon, self.places["SOCKET"] = True, str(found.socket_path)
        return found

    @property
    def store(self) -> MadeStore:
        found: MadeStore = self.request.getfixturevalue("made_store")
        self.places["STORE"] = str(found.path)
        for number, (manifest, pack) in enumerate(zip(found.manifests, found.packs, strict=True)):
            self.places |= {f"MANIFEST_{number}": str(manifest), f"PACK_{number}": str(pack)}
            self.places[f"BUNDLE_{number}"] = manifest.stem
        return found

    def expanded(self, text: str) -> str:
        """The text with the places in it."""
        if re.search(r"\$(STORE|MANIFEST|PACK|BUNDLE)", text):
            assert self.store
        return Template(text).safe_substitute(self.places)

    def shown(self) -> str:
        return self.told.ran.out + self.told.ran.err

    def files(self) -> dict[str, bytes]:
        """What a plan or a refusal may not change: all of the store but its index."""
        return {name: data for name, data in making.tree(self.store.path).items() if "index.sqlite" not in name}


# --- what is arranged


def _serve(world: World, *of_the_store: str) -> None:
    world.daemon.service.store = str(world.store.path) if of_the_store else "/store"


def _facts(text: str, record: type[Any]) -> dict[str, Any]:
    """Facts in JSON, as a record has them."""
    hints = get_type_hints(record)
    return {name: TypeAdapter(hints[name]).validate_json(json.dumps(value)) for name, value in json.loads(text).items()}


def _have(world: World, which: str, facts: str) -> None:
    """Let the service, its model, a session, or the answers to a verb have those facts from now on."""
    service = world.daemon.service
    if which == "service":
        for name, value in json.loads(facts).items():
            setattr(service, name, value)
    elif which == "model":
        service.model = replace(service.model, **_facts(facts, ModelInfo))
    elif which in VERBS:
        service.also(which, **_facts(facts, VERBS[which].result))
    else:
        service.sessions[which].now(**_facts(facts, SessionInfo))


def _refuse(world: World, code: str, _of: str = "", path: str = "") -> None:
    refusal = type("Refused", (TorporError,), {"code": code})
    world.daemon.service.fault = refusal(f"{path} is damaged.", path=path) if path else refusal("So it is.")


def _note(world: World) -> None:
    world.before = world.files()


def _compare(world: World) -> None:
    assert world.files() == world.before, "the files of the store have changed"


def _copy_pack(world: World, path: str) -> None:
    with Store.open(world.store.path, writable=True) as store:
        making.copy_pack(store, Path(path))


def _hold(_: World, path: str, *names: str) -> None:
    assert set(os.listdir(path)) == set(names), f"it holds {os.listdir(path)}"


def _tell(world: World) -> None:
    """Let the diary of the store tell of two requests for a session, and of one for another that is deleted since."""
    agent, gone = SessionUri("default", "agent"), SessionUri("default", "gone")
    read = RequestCost(
        *(1, "chat", 0, "curl chat_completions"),
        read_tokens=40,
        written_tokens=12,
        seconds=2.5,
        waited_seconds=0.1,
        wake_seconds=1.0,
        read_seconds=0.5,
        write_seconds=0.8,
        durable_seconds=0.05,
    )
    texts = ("It is 06:30.", "It is 07:45.", "clock", REMEDIES["clock"], "rewound")
    with Store.open(world.store.path, writable=True) as store:
        views.say(
            store.diary, agent, read, Reuse("chat", 2, "diverged", str(agent), 3, 9, 3, 1, *texts, repeated_tokens=6)
        )
        hit = Reuse("generate", 1, "hit", str(agent), 9, 9)
        views.say(store.diary, agent, RequestCost(2, "generate", 0, written_tokens=3, seconds=0.25), hit)
        anew = RequestCost(3, "append", 0, read_tokens=7, seconds=1.0)
        views.say(store.diary, gone, anew, Reuse("append", 3, "none"))
        store.diary.end(gone)


ARRANGEMENTS: Final[dict[str, Callable[..., object]]] = {
    "a daemon": _serve,
    "a diary": _tell,
    "facts of": _have,
    "each request is refused as": _refuse,
    "a writer has the store": lambda world: world.open.enter_context(Store.open(world.store.path, writable=True)),
    "the writer ends": lambda world: world.open.close(),
    "note the files": _note,
    "the files are as noted": _compare,
    "environment": lambda world, name, value: world.monkeypatch.setenv(name, value),
    "a store at": lambda _, path: Store.open(path, writable=True).close(),
    "copy the pack": _copy_pack,
    "lose": lambda _, path: os.unlink(path),
    "cut": lambda _, path: os.truncate(path, os.path.getsize(path) - 1),
    "flip": lambda _, path, at="": flip(Path(path), int(at or os.path.getsize(path) // 2)),
    "write": lambda _, path, *lines: Path(path).write_text("\n".join(lines), encoding="utf-8"),
    "link": lambda _, path, name: os.link(path, name),
    "symlink": lambda _, path, name: os.symlink(path, name),
    "rename": lambda _, path, name: os.rename(path, name),
    "folder": lambda _, path: os.mkdir(path),
    "mode": lambda _, mode, path: os.chmod(path, int(mode, 8)),
    "pipe": lambda _, path: os.mkfifo(path),
    "holds": _hold,
}
"""What a line `-- ` does, by how it begins; its other words are the arguments."""


# --- the lines


def play(case: Case, world: World) -> None:
    """Do what a case says, line by line. Raises AssertionError, with file and line, where something else was told."""
    for number, line in [*case.lines, (case.lines[-1][0], "-- ")]:
        with at_line(case, number, line, world.shown):
            if line.startswith(("-- ", "$ ", "store$ ")):
                world.told.end()
                world.told = Told(Ran(0, "", ""))
            if line.startswith("-- "):
                _arrange(world, line[3:])
            elif line.startswith(("$ ", "store$ ")):
                world.told = _run(world, line)
            else:
                world.told.compare(world.expanded(line))


def _arrange(world: World, words: str) -> None:
    if not words:
        return
    begin = max((each for each in ARRANGEMENTS if f"{words} ".startswith(f"{each} ")), key=len)
    ARRANGEMENTS[begin](world, *shlex.split(world.expanded(words.removeprefix(begin))))


def _run(world: World, line: str) -> Told:
    prompt, _, typed = line.partition("$ ")
    words = shlex.split(world.expanded(typed))
    if "<<<" in words:
        words, handed_in = words[: words.index("<<<")], words[-1]
        world.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(handed_in.encode())))
    if prompt:
        words += ["--store", str(world.store.path)]
    calls = world.daemon.service.calls if world.has_daemon else []
    asked = len(calls)
    return Told(world.torpor(*words[1:]), calls[asked:])


def _folded(text: str) -> str:
    return " ".join(unstyled(text).split())


@dataclass
class Told:
    """What a command wrote and what it asked of the daemon, and how much of that was compared."""

    ran: Ran
    calls: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    status: int = 0
    found_until: int = 0
    whole: list[str] = field(default_factory=list)

    def compare(self, line: str) -> None:
        mark, _, text = line.partition(" ")
        out, err, text = _folded(self.ran.out), _folded(self.ran.err), _folded(text)
        match mark:
            case ">":
                at = out.find(text, self.found_until)
                assert at >= 0, "stdout has it not, or not here"
                self.found_until = at + len(text)
            case "=":
                self.whole.append(text)
            case "!":
                assert text in err if text else not err, "stderr has it not"
            case "no>":
                assert text not in out, "stdout has it"
            case "no!":
                assert text not in err, "stderr has it"
            case "->":
                self._compare_calls(text)
            case _ if line.startswith("["):
                self.status = int(line[1:-1])
            case _:
                document = json.loads(self.ran.out or self.ran.err)
                has_at_least(document.get("error", document), json.loads(line))

    def _compare_calls(self, text: str) -> None:
        verb, _, facts = text.partition(" ")
        if verb == "nothing":
            assert [name for name, _ in self.calls if name not in _LOOKS] == [], "it was asked for work"
        else:
            asked = json.loads(json.dumps([given for name, given in self.calls if name == verb]))
            assert asked, f"{verb} was not asked, but {self.calls}"
            assert {name: value for name, value in asked[-1].items() if value is not None} == json.loads(facts)

    def end(self) -> None:
        """Compare what can be compared only once all lines below a command are read."""
        assert self.ran.status == self.status, f"the command before ended with status {self.ran.status}"
        if self.whole:
            assert _folded(self.ran.out) == " ".join(self.whole).strip(), f"stdout is not {self.whole}"
