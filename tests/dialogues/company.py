"""Company changes nothing: a daemon that has served, forked, slept, been killed and woken for others answers as one
that has never served anybody.

Dialogues of the generator are led side by side against one daemon, as clients without sessions lead them: each request
has the whole history, with the answers as the daemon gave them. Some clients leave in the midst of an answer and ask
again. Others tell a history in pieces, or go on with one text side by side. Between requests sessions are put to sleep,
woken and forked, and the daemon is killed and started again. Each request is also asked of a second daemon, which is
emptied before it. What both say is compared: text, thinking, calls, the reason of the end, the tokens of the prompt and
of the answer, or the refusal. Everything is at temperature 0. Where they differ, the session's own ledger has to
explain it (`explaining.py`), or there is a fault.

The models write printable ASCII and the template's own end token alone, so that bytes that are no UTF-8 need no
explanation.

Run as a script: `python -m torpor.tests.dialogues.company --help`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import itertools
import json
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from tokenizers import pre_tokenizers
from torpor.daemon.api.conversing import ConverseRequest
from torpor.daemon.api.events import OnEvent, ProgressEvent, WorkEvent, ignore
from torpor.daemon.api.reading import GenerateResult
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.errors import InvalidTokens, TemplateUnusable
from torpor.errors import TorporError
from torpor.memvid.uri import parse_reference
from torpor.socket_api import Client, RemoteError
from torpor.socket_api.client.blocking import blocking_link, wait
from torpor.socket_api.client.link import Link
from torpor.socket_api.client.pieces import answer_in
from torpor.socket_api.errors import LocalProtocolError
from torpor.socket_api.http.turns import Turn
from torpor.socket_api.wire.asking import Call, call_of
from torpor.tests.daemon.models.template_families import FIRST_END, FLAGS, Family, write_family
from torpor.tests.dialogues.explaining import Explaining, Ledger, asked_in
from torpor.tests.dialogues.forms import ALL_FAMILIES
from torpor.tests.dialogues.generator import ALL, PLAIN, TURNS, Dialogue, Request, dialogue
from torpor.tests.dialogues.rendering import STAND_INS
from torpor.tests.model_making import write_model
from torpor.tests.socket_api.loop_gaps import Gap, gaps_in
from torpor.tests.socket_api.real_daemon import RealDaemon

MOST_TOKENS: Final = 12
"""Of an answer."""

SIDE_BY_SIDE: Final = 6
"""Dialogues that are led at a time."""

CONTEXT: Final = 32_768

_NOT_TOLD: Final = (TemplateUnusable.code, InvalidTokens.code, LocalProtocolError.code)
"""A template may refuse a piece that it takes within the whole, or show nothing of it, which leaves nothing to read. No
integer on the socket has more than 64 bits."""


@dataclass
class Report:
    """What came of it. explained: answers that are not those of a fresh daemon for what their ledgers have kept, with
    the names of these differences. wrong: every entry is a failure of the promise. gaps: of the loop, the longest
    first. told: dialogues that were told in pieces, too."""

    dialogues: int = 0
    requests: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    repeated: int = 0
    left: int = 0
    told: int = 0
    continued: int = 0
    sleeps: int = 0
    forks: int = 0
    kills: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    explained: int = 0
    differences: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)


class Answer(NamedTuple):
    """What came back. session: that answered; None if none did."""

    status: int
    body: dict[str, Any]
    session: str | None


class Daemon:
    """A daemon with HTTP on a Unix socket, which can be killed and started again."""

    def __init__(self, folder: Path, model: Path, *, watched: bool = False) -> None:
        self._folder, self._model, self._watched = folder, model, watched
        self.running = self._started()
        self.began = time.monotonic()

    @property
    def gaps(self) -> list[Gap]:
        """Those since it last answered first: a start imports for seconds."""
        return gaps_in(self.running.gaps, since=self.began)

    def _started(self) -> RealDaemon:
        door = self._folder / "h.sock"
        options = ("--model", f"m={self._model}", "--http-socket", str(door))
        return RealDaemon(self._folder, *options, watched=self._watched)

    def killed(self) -> None:
        """Kill it, and start it on the same store."""
        self.running.end(kill=True)
        self.running = self._started()
        self.began = time.monotonic()

    def client(self) -> Client:
        return Client(self.running.socket, timeout_s=120)

    def emptied(self) -> None:
        """Delete all that it knows."""
        with self.client() as client:
            for info in client.list_sessions():
                client.delete(info.session)

    @contextlib.contextmanager
    def _asked(self, path: str, body: bytes, **headers: str) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("localhost", timeout=120)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.connect(str(self._folder / "h.sock"))
            connection.request("POST", path, body, {"content-type": "application/json", **headers})
            yield connection.getresponse()

    def ask(self, body: bytes) -> Answer:
        """A chat completion."""
        with self._asked("/v1/chat/completions", body) as answer:
            return Answer(answer.status, json.loads(answer.read()), answer.getheader("x-torpor-session"))

    def leave(self, body: bytes, lines: int) -> None:
        """Ask for a chat completion, and leave behind so many lines of what comes: of progress, then of the answer."""
        streamed = json.dumps({**json.loads(body), "stream": True, "return_progress": True}).encode()
        with self._asked("/v1/chat/completions", streamed) as answer:
            for _ in range(lines):
                answer.readline()

    def go_on(self, session: str, tokens: Sequence[int]) -> dict[str, Any]:
        """A completion behind what a session holds."""
        body = {"model": "m", "prompt": list(tokens), "temperature": 0, "max_tokens": MOST_TOKENS}
        with self._asked("/v1/completions", json.dumps(body).encode(), **{"x-torpor-session": session}) as answer:
            found = json.loads(answer.read())
            if answer.status != 200:
                return {"status": answer.status, "code": found["error"]["code"]}
            return {"text": found["choices"][0]["text"], "prompt_tokens": found["usage"]["prompt_tokens"]}

    def tell(self, session: str, asked: Turn, chance: Random) -> dict[str, Any]:
        """Tell a dialogue in pieces, each up to an answer or behind one, and ask for the answer to the last message.
        Raises TorporError."""
        at, messages = 0, asked.messages
        with self.client() as client:
            client.create(session, tools=asked.tools, template_arguments=dict(asked.template_arguments))
            for end in range(1, len(messages)):
                is_beside_answer = "assistant" in (messages[end - 1]["role"], messages[end]["role"])
                if is_beside_answer and chance.random() < 0.5:
                    client.append(session, messages=messages[at:end])
                    at = end
        given = self._converse(session, messages[at:], leaves=chance.random() < 0.5)
        usage = {"prompt_tokens": given.token_count - len(given.tokens), "completion_tokens": len(given.tokens)}
        return {"text": given.text, "end": given.finish_reason, **usage}

    def _converse(self, session: str, messages: Sequence[Mapping[str, Any]], *, leaves: bool) -> GenerateResult:
        """Go on behind all that a session holds. leaves: the client leaves once its messages are read, and asks again
        if it has no answer. Raises TorporError."""
        sampling = Sampling(temperature=0.0)
        asked = ConverseRequest(session, messages, at_end=True, max_tokens=MOST_TOKENS, sampling=sampling)
        call = call_of(VERBS["converse"], asked, None)
        link = blocking_link(self.running.socket, timeout_s=120)
        try:
            return (_left_once_read(link, call) if leaves else None) or _answered(link, call, wait(link.begin(call)))
        finally:
            wait(link.close())

    def ledger_of(self, session: str) -> Ledger:
        """What a session has read and written, which is put to sleep for it."""
        with self.client() as client:
            client.sleep(session)
        return Ledger.of(self.running.store, session)

    def written_behind(self, tokens: Sequence[int]) -> list[int]:
        """What a fresh daemon answers to these tokens, with the end token: a chat keeps it, and `generate` does not."""
        self.emptied()
        with self.client() as client:
            sampling = Sampling(temperature=0.0)
            answer = client.generate("a", tokens=tokens, create=True, max_tokens=MOST_TOKENS, sampling=sampling)
            return [*answer.tokens, *([FIRST_END] if answer.finish_reason == "stop" else [])]


def _answered(link: Link, call: Call[GenerateResult], number: int, emit: OnEvent = ignore) -> GenerateResult:
    """The answer to a request by its number. Raises RemoteError."""
    while (given := answer_in(wait(link.wait_for(number)), call, emit)) is None:
        pass
    return given


def _left_once_read(link: Link, call: Call[GenerateResult]) -> GenerateResult | None:
    """Leave a request once its messages are read; None if the daemon heard it before it had the answer."""

    def leave(event: WorkEvent) -> None:
        if isinstance(event, ProgressEvent) and event.done == event.total:
            link.cancel(number)

    number = wait(link.begin(call))
    try:
        return _answered(link, call, number, leave)
    except RemoteError as error:
        if error.code != "cancelled":
            raise
        return None


def body_of(request: Request, of: Dialogue) -> bytes:
    """The body of a chat completion."""
    tools = [{"type": "function", "function": dict(tool)} for tool in of.tools]
    body = {
        "model": "m",
        "messages": [_as_sent(message) for message in request.messages],
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
        **({"tools": tools} if tools else {}),
        **({"chat_template_kwargs": dict(of.arguments)} if of.arguments else {}),
    }
    return json.dumps(body).encode("ascii")


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    sent = {"role": message["role"], "content": message["content"]}
    if "reasoning" in message:
        sent["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": _written(call)}}
            for call in calls
        ]
    if "tool_call_id" in message:
        sent["tool_call_id"] = message["tool_call_id"]
    return sent


def _written(call: Mapping[str, Any]) -> str:
    arguments = call["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def said(status: int, answer: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be the same, whoever was served before. Ids and cached tokens may differ, and the words of a refusal
    may name a session."""
    if status != 200:
        return {"status": status, "code": answer.get("error", {}).get("code")}
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    thought = message.get("reasoning_content") or message.get("reasoning")
    return {"text": message.get("content"), "thought": thought, "calls": calls, "end": choice["finish_reason"], **usage}


