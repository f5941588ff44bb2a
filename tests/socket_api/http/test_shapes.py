"""Each client's way with its history hits: recorded requests, asked anew, find all that the ones before them left.

`shapes/` has short ones of our own. Those that were recorded in full lie beside the repository, where there are any.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from torpor.tests.socket_api.http.replay import Answer, Replay, shapes_in
from torpor.tests.socket_api.http.serving import Served

SHAPES = Path(__file__).parent / "shapes"
OURS = sorted(SHAPES.glob("*.json"))
RECORDED = Path(__file__).resolve().parents[4] / "shared" / "shapes"
HELD = (
    *("anthropic-py-2.12.0", "claude-code-2.1.197-headless", "claude-code-2.1.330-headless", "claude-code-subagents"),
    *(
        "claude-code-toolsearch-deferred",
        "claude-code-two-tools",
        "codex-0.169.0-headless",
        "langgraph-langchain-openai",
    ),
    *("llm-0.36", "openai-agents-0.24.0", "openai-py-3.54.0-chat"),
    *("opencode-1.18.33-anthropic", "opencode-1.18.33-chat", "opencode-1.18.33-responses", "pi-0.73.1-anthropic"),
    *("pi-0.73.1-chat", "pi-0.73.1-responses", "pydantic-ai-2.68.0"),
)
TEN_TIMES_SHORTER = 0.1


def client_of(served: Served) -> httpx2.Client:
    return httpx2.Client(base_url=served.url, headers={"authorization": f"Bearer {served.token}"}, timeout=300)


def require_hits(answers: list[Answer]) -> None:
    """More than what the request before left is cached where the same was asked before, as by another API."""
    for at, answer in enumerate(answers):
        assert answer.cached >= answer.before, f"request {at}: {answer}"
    assert any(answer.before for answer in answers)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("file", OURS, ids=lambda file: file.stem)
def test_each_request_finds_all_that_the_ones_before_it_left(served: Served, file: Path) -> None:
    with client_of(served) as client:
        answers = list(Replay(client).ask(shapes_in(file)))
        assert [answer.cached for answer in answers] == [answer.before for answer in answers]


@pytest.mark.one_in(len(HELD))
@pytest.mark.parametrize("name", HELD)
def test_each_recorded_request_finds_all_that_the_ones_before_it_left(served: Served, name: str) -> None:
    if not RECORDED.is_dir():
        pytest.skip("no recorded shapes lie beside the repository")
    with client_of(served) as client:
        require_hits(list(Replay(client).ask(shapes_in(RECORDED / f"{name}.json", scale=TEN_TIMES_SHORTER))))


def why(client: httpx2.Client, answer: Answer) -> Any:
    """What the daemon tells of an answer's request."""
    name = quote(answer.session.removeprefix("torpor://"), safe="")
    return client.get(f"/v1/sessions/{name}/why").json()["requests"][-1]


def reorder_tools(at: int, body: dict[str, Any]) -> None:
    if at == 2:
        body["tools"] = body["tools"][::-1]


def tell_the_time(at: int, body: dict[str, Any]) -> None:
    first = body["system"][-1] if "system" in body else body["messages"][0]
    key = "text" if "system" in body else "content"
    first[key] += f" Today is 2026-11-{10 + at}."


def edit_a_result(at: int, body: dict[str, Any]) -> None:
    for message in body["messages"] if at == 3 else ():
        parts = message["content"] if isinstance(message["content"], list) else [message]
        for part in parts:
            if message["role"] == "tool" or part.get("type") == "tool_result":
                part["content"] = "[removed to save room]"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("change", "at", "cause"),
    [(reorder_tools, 2, "reordered"), (tell_the_time, 2, "clock"), (edit_a_result, 3, "message")],
)
@pytest.mark.parametrize("name", ["claude_code", "opencode"])
def test_a_miss_that_the_client_makes_is_explained(
    served: Served, name: str, change: Callable[[int, dict[str, Any]], None], at: int, cause: str
) -> None:
    """MS8: the tools in another order, a clock in the system text, an edited result."""
    with client_of(served) as client:
        told = []
        for answer in Replay(client).ask(shapes_in(SHAPES / f"{name}.json"), change):
            told.append(why(client, answer))
            if len(told) > at:
                break
        assert answer.cached < answer.before
        assert (told[at]["outcome"], told[at]["cause"]) == ("diverged", cause)


def move_a_clock(at: int, body: dict[str, Any]) -> None:
    line = f"Current date and time: 2026-11-22 10:{at:02}\n"
    if "system" in body:
        body["system"][-1]["text"] = line + body["system"][-1]["text"]
    else:
        body["messages"][0]["content"] = line + body["messages"][0]["content"]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", ["claude_code", "opencode"])
def test_a_clock_costs_no_reading_unless_its_line_is_to_stay(served: Served, name: str) -> None:
    with client_of(served) as client:
        shapes = shapes_in(SHAPES / f"{name}.json")
        for at, answer in enumerate(Replay(client).ask(shapes, move_a_clock)):
            assert answer.cached == answer.before
            assert why(client, answer)["volatile"][-1].endswith(f"10:{at:02}")
        asked = [replace(shape, headers={**shape.headers, "x-torpor-volatile": "off"}) for shape in shapes]
        *_, answer = Replay(client).ask(asked, move_a_clock)
        assert answer.cached < answer.before
