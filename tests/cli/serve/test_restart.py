"""`torpor restart`: the same daemon again, by whoever ran it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.cli.serve import ensure, last_options, restart, service
from torpor.daemon.api.process import ShutdownResult
from torpor.socket_api.wire.address import default_socket_path
from torpor.tests.cli.cli_rig import Torpor
from torpor.tests.socket_api.server_rig import ServerThread

HAD = {"idle_sleep": 900, "store": "/a/store", "config": "/a/torpor.toml", "model": {"qwen": "/models/qwen"}}


@pytest.fixture
def begun(daemon: ServerThread, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a restart has stopped and started; the daemon stays the same, and leaves no options behind."""
    told: dict[str, Any] = {}
    socket = default_socket_path()

    def shut_down(_: Path | None, timeout_s: float, *, force: bool) -> tuple[int, ShutdownResult]:
        told["stopped"] = (timeout_s, force)
        last_options.drop(socket)
        return 7, ShutdownResult(slept=("torpor://default/a",), failed={"torpor://default/b": "why"} if force else {})

    def find_or_start(_: Any, given: dict[str, Any]) -> Any:
        told["started"] = given
        return ensure.connect(socket), True

    monkeypatch.setattr(restart, "shut_down", shut_down)
    monkeypatch.setattr(restart, "find_or_start", find_or_start)
    last_options.remember(socket, HAD)
    return told


def test_it_starts_with_the_options_that_the_stopped_one_had(torpor: Torpor, begun: dict[str, Any]) -> None:
    ran = torpor("restart", "--timeout", "20", "--json")
    assert ran.status == 0
    assert begun["stopped"] == (20.0, False)
    paths = {"store": Path("/a/store"), "config": Path("/a/torpor.toml"), "socket": default_socket_path()}
    assert begun["started"] == {**HAD, **paths}
    assert (ran.document["was"], ran.document["slept"]) == (7, ["torpor://default/a"])


def test_what_could_not_sleep_is_status_3(torpor: Torpor, begun: dict[str, Any]) -> None:
    ran = torpor("restart", "--force", "--json")
    assert (ran.status, ran.document["failed"]) == (3, {"torpor://default/b": "why"})


def test_a_service_starts_its_own(
    torpor: Torpor, begun: dict[str, Any], daemon: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ensure.connect(default_socket_path()) as client:
        pid = client.peer_pid
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(restart, "main_pid", lambda: pid)
    monkeypatch.setattr(service, "_run", lambda commands: (asked.extend(commands), ([], None))[1])
    assert torpor("restart").status == 0
    assert asked == [("systemctl", "--user", "restart", "torpor")]


def test_without_a_daemon_there_is_none_to_start_again(torpor: Torpor) -> None:
    ran = torpor("restart")
    assert (ran.status, "torpor ensure" in ran.err) == (12, True)
