"""Each verb and each path of HTTP, at the limits of what a request may have, against a daemon whose loop is watched.

What a step sends takes as many messages, bytes, values, tools or sessions as the daemon takes. While it is answered the
loop serves all others, so the longest gap of each step is what they wait for.

Run as a script: `python -m torpor.tests.socket_api.requests_at_limits [--messages N] [STEP...]`.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torpor.daemon.api.limits import MAX_MESSAGES
from torpor.errors import TorporError
from torpor.socket_api import Client
from torpor.socket_api.http.connections import MAX_BODY_BYTES
from torpor.tests.model_making import write_model
from torpor.tests.socket_api.loop_gaps import Gap, gaps_in
from torpor.tests.socket_api.real_daemon import RealDaemon, served

CONTEXT: Final = 1_048_576
SHORT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role[0] }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
"""Four tokens for a message of one letter, so that a model reads as many messages as a dialogue may have."""

MANY_MESSAGES: Final = MAX_MESSAGES - 400
MANY_BYTES: Final = MAX_BODY_BYTES - 3 * 1024**2
Step = tuple[str, Callable[[], object]]


@dataclass
class Done:
    """A step. status: of HTTP; 0 for the socket. gaps: the longest first."""

    step: str
    seconds: float
    status: int
    gaps: list[Gap] = field(default_factory=list)

    def told(self) -> str:
        longest = self.gaps[0].seconds if self.gaps else 0.0
        return f"{longest * 1e3:7.0f} ms  {self.step} (status {self.status}, {self.seconds:.1f} s)"


def write_roomy_model(folder: Path) -> Path:
    """A model of one small layer, with a long context."""
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    write_model(folder, **one, max_position_embeddings=CONTEXT)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": SHORT_TEMPLATE}))
    return folder


class Requests:
    """What is asked of one daemon. messages: of a long dialogue; many_bytes: of a large body."""

    def __init__(self, daemon: RealDaemon, door: Path, *, messages: int, many_bytes: int) -> None:
        self.daemon, self._door = daemon, door
        self.client = Client(daemon.socket, timeout_s=600)
        self.many, self.many_bytes = messages, many_bytes
        self.status = 0
        self._response = self._conversation = "none"

    def http(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        """Ask; the status and the answer. body: bytes as they are, else JSON."""
        connection = http.client.HTTPConnection("localhost", timeout=600)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.connect(str(self._door))
            given = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, given, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            raw = answer.read()
            self.status = answer.status
            return json.loads(raw) if "json" in answer.headers.get("content-type", "") else raw

    def post(self, path: str, body: object) -> Any:
        """As `http`."""
        return self.http("POST", path, body)

    def dialogue(self, count: int) -> list[dict[str, Any]]:
        """So many messages, an odd number: the last is the user's."""
        return [{"role": ("user", "assistant")[at % 2], "content": f"{at % 89}"} for at in range(count)]

    def chat(self, messages: Sequence[Mapping[str, Any]], named: str | None = None, **more: Any) -> Any:
        headers = {"x-torpor-session": named} if named else {}
        body = {"model": "m", "messages": messages, "max_tokens": 2, "temperature": 0, **more}
        return self.http("POST", "/v1/chat/completions", body, headers)

    def steps(self) -> Iterator[Step]:
        """All of them, in the order in which they are done."""
        yield from self._of_a_dialogue()
        yield from self._of_bodies()
        yield from self._of_tools()
        yield from self._of_responses()
        yield from self._of_conversations()
        yield from self._of_the_socket()
        yield from self._of_many_sessions()

    def _of_a_dialogue(self) -> Iterator[Step]:
        long, half = self.dialogue(self.many - self.many % 2 + 1), self.many // 2
        edited = [*long[:half], {**long[half], "content": "edited"}, *long[half + 1 :]]
        counted, client = {"model": "m", "messages": long}, self.client

        def goes_on() -> None:
            said = self.chat(long, "long")["choices"][0]["message"]["content"]
            self.chat([*long, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}], "long")

        yield "chat completion: a long dialogue, new", lambda: self.chat(long, "long")
        yield "chat completion: a long dialogue, gone on with", goes_on
        yield "chat completion: a long dialogue, again without a name", lambda: self.chat(long)
        yield "chat completion: a long dialogue, edited in its midst", lambda: self.chat(edited, "long")
        yield "chat completion: streamed", lambda: self.chat(long, "long", stream=True)
        yield "messages", lambda: self.post("/v1/messages", {**counted, "max_tokens": 2})
        yield "messages/count_tokens", lambda: self.post("/v1/messages/count_tokens", counted)
        yield "measure", lambda: client.measure("long", messages=long)
        yield "recall", lambda: client.recall("long")
        yield "why", lambda: client.why("long")
        yield "show", lambda: client.show("long")
        yield "fork", lambda: client.fork("long", name="fork")
        yield "fork at a token", lambda: client.fork("long", name="fork-2", at_token=100)
        yield "sleep", lambda: client.sleep("long")
        yield "recall asleep", lambda: client.recall("long")
        yield "measure asleep", lambda: client.measure("long", messages=long)
        yield "wake", lambda: client.wake("long")
        yield "save", lambda: client.save("long")
        yield "chat verb, transcript", lambda: client.chat("fork", messages=long, max_tokens=2, on_divergence="rewind")
        yield "append messages", lambda: client.append("appended", messages=long, create=True)
        yield "tree", lambda: client.tree("fork")
        yield "fold", lambda: client.fold("fork", name="folded", summary="it was long")
        yield "delete", lambda: client.delete("fork-2")
        yield "calls", lambda: self.chat(self._with_calls())

    def _with_calls(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for at in range(self.many // 16):
            function = {"name": "f", "arguments": json.dumps({"a": at, "b": ["x", None]})}
            call = {"id": f"c{at}", "type": "function", "function": function}
            found += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            found += [{"role": "tool", "tool_call_id": f"c{at}", "content": "1"}]
        return found

    def _of_bodies(self) -> Iterator[Step]:
        size, many = self.many_bytes, range(self.many_bytes // 500)
        escapes, plain = "\\u00e9" * (size // 6), "x" * size
        parts = "[" + ",".join('{"type":"text","text":"x"}' for _ in many[:30_000]) + "]"
        objects, names = ",".join('{"a":1.5}' for _ in many), "".join(f'"n{at}":1,' for at in many)
        told = "".join(f',"n{at}":"1"' for at in many)

        def raw(content: str, where: str = "/v1/chat/completions", more: str = "") -> Callable[[], object]:
            body = f'{{"model":"m","max_tokens":2,{more}"messages":[{{"role":"user","content":{content}}}]}}'
            return lambda: self.post(where, body.encode())

        def complete(prompt: object) -> Callable[[], object]:
            return lambda: self.post("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 2})

        yield "one message of many MiB", raw(f'"{plain}"')
        yield "one message of many MiB, escaped", raw(f'"{escapes}"')
        yield "one message of many MiB, to be counted", raw(f'"{plain}"', "/v1/messages/count_tokens")
        yield "one message of many MiB, half pairs", raw('"' + "\\ud800" * (size // 6) + '"')
        yield "an ignored field of many MiB", raw('"hi"', more=f'"ignored":"{escapes}",')
        yield "ignored objects", raw('"hi"', more=f'"ignored":[{objects}],')
        yield "many names", raw('"hi"', more=names)
        yield "metadata of many names", raw('"hi"', more=f'"metadata":{{"a":"b"{told}}},')
        yield "parts of a text", raw(parts)
        yield "parts of messages", raw(parts, "/v1/messages")
        yield "completion: many MiB", complete(plain)
        yield "completion: tokens", complete([65] * (2 * len(many)))
        yield "completion: prompts", complete(["a"] * (2 * len(many)))
        yield "broken JSON", raw('"hi"', more=f'"ignored":"{plain}" ')
        yield "many brackets", lambda: self.post("/v1/chat/completions", b"[" * 100_000)

    def _of_tools(self) -> Iterator[Step]:
        def offer(*tools: object) -> Callable[[], object]:
            return lambda: self.chat([{"role": "user", "content": "hi"}], tools=tools)

        def answer_to(properties: int) -> Callable[[], object]:
            schema = {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(properties)}}
            form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
            return lambda: self.chat([{"role": "user", "content": "hi"}], response_format=form)

        yield "512 tools", offer(*(_tool(f"t{at}", 1) for at in range(512)))
        yield "10,000 tools", offer(*(_tool(f"t{at}", 1) for at in range(10_000)))
        yield "a tool with a large schema", offer(_tool("t", 8_000))
        yield "a strict tool with a large schema", offer(_tool("t", 2_000, strict=True))
        yield "an answer's schema, large", answer_to(2_000)
        yield "an answer's schema, too large", answer_to(30_000)

    def _of_responses(self) -> Iterator[Step]:
        items = self.dialogue(self.many - self.many % 2 + 1)

        def respond(given: object, **more: Any) -> None:
            self._response = self.post("/v1/responses", {"model": "m", "input": given, **more}).get("id", "none")

        def at(path: str = "") -> str:
            return f"/v1/responses/{self._response}{path}"

        yield "response: a long dialogue", lambda: respond(items)
        yield "response: gone on with", lambda: respond("more", previous_response_id=self._response)
        yield "response: told", lambda: self.http("GET", at())
        yield "response: its items", lambda: self.http("GET", at("/input_items?limit=100"))
        yield "response: deleted", lambda: self.http("DELETE", at())

    def _of_conversations(self) -> Iterator[Step]:
        items = self.dialogue(self.many - self.many % 2 + 1)

        def at(path: str = "") -> str:
            return f"/v1/conversations/{self._conversation}{path}"

        def begin() -> None:
            self._conversation = self.post("/v1/conversations", {}).get("id", "none")

        def add() -> None:
            for first in range(0, len(items) - 2_000, 2_000):
                self.post(at("/items"), {"items": items[first : first + 2_000]})

        def answer() -> None:
            self.post("/v1/responses", {"model": "m", "input": "more", "conversation": self._conversation})

        yield "conversation: new", begin
        yield "conversation: items added", add
        yield "conversation: told", lambda: self.http("GET", at())
        yield "conversation: its items", lambda: self.http("GET", at("/items?limit=100"))
        yield "conversation: answered", answer
        yield "conversation: deleted", lambda: self.http("DELETE", at())

    def _of_the_socket(self) -> Iterator[Step]:
        client, tokens, long = self.client, [65] * 100_000, "x" * min(self.many_bytes, 15_000_000)
        yield "append tokens", lambda: client.append("tokens", tokens=tokens, create=True)
        yield "append text", lambda: client.append("text", text="x" * 100_000, create=True)
        yield "append text that is too long", lambda: client.append("text", text=long)
        yield "append tokens that are too many", lambda: client.append("text", tokens=[65] * 1_048_576)
        yield "generate", lambda: client.generate("tokens", max_tokens=200)
        yield "generate with log-probabilities", lambda: client.generate("tokens", max_tokens=200, logprobs=20)
        yield "sleep of tokens", lambda: client.sleep("tokens")
        yield "wake of tokens", lambda: client.wake("tokens")
        yield "labels", lambda: client.set("tokens", labels=[f"label {at}" for at in range(64)])
        yield "a long system text", lambda: client.create("system", system="s" * 250_000)
        yield "chat with a long system text", lambda: client.chat("system", message="hi", max_tokens=2)
        yield "branches", self._branch

    def _branch(self) -> None:
        root = self.client.tree("tokens").branch
        self.client.branch(root, count=1000)
        self.client.branches(root)
        self.client.prune([root], subtree=True)

    def _of_many_sessions(self) -> Iterator[Step]:
        client, count = self.client, self.many // 4

        def make() -> None:
            for at in range(count):
                client.create(f"many-{at}", labels=["many"])

        def put_to_sleep() -> None:
            for at in range(0, count, 8):
                client.sleep(f"many-{at}")

        yield "many sessions", make
        yield "of them, asleep", put_to_sleep
        yield "list", client.list_sessions
        yield "stats", lambda: client.stats(label="many")
        yield "status", client.status
        yield "metrics", lambda: self.http("GET", "/metrics")
        yield "models", lambda: self.http("GET", "/v1/models")
        yield "sessions by HTTP", lambda: self.http("GET", "/v1/sessions")
        yield "openapi", lambda: self.http("GET", "/openapi.json")
        yield "warm", lambda: client.warm(label="many")
        yield "verify", lambda: client.maintain("verify")
        yield "repack", lambda: client.maintain("repack")
        yield "clear, told only", lambda: client.clear("many", dry_run=True)
        yield "clear", lambda: client.clear("many")

    def done(self, chosen: Sequence[str] = ()) -> Iterator[Done]:
        """Do the steps whose names begin with one of these; all, if there are none."""
        for step, do in self.steps():
            if chosen and not any(step.startswith(each) for each in chosen):
                continue
            since, self.status = time.monotonic(), 0
            try:
                do()
            except TorporError as error:
                step = f"{step} [{error.code}]"
            seconds = time.monotonic() - since
            status = self.status
            self.http("GET", "/healthz")  # a gap is told behind its end
            yield Done(step, seconds, status, gaps_in(self.daemon.gaps, since=since))


def _tool(name: str, properties: int, **more: object) -> dict[str, Any]:
    parameters = {f"p{at}": {"type": "string", "description": "d" * 20} for at in range(properties)}
    function = {"name": name, "description": "d" * 40, "parameters": {"type": "object", "properties": parameters}}
    return {"type": "function", "function": {**function, **more}}


@contextlib.contextmanager
def asked(folder: Path, **sizes: int) -> Iterator[Requests]:
    """Requests to a daemon of its own."""
    model, door = write_roomy_model(folder / "model"), folder / "h.sock"
    options = ("--model", f"m={model}", "--http-socket", str(door))
    with served(folder / "d", *options, watched=True) as daemon:
        requests = Requests(daemon, door, **sizes)
        with requests.client:
            yield requests


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--messages", type=int, default=MANY_MESSAGES)
    asking.add_argument("--bytes", type=int, default=MANY_BYTES)
    asking.add_argument("--stacks", type=float, default=0.03, help="of gaps of so many seconds")
    asking.add_argument("steps", nargs="*")
    given = asking.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tl-") as folder,
        asked(Path(folder), messages=given.messages, many_bytes=given.bytes) as requests,
    ):
        for step in requests.done(given.steps):
            print(step.told(), flush=True)
            for gap in step.gaps[:6]:
                if gap.seconds >= given.stacks:
                    told = f"      {gap.seconds * 1e3:.0f} ms, computed {gap.computed_s * 1e3:.0f}"
                    print(told, *gap.stack[-7:], sep="\n         ", flush=True)


if __name__ == "__main__":
    main()
