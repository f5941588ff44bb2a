"""Processes that are killed, stopped and let go on take one session from each other, by the clock of this machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from torpor.memvid.folder.seen_heads import SeenHeads
from torpor.memvid.remote.folder_objects import FolderObjects
from torpor.memvid.remote.heads import Heads
from torpor.tests.memvid.remote.lease_process import URI
from torpor.tests.memvid.store_making import new_folder
from torpor.tests.shares import share

NAMES = ("a", "b", "c")
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Answer:
    """A moment between two readings of the clock at which a lease counted, and the version that was told by then."""

    before_s: float
    after_s: float
    epoch: int
    name: str
    told: str


class Fleet:
    """The processes, each with its store."""

    def __init__(self, place: Path) -> None:
        self.shared, self._log, self._place = place / "shared", place / "log", place
        self.shared.mkdir()
        self._log.touch()
        for name in NAMES:
            new_folder(place / name).close()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        module = "torpor.tests.memvid.remote.lease_process"
        places = (str(self.shared), str(self._place / name), name, str(self._log))
        self._running[name] = subprocess.Popen([sys.executable, "-m", module, *places])

    def send(self, name: str, number: signal.Signals) -> None:
        self._running[name].send_signal(number)

    def kill(self, name: str) -> None:
        self._running[name].kill()
        self._running.pop(name).wait()

    def close(self) -> None:
        for name in list(self._running):
            self.kill(name)

    def answers(self) -> list[Answer]:
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [Answer(float(one), float(two), int(epoch), name, told) for one, two, epoch, name, told in lines]

    def last(self) -> Answer | None:
        return next(iter(self.answers()[-1:]), None)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert all(each.poll() is None for each in self._running.values()), "a process has failed"
            assert time.monotonic() < deadline, f"it never came: {self.last()}"
            time.sleep(0.01)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


@pytest.mark.one_in(1)
@pytest.mark.parametrize("history", range(6))
def test_whoever_is_killed_or_stopped_answers_nothing_when_another_does(
    history: int, fleet: Fleet, tmp_path: Path
) -> None:
    chance = Random(share() * 6 + history)
    fleet.until(lambda: fleet.last() is not None)
    for _ in range(5):
        last = fleet.last()
        assert last is not None
        holder, epoch = last.name, last.epoch

        def is_taken(epoch: int = epoch) -> bool:
            now = fleet.last()
            return now is not None and now.epoch > epoch

        if chance.random() < 0.5:
            fleet.kill(holder)
            if chance.random() < 0.5:  # else the others wait it out
                fleet.start(holder)
            fleet.until(is_taken)
            if holder not in fleet._running:
                fleet.start(holder)
        else:
            fleet.send(holder, signal.SIGSTOP)
            fleet.until(is_taken)
            fleet.send(holder, signal.SIGCONT)
            seen = len(fleet.answers())
            fleet.until(lambda seen=seen: len(fleet.answers()) > seen + 20)  # type: ignore[misc]
    fleet.close()
    require_one_at_a_time(fleet.answers())
    heads = Heads(FolderObjects(str(fleet.shared), fleet.shared.as_uri()), SeenHeads(new_folder(tmp_path / "reader")))
    seen = heads.read(URI)
    assert seen is not None
    assert {each.told for each in fleet.answers()} - {"-"} <= set(seen.head.versions)


def require_one_at_a_time(answers: list[Answer]) -> None:
    """No lease counts once one of a later epoch has counted; and an epoch is had by one."""
    assert len({answer.epoch for answer in answers}) == len({(answer.epoch, answer.name) for answer in answers})
    begun: dict[int, float] = {}
    for answer in answers:
        begun[answer.epoch] = min(begun.get(answer.epoch, answer.after_s), answer.after_s)
    for answer in answers:
        later = [epoch for epoch, after_s in begun.items() if epoch > answer.epoch and after_s < answer.before_s]
        assert not later, f"{answer} when epoch {later} had begun"
