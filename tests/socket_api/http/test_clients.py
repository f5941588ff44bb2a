"""The clients that people use, against a real daemon on the demo model: over the loopback port and the Unix socket."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
import torpor
from torpor.socket_api import Client
from torpor.socket_api.tokens import Tokens
from torpor.tests.socket_api.http.serving import QUESTIONS, Served, serving, working
from torpor.tests.socket_api.real_daemon import until

if TYPE_CHECKING:
    import anthropic
    import openai

HOW_TO = Path(__file__).parents[3] / "docs" / "how-to" / "http.md"


def asked_of_messages(client: anthropic.Anthropic, messages: list[Any], *, stream: bool) -> Any:
    """Ask, add the answer's blocks to the messages, and give its usage."""
    system: Any = [
        {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.{len(messages)}"},
        {"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}},
    ]
    tool: Any = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}
    options: dict[str, Any] = {
        "model": "demo",
        "messages": messages,
        "max_tokens": 12,
        "system": system,
        "tools": [tool],
    }
    if stream:
        with client.messages.stream(**options) as events:
            message: Any = events.get_final_message()
    else:
        message = client.messages.create(**options)
    messages.append({"role": "assistant", "content": [each.to_dict() for each in message.content]})
    return message.usage


def asked(client: openai.OpenAI, messages: list[Any], *, stream: bool) -> tuple[str, Any]:
    """Ask, add the answer to the messages, and give it with its usage."""
    options: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 12}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        whole = client.chat.completions.create(**options)
        text, usage = whole.choices[0].message.content or "", whole.usage
    messages.append({"role": "assistant", "content": text})
    return text, usage


@pytest.mark.one_in(1)
def test_ten_turns_by_either_api_survive_a_kill_and_nothing_is_read_twice(short_path: Path) -> None:
    """T9: each turn finds all of the ones before in the session, also behind a `kill -9` and on the other address. Two
    dialogues of one daemon at the same time, in turns."""
    by_openai: list[Any] = [{"role": "system", "content": "You are terse."}]
    by_anthropic: list[Any] = []
    held = held_by_anthropic = 0
    with contextlib.ExitStack() as running:
        now = running.enter_context(serving(short_path))
        for at, question in enumerate(QUESTIONS):
            if at == 5:
                now.daemon.end(kill=True)
                now = running.enter_context(serving(short_path))
            by_openai.append({"role": "user", "content": question})
            with now.openai(on_unix=at % 2 == 1) as client:
                _, usage = asked(client, by_openai, stream=at % 3 == 0)
            details = usage.prompt_tokens_details
            assert details.cached_tokens + details.recomputed_tokens == held
            assert not details.recomputed_tokens or at == 5, "after the kill alone"
            assert details.cached_tokens + details.cache_write_tokens == usage.prompt_tokens
            held = usage.total_tokens
            by_anthropic.append({"role": "user", "content": question})
            with now.anthropic(on_unix=at % 2 == 0) as other:
                told = asked_of_messages(other, by_anthropic, stream=at % 3 == 0)
            assert told.cache_read_input_tokens + told.recomputed_tokens == held_by_anthropic
            assert told.input_tokens == 0
            held_by_anthropic += told.cache_creation_input_tokens - told.recomputed_tokens + told.output_tokens


@pytest.mark.one_in(1)
def test_the_status_tells_where_http_is_served(served: Served) -> None:
    with Client(served.daemon.socket) as client:
        http = client.status().http
    assert http is not None
    assert (http.url, http.socket) == (served.url, str(served.socket))
    assert Tokens(Path(str(http.tokens))).token_of("default") == served.token


@pytest.mark.one_in(1)
def test_tokens_are_counted_before_they_are_read(served: Served) -> None:
    from anthropic import BadRequestError

    with served.anthropic() as client:
        hello: list[Any] = [{"role": "user", "content": "How many tokens is this?"}]
        counted = client.messages.count_tokens(model="demo", messages=hello)
        usage = client.messages.create(model="demo", messages=hello, max_tokens=2).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        with pytest.raises(BadRequestError, match="prompt is too long: 10009 tokens > 8192 maximum"):
            client.messages.create(model="demo", messages=[{"role": "user", "content": "word " * 10_000}], max_tokens=9)


def test_a_stop_sequence_ends_an_answer_and_is_named(served: Served) -> None:
    options: Any = {"model": "demo", "messages": [{"role": "user", "content": "What is a dict?"}], "max_tokens": 12}
    with served.anthropic() as client:
        whole = client.messages.create(**options)
        assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)
        text = whole.content[0].text  # type: ignore[union-attr]
        stop = text[5:9]
        for stream in (True, False):
            if stream:
                with client.messages.stream(**options, stop_sequences=["zzzz", stop]) as events:
                    told: Any = events.get_final_message()
            else:
                told = client.messages.create(**options, stop_sequences=["zzzz", stop])
            assert (told.stop_reason, told.stop_sequence) == ("stop_sequence", stop)
            assert told.content[0].text == text.partition(stop)[0]


