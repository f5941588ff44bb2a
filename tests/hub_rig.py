"""A hub on a loopback port, as far as `huggingface_hub` asks one for models. Its models are folders. It can refuse
them, and break off or wait in the middle of a file."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

COMMIT = "c0ffee" * 6 + "c0ff"
_ABOUT = re.compile(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/[^/]+)?")
_TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


@dataclass
class Hub:
    """models: folders by name. gated: names of those whose files are refused. most_bytes: so many bytes of a file one
    request gets; then the connection breaks, or waits for the event, if there is one. asked: the files that were asked
    for, each with the first byte. change: of what it tells of a model."""

    models: dict[str, Path]
    address: str = ""
    gated: frozenset[str] = frozenset()
    most_bytes: int | None = None
    goes_on: threading.Event | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)
    change: Callable[[dict[str, Any]], object] = lambda _: None

    def environment(self, cache: Path) -> dict[str, str]:
        """For a program that is to use this hub, and a folder as its cache."""
        return {"HF_ENDPOINT": self.address, "HF_HUB_CACHE": str(cache)}

    def used_here(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Have this process use this hub, and a folder as its cache. It downloads by pieces of 64 KiB."""
        monkeypatch.setattr(constants, "ENDPOINT", self.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.address + _TEMPLATE)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 64 << 10)


@contextmanager
def serving(models: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        asked = _ABOUT.fullmatch(path) or _FILE.fullmatch(path)
        folder = self.hub.models.get(asked[1]) if asked else None
        if asked is None or folder is None:
            self._refuse(401, "RepoNotFound")
        elif asked.re is _ABOUT:
            self._answer(_tree(folder) if asked[2] == "tree" else self._about(asked[1], folder))
        elif asked[1] in self.hub.gated:
            self._refuse(403, "GatedRepo")
        else:
            self._send(folder / asked[2])

    def _about(self, name: str, folder: Path) -> dict[str, Any]:
        info = _info(name, folder)
        self.hub.change(info)
        return info

    def _send(self, file: Path) -> None:
        content = file.read_bytes()
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(ranged[1]) if ranged else 0
        body = content[first:]
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_digest(file)}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.asked.append((file.name, first))
        most = self.hub.most_bytes
        self.wfile.write(body[:most])
        if most is not None and len(body) > most:
            if self.hub.goes_on is None:
                self.close_connection = True
                return
            self.wfile.flush()
            self.hub.goes_on.wait(60)
            self.wfile.write(body[most:])

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _info(name: str, folder: Path) -> dict[str, Any]:
    siblings = [
        {
            "rfilename": each["path"],
            "size": each["size"],
            "blobId": each["oid"],
            **({"lfs": {**each["lfs"], "sha256": each["lfs"]["oid"]}} if "lfs" in each else {}),
        }
        for each in _tree(folder)
    ]
    return {
        "id": name,
        "modelId": name,
        "sha": COMMIT,
        "siblings": siblings,
        "tags": [],
        "private": False,
        "downloads": 0,
    }


def _tree(folder: Path) -> list[dict[str, Any]]:
    """Its files; weights are large ones."""
    found = []
    for file in sorted(folder.iterdir()):
        size, digest = file.stat().st_size, _digest(file)
        large = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if file.suffix == ".safetensors" else {}
        found.append({"type": "file", "path": file.name, "size": size, "oid": digest[:40], **large})
    return found


def _digest(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return digest if file.suffix == ".safetensors" else digest[:40]
