"""What a token of one namespace is told of another, by each route that the server has: nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import httpx2
import pytest
from starlette.routing import Route
from torpor.socket_api.client.client import Client
from torpor.socket_api.http.app import app_of
from torpor.tests.socket_api.http.serving import Served

MINE, THEIRS = "the-token-of-this-namespace", "the-token-of-that-namespace"
NAME, WORDS, LABEL = "a-session-of-nobody-else", "zanzibar quokka ", "a-label-of-nobody-else"
SECRETS: Final = (NAME, "zanzibar", "quokka", LABEL)
OUT = {"max_tokens": 4}
TEXT: Final = WORDS * 40
SAID = [{"role": "user", "content": "hello"}]
SHOWN = {"name": "show", "arguments": {"session": f"theirs/{NAME}"}}

BODIES: Final[Mapping[str, dict[str, Any]]] = MappingProxyType(
    {
        "/v1/chat/completions": {"model": "demo", "messages": SAID, **OUT},
        "/v1/completions": {"model": "demo", "prompt": "hello", **OUT},
        "/v1/responses": {"model": "demo", "input": "hello", "max_output_tokens": 4},
        "/v1/responses/input_tokens": {"model": "demo", "input": "hello"},
        "/v1/conversations": {},
        "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
        "/v1/conversations/{conversation_id}/items": {"items": SAID},
        "/v1/messages": {"model": "demo", "messages": SAID, **OUT},
        "/v1/messages/count_tokens": {"model": "demo", "messages": SAID},
        "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": SHOWN},
        "/v1/sessions": {"session": f"theirs/{NAME}"},
        "/v1/sessions/{session}/mark": {"tag": "mine"},
        "/v1/sessions/{session}/maintain": {"operation": "strip"},
        "/v1/sessions/{session}/set": {"labels": ["mine"]},
        "/v1/sessions/{session}/sleep": {},
        "/v1/sessions/{session}/save": {},
        "/v1/sessions/{session}/wake": {},
        "/v1/sessions/{session}/fork": {"name": "mine"},
        "/v1/sessions/{session}/fold": {"into": f"theirs/{NAME}"},
        "/inspector/link": {},
        "/inspector/token": {"code": "unknown"},
    }
)
"""What is asked of each path that takes a body; a new one needs its own here."""

QUERIES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "/v1/sessions": ("?namespace=theirs",),
        "/v1/history": ("?namespace=theirs", f"?sessions=theirs%2F{NAME}"),
        "/v1/why": ("?namespace=theirs&by=session", f"?session=theirs%2F{NAME}", "?by=client"),
        "/v1/sessions/{session}/difference": (f"?other=theirs%2F{NAME}", "?other=own"),
        "/v1/sessions/{session}/contents": ("?from_token=0",),
        "/v1/events": ("?names=subscribed&namespace=theirs",),
    }
)
"""What is asked besides."""

ROUTES: Final = [
    (method, route.path)
    for route in app_of(SimpleNamespace(codes=object()))._app.routes  # type: ignore[arg-type, attr-defined]
    if isinstance(route, Route)
    for method in sorted(route.methods or ())
    if method != "HEAD"  # it is a GET whose text nobody sees
]


@pytest.fixture(scope="module")
def names(served: Served) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """What the parts of a path in braces may be: of their namespace, all that has a name; and sessions of mine."""
    tokens = served.daemon.folder / "config" / "torpor" / "http-tokens"
    before = tokens.read_text()
    tokens.write_text(f"{before}mine {MINE}\ntheirs {THEIRS}\n")
    with Client(served.daemon.socket) as client, client_of(served, THEIRS) as their:
        client.append(f"theirs/{NAME}", text=TEXT, create=True, labels=[LABEL])
        client.sleep(f"theirs/{NAME}")
        client.mark(f"theirs/{NAME}", tag="theirs")
        version = client.show(f"theirs/{NAME}").versions[-1]
        client.append("mine/own", text=TEXT, create=True)
        client.save("mine/own")
        made = their.post("/v1/responses", json={"model": "demo", "input": TEXT, "max_output_tokens": 4}).json()
        talk = their.post("/v1/conversations", json={"items": [{"role": "user", "content": TEXT}]}).json()
        assert "id" in talk, talk
        items = their.get(f"/v1/conversations/{talk['id']}/items").json()["data"]
        whole = f"theirs%2F{NAME}"
        yield {
            "session": (whole, f"torpor:%2F%2F{whole}@1", f"{whole}@theirs", f"@{version.bundle_id[:16]}"),
            "response_id": (made["id"],),
            "conversation_id": (talk["id"],),
            "item_id": (items[0]["id"],),
            "model:path": ("demo", "unknown"),
            "name": ("index.html", "main.js", "unknown"),
        }
        for each in client.list_sessions():
            if each.session.startswith(("torpor://theirs/", "torpor://mine/")):
                client.delete(each.session)
    tokens.write_text(before)


def client_of(served: Served, token: str) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, headers={"x-api-key": token}, timeout=60)


def paths_of(path: str, names: Mapping[str, tuple[str, ...]]) -> list[str]:
    """The path with each of the names in it, and with each query."""
    found = [path]
    for part, given in names.items():
        if f"{{{part}}}" in path:
            found = [each.replace(f"{{{part}}}", name) for each in found for name in given]
    return [each + more for each in found for more in ("", *QUERIES.get(path, ()))]


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("method", "path"), [each for each in ROUTES if each != ("GET", "/v1/events")])
def test_no_route_tells_another_namespace_anything(
    served: Served, names: Mapping[str, tuple[str, ...]], method: str, path: str
) -> None:
    """Where a path names what is theirs, it is refused or unknown."""
    with client_of(served, MINE) as mine:
        for asked in paths_of(path, names):
            body = BODIES[path] if method == "POST" else None
            for headers in ({}, {"x-torpor-session": f"theirs/{NAME}"}, {"accept": "text/html"}):
                given = {"accept": "application/json, text/event-stream", **headers}
                answer = mine.request(method, asked, json=body, headers=given)
                told = answer.text + json.dumps(dict(answer.headers))
                assert not [each for each in SECRETS if each in told], (asked, told[:2000])
                if any(f"{{{part}}}" in path for part in ("session", "response_id", "conversation_id")):
                    assert answer.status_code in (400, 403, 404), (asked, told[:500])


def test_what_they_have_is_as_it_was_before_others_asked(served: Served, names: Mapping[str, tuple[str, ...]]) -> None:
    with Client(served.daemon.socket) as client, client_of(served, THEIRS) as their:
        detail = client.show(f"theirs/{NAME}")
        assert (detail.info.labels, detail.versions[-1].tags, len(detail.versions)) == ((LABEL,), ("theirs",), 1)
        assert their.get(f"/v1/responses/{names['response_id'][0]}").status_code == 200
        assert their.get(f"/v1/conversations/{names['conversation_id'][0]}").json().get("metadata") == {}


@pytest.mark.one_in(1)
def test_events_tell_of_nothing_that_another_namespace_does(
    served: Served, names: Mapping[str, tuple[str, ...]]
) -> None:
    read: list[str] = []
    following, seen = threading.Event(), threading.Event()

    def follow() -> None:
        with client_of(served, MINE) as mine, mine.stream("GET", "/v1/events?namespace=theirs") as answer:
            for line in answer.iter_lines():
                read.append(line)
                following.set()
                if "mine/own" in line and "sleep_ended" in line:
                    seen.set()
                    return

    reader = threading.Thread(target=follow)
    reader.start()
    with Client(served.daemon.socket) as client:
        assert following.wait(60)
        client.append(f"theirs/{NAME}", text=TEXT)
        client.sleep(f"theirs/{NAME}")
        client.append("mine/own", text="x")
        client.sleep("mine/own")
    assert seen.wait(60)
    reader.join()
    assert not [each for each in (*SECRETS, "theirs") if each in "\n".join(read)]


def test_tokens_that_another_namespace_has_read_are_not_taken_over(
    served: Served, names: Mapping[str, tuple[str, ...]]
) -> None:
    with client_of(served, MINE) as mine:
        body = {"model": "demo", "input": TEXT, "max_output_tokens": 1}
        usage = mine.post("/v1/responses", json=body).json()["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] == 0
