"""`torpor models --available` shows the report of a program that looks at the hub's cache."""

from __future__ import annotations

import json
from typing import Any

import pytest
from torpor.cli.commands import models
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread

GIB = 1 << 30
WHOLE = {
    "name": "owner/whole",
    "disk_bytes": 2 * GIB,
    "context_tokens": 40_960,
    "weights_bytes": 2 * GIB,
    "memory": {"8192": 3 * GIB, "32768": 5 * GIB},
    "fitting_tokens": 12_000,
    "budget_bytes": 4 * GIB,
    "problem": None,
}
PART = {**dict.fromkeys(WHOLE), "name": "owner/part", "disk_bytes": 3 << 20, "memory": {}, "problem": "it is not whole"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the program was called with; it reports `listed`."""
    calls: list[tuple[str, ...]] = []
    report = {"cache": "/hub", "token_counts": [8192, 32768, 131072], "models": listed}
    monkeypatch.setattr(models, "examine", lambda *arguments: calls.append(arguments) or report)
    return calls


listed: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def _listed() -> None:
    listed[:] = [WHOLE, PART]


def test_each_model_has_a_row_and_its_problem_a_remark(torpor: Torpor, asked: list[tuple[str, ...]]) -> None:
    ran = torpor("models", "--available")
    head, whole, part = (line.split("\t") for line in ran.out.splitlines())
    assert head == ["MODEL", "DISK", "CONTEXT", "8K", "32K", "128K", "FITS"]
    assert whole == ["owner/whole", "2.00 GiB", "40,960", "3.00 GiB", "5.00 GiB", "–", "12,000 tokens"]
    assert part == ["owner/part", "3.00 MiB", "–", "–", "–", "–", "–"]
    assert "owner/part: it is not whole" in ran.err
    assert "in the memory budget of a daemon that starts now" in ran.err
    assert asked == [("available",)]


@pytest.mark.parametrize(("tokens", "words"), [(40_960, "whole context"), (0, "no"), (7, "7 tokens")])
def test_what_fits_is_a_session_or_no_session(
    torpor: Torpor, asked: list[tuple[str, ...]], tokens: int, words: str
) -> None:
    listed[:] = [WHOLE | {"fitting_tokens": tokens}]
    assert torpor("models", "--available").out.splitlines()[1].split("\t")[-1] == words


def test_the_budget_is_that_of_a_daemon_that_runs(
    torpor: Torpor, asked: list[tuple[str, ...]], daemon: ServerThread
) -> None:
    ran = torpor("models", "--available", "--json")
    assert json.loads(ran.out)["models"] == [WHOLE, PART]
    (call,) = asked
    assert (call[0], int(call[1]) > 0) == ("available", True)


def test_an_empty_cache_says_how_to_fill_it_and_an_action_goes_with_no_list(
    torpor: Torpor, asked: list[tuple[str, ...]]
) -> None:
    listed.clear()
    assert (
        "no model is in /hub; torpor ensure --model NAME=OWNER/NAME downloads one"
        in torpor("models", "--available").err
    )
    assert torpor("models", "load", "x", "--available").status == 2
