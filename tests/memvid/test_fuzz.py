"""T6 in small: every input that the fuzzer ever found, and some changes by chance (`fuzz/run.py` searches for hours).

Each check of a target holds what it accepts against a second opinion; see fuzz/targets.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from torpor.memvid.errors import StoreError
from torpor.tests.memvid.fuzz import plants, targets
from torpor.tests.memvid.fuzz.target import Target, changed, corpus_of
from torpor.tests.memvid.fuzz.watch import Hung, Watch, with_alarm

FUZZ = Path(__file__).parent / "fuzz"
NAMES = [kind.name for kind in targets.TARGETS]
CHANGES = {
    "store": 40,
    "version": 40,
    "maintenance": 25,
    "index": 40,
    "import": 60,
    "packing": 100,
    "marks": 100,
    "replay": 40,
}
"""How many changed inputs of a target are tried in a bounded run; 250 of those not named."""


def faults(watch: Watch) -> str:
    """The findings, for people."""
    return "\n".join(finding.text for finding in watch.findings.values())


@pytest.fixture
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    with targets.opened(request.param) as opened:
        yield opened


def changed_inputs(target: Target, count: int, seed: int) -> Iterator[bytes]:
    rng = Random(seed)
    seeds = [*target.seeds(), *(path.read_bytes() for path in corpus_of(target))]
    for _ in range(count):
        yield changed(target, rng.choice(seeds), rng, (1, 1, 2, 4))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("target", NAMES, indirect=True)
def test_t6_seeds_are_accepted_and_inputs_once_found_stay_refused_or_right(target: Target) -> None:
    watch = Watch(target.check, StoreError)
    for data in target.seeds():
        watch.execute(data)
    assert watch.outcomes["sound"] >= 1
    for path in corpus_of(target):  # some need what went before
        watch.execute(path.read_bytes())
    assert not faults(watch)


@pytest.mark.parametrize(
    ("times", "seed"), [pytest.param(1, 1, marks=pytest.mark.one_in(5)), pytest.param(10, 2, marks=pytest.mark.heavy)]
)
@pytest.mark.parametrize("target", NAMES, indirect=True)
def test_t6_changed_inputs_are_refused_or_right(target: Target, times: int, seed: int) -> None:
    watch = Watch(target.check, StoreError)
    for data in changed_inputs(target, times * CHANGES.get(target.name, 250), seed):
        watch.execute(data)
    assert not faults(watch)
    if target.name not in ("index", "maintenance"):  # where nothing need be refused for ever
        assert len(watch.outcomes) > 1  # some were accepted and some refused, else the changes are no good


@pytest.mark.parametrize("target", ["pack"], indirect=True)
def test_t6_changes_get_past_the_digests(target: Target) -> None:
    """Most changed files are refused for what they say, not for a digest that was not made right."""
    texts = []
    for data in changed_inputs(target, 300, seed=3):
        try:
            texts.append(target.check(data))
        except StoreError as error:
            texts.append(error.message)
    assert sum("digest" in text for text in texts) < len(texts) / 5
    assert texts.count("sound") > len(texts) / 50


def test_t6_every_fault_that_is_planted_to_try_the_fuzzer_fits_the_code() -> None:
    for plant in plants.PLANTS:
        (module,) = (plants.ROOT / "memvid").rglob(plant.module)
        source = module.read_text()
        assert source.count(plant.before) == 1, plant.name
        assert plant.target in NAMES, plant.name
        compile(source.replace(plant.before, plant.after), plant.name, "exec")


SOON_FOUND = (
    "no second packing",
    "chain is not checked",
    "frames with gaps",
    "pack id is not compared",
    "an import keeps its own name",
    "marks in any form",
)
"""Plants of six targets that blind changes find within a second or two; `fuzz/plants.py` hunts all of them."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", SOON_FOUND)
def test_t6_a_planted_fault_is_found(name: str) -> None:
    [plant] = [plant for plant in plants.PLANTS if plant.name == name]
    hunted = plants._hunt(plant, argparse.Namespace(seconds=60, engine="blind"))
    assert hunted["found"], hunted


def test_t6_the_watch_tells_what_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.tests.memvid.fuzz.watch.MAX_CPU_SECONDS", 0.01)

    def check(data: bytes) -> str:
        sum(range(int(data)))
        return "sound"

    watch = Watch(check, StoreError)
    assert watch.execute(b"10") is None
    finding = watch.execute(b"3000000")
    assert finding is not None
    assert finding.kind == "slow:sound"


@pytest.mark.parametrize(("after", "finds"), [(886.0, False), (1058.0, True)])
def test_t6_the_watch_tells_what_takes_memory_whatever_the_process_had_before(
    after: float, finds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = [865.0]
    monkeypatch.setattr("torpor.tests.memvid.fuzz.watch.peak_rss_mib", lambda: resident[0])

    def check(data: bytes) -> str:
        resident[0] = after
        return "sound"

    watch = Watch(check, StoreError, base_rss_mib=865.0, _rss_mib=865.0)
    assert (watch.execute(b"") is not None) is finds


def test_t6_the_watch_gives_up_on_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.tests.memvid.fuzz.watch.MAX_WALL_SECONDS", 0.05)

    def check(data: bytes) -> str:
        while True:
            pass

    finding = with_alarm(Watch(check, StoreError).execute)(b"")
    assert finding is not None
    assert finding.kind.startswith(Hung.__name__)


@pytest.mark.one_in(2)
def test_t6_a_run_is_made_again_by_its_seed(tmp_path: Path) -> None:
    """The command line, without coverage: the same seed begins with the same inputs."""
    with targets.opened("pack") as target:
        assert list(changed_inputs(target, 20, seed=5)) != list(changed_inputs(target, 20, seed=6))
        seeds = list(target.seeds())
        assert [target.change(data, Random(7)) for data in seeds] == [target.change(data, Random(7)) for data in seeds]
    report = tmp_path / "report.json"
    command = [sys.executable, str(FUZZ / "run.py"), "--target", "directory", "--engine", "blind", "--seconds", "1"]
    command += ["--out", str(tmp_path / "findings"), "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    figures = json.loads(report.read_text())
    assert figures["executions"] > 5
    assert figures["findings"] == []
    assert 0 < figures["rss_peak_mib"] < 256
