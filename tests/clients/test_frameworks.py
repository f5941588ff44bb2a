"""Agent frameworks: ten turns each, a tool called in each second one, and a `kill -9` of the daemon after the fifth.

Each runs over the loopback port, and over the Unix socket where it takes an HTTP client. None has code of ours in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from conftest import Stage
from front import calls_in, require_nothing_read_twice, require_reads_do_not_grow
from serving import INSTALLED, NODE, OLDER

TURNS = 10
SYSTEM = "You are terse."
Part = Literal["head", "body", "tail"]
Ask = Callable[[str], object]


def look(part: Part) -> str:
    """Looks at a part of the file.

    Args:
        part: Which one.
    """
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
    """How a client reaches the front. socket: of the Unix socket; None for the loopback port. ending: ends what the
    client has started."""

    url: str
    token: str
    socket: Path | None
    folder: Path
    ending: ExitStack

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


def by_autogen(reach: Reach) -> Ask:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.models import ModelFamily
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    model = OpenAIChatCompletionClient(
        model="demo",
        base_url=f"{reach.url}/v1",
        api_key=reach.token,
        http_client=reach.aclient(),
        max_retries=0,
        model_info={
            "family": ModelFamily.UNKNOWN,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "vision": False,
        },
    )
    agent = AssistantAgent("one", model, tools=[look], system_message=SYSTEM, max_tool_iterations=4)
    loop = asyncio.new_event_loop()
    return lambda question: loop.run_until_complete(agent.run(task=question)).messages[-1]


def by_smolagents(reach: Reach) -> Ask:
    from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool  # type: ignore[attr-defined]

    model = OpenAIModel(
        "demo", api_base=f"{reach.url}/v1", api_key=reach.token, client_kwargs={"http_client": reach.client()}
    )
    agent = ToolCallingAgent([tool(look)], model, instructions=SYSTEM, max_steps=4, verbosity_level=LogLevel.OFF)
    return lambda question: agent.run(question, reset=False)


def by_llama_index(reach: Reach) -> Ask:
    return _by_program(reach, OLDER / "python", Path(__file__).with_name("llama_index_agent.py"))


def by_ai_sdk(reach: Reach) -> Ask:
    program = Path(__file__).with_name("ai_sdk_agent.mjs").read_text(encoding="utf-8")
    return _by_program(reach, NODE / "node", "--input-type=module", "--eval", program)


def _by_program(reach: Reach, *command: str | Path) -> Ask:
    """A program that answers a question a line. It ends with its standard input."""
    program = subprocess.Popen(
        [*command, reach.url, reach.token], cwd=INSTALLED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    reach.ending.enter_context(program)

    def ask(question: str) -> object:
        assert program.stdin is not None
        assert program.stdout is not None
        print(question, file=program.stdin, flush=True)
        answer = program.stdout.readline()
        assert answer, f"the program ended with {program.wait(timeout=60)}"
        return answer

    return ask


CLIENTS = [
    *(pytest.param(by, on_unix, id=f"{by.__name__[3:]}-{'unix' if on_unix else 'loopback'}")
    for by in (
        by_openai, by_openai_responses, by_anthropic, by_langgraph, by_pydantic_ai, by_openai_agents, by_litellm,
        by_autogen,
    )
    for on_unix in (False, True)),
    *(pytest.param(by, False, id=f"{by.__name__[3:]}-loopback") for by in (by_llm, by_llama_index, by_ai_sdk)),
]  # fmt: skip


@pytest.mark.parametrize(("by", "on_unix"), CLIENTS)
def test_ten_turns_with_tools_survive_a_kill_and_nothing_is_read_twice(
    stage: Stage, by: Callable[[Reach], Ask], on_unix: bool
) -> None:
    """T9."""
    lead(stage, by, on_unix)
    require_nothing_read_twice(stage.front.exchanges)
    assert list(calls_in(stage.front.exchanges)) == ["look"] * (TURNS // 2)


def test_smolagents_goes_on_over_a_kill_and_reads_again_what_it_words_anew(stage: Stage) -> None:
    """T9, for a client that keeps a call as a text of its own."""
    stage.front.ends = "final_answer"
    stage.front.arguments = {"final_answer": {"answer": "It has twelve lines."}}
    lead(stage, by_smolagents, on_unix=False)
    require_reads_do_not_grow(stage.front.exchanges, settled=6)
    assert list(calls_in(stage.front.exchanges)).count("look") == TURNS // 2


def lead(stage: Stage, by: Callable[[Reach], Ask], on_unix: bool) -> None:
    """Ten turns, a call in each second one, and a kill right after the fifth."""
    front = stage.begin()
    socket = front.socket if on_unix else None
    with ExitStack() as ending:
        url = "http://localhost" if on_unix else front.url
        ask = by(Reach(url, front.token, socket, stage.folder, ending))
        for turn in range(TURNS):
            if turn == TURNS // 2:
                stage.kill()
            front.calls = "look" if turn % 2 else None
            ask(f"Question {turn}: what does it say?")
