"""Agent frameworks: ten turns each, a tool called in each second one, and a `kill -9` of the daemon after the fifth.

Each runs over the loopback port, and over the Unix socket where it takes an HTTP client. None has code of ours in it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from conftest import Stage
from front import calls_in, require_nothing_read_twice

TURNS = 10
SYSTEM = "You are terse."
Part = Literal["head", "body", "tail"]
Ask = Callable[[str], object]


def look(part: Part) -> str:
    """Looks at a part of the file."""
    return f"The {part} has 12 lines."


LOOK = {
    "name": "look",
    "description": "Looks at a part of the file.",
    "parameters": {
        "type": "object",
        "properties": {"part": {"type": "string", "enum": ["head", "body", "tail"]}},
        "required": ["part"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Reach:
    """How a client reaches the front. socket: of the Unix socket; None for the loopback port."""

    url: str
    token: str
    socket: Path | None
    folder: Path

    def client(self) -> httpx2.Client:
        return httpx2.Client(transport=self.socket and httpx2.HTTPTransport(uds=str(self.socket)), timeout=120)

    def aclient(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(
            transport=self.socket and httpx2.AsyncHTTPTransport(uds=str(self.socket)), timeout=120
        )


def by_openai(reach: Reach) -> Ask:
    import openai

    client = openai.OpenAI(base_url=f"{reach.url}/v1", api_key=reach.token, http_client=reach.client(), max_retries=0)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    tools: Any = [{"type": "function", "function": LOOK}]

    def ask(question: str) -> object:
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.chat.completions.create(model="demo", messages=messages, tools=tools).choices[0].message
            messages.append(answer.to_dict())
            if not answer.tool_calls:
                return answer.content
            for call in answer.tool_calls:
                found = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})

    return ask


def by_openai_responses(reach: Reach) -> Ask:
    import openai

    client = openai.OpenAI(base_url=f"{reach.url}/v1", api_key=reach.token, http_client=reach.client(), max_retries=0)
    tools: Any = [{"type": "function", **LOOK, "strict": True}]
    last: list[str] = []

    def ask(question: str) -> object:
        given: Any = question
        while True:
            more: Any = {"previous_response_id": last[-1]} if last else {}
            answer = client.responses.create(model="demo", input=given, instructions=SYSTEM, tools=tools, **more)
            last.append(answer.id)
            calls = [each for each in answer.output if each.type == "function_call"]
            if not calls:
                return answer.output_text
            given = [
                {"type": "function_call_output", "call_id": each.call_id, "output": look(**json.loads(each.arguments))}
                for each in calls
            ]

    return ask


def by_anthropic(reach: Reach) -> Ask:
    import anthropic

    client = anthropic.Anthropic(base_url=reach.url, api_key=reach.token, http_client=reach.client(), max_retries=0)
    messages: list[Any] = []
    tools: Any = [{"name": "look", "description": LOOK["description"], "input_schema": LOOK["parameters"]}]

    def ask(question: str) -> object:
        messages.append({"role": "user", "content": question})
        while True:
            answer = client.messages.create(
                model="demo", system=SYSTEM, messages=messages, tools=tools, max_tokens=32_000, timeout=120
            )
            messages.append({"role": "assistant", "content": [each.to_dict() for each in answer.content]})
            calls = [each for each in answer.content if each.type == "tool_use"]
            if not calls:
                return answer.content
            results = [{"type": "tool_result", "tool_use_id": each.id, "content": look(**each.input)} for each in calls]
            messages.append({"role": "user", "content": results})

    return ask


def by_langgraph(reach: Reach) -> Ask:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.prebuilt import create_react_agent

    model = ChatOpenAI(
        model="demo", base_url=f"{reach.url}/v1", api_key=reach.token, http_client=reach.client(), max_retries=0
    )
    agent = create_react_agent(model, [tool(look)], prompt=SYSTEM, checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "one"}}
    return lambda question: agent.invoke({"messages": [("user", question)]}, thread)


def by_pydantic_ai(reach: Reach) -> Ask:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    loop = asyncio.new_event_loop()
    provider = OpenAIProvider(base_url=f"{reach.url}/v1", api_key=reach.token, http_client=reach.aclient())
    agent = Agent(OpenAIChatModel("demo", provider=provider), system_prompt=SYSTEM, tools=[look])
    history: list[Any] = []

    def ask(question: str) -> object:
        result = loop.run_until_complete(agent.run(question, message_history=history))
        history[:] = result.all_messages()
        return result.output

    return ask


def by_openai_agents(reach: Reach) -> Ask:
    import agents
    import openai

    client = openai.AsyncOpenAI(
        base_url=f"{reach.url}/v1", api_key=reach.token, http_client=reach.aclient(), max_retries=0
    )
    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel("demo", client)
    agent = agents.Agent(name="one", instructions=SYSTEM, model=model, tools=[agents.function_tool(look)])
    loop, history = asyncio.new_event_loop(), []  # type: ignore[var-annotated]

    def ask(question: str) -> object:
        history.append({"role": "user", "content": question})
        result = loop.run_until_complete(agents.Runner.run(agent, list(history)))
        history[:] = result.to_input_list()
        return result.final_output

    return ask


def by_litellm(reach: Reach) -> Ask:
    import httpx
    import litellm

    if reach.socket is not None:
        litellm.client_session = httpx.Client(transport=httpx.HTTPTransport(uds=str(reach.socket)), timeout=120)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]

    def ask(question: str) -> object:
        messages.append({"role": "user", "content": question})
        while True:
            answer: Any = litellm.completion(
                "openai/demo",
                messages=messages,
                tools=[{"type": "function", "function": LOOK}],
                api_base=f"{reach.url}/v1",
                api_key=reach.token,
                max_retries=0,
            )
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if not said.tool_calls:
                return said.content
            for call in said.tool_calls:
                found = look(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})

    return ask


def by_llm(reach: Reach) -> Ask:
    os.environ["LLM_USER_PATH"] = str(reach.folder)
    (reach.folder / "extra-openai-models.yaml").write_text(
        f"- model_id: torpor\n  model_name: demo\n  api_base: {reach.url}/v1\n  api_key_name: torpor\n"
        "  supports_tools: true\n"
    )
    (reach.folder / "keys.json").write_text(json.dumps({"torpor": reach.token}))
    import llm

    talk = llm.get_model("torpor").conversation(tools=[look])
    return lambda question: talk.chain(question, system=SYSTEM).text()


CLIENTS = [
    *(pytest.param(by, on_unix, id=f"{by.__name__[3:]}-{'unix' if on_unix else 'loopback'}")
    for by in (by_openai, by_openai_responses, by_anthropic, by_langgraph, by_pydantic_ai, by_openai_agents, by_litellm)
    for on_unix in (False, True)),
    pytest.param(by_llm, False, id="llm-loopback"),
]  # fmt: skip


@pytest.mark.parametrize(("by", "on_unix"), CLIENTS)
def test_ten_turns_with_tools_survive_a_kill_and_nothing_is_read_twice(
    stage: Stage, by: Callable[[Reach], Ask], on_unix: bool
) -> None:
    """T9."""
    front = stage.begin()
    socket = front.socket if on_unix else None
    ask = by(Reach("http://localhost" if on_unix else front.url, front.token, socket, stage.folder))
    for turn in range(TURNS):
        if turn == TURNS // 2:
            stage.kill()
        front.calls = "look" if turn % 2 else None
        ask(f"Question {turn}: what does it say?")
    require_nothing_read_twice(front.exchanges)
    assert list(calls_in(front.exchanges)) == ["look"] * (TURNS // 2)