@pytest.mark.one_in(1)
def test_a_text_is_continued(served: Served) -> None:
    with served.openai() as client:
        whole = client.completions.create(model="demo", prompt="The function os.path.join", max_tokens=6)
        stream = client.completions.create(model="demo", prompt="The function os.path.join", max_tokens=6, stream=True)
        assert "".join(each.choices[0].text for each in stream) == whole.choices[0].text


def test_a_stream_and_a_whole_answer_say_the_same(served: Served) -> None:
    """QC3."""
    said = []
    with served.openai() as client:
        for stream in (True, False):
            text, usage = asked(client, [{"role": "user", "content": "What is a list?"}], stream=stream)
            said.append((text, usage.completion_tokens))
    assert said[0] == said[1]
    assert said[0][0]


@pytest.mark.one_in(1)
def test_an_edited_history_goes_on_in_a_fork_and_the_first_one_still_hits(served: Served) -> None:
    with served.openai() as client:
        first: list[Any] = [{"role": "user", "content": "What is a fork?"}]
        asked(client, first, stream=False)
        edited, first = [*first, {"role": "user", "content": "No."}], [*first, {"role": "user", "content": "Yes."}]
        _, before = asked(client, first, stream=False)
        _, usage = asked(client, edited, stream=True)
        assert 0 < usage.prompt_tokens_details.cached_tokens < before.total_tokens
        first.append({"role": "user", "content": "And then?"})
        _, after = asked(client, first, stream=False)
        assert after.prompt_tokens_details.cached_tokens == before.total_tokens


@pytest.mark.one_in(1)
def test_a_stream_names_its_session_before_its_first_token_a_fork_too(served: Served) -> None:
    def ask(client: openai.OpenAI, messages: list[Any]) -> str:
        options: Any = {"model": "demo", "messages": messages, "max_tokens": 12, "stream": True}
        told = client.chat.completions.with_raw_response.create(**options, extra_headers={"x-torpor-session": "named"})
        pieces = [each.choices[0].delta.content or "" for each in told.parse() if each.choices]
        messages.append({"role": "assistant", "content": "".join(pieces)})
        return str(told.headers["x-torpor-session"])

    with served.openai() as client:
        first: list[Any] = [{"role": "user", "content": "What is a name?"}]
        own = ask(client, first)
        edited = [*first, {"role": "user", "content": "No."}]
        assert ask(client, [*first, {"role": "user", "content": "Yes."}]) == own == "torpor://default/named"
        fork = ask(client, edited)
        assert fork.startswith(f"{own}-")
        edited.append({"role": "user", "content": "And then?"})
        assert ask(client, edited) == fork, "it holds what the stream before said"


def test_errors_come_out_as_the_clients_own(served: Served) -> None:
    import openai

    with served.openai() as client:
        hello: list[Any] = [{"role": "user", "content": "hello"}]
        with pytest.raises(openai.NotFoundError, match="No model is served as 'gpt'"):
            client.chat.completions.create(model="gpt", messages=hello)
        long: list[Any] = [{"role": "user", "content": "word " * 10_000}]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens") as overflow:
                client.chat.completions.create(model="demo", messages=long, stream=stream)
            assert overflow.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="n: one answer"):
            client.chat.completions.create(model="demo", messages=hello, n=2)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()
        assert [each.id for each in client.models.list()] == ["demo"]


def test_a_client_that_closes_its_stream_frees_the_session(served: Served) -> None:
    """Threat 45, QX16."""
    with served.openai() as client:
        messages: list[Any] = [{"role": "user", "content": "Count."}]
        stream = client.chat.completions.create(model="demo", messages=messages, stream=True, max_tokens=7000)
        next(iter(stream))
        stream.close()
        until(lambda: working(served) == 0)
        assert asked(client, messages, stream=False)[0]