class _Led:
    """A dialogue as a client leads it: the answers in its history are those that it was given."""

    def __init__(self, of: Dialogue) -> None:
        self.of = of
        self._answers: dict[int, dict[str, Any]] = {}
        self._left = of.requests(self._answers)

    def next(self) -> Request | None:
        """The next request; None behind the last."""
        return next(self._left, None)

    def take(self, request: Request, answer: Mapping[str, Any]) -> None:
        """Put the words of an answer into the history; a message with calls stays, for results follow it."""
        at = len(request.messages)
        if request.kind != "turn" or at >= len(self.of.messages) or self.of.messages[at].get("tool_calls"):
            return
        message = answer["choices"][0]["message"]
        thought = message.get("reasoning_content")
        self._answers[at] = {
            "role": "assistant",
            "content": message.get("content") or "",
            **({"reasoning": thought} if thought else {}),
        }


class Sweep:
    """Leads dialogues against the daemon in company, and asks each request of the one that is alone."""

    def __init__(
        self, folder: Path, family: Family, flags: Any, seed: int, *, kill_share: float, turns: Sequence[int]
    ) -> None:
        model = write_family(folder / "model", family, _wide, flags=flags)
        self._explaining = functools.cache(lambda: Explaining(model, family))
        self._chance, self._kill_share = Random(f"company {seed}"), kill_share
        self._company = Daemon(folder / "company", model, watched=True)
        self._alone = Daemon(folder / "alone", model)
        self.report, self._turns = Report(), turns
        self._known: dict[bytes, dict[str, Any]] = {}  # by the body
        self._where = {"family": family.name, "flags": flags, "seed": seed}
        self._pool = ThreadPoolExecutor(3)

    def close(self) -> None:
        self.report.gaps += self._company.gaps
        self.report.gaps.sort(key=lambda gap: -gap.seconds)
        self._pool.shutdown()
        for daemon in (self._company, self._alone):
            daemon.running.end()

    def lead(self, seeds: Sequence[int]) -> None:
        """Lead these dialogues, some at a time."""
        waiting = iter(seeds)
        led = [_Led(self._made(seed)) for seed in itertools.islice(waiting, SIDE_BY_SIDE)]
        while led:
            chosen = self._chance.sample(led, min(len(led), self._chance.choice((1, 1, 1, 2, 3))))
            asked = [(one, request) for one in chosen if (request := one.next()) is not None]
            for one in chosen:
                if one not in [each for each, _ in asked]:
                    led.remove(one)
                    self.report.dialogues += 1
                    led += [_Led(self._made(seed)) for seed in itertools.islice(waiting, 1)]
            bodies = [body_of(request, one.of) for one, request in asked]
            for body in bodies:
                if self._chance.random() < 0.15:
                    self._company.leave(body, self._chance.choice((1, 1, 3, 5, 9)))
                    self.report.left += 1
            answers = list(self._pool.map(self._company.ask, bodies))
            for (one, request), answer in zip(asked, answers, strict=True):
                self._compare(one, request, answer)
                if answer.status == 200 and self._chance.random() < 0.15:
                    self._tell(one, request)
            if self._chance.random() < 0.15:
                self._go_on()
            self._disturb()

    def _made(self, seed: int) -> Dialogue:
        """Every fourth may have in it what no client should send."""
        return dialogue(seed, PLAIN if seed % 4 else ALL, turns=self._turns)

    def _compare(self, one: _Led, request: Request, given: Answer) -> None:
        report, body, (status, answer, session) = self.report, body_of(request, one.of), given
        report.requests += 1
        if body not in self._known:
            self._alone.emptied()
            self._known[body] = said(*self._alone.ask(body)[:2])
        else:
            report.repeated += 1
        found, expected = said(status, answer), self._known[body]
        self._require(one.of.seed, request.kind, body, found, expected, session)
        if status != 200:
            code = str(found["code"])
            report.refused[code] = report.refused.get(code, 0) + 1
            return
        report.prompt_tokens += answer["usage"]["prompt_tokens"]
        report.cached_tokens += answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
        one.take(request, answer)

    def _tell(self, one: _Led, request: Request) -> None:
        """Another client tells the same dialogue in pieces."""
        body = body_of(request, one.of)
        asked = asked_in(body)
        session = str(parse_reference(f"told-{self.report.requests}"))
        try:
            found = self._company.tell(session, asked, self._chance)
        except TorporError as error:
            if error.code in _NOT_TOLD:
                return
            found = {"code": error.code}
        self.report.told += 1
        expected = {name: self._known[body].get(name) for name in found}
        expected["text"] = expected.get("text") or ""
        self._require(one.of.seed, "told in pieces", body, found, expected, session)

    def _go_on(self) -> None:
        """Two clients go on with one text at once: one behind the other."""
        session = f"text-{self.report.continued}"
        self.report.continued += 1
        given = [self._chance.choices(range(256), k=self._chance.randint(20, 60)) for _ in range(2)]
        found = list(self._pool.map(lambda tokens: self._company.go_on(session, tokens), given))
        expected = []
        for first, second in ((0, 1), (1, 0)):
            self._alone.emptied()
            of = {at: self._alone.go_on("a", given[at]) for at in (first, second)}
            expected.append([of[0], of[1]])
        if found not in expected:
            self.report.wrong.append({**self._where, "found": found, "expected": expected, "given": given})

    def _require(
        self,
        dialogue: int,
        kind: str,
        body: bytes,
        found: Mapping[str, Any],
        expected: Mapping[str, Any],
        session: str | None,
    ) -> None:
        """Note an answer that is not that of a fresh daemon, and that its session's ledger does not explain."""
        if found != expected and (fault := self._unexplained(body, found, session)):
            where = {**self._where, "dialogue": dialogue, "kind": kind, "kills": self.report.kills}
            told = {"found": found, "expected": expected, "fault": fault, "body": json.loads(body)}
            self.report.wrong.append({**where, **told})

    def _unexplained(self, body: bytes, found: Mapping[str, Any], session: str | None) -> str:
        """What is wrong with an answer that is not that of a fresh daemon; empty if its ledger explains it."""
        if session is None or "prompt_tokens" not in found:
            return "one of them refuses"
        ledger, explaining = self._company.ledger_of(session), self._explaining()
        written = found["completion_tokens"]
        before = ledger.tokens[: len(ledger.tokens) - written]
        if len(before) != found["prompt_tokens"]:
            return f"the ledger has {len(before)} tokens before the answer"
        if (alone := self._alone.written_behind(before)) != (has := ledger.tokens[len(before) :]):
            return f"a fresh daemon writes {alone} behind the same tokens, and not {has}"
        told = explaining.told(ledger, body, written)
        if (told["content"], told.get("reasoning")) != (
            found["text"] or "",
            found.get("thought", told.get("reasoning")),
        ):
            return f"its tokens say {told}"
        explained = explaining.ledger_of(ledger, body, written)
        self.report.differences += explained.names
        self.report.explained += not explained.fault
        return explained.fault

    def _disturb(self) -> None:
        """What other clients, people and accidents do meanwhile."""
        drawn = self._chance.random()
        if drawn < self._kill_share:
            self.report.gaps += self._company.gaps
            self._company.killed()
            self.report.kills += 1
            return
        with self._company.client() as client:
            sessions = client.list_sessions()
            if not sessions or drawn > 0.4:
                return
            chosen = self._chance.choice(sessions).session
            with contextlib.suppress(TorporError):  # it may be empty, or unread
                if drawn < 0.25:
                    client.sleep(chosen)
                    self.report.sleeps += 1
                elif drawn < 0.3:
                    client.fork(chosen, name=f"fork-{self.report.forks}")
                    self.report.forks += 1
                else:
                    client.wake(chosen)


