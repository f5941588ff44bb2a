"""`make bench`, and the wake's benchmark in tiny: what is measured, not how fast it is."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def _calls(source: Path) -> set[str]:
    """The names of the functions that a module calls."""
    calls = (node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)}


def test_make_bench_runs_every_script_that_takes_the_common_arguments() -> None:
    sources = {file.name for file in BENCH.glob("*.py") if file.name != "figures.py" and "parser_for" in _calls(file)}
    tree = ast.parse((BENCH / "run.py").read_text(encoding="utf-8"))
    lists = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    assert sources == set(ast.literal_eval(lists[0]))


def test_wake_measures_every_peer_in_each_round(tmp_path: Path) -> None:
    subprocess.run(
        [
            sys.executable,
            BENCH / "wake.py",
            "--quick",
            "--lengths",
            "64",
            "--folder",
            tmp_path,
            "--out",
            tmp_path / "out",
        ],
        check=True,
        capture_output=True,
        env=os.environ,
        timeout=200,
    )
    found = json.loads((tmp_path / "out" / "wake.json").read_text(encoding="utf-8"))
    seconds = found["lengths"][0]["seconds"]
    assert all(each["runs"] == 2 and each["lowest"] > 0 for each in seconds.values()), seconds
    assert {"mlx_lm_load", "plain_read", "plain_write", "mlx_lm_save"} <= seconds.keys()
    assert (tmp_path / "out" / "wake.png").stat().st_size > 0
    assert [name.name for name in tmp_path.iterdir()] == ["out"]