@pytest.mark.one_in(1)
def test_the_blocks_of_the_page_on_http_run_as_they_stand(served: Served) -> None:
    text = HOW_TO.read_text(encoding="utf-8")
    found = re.findall(r"<!-- python: .*?-->\n```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == text.count("```python") == 3
    environment = {
        "OPENAI_BASE_URL": f"{served.url}/v1",
        "OPENAI_API_KEY": served.token,
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_API_KEY": served.token,
    }
    done = subprocess.run(
        [sys.executable, "-"],
        input="".join(found),
        text=True,
        env=environment,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


@pytest.mark.one_in(1)
def test_logprobs_come_as_a_client_of_openai_reads_them(served: Served) -> None:
    with served.openai() as client:
        asked: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        choice = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3).choices[0]
        assert choice.logprobs is not None
        assert "".join(each.token for each in choice.logprobs.content or ()) == choice.message.content
        assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in choice.logprobs.content or ())
        chunks = [each.choices[0] for each in client.chat.completions.create(**asked, logprobs=True, stream=True)]
        streamed = [one.token for each in chunks if each.logprobs for one in each.logprobs.content or ()]
        assert streamed == [each.token for each in choice.logprobs.content or ()]
        legacy = client.completions.create(model="demo", prompt="import ", max_tokens=8, logprobs=2).choices[0]
        assert legacy.logprobs is not None
        assert "".join(legacy.logprobs.tokens or ()) == legacy.text
        included: Any = ["message.output_text.logprobs"]
        response = client.responses.create(
            model="demo", input="hi", max_output_tokens=16, top_logprobs=2, include=included
        )
        told: Any = response.output[0]
        assert "".join(each.token for each in told.content[0].logprobs) == response.output_text


ASKERS: dict[str, dict[str, Any]] = {
    "main": {"system": "You are a coding agent.", "headers": {}},
    "agent": {"system": "You are a coding agent.", "headers": {"x-claude-code-agent-id": "explore-1"}},
    "title": {"system": "Write a title.", "headers": {}},
}


@pytest.mark.one_in(1)
def test_the_main_dialogue_a_title_and_a_sub_agent_under_one_id_at_once_harm_no_head(served: Served) -> None:
    """T9: the ids of a client name a group; the tokens tell who goes on where."""
    together = threading.Barrier(len(ASKERS))

    def talk(who: str) -> tuple[set[str], list[tuple[int, int]]]:
        messages: list[Any] = []
        found: list[tuple[int, int]] = []
        sessions: set[str] = set()
        held = 0
        headers = {"x-claude-code-session-id": "9f2c7a10", **ASKERS[who]["headers"]}
        with served.anthropic() as client:
            for question in (f"{who}: begin", *QUESTIONS[:3]):
                messages.append({"role": "user", "content": question})
                together.wait(60)
                told = client.messages.with_raw_response.create(
                    model="demo",
                    messages=messages,
                    max_tokens=12,
                    system=ASKERS[who]["system"],
                    extra_headers=headers,
                )
                message = told.parse()
                sessions.add(told.headers["x-torpor-session"])
                usage = message.usage
                found.append((usage.cache_read_input_tokens or 0, held))
                held = usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens
                messages.append({"role": "assistant", "content": [each.to_dict() for each in message.content]})
        return sessions, found

    with ThreadPoolExecutor(len(ASKERS)) as pool:
        told = list(pool.map(talk, ASKERS))
    sessions = [name for names, _ in told for name in names]
    assert len(sessions) == len(set(sessions)) == 3, "each has one session, from its first turn to its last"
    assert all(name.startswith("torpor://default/9f2c7a10") for name in sessions)
    assert all(cached == held for _, turns in told for cached, held in turns[1:])


def long_demo(folder: Path, positions: int) -> Path:
    """A copy of the demo model with a larger context."""
    made = shutil.copytree(Path(torpor.__file__).parent / "daemon" / "demo_model", folder / "long-demo")
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        (made / name).write_text(json.dumps({**json.loads((made / name).read_text()), key: positions}))
    return made


def leave_at(served: Served, asked: dict[str, Any], tokens: int) -> tuple[int, int]:
    """Ask, and leave once so many tokens of the dialogue are processed: how many of them were cached, and how many are
    told to be processed."""
    headers = {"x-api-key": served.token}
    with httpx2.stream("POST", f"{served.url}/v1/chat/completions", json=asked, headers=headers, timeout=60) as answer:
        for line in answer.iter_lines():
            progress = json.loads(line[6:]).get("prompt_progress") if line.startswith("data: {") else None
            if progress is not None and progress["processed"] >= tokens:
                return progress["cache"], progress["processed"]
    raise AssertionError("it was answered")


@pytest.mark.one_in(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("tokens", "cuts"), [(1_200, 3), pytest.param(20_000, 10, marks=pytest.mark.heavy)])
def test_a_prefill_that_its_client_cuts_again_and_again_ends(short_path: Path, tokens: int, cuts: int) -> None:
    """QX16: who gives up and asks again has less than a block read twice."""
    messages: list[Any] = [{"role": "user", "content": "word " * tokens}]
    with serving(short_path, "--model", f"demo={long_demo(short_path, 65_536)}") as served, served.openai() as client:
        asked = {"messages": messages, "max_tokens": 1}
        read = again = 0
        for cut in range(1, cuts + 1):
            streamed = {**asked, "stream": True, "return_progress": True}
            cached, processed = leave_at(served, streamed, cut * tokens // (cuts + 1))
            again, read = again + max(0, read - cached), processed
            until(lambda: working(served) == 0)
        usage = client.with_options(timeout=600).chat.completions.create(model="demo", **asked).usage
        assert usage is not None
        assert usage.prompt_tokens > tokens
        assert usage.prompt_tokens_details is not None
        assert again + max(0, read - (usage.prompt_tokens_details.cached_tokens or 0)) < 256 * cuts
