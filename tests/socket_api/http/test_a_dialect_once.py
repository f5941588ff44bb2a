"""An API of another client costs a module, and its row among the dialects: then the server answers it, whole and as a
stream, checks its token and its body, tells errors in the shape that it speaks, and describes and counts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torpor.tests.changed_copy import copy_package, put, put_import, require_sound, serving

MODULE = '''"""`/v9/say`: a dialect of tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Send

from ...daemon.api.events import TokenEvent
from ...errors import TorporError
from .answering import Order, answer
from .errors import error_map
from .requests import Body, ignored_of, read_fields
from .routing import Posted, Sending
from .telling import Telling, event_bytes
from .turns import Answered, Turn
from .work import desk_of

PATH = "/v9/say"


class SayBody(Body):
    """A request for an answer to one text."""

    text: str
    most: int = 4
    stream: bool = False


def routes() -> list[Posted]:
    """The one that answers."""
    return [Posted(PATH, Sending(say), SayBody, speaks="anthropic")]


async def say(request: Request, send: Send) -> None:
    """Answer a request."""
    async with desk_of(request).bodies.made(request, _order) as order:
        await answer(request, send, order)


def _order(raw: Mapping[str, Any]) -> Order:
    body = read_fields(SayBody, raw)
    turn = Turn([{"role": "user", "content": body.text}], max_tokens=body.most)
    return Order(turn, _Said(), body.stream, ignored_of(body))


class _Said(Telling):
    def whole(self, answered: Answered) -> Mapping[str, Any]:
        return {"said": answered.result.text}

    def opening(self) -> bytes:
        return event_bytes({"begins": True})

    def token(self, event: TokenEvent) -> bytes:
        return event_bytes({"more": event.text})

    def silence(self) -> bytes:
        return event_bytes({})

    def closing(self, answered: Answered) -> bytes:
        return event_bytes({"said": answered.result.text})

    def failure(self, error: TorporError) -> bytes:
        return event_bytes(error_map(error, "anthropic"))
'''
PROGRAM = """
import http.client, json, sys
from pathlib import Path

port, token = int(sys.argv[1]), Path(sys.argv[2]).read_text().split()[-1]


def asked(method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": "Bearer " + token, **headers}
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def refusal(*given, **headers):
    status, _, body = asked(*given, **headers)
    told = json.loads(body)
    assert told["type"] == "error", told
    return status, told["error"]["message"]


status, headers, body = asked("POST", "/v9/say", {"text": "hello", "mood": "warm"})
said = json.loads(body)["said"]
assert status == 200 and said, body
assert headers["x-torpor-session"] and headers["x-torpor-ignored"] == "mood"
status, headers, body = asked("POST", "/v9/say", {"text": "hello", "stream": True})
events = [json.loads(line[6:]) for line in body.decode().splitlines() if line]
assert headers["content-type"].startswith("text/event-stream")
assert events[0] == {"begins": True} and events[-1] == {"said": said}, events
assert "".join(each.get("more", "") for each in events) == said
told = refusal("POST", "/v9/say", {"text": 3})
assert told == (400, "text: it is no text; give a text."), told
assert refusal("POST", "/v9/say", {"text": "x"}, authorization="Bearer none")[0] == 401
assert refusal("GET", "/v9/say")[0] == 405
assert json.loads(asked("POST", "/v1/completions", {})[2])["error"]["param"] == "prompt", "others keep their shape"
operation = json.loads(asked("GET", "/openapi.json")[2])["paths"]["/v9/say"]["post"]
assert operation["summary"] == "A request for an answer to one text."
assert operation["requestBody"]["required"]
assert b'route="/v9/say",status="200"} 2.0' in asked("GET", "/metrics")[2], asked("GET", "/metrics")[2]
print("a dialect once")
"""


def put_dialect(package: Path) -> None:
    folder = package / "socket_api" / "http"
    (folder / "saying.py").write_text(MODULE)
    put_import(folder / "app.py", "from . import saying")
    put(folder / "app.py", "saying, ", behind="DIALECTS: Final = (")


def test_what_a_dialect_costs_has_its_place_in_the_code(tmp_path: Path) -> None:
    """Each commit checks this, though few try the dialect."""
    put_dialect(package := copy_package(tmp_path))
    require_sound(package)


@pytest.mark.one_in(3)
def test_a_dialect_is_added_by_its_module_and_answers_everywhere(tmp_path: Path) -> None:
    put_dialect(copy_package(tmp_path))

    with serving(tmp_path, "--http", "0") as (told, ask):
        reached = re.fullmatch(r"HTTP on http://\S+:(\d+)/v1, with a token of (.*)\n", told.readline())
        assert reached is not None
        asked = ask(PROGRAM, *reached.groups())
    assert asked.stdout == "a dialect once\n", asked.stderr
