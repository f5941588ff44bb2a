"""`torpor serve` reads its options, and hands them on, in this process and to one in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torpor.cli.reach import background
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread

Given = Callable[..., dict[str, Any]]


@pytest.fixture
def given(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> Given:
    """What the daemon is handed for a command line, as far as that says it."""
    handed: list[dict[str, Any]] = []
    monkeypatch.setattr("torpor.socket_api.main.run", lambda given, **_: handed.append(given))

    def serve(*arguments: object) -> dict[str, Any]:
        ran = torpor("serve", *arguments)
        assert ran.status == 0, ran.err
        return {name: value for name, value in handed[-1].items() if name not in ("store", "socket")}

    return serve


@pytest.fixture
def started(torpor: Torpor, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The arguments of the daemon in the background, for a command line; without those for its store and socket."""
    commands: list[list[str]] = []

    def start(arguments: list[str], log: Path, *_: object) -> Any:
        commands.append(arguments)
        return background.Started("/socket", SimpleNamespace(pid=1), log)

    monkeypatch.setattr(background, "start", start)

    def serve(*arguments: object) -> list[str]:
        ran = torpor("serve", "--detach", *arguments)
        assert ran.status == 0, ran.err
        at = commands[-1].index("--store")
        assert commands[-1][at + 2] == "--socket"
        return commands[-1][:at] + commands[-1][at + 4 :]

    return serve


ALL = [
    *("--model", "m=/m", "--model", "n=owner/name=x", "--adapter", "m=/a", "--adapter", "n=/y=z", "--fuse"),
    *("--kv-bits", "m=8", "--kv-bits", "n=4", "--kv-group", "m=32", "--pin", "m", "--config", "/c.toml"),
    *("--load", "start", "--model-ttl", "60.0", "--on-model-change", "reload", "--check-models"),
    *("--memory-budget", "5", "--idle-sleep", "900.0", "--max-waiting", "9", "--batch", "3"),
    *("--prefix-reuse", "longest", "--stop-within", "7.5"),
    *(
        "--store-budget",
        "none",
        "--strip-named",
        "--keep-unnamed",
        "7.0",
        "--daily-write-budget",
        "200",
        "--keep-free",
        "30",
        "--keep-last",
        "5",
    ),
    *("--keep-days", "30.0", "--scrub-rate", "off"),
]
AS_GIVEN = {
    "model": {"m": "/m", "n": "owner/name=x"},
    "adapter": {"m": "/a", "n": "/y=z"},
    "fuse": True,
    "kv_bits": {"m": 8, "n": 4},
    "kv_group": {"m": 32},
    "pin": {"m": True},
    "config": Path("/c.toml"),
    "load": "start",
    "model_ttl": 60.0,
    "on_model_change": "reload",
    "check_models": True,
    "memory_budget": 5,
    "idle_sleep": 900.0,
    "max_waiting": 9,
    "batch": 3,
    "prefix_reuse": "longest",
    "stop_within": 7.5,
    "store_budget": 0,
    "strip_named": True,
    "keep_unnamed": 7.0,
    "daily_write_budget": 200,
    "keep_free": 30,
    "keep_last": 5,
    "keep_days": 30.0,
    "scrub_rate": 0,
}


def test_every_option_is_handed_on_as_it_was_given_and_in_its_order(given: Given) -> None:
    found = given(*ALL)
    assert found == AS_GIVEN
    assert list(found["model"]) == ["m", "n"]


def test_a_daemon_in_the_background_gets_every_option(started: Callable[..., list[str]]) -> None:
    assert started(*ALL) == ALL


def test_what_is_not_given_is_not_handed_on(given: Given, started: Callable[..., list[str]]) -> None:
    assert given() == {}
    assert started() == []


