"""Promise 1 under faults: what was acknowledged survives a kill and a power cut, and every refusal is a typed error.

T1 (kills), T2 (power loss), T3 (mutants that T2 must catch), T4 (errors of the system). `make test` runs a share,
`make test-all` everything; what each run did is printed, and with TORPOR_FAULTS_JSON=FOLDER written there.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid.disk import durable
from torpor.memvid.store import Store
from torpor.tests.memvid.faults import errnos, kill, strace_kill
from torpor.tests.memvid.faults.beginnings import Scenario, Swept, fresh, prepare
from torpor.tests.memvid.faults.mutant_runs import outline
from torpor.tests.memvid.faults.mutants import EQUIVALENT, all_mutants, modules, mutate, touched_by
from torpor.tests.memvid.faults.power import Effort, Replay
from torpor.tests.memvid.faults.recording import record
from torpor.tests.memvid.faults.run import EXPORTS, PAIRED, of_this_share
from torpor.tests.memvid.faults.scenarios import SCENARIOS
from torpor.tests.memvid.faults.shim import Call, Shim
from torpor.tests.memvid.faults.states import Seen, state_of
from torpor.tests.memvid.faults.worlds import Tape
from torpor.tests.memvid.store_making import flip
from torpor.tests.shares import share

RUN = Path(__file__).with_name("run.py")
ROOT = Path(__file__).parents[3]
needs_strace = pytest.mark.skipif(bool(strace_kill.unavailable()), reason=strace_kill.unavailable())

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="forks without exec, which macOS does not like"),
    pytest.mark.timeout(1800),  # thousands of short processes: on a machine with other work each waits for its turn
]


def sweep(name: str, folder: Path, *options: str, of: Iterable[str] = ()) -> dict[str, Any]:
    """Run a sweep in a process of its own, which takes up these scenarios, and return its report."""
    report = Path(os.environ.get("TORPOR_FAULTS_JSON", folder)) / f"{name}.json"
    command = [sys.executable, str(RUN), name, *options, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout)
    assert done.returncode in (0, 3), done.stderr
    found: dict[str, Any] = json.loads(report.read_text())[name]
    assert found["failures"] == [], done.stderr
    assert {row["scenario"] for row in found.get("scenarios", ())} == set(of)
    return found


@pytest.mark.one_in(1)
def test_t1_threat_27_a_process_killed_at_any_step_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = sweep("kill", tmp_path, of=of_this_share())
    assert found["second_points"], "what was due is asked by the sweep itself"


@pytest.mark.one_in(1)
@needs_strace
def test_t1_a_process_killed_in_real_system_calls_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Of one scenario, another one at each commit."""
    chosen = sorted(SCENARIOS)[share() % len(SCENARIOS)]
    assert sweep("strace", tmp_path, "--only", chosen, of=[chosen])["points"]


@pytest.mark.one_in(1)
def test_t2_threat_29_no_power_cut_loses_what_was_acknowledged(tmp_path: Path) -> None:
    found = sweep("power", tmp_path, of=of_this_share())
    assert found["states"] >= 0.8 * found["cuts"]


@pytest.mark.one_in(1)
def test_t1_t2_an_index_that_is_removed_after_any_fault_is_no_loss(tmp_path: Path) -> None:
    found = sweep("lost_index", tmp_path, of=of_this_share())
    assert found["points"]
    assert found["states"] >= 0.8 * found["cuts"] > 0


@pytest.mark.one_in(4)
def test_t2_a_scenario_does_the_same_in_each_run(tmp_path: Path) -> None:
    """A mutant is replayed where it does something else than the code."""
    for name in of_this_share():
        scenario, runs = SCENARIOS[name], []
        for run in "12":
            path = tmp_path / run / name / "store"
            runs.append(outline(record(scenario.run, path, Tape(prepare(scenario, path)))))
        assert runs[0] == runs[1], name


