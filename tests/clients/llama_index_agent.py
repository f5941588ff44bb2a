"""A LlamaIndex agent that answers the questions of standard input, one a line. `python llama_index_agent.py URL TOKEN`.

A program of its own, because LlamaIndex takes no `openai` from 3 on, and runs in the environment of older clients.
"""

import asyncio
import sys
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


def look(part: Literal["head", "body", "tail"]) -> str:
    """Looks at a part of the file."""
    return f"The {part} has 12 lines."


async def main(url: str, token: str) -> None:
    model = OpenAILike(
        model="demo",
        api_base=f"{url}/v1",
        api_key=token,
        context_window=2_048,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        timeout=120,
    )
    agent = FunctionAgent(tools=[look], llm=model, system_prompt="You are terse.")
    context = Context(agent)
    for question in sys.stdin:
        print(await agent.run(question.strip(), ctx=context), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
