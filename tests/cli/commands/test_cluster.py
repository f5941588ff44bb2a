"""`torpor ls --cluster`: what is shown of several replicas."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from torpor.cli.commands.cluster import list_cluster
from torpor.cli.errors import InvalidUsage
from torpor.cli.view.output import Output
from torpor.socket_api.errors import DaemonUnreachable
from torpor.socket_api.tokens import Tokens, default_tokens_path


def session(name: str, state: str, version: int) -> dict[str, Any]:
    figures = {"token_count": 10 * version, "resident_bytes": 0, "bundle_id": "b" * 64}
    return {"session": f"torpor://default/{name}", "state": state, "version": version, **figures}


def replica(name: str, *sessions: dict[str, Any]) -> dict[str, Any]:
    memory = {"sessions_bytes": 1024, "budget_bytes": 2048}
    return {"replica": name, "status": {"sessions_awake": 1, "memory": memory}, "sessions": list(sessions)}


TOLD = {
    "replicas": [
        replica("aaa", session("notes", "asleep", 3), session("old", "asleep", 1)),
        replica("bbb", session("notes", "awake", 2), session("old", "asleep", 2)),
    ]
}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """The requests that a cluster got: path and token. Its address is `url` of the list's last entry."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    Tokens(default_tokens_path()).make()
    requests: list[tuple[str, str]] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers["Authorization"]))
            body = json.dumps(TOLD).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    requests.append(("url", f"http://127.0.0.1:{server.server_port}/v1"))
    yield requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_session_is_shown_where_it_is_awake_or_newest(
    asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    list_cluster(asked[0][1], None, Output(as_json=False))
    shown = capsys.readouterr()
    assert [line.split("\t")[:6] for line in shown.out.splitlines()[-2:]] == [
        ["default/notes", "awake", "20", "2", "–", "bbb"],
        ["default/old", "asleep", "20", "2", "–", "bbb"],
    ]
    assert [line.split(":")[0] for line in shown.err.splitlines()] == ["replica aaa", "replica bbb"]
    assert asked[1:] == [("/v1/cluster", f"Bearer {Tokens(default_tokens_path()).token_of('default')}")]


def test_a_script_gets_what_the_cluster_told(asked: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    list_cluster(asked[0][1], None, Output(as_json=True))
    assert json.loads(capsys.readouterr().out)["replicas"] == TOLD["replicas"]


def test_no_cluster_is_told_apart_from_no_address(asked: list[tuple[str, str]]) -> None:
    with pytest.raises(DaemonUnreachable, match=r"No cluster answers at http://127\.0\.0\.1:1: "):
        list_cluster("http://127.0.0.1:1", None, Output(as_json=False))
    with pytest.raises(InvalidUsage, match="file:///etc is no address"):
        list_cluster("file:///etc", None, Output(as_json=False))
