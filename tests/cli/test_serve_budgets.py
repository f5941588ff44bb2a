"""`torpor serve` hands its options on, in this process and to one in the background."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_rig import FakeDaemon, Torpor
from torpor.cli.errors import InvalidUsage
from torpor.cli.reach import background
from torpor.cli.serve import serve
from torpor.socket_api.wire.address import default_socket_path

BUDGETS = {"store_budget": 1000, "daily_write_budget": 200, "keep_free": 30, "memory_budget": 5}


def test_a_daemon_in_the_background_gets_the_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    def start(arguments: list[str], log: Path) -> Any:
        started.append(arguments)
        return background.Started("/socket", 1, log)

    monkeypatch.setattr(background, "start", start)
    serve.serve(store=tmp_path, detach=True, log=tmp_path / "log", as_json=True, **BUDGETS)
    serve.serve(store=tmp_path, detach=True, log=tmp_path / "log", as_json=True)
    wanted = ["--store-budget", "1000", "--daily-write-budget", "200", "--keep-free", "30", "--memory-budget", "5"]
    assert started[0][-8:] == wanted
    assert not [text for text in started[1] if "budget" in text or "free" in text]


def test_a_socket_in_use_is_told_before_any_process_is_started(
    torpor: Torpor, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon itself finds out only once MLX is loaded, which takes seconds."""
    monkeypatch.setattr(background, "start", lambda *_: pytest.fail("a process was started"))
    ran = torpor("serve", "--detach", "--store", tmp_path, "--socket", daemon.socket_path)
    assert (ran.status, "socket_in_use" in ran.err) == (11, True)


@pytest.mark.parametrize("is_default", [True, False])
def test_who_starts_a_daemon_in_the_background_is_told_how_to_end_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_default: bool
) -> None:
    place = str(default_socket_path()) if is_default else "/an other/socket"
    monkeypatch.setattr(background, "start", lambda *_: background.Started(place, 1, tmp_path / "log"))
    monkeypatch.setenv("COLUMNS", "300")
    serve.serve(store=tmp_path, detach=True, log=tmp_path / "log")
    told = capsys.readouterr().out
    assert ("torpor stop --socket '/an other/socket'" in told) is not is_default
    assert "end it with torpor stop" in told


def test_a_daemon_in_the_background_gets_adapters_and_what_to_do_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(arguments: list[str], log: Path) -> Any:
        started.append(arguments)
        return background.Started("/socket", 1, log)

    monkeypatch.setattr(background, "start", start)
    given = {"model": ["m=/m"], "adapter": ["m=/a"], "fuse": True, "check_models": True}
    given |= {"kv_bits": ["m=8"], "kv_group": ["m=32"], "canary": "changed", "trusting": True}
    given |= {"recompute": "exact"}
    given |= {"quantise_after": 30.0, "quantise_bits": "4", "idle_sleep": 900.0}
    given |= {"config": tmp_path / "c.toml", "on_model_change": "reload"}
    given |= {"load": "start", "pin": ["m"], "model_ttl": 60.0, "scrub_rate": 0, "max_waiting": 9}
    serve.serve(store=tmp_path, detach=True, log=tmp_path / "log", as_json=True, **given)
    wanted = ["--model", "m=/m", "--adapter", "m=/a", "--fuse", "--check-models"]
    wanted += [
        "--kv-bits",
        "m=8",
        "--kv-group",
        "m=32",
        "--canary",
        "changed",
        "--trusting",
        "--recompute",
        "exact",
        "--max-waiting",
        "9",
    ]
    wanted += ["--quantise-after", "30.0", "--quantise-bits", "4", "--idle-sleep", "900.0"]
    wanted += ["--config", str(tmp_path / "c.toml"), "--load", "start", "--pin", "m"]
    wanted += ["--on-model-change", "reload", "--model-ttl", "60.0", "--scrub-rate", "0"]
    assert started[0][-len(wanted) :] == wanted


def test_the_daemon_in_this_process_gets_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handed: list[Any] = []
    monkeypatch.setattr("torpor.socket_api.main.run", handed.append)
    assert serve.serve(store=tmp_path, model=["m=/m"], adapter=["m=~/a"], fuse=True, check_models=True) == 0
    (options,) = handed
    assert (options.kv_bits, options.kv_group, options.canary) == ({}, {}, "always")
    assert (options.quantise_after, options.quantise_bits) == (None, 8)
    assert (options.memory_budget, options.idle_sleep, options.scrub_rate) == (None, None, 8 << 20)
    serve.serve(store=tmp_path, scrub_rate=0, max_waiting=9, recompute="fastest")
    assert (handed[0].max_waiting, handed[1].max_waiting, handed[1].scrub_rate) == (None, 9, 0)
    assert (handed[0].recompute, handed[1].recompute) == ("off", "fastest")
    assert (options.adapters, options.fuse, options.check_models) == ({"m": str(Path.home() / "a")}, True, True)


@pytest.mark.parametrize("wrong", [("5",), ("=8",), ("m=16",), ("m=8", "m=4"), ("8", "8")])
def test_bits_that_there_are_not_or_twice_are_wrong_usage(torpor: Torpor, wrong: tuple[str, ...]) -> None:
    ran = torpor("serve", *(part for each in wrong for part in ("--kv-bits", each)))
    assert (ran.status, "--kv-bits" in ran.err) == (2, True)


@pytest.mark.parametrize(("given", "rate"), [("off", 0), ("0", 0), ("1MiB", 1 << 20)])
def test_the_rate_of_the_scrub_is_a_size_or_off(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str, rate: int
) -> None:
    handed: list[Any] = []
    monkeypatch.setattr("torpor.socket_api.main.run", handed.append)
    assert torpor("serve", "--store", tmp_path, "--scrub-rate", given).status == 0
    assert handed[0].scrub_rate == rate
    assert torpor("serve", "--scrub-rate", "fast").status == 2


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"quantise_bits": "8"}, "--quantise-bits"),
        ({"quantise_after": -1.0}, "--quantise-after"),
        ({"quantise_after": float("nan")}, "--quantise-after"),
    ],
)
def test_a_policy_of_age_needs_an_age(given: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidUsage, match=option):
        serve.serve(**given)


@pytest.mark.parametrize("option", list(BUDGETS))
def test_less_than_nothing_is_no_budget(option: str) -> None:
    with pytest.raises(InvalidUsage, match=f"--{option.replace('_', '-')}"):
        serve.serve(**{option: -1})


@pytest.mark.parametrize("option", ["store_budget", "daily_write_budget"])
def test_a_budget_of_0_is_refused_before_anything_starts(option: str) -> None:
    """It would let a session read, and then refuse every sleep of it."""
    with pytest.raises(InvalidUsage, match=f"--{option.replace('_', '-')} 0 would refuse every sleep"):
        serve.serve(**{option: 0})


def test_a_memory_budget_of_0_is_refused_for_no_model_fits() -> None:
    with pytest.raises(InvalidUsage, match="--memory-budget 0 would hold no model"):
        serve.serve(memory_budget=0)


def test_to_keep_nothing_free_is_no_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "start", lambda *_: background.Started("/socket", 1, tmp_path))
    assert serve.serve(store=tmp_path, detach=True, log=tmp_path / "log", as_json=True, keep_free=0) == 0
