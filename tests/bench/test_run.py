"""`make bench`, and its benchmarks in tiny: what is measured, not how fast it is.

Most are heavy: they load models in several processes, and prove nothing of the store or the daemon.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def run(name: str, *arguments: str, out: Path) -> dict[str, Any]:
    """The figures of a benchmark that was run as a program, after a look at its plot and at what it leaves."""
    subprocess.run(
        [sys.executable, BENCH / f"{name}.py", "--quick", "--folder", out.parent, "--out", out, *arguments],
        check=True,
        capture_output=True,
        env=os.environ,
        timeout=250,
    )
    assert (out / f"{name}.png").stat().st_size > 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    found: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.heavy
def test_wake_measures_every_way_in_each_round(tmp_path: Path) -> None:
    shapes = ("Qwen3-0.6B", "Gemma-3-1B")
    found = run("wake", "--shapes", *shapes, "--mib", "14", "--rounds", "1", out=tmp_path / "out")
    ways = {f"{way}_{kind}" for way in ("verified", "mlx_lm", "plain") for kind in ("fresh", "warm")}
    for shape, case in zip(shapes, found["cases"], strict=True):
        assert case["shape"] == shape
        assert case["tokens"] > 0
        for each in ("wake_seconds", "wake_processor_seconds", "wake_speed_over_mlx_lm", "wake_speed_over_plain"):
            assert case[each].keys() == ways
            assert all(taken["runs"] == 1 and taken["lowest"] > 0 for taken in case[each].values())
        peers = {f"{which}_{peer}" for which in ("first", "second") for peer in ("mlx_lm", "mlx_lm_flushed")}
        assert case["sleep_speed_over"].keys() == peers
        assert case["written_bytes"]["second"] > 0
        if Path("/proc/self/clear_refs").exists():
            assert case["wake_peak_bytes"]["verified"]["highest"] > 0


@pytest.mark.one_in(4)
def test_ttft_measures_both_models_at_each_length(tmp_path: Path) -> None:
    found = run("ttft", "--rounds", "1", out=tmp_path / "out")
    assert found["woken_is_faster_from"].keys() == found["models"].keys()
    for lengths in found["models"].values():
        assert [each["tokens"] for each in lengths] == [16, 300]
        for each in lengths:
            assert all(taken["lowest"] > 0 for taken in each["seconds"].values())
            assert each["state_bytes"] > 0


@pytest.mark.one_in(4)
def test_reuse_reads_the_new_message_of_each_turn_alone(tmp_path: Path) -> None:
    """With either template; a cache by token prefix would not, with the second."""
    found = run("reuse", "--rounds", "1", out=tmp_path / "out")
    assert len(found["templates"]) == 2
    for turns in found["templates"].values():
        assert len(turns) == 3
        assert all(turn["prefilled_tokens"] == turn["new_message_tokens"] for turn in turns)
        assert all(turn["transcript_tokens"] > 2 * turn["prefilled_tokens"] for turn in turns[1:])
    thinking = found["templates"]["a template that drops thinking"]
    assert all(turn["behind_the_common_prefix"] > turn["prefilled_tokens"] for turn in thinking[1:])


@pytest.mark.heavy
def test_agents_are_measured_beside_the_peer_and_after_a_restart(tmp_path: Path) -> None:
    """Both give as many tokens for the same chats: like is compared with like."""
    found = run("agents", "--agents", "1", "--rounds", "1", out=tmp_path / "out")
    (load,) = found["loads"]
    assert load["agents"] == 1
    assert load["torpor"]["tokens"] == load["mlx_lm.server"]["tokens"]
    for each in (load["torpor"], load["mlx_lm.server"]):
        assert each["tokens_a_second"]["lowest"] > 0
        assert 0 < each["first_token_s"]["p50"] <= each["first_token_s"]["p99"]
        assert each["first_token_after_restart_s"]["p50"] > 0
    assert load["throughput_ratio"]["runs"] == load["restart_ratio"]["runs"] == 1


@pytest.mark.heavy
def test_a_start_is_measured_to_its_first_woken_token(tmp_path: Path) -> None:
    found = run("start", "--rounds", "1", out=tmp_path / "out")
    seconds = found["seconds"]
    assert 0 < seconds["ready"]["lowest"] < seconds["first_token"]["lowest"]
    assert found["beyond_import_s"]["runs"] == 1
    assert all(each["module"] and each["own_ms"] > 0 for each in found["imported_beyond_mlx_lm"])


@pytest.mark.heavy
def test_a_stream_is_measured_beside_requests_for_all_sessions_and_beside_long_reads(tmp_path: Path) -> None:
    found = run("loop", "--seconds", "0.5", out=tmp_path / "out")["beside"]
    assert found.keys() >= {"nothing", "list", "stats", "status", "clear", "large", "1 long reads", "3 long reads"}
    assert all(each["gaps"] > 0 for what, each in found.items() if what != "one read alone")
    assert all(each["asked"] > 0 for what, each in found.items() if what != "nothing")


@pytest.mark.heavy
def test_branches_are_measured_beside_copies_in_mlx_lm_and_through_a_socket(tmp_path: Path) -> None:
    found = run("branches", "--rounds", "1", out=tmp_path / "out")
    cases = [(each["model"], each["tokens"], each["branches"]) for each in found["speed"]]
    assert cases == [(model, 300, count) for model in ("demo", "qwen3") for count in (1, 3)]
    assert all(each["speed"]["lowest"] > 0 for part in ("speed", "socket") for each in found[part])
    assert all(each["milliseconds"]["lowest"] > 0 for each in found["forks"])
    for each in found["memory"]:
        assert 1 < each["account_over_segments"] < 1.5
        assert 1 < each["active_over_segments"] < 2
    assert [each["speed"].keys() for each in found["around"]] == [{"read", "sleep", "wake"}] * 2


@pytest.mark.heavy
def test_sessions_that_write_together_are_measured_in_rounds_and_in_batches(tmp_path: Path) -> None:
    found = run("rounds", out=tmp_path / "out")
    assert [(each["model"], each["lengths"]) for each in found["sessions"]] == [
        (model, lengths) for model in ("demo", "qwen3") for lengths in ("50", "20 to 100")
    ]
    for each in found["sessions"]:
        assert each["rounds"]["calls"]["highest"] == 1
        assert each["batches"]["calls"]["lowest"] == (1 if each["lengths"] == "50" else 3)
        assert each["speed_by_s"]["lowest"] > 0


@pytest.mark.heavy
def test_http_is_measured_beside_an_echo_and_for_each_token(tmp_path: Path) -> None:
    found = run("over_http", "--rounds", "1", out=tmp_path / "out")
    assert found["echoes"].keys() == {"/healthz", "/v1/models"}
    assert all(each["lowest"] > 0 for each in (*found["echoes"].values(), *found["seconds"].values()))
    assert found["token_share_s"]["lowest"] > 0


@pytest.mark.one_in(1)
def test_forty_answers_to_schemas_are_valid(tmp_path: Path) -> None:
    """`make bench` draws 10,000."""
    found = run("constraints", out=tmp_path / "out")
    assert found["wrong"] == []
    assert found["valid"] == found["answers"] >= 40
    assert found["schemas"] >= 10
    assert found["values"].keys() == {"str", "int", "float", "bool", "NoneType"}
    assert found["masks"] >= found["tokens"] > 400
    assert 0 < found["mask_seconds"]["processor"]["p50"] <= found["mask_seconds"]["processor"]["p99"]


@pytest.mark.heavy
def test_sixteen_draws_are_measured_in_each_way_and_in_a_round(tmp_path: Path) -> None:
    """The ways that draw by place draw the same tokens: the benchmark checks that."""
    found = run("drawing", out=tmp_path / "out")
    ways = {"by a key", "by place", "one evaluation", "one array"}
    assert [each["sampling"] for each in found["draws"]] == ["temperature", "top_p"]
    assert all(each["seconds"].keys() == ways for each in found["draws"])
    assert found["round_seconds"].keys() == {"greedy", "by a key", "by place"}
    assert all(taken["lowest"] > 0 for taken in found["round_seconds"].values())


@pytest.mark.heavy
def test_durable_answers_are_measured_beside_others_and_beside_the_flush_alone(tmp_path: Path) -> None:
    found = run("durability", "--rounds", "1", out=tmp_path / "out")
    assert [case["sessions"] for case in found["cases"]] == [1, 4]
    for case in found["cases"]:
        ways = case["ways"]
        assert ways.keys() == {"none", "turn", "sleep"}
        assert case["flush_alone_s"]["lowest"] > 0
        assert all(each["turns"] == 2 * case["sessions"] for each in ways.values())
        assert all(each["last_token_s"]["lowest"] > 0 for each in ways.values())
        assert 0 < ways["turn"]["flushes_a_turn"]["highest"] <= 2
        assert ways["none"]["flushes_a_turn"]["highest"] == ways["sleep"]["flushes_a_turn"]["highest"] == 0


@pytest.mark.heavy
def test_a_killed_agent_has_less_to_compute_again_where_its_blocks_were_written(tmp_path: Path) -> None:
    found = run("killed", "--rounds", "1", out=tmp_path / "out")
    behind, nothing = found["ways"]["behind"], found["ways"]["nothing"]
    assert behind["recomputed_tokens"]["highest"] <= 512 + behind["last_turn_tokens"]
    assert nothing["recomputed_tokens"]["lowest"] == nothing["held_tokens"] == behind["held_tokens"]
    assert found["p99_over_nothing"] > 0


@pytest.mark.heavy
def test_a_soak_notes_what_the_daemon_takes_and_how_long_turns_take(tmp_path: Path) -> None:
    found = run("soak", "--minutes", "0.15", out=tmp_path / "out")
    assert found["turns"] > 0
    assert found["refusals"] == {}
    for each in ("resident_bytes", "open_files", "threads", "stored_files", "turn_s"):
        assert found[each]["second_quarter"] > 0
        assert found[each]["growth"] > -1


@pytest.mark.heavy
def test_a_soak_of_two_models_has_them_leave_memory_for_each_other(tmp_path: Path) -> None:
    found = run("soak", "--models", "2", "--minutes", "0.15", out=tmp_path / "out")
    assert (found["models"], found["model_loads"] > 4) == (2, True)
    assert found["threads"]["second_quarter"] > 0