def _wide(folder: Path, **changes: Any) -> Path:
    """A model with a long context, whose answers are printable ASCII and the template's end."""
    import mlx.core as mx

    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    write_model(folder, **changes, **small, max_position_embeddings=CONTEXT, tie_word_embeddings=False)
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    head = weights["lm_head.weight"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())  # one token each, in this order
    plain = {chr(code) for code in range(ord("!"), ord("~"))} - {*STAND_INS.values()}
    written = {index for index, symbol in enumerate(symbols) if symbol in plain} | {FIRST_END}
    shown = mx.array([[float(row in written)] for row in range(head.shape[0])])
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**weights, "lm_head.weight": head * shown}, {"format": "mlx"}
    )
    return folder


def swept(
    family: Family, flags: Any, seeds: Sequence[int], *, kill_share: float = 0.03, turns: Sequence[int] = TURNS
) -> Report:
    """The dialogues of these numbers with one family's template and tokenizer. turns: how many questions a dialogue
    may have before the last."""
    with tempfile.TemporaryDirectory(prefix="torpor-company-") as folder:
        sweep = Sweep(Path(folder), family, flags, seeds[0], kill_share=kill_share, turns=turns)
        try:
            sweep.lead(seeds)
        finally:
            sweep.close()
        return sweep.report