def test_sizes_and_durations_have_units_and_folders_of_a_model_may_begin_at_home(given: Given) -> None:
    words = ("--memory-budget", "1.5GiB", "--idle-sleep", "15min", "--keep-free", "0", "--scrub-rate")
    assert given(*words, "1MiB") == {
        "memory_budget": 3 << 29,
        "idle_sleep": 900.0,
        "keep_free": 0,
        "scrub_rate": 1 << 20,
    }
    assert given("--scrub-rate", "off") == {"scrub_rate": 0}
    assert given("--model", "m=~/m")["model"] == {"m": str(Path.home() / "m")}
    assert given("--kv-bits", "8", "--kv-group", "32") == {"kv_bits": {"": 8}, "kv_group": {"": 32}}
    assert given("--deterministic") == given("--batch", "1") == {"batch": 1}


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--kv-bits 5", "'--kv-bits': it takes NAME=N, where N is 8 or 4, not '5'."),
        ("--kv-bits =8", "'--kv-bits': it takes NAME=N"),
        ("--kv-bits m=", "'--kv-bits': it takes NAME=N"),
        ("--kv-bits m=16", "'--kv-bits': it takes NAME=N"),
        ("--kv-bits m=8 --kv-bits m=4", "--kv-bits is given twice for m."),
        ("--kv-bits 8 --kv-bits 8", "--kv-bits is given twice for the only model."),
        ("--model nameless", "'--model': it takes NAME=PATH, not 'nameless'."),
        ("--model =x", "'--model': it takes NAME=PATH"),
        ("--model a=", "'--model': it takes NAME=PATH"),
        ("--model a=1 --model a=2", "--model is given twice for a."),
        ("--adapter nameless", "'--adapter': it takes NAME=PATH"),
        ("--adapter a=1 --adapter a=2", "--adapter is given twice for a."),
        ("--model a=1 --fuse", "--fuse is for --adapter; without one there is nothing to fuse."),
        ("--keep-days nan", "--keep-days"),
        ("--deterministic --batch 2", "--deterministic is --batch 1; give one of them."),
        ("--batch 257", "--batch"),
        ("--max-waiting 0", "--max-waiting"),
        ("--max-waiting 65537", "--max-waiting"),
        ("--max-waiting many", "--max-waiting"),
        ("--scrub-rate fast", "'--scrub-rate': 'fast' is no size"),
        ("--scrub-rate=-1", "'--scrub-rate': '-1' is no size"),
        ("--keep-free much", "'--keep-free': 'much' is no size"),
        *((f"--idle-sleep={each}", "'--idle-sleep'") for each in ("0", "-1", "nan", "inf", "soon")),
        *((f"--{each}-budget=-1", f"'--{each}-budget'") for each in ("store", "daily-write", "memory")),
        ("--keep-free=-1", "'--keep-free'"),
        # It would let a session read, and then refuse every sleep of it.
        ("--store-budget 0", "'--store-budget': 0 would refuse every sleep. Say none for no bound, or give a size"),
        ("--daily-write-budget 0", "'--daily-write-budget': 0 would refuse every sleep."),
        ("--memory-budget 0", "'--memory-budget': 0 would hold no model. Leave it out for a share"),
        ("--log /l", "--log is for --detach"),
    ],
)
def test_what_is_wrong_is_told_before_anything_starts(torpor: Torpor, wrong: str, told: str) -> None:
    ran = torpor("serve", *wrong.split())
    assert ran.status == 2
    assert told in ran.err


def test_a_program_is_told_which_option_is_wrong(torpor: Torpor) -> None:
    for wrong in ("--kv-bits 5", "--memory-budget 0", "--batch 0", "--load never", "--fuse"):
        error = torpor("serve", "--json", *wrong.split()).error["error"]
        assert (error["code"], error["details"]) == ("invalid_usage", {"option": wrong.split()[0]})


def test_a_socket_in_use_is_told_before_any_process_is_started(
    torpor: Torpor, daemon: ServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon itself finds out only once MLX is loaded, which takes seconds."""
    monkeypatch.setattr(background, "start", lambda *_: pytest.fail("a process was started"))
    ran = torpor("serve", "--detach", "--store", tmp_path, "--socket", daemon.socket_path)
    assert (ran.status, "socket_in_use" in ran.err) == (11, True)


@pytest.mark.parametrize("is_default", [True, False])
def test_who_starts_a_daemon_in_the_background_is_told_what_its_store_may_hold_and_how_to_end_it(
    torpor: Torpor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_default: bool
) -> None:
    place = str(default_socket_path()) if is_default else "/an other/socket"
    begun = background.Started(place, SimpleNamespace(pid=1), tmp_path / "log", budget="the store may hold much")
    monkeypatch.setattr(background, "start", lambda *_: begun)
    told = torpor("serve", "--store", tmp_path, "--detach", "--log", tmp_path / "log")
    assert ("torpor stop --socket '/an other/socket'" in told.out) is not is_default
    assert "end it with torpor stop" in told.out
    assert told.err == "the store may hold much\n"
