"""SIGKILL in the middle of every kind of request that acknowledges turns (T1): what was answered is there once, bit for
bit, and what was not answered is there whole or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from torpor.tests.daemon import killed_daemon
from torpor.tests.daemon.killed_daemon import STEPS, go_through, prepare
from torpor.tests.daemon.session_rig import MODEL, Fingerprint, Rigged, open_rigged
from torpor.tests.memvid.faults import strace_kill
from torpor.tests.memvid.faults.strace_kill import CALLS, await_end
from torpor.tests.shares import share

import mlx.core as mx  # isort: skip  # after torpor, which chooses the BLAS

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks without exec, which macOS does not like"),
    pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a fork without exec has no CUDA"),
]

SHARE_OF_POINTS: Final = 2
NEVER: Final = 10**9


@dataclass(frozen=True)
class Stands:
    """All of a session that a kill must leave."""

    fingerprint: Fingerprint
    sampling: object
    text_map: object
    system: str | None


Sessions = dict[str, Stands]


def _named(name: str) -> str:
    """The name of a session, but for what is drawn by chance of it."""
    return name.partition("-")[0] + ("-" if "-" in name else "")


async def _stands(rig: Rigged, name: str) -> Stands:
    live = rig.live(name)
    return Stands(await rig.fingerprint(name), live.sampling, live.chat.text_map, live.chat.system)


async def _found(store: Path, model: Path, digests: Path, *, torn: bool = False) -> Sessions:
    """What a daemon finds in a store, once each session was used: computed in the same calls. torn: a write was cut
    off; if it was one of the journal, that is told."""
    found: Sessions = {}
    async with open_rigged(store, {MODEL: str(model)}, digests) as rig:
        assert len(rig.service._parts.store.disk.opening.journal) <= torn, "nothing else of the journal is damaged"
        for info in await rig.service.list_sessions():
            name = info.name
            woken = await rig.wake(name)
            assert woken.provenance.recomputed is None or woken.provenance.recomputed.same_logits, name
            assert _named(name) not in found
            found[_named(name)] = await _stands(rig, name)
    return found


@dataclass
class Control:
    """The same requests in a daemon that is never killed. live: behind each step, the sessions that are awake and no
    mere look; copies: the store behind it, for the others."""

    folder: Path
    model: Path
    digests: Path
    live: list[Sessions] = field(default_factory=list)
    copies: list[Path] = field(default_factory=list)
    _whole: dict[int, Sessions] = field(default_factory=dict)

    async def run(self) -> None:
        await prepare(self.folder / "begin", str(self.model), self.digests)
        store = shutil.copytree(self.folder / "begin", self.folder / "control")
        async with open_rigged(store, {MODEL: str(self.model)}, self.digests) as rig:

            async def note(_name: str) -> None:
                awake = [live for live in rig.service._parts.sessions.residency.awake.values() if not live.is_mere_look]
                self.live.append({_named(one.uri.name): await _stands(rig, one.uri.name) for one in awake})
                copy = self.folder / f"copy-{len(self.copies)}"
                self.copies.append(shutil.copytree(store, copy, ignore=shutil.ignore_patterns("lock")))

            await note("at the start")
            await go_through(rig, note)

    async def behind(self, steps: int) -> Sessions:
        """What stands behind so many steps."""
        if steps not in self._whole:
            self._whole[steps] = await _found(self.copies[steps], self.model, self.digests) | self.live[steps]
        return self._whole[steps]


class Dying:
    """The process that forks those that die."""

    def __init__(self, model: Path, digests: Path) -> None:
        command = [sys.executable, str(Path(killed_daemon.__file__)), str(model), str(digests)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, store: Path, point: int, *, torn: bool = False) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"store": str(store), "point": point, "torn": torn}), file=self.process.stdin, flush=True)
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert not told["failed"], f"the daemon failed by itself before call {point}"
        return told

    def kill(self, store: Path, point: int, *, torn: bool = False) -> tuple[int, bool]:
        """How many steps were answered, and whether the daemon was killed there."""
        told = self.run(store, point, torn=torn)
        return len(told["calls"]), bool(told["died"])

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.fixture
def dying(tiny_model: Path, digest_cache: Path) -> Iterator[Dying]:
    dying = Dying(tiny_model, digest_cache)
    yield dying
    dying.end()


@pytest.fixture
def control(tiny_model: Path, digest_cache: Path, tmp_path: Path) -> Control:
    return Control(tmp_path, tiny_model, digest_cache)


def trace_and_kill(control: Control, store: Path, point: int) -> tuple[int, bool]:
    """As `Dying.kill`, at the system's own interface: at the call of that number of any thread."""
    command = [
        *("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={CALLS}"),
        *("-e", f"inject={CALLS}:signal=KILL:when={point}"),
        *(
            sys.executable,
            "-B",
            str(Path(killed_daemon.__file__)),
            str(control.model),
            str(control.digests),
            str(store),
        ),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode in (0, -9, 137), done.stderr[-2000:]
    await_end(store / "lock")
    return len(done.stdout), done.returncode != 0


async def kill_at(control: Control, kill: Callable[[Path], tuple[int, bool]], *, torn: bool = False) -> bool:
    """Whether the daemon was killed. What it left is what was answered, and what was not is there whole or not at
    all; but a delete that was cut off may leave a session without its last turns."""
    work = control.folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    answered, died = kill(shutil.copytree(control.folder / "begin", work))
    found = await _found(work, control.model, control.digests, torn=torn)
    before = await control.behind(answered)
    after = await control.behind(min(answered + died, len(STEPS)))
    is_in_delete = died and list(STEPS)[answered] == "delete"
    forked = (await control.behind(list(STEPS).index("fork") + 1))["copy"]
    for session in {*before, *after, *found}:
        may_be = [before.get(session), after.get(session), *([forked] if is_in_delete and session == "copy" else [])]
        assert found.get(session) in may_be, (answered, session)
    return died


@pytest.mark.one_in(1)
@pytest.mark.timeout(600)
async def test_t1_what_was_answered_survives_a_kill_in_any_request(control: Control, dying: Dying) -> None:
    await control.run()
    whole = shutil.copytree(control.folder / "begin", control.folder / "whole")
    points = dying.run(whole, NEVER, torn=False)["calls"][-1]
    assert await _found(whole, control.model, control.digests) == await control.behind(len(STEPS))
    for number in range(SHARE_OF_POINTS):
        point = 1 + (share() * 7919 + number * points // SHARE_OF_POINTS) % points
        torn = bool(number % 2)
        print(f"a kill at call {point}, torn: {torn}")
        assert await kill_at(control, partial(dying.kill, point=point, torn=torn), torn=torn)
    print(f"{SHARE_OF_POINTS} of {points} calls of {len(STEPS)} requests")


@pytest.mark.heavy
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("torn", [False, True])
async def test_t1_in_full_a_kill_at_every_call_of_every_request(control: Control, dying: Dying, torn: bool) -> None:
    await control.run()
    point = 1
    while await kill_at(control, partial(dying.kill, point=point, torn=torn), torn=torn):
        point += 1
    print(f"{point - 1} kills in {len(STEPS)} requests, torn: {torn}")
    assert point > 100, "each of the 19 requests makes several calls"


@pytest.mark.heavy
@pytest.mark.timeout(3 * 3600)
@pytest.mark.skipif(bool(strace_kill.unavailable()), reason=strace_kill.unavailable())
async def test_t1_in_full_a_kill_at_real_system_calls_of_every_request(control: Control) -> None:
    """Strace counts the calls of each thread: the one dies that comes to the number first."""
    await control.run()
    point, kills = 1, 0
    while await kill_at(control, partial(trace_and_kill, control, point=point)):
        point += 1
        kills += 1
    print(f"{kills} kills at system calls in {len(STEPS)} requests")
    assert kills > 20
