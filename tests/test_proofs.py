"""The comparison of two commits by what their tests prove names what was lost, and sees all that there is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torpor.tests import proofs
from torpor.tests.daemon.killed_daemon import STEPS
from torpor.tests.memvid.faults.errnos import FAULTS
from torpor.tests.memvid.faults.mutants import EARLY, all_mutants
from torpor.tests.memvid.faults.run import PAIRED, SWEEPS
from torpor.tests.memvid.faults.scenarios import SCENARIOS
from torpor.tests.memvid.fuzz import plants, targets

FILE = '''
"""T7: of all tests in here."""
SWEEPS = {"kill": 1}
MUTANTS = (Mutant("it forgets", edits=()), *_by_test({"a test": {"it lies": Edit()}}))


class OneTarget(Target):
    name = "one"


def test_what_is_so_qc1_qx2():
    """LV3 in part."""


async def test_threats_30_to_32_and_no_other():
    ...
'''
NAMES = {
    *(("id", one) for one in ("T7", "QC1", "QX2", "LV3", "threat 30", "threat 31", "threat 32")),
    *(("sweep", "kill"), ("mutant", "it forgets"), ("mutant", "it lies"), ("target of the fuzzer", "one")),
}


def read(text: str) -> proofs.Proofs:
    return proofs.proofs_in({"tests/test_it.py": text.encode(), "tests/fuzz/corpus/one": b""})


def test_each_name_is_found_and_is_lost_where_it_is_gone() -> None:
    found = read(FILE)
    assert {(kind, name) for kind, names in found.items() for name in names if kind != "test"} == {
        *NAMES,
        ("kept input", "tests/fuzz/corpus/one"),
    }
    assert proofs.lost(found, found) == []
    assert set(proofs.lost(found, read(""))) == NAMES


@pytest.mark.parametrize(
    ("gone", "kind", "name"),
    [
        ("_qc1", "id", "QC1"),
        ("LV3 in part.", "id", "LV3"),
        ('"it lies": Edit()', "mutant", "it lies"),
        ('"kill": 1', "sweep", "kill"),
        ("_to_32", "id", "threat 31"),
    ],
)
def test_what_is_lost_is_named(gone: str, kind: str, name: str) -> None:
    assert (kind, name) in proofs.lost(read(FILE), read(FILE.replace(gone, "")))


def test_what_went_with_its_subject_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(proofs.GONE, ("sweep", "kill"), "nothing is killed any more")
    assert ("sweep", "kill") not in proofs.lost(read(FILE), read(""))


@pytest.mark.one_in(1)
def test_all_that_the_harness_has_is_found_in_its_source() -> None:
    files = proofs.files_of(None).items()
    found = proofs.proofs_in({name: data for name, data in files if "/test_" not in name or b"PLANTS" in data})
    assert found["mutant"].keys() - {"EARLY"} == {
        name for name, mutant in all_mutants().items() if mutant.flush is None and name != EARLY
    }
    assert found["scenario"].keys() >= set(SCENARIOS)
    assert found["sweep"].keys() == set(SWEEPS)
    assert found["scenario of two faults"].keys() == set(PAIRED)
    assert found["fault"].keys() >= {fault.name for fault in FAULTS}
    assert found["target of the fuzzer"].keys() == {kind.name for kind in targets.TARGETS}
    assert found["plant"].keys() > {plant.name for plant in plants.PLANTS}
    assert {"a turn is closed twice", "prompts of two clients interleave"} <= found["plant"].keys()
    assert sum("calls are read by mlx-lm's parser" in name for name in found["plant"]) == 7
    assert found["request that is killed"].keys() == set(STEPS)
    assert found["kept input"]


@pytest.mark.one_in(1)
def test_two_commits_are_compared(tmp_path: Path) -> None:
    """The command, in a repository of its own."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "proofs.py").write_text(Path(proofs.__file__).read_text())

    def git(*words: str) -> None:
        who = ("-c", "user.name=one", "-c", "user.email=one@example.org")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, env=clean)

    git("init")
    for text in (FILE, FILE.replace("_qc1", "")):
        (tests / "test_it.py").write_text(text)
        git("add", ".")
        git("commit", "-m", "one")
    assert compared(tests, "HEAD~1", "HEAD") == (1, ["id: QC1"])
    assert compared(tests, "HEAD~1") == (1, ["id: QC1"])
    assert compared(tests, "HEAD", "HEAD") == compared(tests, "HEAD", "HEAD~1") == (0, [])


def compared(tests: Path, *commits: str) -> tuple[int, list[str]]:
    command = [sys.executable, str(tests / "proofs.py"), *commits]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.returncode, [line.partition("LOST ")[2] for line in done.stdout.splitlines() if "LOST " in line]


@pytest.mark.one_in(1)
def test_an_id_that_fewer_tests_bear_is_not_lost() -> None:
    twice = proofs.proofs_in({"tests/test_it.py": FILE.encode(), "tests/test_other.py": FILE.encode()})
    assert twice["id"] == Counter({name: 2 for kind, name in NAMES if kind == "id"})
    assert proofs.lost(twice, read(FILE)) == []