def test_a_thread_that_waits_in_a_call_keeps_no_other_thread_s_calls_from_the_handler(tmp_path: Path) -> None:
    """A worker that an earlier test left waiting would make every step of a scenario unseen."""
    seen: list[str] = []
    has_begun = threading.Event()

    def note(call: Call) -> Any:
        seen.append(call.name)
        has_begun.set()
        return call.run()

    ours, theirs = os.pipe()
    with Shim(note):
        waiting = threading.Thread(target=os.read, args=(ours, 1))
        waiting.start()
        assert has_begun.wait(60)
        os.mkdir(tmp_path / "folder")
        os.write(theirs, b"x")
        waiting.join()
    os.close(ours)
    os.close(theirs)
    assert {"read", "mkdir", "write"} <= set(seen)


def test_t2_a_replay_leaves_its_recording_as_it_was(tmp_path: Path) -> None:
    """A mutant that survives a few states is replayed again."""
    path = tmp_path / "recorded" / "store"
    recording = record(SCENARIOS["create"].run, path, Tape(prepare(SCENARIOS["create"], path)))
    one, other = (Replay("create", recording, tmp_path / "work", Effort(1, 0), one_in=64).run() for _ in "12")
    assert one.failures == other.failures == []
    assert one.counts == other.counts


@pytest.mark.one_in(1)
def test_t3_a_store_that_leaves_out_or_swaps_a_flush_is_caught(tmp_path: Path) -> None:
    found = sweep("mutants", tmp_path)
    assert found["caught"] + found["not_judged"] == found["mutants"] >= 2
    assert found["caught"]


@pytest.fixture
def two_versions(tmp_path: Path) -> Path:
    """A store of three versions, and a copy of it: the same to the byte, with the times of its files."""
    prepare(SCENARIOS["sleep_delta"], tmp_path / "one" / "store")
    fresh(tmp_path / "one" / "store", tmp_path / "other" / "store")
    return tmp_path


def state_at(path: Path, sql: str = "") -> bytes:
    with Store.open(path, writable=True) as store:
        if sql:
            store.index._connection.execute(sql)
        return state_of(store)


def test_a_copy_of_a_store_is_in_its_state_and_is_so_when_it_was_opened_again(two_versions: Path) -> None:
    here = state_at(two_versions / "one" / "store")
    assert state_at(two_versions / "other" / "store") == here
    assert state_at(two_versions / "other" / "store") == here


def test_an_index_that_says_anything_else_is_another_state(two_versions: Path) -> None:
    one, other = two_versions / "one" / "store", two_versions / "other" / "store"
    for table in ("versions", "packs", "blocks"):
        assert state_at(one) != state_at(other, f"DELETE FROM {table}")


