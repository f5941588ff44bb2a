"""What `torpor serve-ray` hands on, of its command line and of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torpor.cli.errors import InvalidUsage
from torpor.cli.serve.serve_ray import serve_ray
from torpor.daemon.options.serve_options import CLUSTER_OPTIONS, GIVEN_OPTIONS
from torpor.socket_api.cluster import main

NOTHING = dict.fromkeys([*GIVEN_OPTIONS, *CLUSTER_OPTIONS])
FILE = 'remote = "file:///r"\n[cluster]\nreplicas = 3\nport = 81\n'


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the cluster was begun with."""
    begun: list[dict[str, Any]] = []
    monkeypatch.setattr(main, "run", lambda args, **more: begun.append({**args, **more}))
    return begun


def test_a_cluster_has_two_replicas_on_loopback_unless_told_otherwise(ran: list[dict[str, Any]]) -> None:
    serve_ray(as_json=True, **{**NOTHING, "remote": "file:///r"})
    told = {name: ran[0][name] for name in ("replicas", "most_replicas", "host", "port", "remote", "as_json")}
    assert told == {
        "replicas": 2,
        "most_replicas": None,
        "host": "127.0.0.1",
        "port": 8000,
        "remote": "file:///r",
        "as_json": True,
    }


def test_the_command_line_wins_over_the_file(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "torpor.toml"
    file.write_text(FILE)
    serve_ray(as_json=False, **{**NOTHING, "config": file, "replicas": 5})
    assert (ran[0]["replicas"], ran[0]["port"], ran[0]["config"]) == (5, 81, file)


@pytest.mark.parametrize(
    ("given", "why"),
    [({}, "needs --remote"), ({"remote": "file:///r", "replicas": 3, "most_replicas": 2}, "at most 2")],
)
def test_what_cannot_be_is_refused(ran: list[dict[str, Any]], given: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidUsage, match=why):
        serve_ray(as_json=False, **{**NOTHING, **given})
    assert ran == []
