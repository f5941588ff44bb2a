"""`make bench` in tiny: each script runs, leaves its figures and its plot and nothing else, and measures what it says.

Most are heavy: they load models in several processes, and prove nothing of the store or the daemon.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))
try:
    import stated
finally:
    sys.path.remove(str(BENCH))
OF_A_PART = {
    "wake": ("--shapes", "Qwen3-0.6B", "Gemma-3-1B", "--mib", "14"),
    "agents": ("--agents", "1"),
    "loop": ("--seconds", "0.5"),
    "scale": ("--sessions", "3"),
    "soak": ("--models", "2", "--minutes", "0.15"),
}
"""What makes a script shorter still than `--quick --rounds 1` does."""
QUICK = {"constraints": 1, "delta": 2, "forks": 1, "remote": 2, "reuse": 4, "scale": 3, "store": 1, "ttft": 4}
"""Scripts that `make test` runs, and at how many commits."""


def _called_in(source: Path) -> set[str]:
    """The names of the functions that a module calls."""
    calls = (node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def _listed() -> list[str]:
    tree = ast.parse((BENCH / "run.py").read_text(encoding="utf-8"))
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    return [Path(name).stem for name in ast.literal_eval(lists[0])]


def test_make_bench_runs_every_script_that_takes_the_common_arguments() -> None:
    taking = {file.stem for file in BENCH.glob("*.py") if file.stem != "figures" and "parser_for" in _called_in(file)}
    assert taking == set(_listed())


def _scripts() -> Iterator[Any]:
    for name in _listed():
        marks = pytest.mark.one_in(QUICK[name]) if name in QUICK else pytest.mark.heavy
        yield pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", list(_scripts()))
def test_a_script_leaves_its_figures_and_its_plot_and_nothing_else(short_path: Path, name: str) -> None:
    out, rounds = short_path / "out", ("--rounds", "1") if name not in ("constraints", "drawing", "rounds") else ()
    command = [sys.executable, BENCH / f"{name}.py", "--quick", "--folder", short_path, "--out", out]
    command += [*rounds, *OF_A_PART.get(name, ())]
    subprocess.run(command, check=True, capture_output=True, env=os.environ, timeout=250)
    assert [path.name for path in short_path.iterdir()] == [out.name], "its stores are gone"
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    assert found["benchmark"] == name
    assert {"processor", "cpu_count", "packages"} <= found["machine"].keys()
    measured = list(_rounds_in(found))
    assert all(each["lowest"] <= each["median"] <= each["highest"] for each in measured)
    if name in CLAIMS:
        assert CLAIMS[name](found)


def _rounds_in(found: Any) -> Iterator[dict[str, Any]]:
    """What was measured in rounds, wherever it stands."""
    if isinstance(found, dict) and {"lowest", "median", "highest"} <= found.keys():
        yield found
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, list) else ():
        yield from _rounds_in(each)


def _each_turn_reads_its_message_alone(found: dict[str, Any]) -> bool:
    """With either template; a cache by token prefix would not, with the second."""
    turns = [turn for turns in found["templates"].values() for turn in turns]
    thinking = found["templates"]["a template that drops thinking"][1:]
    return all(turn["prefilled_tokens"] == turn["new_message_tokens"] for turn in turns) and all(
        turn["behind_the_common_prefix"] > turn["prefilled_tokens"] for turn in thinking
    )


def _all_answers_are_valid(found: dict[str, Any]) -> bool:
    """`make bench` draws 10,000."""
    return found["wrong"] == [] and found["valid"] == found["answers"] >= 40 and found["schemas"] >= 10


def _like_is_compared_with_like(found: dict[str, Any]) -> bool:
    (load,) = found["loads"]
    return bool(load["torpor"]["tokens"] == load["mlx_lm.server"]["tokens"])


def _blocks_that_were_written_are_not_computed_again(found: dict[str, Any]) -> bool:
    behind, nothing = found["ways"]["behind"], found["ways"]["nothing"]
    return bool(
        behind["recomputed_tokens"]["highest"] <= 512 + behind["last_turn_tokens"]
        and nothing["recomputed_tokens"]["lowest"] == nothing["held_tokens"] == behind["held_tokens"]
    )


def _a_sleep_writes_no_more_behind_a_long_history(found: dict[str, Any]) -> bool:
    return all(each["bytes_over_shortest"]["highest"] < 1.01 for each in found["histories"])


def _forks_take_one_base_and_their_tails(found: dict[str, Any]) -> bool:
    most = 1.02 * found["raw_base_and_tails_bytes"]
    return all(way["file_bytes"] < most for way in found["ways"].values())


def _a_flush_a_turn_is_the_price(found: dict[str, Any]) -> bool:
    flushes = [{way: each["flushes_a_turn"] for way, each in case["ways"].items()} for case in found["cases"]]
    return all(each["none"]["highest"] == 0 < each["turn"]["highest"] <= 2 for each in flushes)


def _the_simulation_asks_for_as_much(found: dict[str, Any]) -> bool:
    """A wake has one request more for each part of it."""
    counts = found["counts"]
    requests = {what: (each["writes"], each["reads"]) for what, each in counts.items()}
    parts = -(-counts["wake"]["came_bytes"] // stated.PIECE_BYTES)
    requests["wake"] = (requests["wake"][0], requests["wake"][1] - parts)
    sums = ("sleep", "awake hour")
    return all(stated.REQUESTS[what] == asked for what, asked in requests.items() if what not in sums)


CLAIMS = {
    "reuse": _each_turn_reads_its_message_alone,
    "constraints": _all_answers_are_valid,
    "agents": _like_is_compared_with_like,
    "killed": _blocks_that_were_written_are_not_computed_again,
    "delta": _a_sleep_writes_no_more_behind_a_long_history,
    "forks": _forks_take_one_base_and_their_tails,
    "durability": _a_flush_a_turn_is_the_price,
    "remote": _the_simulation_asks_for_as_much,
    "soak": lambda found: found["refusals"] == {} and found["model_loads"] > 4,
}
"""What the documents say of a script's figures that is so at any size."""