def kinds() -> Iterator[tuple[Family, Any]]:
    """Each family with each kind of tokenizer."""
    return itertools.product(ALL_FAMILIES, FLAGS)


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asking.add_argument("--dialogues", type=int, default=25, help="of each family and kind of tokenizer")
    asking.add_argument("--first", type=int, default=0, help="the number of the first")
    asking.add_argument("--only", help="this family alone")
    asking.add_argument("--flags", choices=FLAGS, help="this kind of tokenizer alone")
    asking.add_argument("--turns", type=int, nargs="+", default=TURNS, help="how many questions a dialogue may have")
    asking.add_argument(
        "--kills", type=float, default=0.03, help="the share of steps behind which the daemon is killed"
    )
    given = asking.parse_args()
    for family, flags in kinds():
        if given.only in (None, family.name) and given.flags in (None, flags):
            seeds = range(given.first, given.first + given.dialogues)
            report = swept(family, flags, seeds, kill_share=given.kills, turns=given.turns)
            told = {**vars(report), "gaps": [asdict(gap) for gap in report.gaps[:3]], "wrong": len(report.wrong)}
            print(json.dumps({"family": family.name, "flags": flags, **told}), flush=True)
            for one in report.wrong[:5]:
                print(json.dumps(one), flush=True)


if __name__ == "__main__":
    main()