def test_a_file_with_another_byte_or_name_is_another_state(two_versions: Path) -> None:
    one, other = two_versions / "one" / "store", two_versions / "other" / "store"
    here = state_at(one)
    with Store.open(other, writable=True) as store:
        (other / "note").write_bytes(b"")
        assert state_of(store) != here
        (other / "note").unlink()
        assert state_of(store) == here
        pack = next(other.glob("packs/*.mvp"))
        flip(pack, pack.stat().st_size // 2)
        assert state_of(store) != here


def test_a_state_that_was_seen_is_checked_again_at_times_and_must_hold_what_it_did() -> None:
    seen = Seen[int]()
    assert seen.find("state") is None
    seen.add("state", 3)
    assert [seen.find("state") for _ in range(32)].count(None) == 2
    with pytest.raises(AssertionError, match="two findings"):
        seen.add("state", 4)


def test_a_sweep_that_does_less_than_was_due_or_has_hardly_anything_to_do_has_failed(tmp_path: Path) -> None:
    short = Swept("short")
    for _ in short.choose("points", range(100), 10, 3):
        short.counts["points"] += 1
        break
    assert short.told()["failures"] == ["short: 1 points, and 10 were due"]
    idle = Scenario("idle", None, lambda path, tape: None)
    (failure,) = kill.sweep(idle, tmp_path).told()["failures"]
    assert failure == "idle: 0 to choose from: does it do anything?"


@pytest.mark.one_in(1)
def test_t3_every_mutant_has_a_name_of_its_own_and_fits_the_code(tmp_path: Path) -> None:
    mutants, paths = all_mutants(), modules()
    assert mutants.keys() >= EQUIVALENT.keys()
    plain = cache(lambda module: ast.unparse(ast.parse(paths[module].read_text())))
    for number, mutant in enumerate(mutants.values()):
        for module in touched_by(mutant):
            changed = ast.unparse(mutate(ast.parse(paths[module].read_text()), module, mutant))
            assert changed != plain(module), mutant.name
            (tmp_path / f"{number}_{module}.py").write_text(f"# {mutant.name}\n{changed}")
        path, _, test = mutant.test.partition("::")
        assert not test or f"def {test}(" in (ROOT / path).read_text(), mutant.name
    undefined_names = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", str(tmp_path)]
    found = subprocess.run(undefined_names, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


@pytest.mark.one_in(1)
def test_t4_threats_30_to_33_every_refusal_of_the_system_is_a_typed_error_and_leaves_a_whole_store(
    tmp_path: Path,
) -> None:
    found = sweep("errno", tmp_path, of=of_this_share())
    assert found["refused"]  # Not each share has a scenario whose store is poisoned.


@pytest.mark.one_in(1)
def test_no_removal_loses_what_woke_beside_an_index_of_another_moment(tmp_path: Path) -> None:
    found = sweep("moments", tmp_path, of={*of_this_share()} - {*EXPORTS})
    assert found["awake"] >= found["mixed"]


@pytest.mark.one_in(1)
def test_no_copy_of_a_live_store_opens_and_then_loses_by_a_removal(tmp_path: Path) -> None:
    found = sweep("copies", tmp_path, of=["a live store"])
    assert found["awake"] >= 10 * found["mixed"]


def test_t4_a_flush_whose_failure_is_swallowed_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep itself, tried on a store that has the fault."""

    def swallow(fd: int, path: str) -> None:
        with contextlib.suppress(OSError):
            os.fsync(fd)

    only = errnos.Fault("EIO", errno.EIO, lambda call: call.name == "fsync")
    monkeypatch.setattr(errnos, "FAULTS", (only,))
    assert errnos.sweep(SCENARIOS["create"], tmp_path / "sound").failures == []
    monkeypatch.setattr(durable, "_sync", swallow)
    failures = errnos.sweep(SCENARIOS["create"], tmp_path / "faulty").failures
    assert failures
    assert all("nobody was told" in failure for failure in failures)


@pytest.mark.one_in(1)
def test_a_file_that_was_missing_or_damaged_is_put_back_and_all_is_whole(tmp_path: Path) -> None:
    assert sweep("put_back", tmp_path, of=["put_back"])["cases"]


@pytest.mark.one_in(1)
def test_two_faults_at_once_lose_nothing(tmp_path: Path) -> None:
    chosen = [name for name in of_this_share() if name in PAIRED]
    assert sweep("pairs", tmp_path, of=chosen)["pairs"] or not chosen


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    "name", ["kill", pytest.param("strace", marks=needs_strace), "power", "lost_index", "errno", "moments"]
)
def test_t1_t2_t4_threats_27_28_in_full_every_fault_at_every_step(tmp_path: Path, name: str) -> None:
    sweep(name, tmp_path, "--full", of={*SCENARIOS} - ({*EXPORTS} if name == "moments" else set()))


@pytest.mark.heavy
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("name", "of"), [("put_back", ["put_back"]), ("pairs", PAIRED), ("copies", ["a live store"])])
def test_in_full_two_faults_at_once_every_file_that_is_put_back_and_copies_of_a_live_store(
    tmp_path: Path, name: str, of: Iterable[str]
) -> None:
    sweep(name, tmp_path, "--full", of=of)


@pytest.mark.heavy
@pytest.mark.timeout(7200)
def test_t3_in_full_every_flush_and_every_pair_of_steps_is_needed(tmp_path: Path) -> None:
    found = sweep("mutants", tmp_path, "--full")
    assert found["caught"] + found["equivalent"] == found["mutants"]
