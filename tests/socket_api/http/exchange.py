"""Exchanges over HTTP as text: what a client sends, what the service answers, and what the client is told.

    == what the case proves
    -- asks "/v1/chat/completions" {"messages": [{"role": "user", "content": "hello"}]}
    -- tells reasoning "so"
    -- ends {"text": "hi", "reasoning": "so"}
    POST {"stream": true}
    ~ {"choices": [{"delta": {"role": "assistant"}}]}
    ~ ...
    ~ [DONE]

`-- ` says what is asked, and what the service does, by SCRIPT. `POST {...}` sends the request of `asks` with these
fields; with a path it is a request of its own, as are those of other methods. `@ name: value` before it is a header.
What stands below is asked of the answer:

    [400]             the status, 200 where none stands       < name: value     a header; no value: it is not there
    {...}             the body has at least this              ~ {...}           so has the next event; ~ ... passes any
    no text           the body has not this text              -> verb {...}     the service was asked this last: these
    ! field           the error names this field                                facts are exactly so, null is not given
    -> no verb        it was not asked this

`text_cases.py` has what else such a file may say.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter
from torpor.daemon import errors
from torpor.daemon.api.conversing import MeasureResult
from torpor.daemon.api.dialogue import ToolCall
from torpor.daemon.api.events import ProgressEvent, SessionEvent, TokenEvent, WorkEvent
from torpor.daemon.api.recalling import RecallRequest, RecallResult
from torpor.tests.socket_api.http.answers import asked_for, likelihoods, measures, says
from torpor.tests.socket_api.http.http_rig import Answer, HttpThread
from torpor.tests.text_cases import Case, at_line, has_at_least

FOLDER: Final = Path(__file__).parent / "exchanges"


@dataclass
class Script:
    """What the service does in a case: the events that it tells, and how the answer ends."""

    server: HttpThread
    path: str = ""
    hello: dict[str, Any] = field(default_factory=dict)
    events: list[WorkEvent] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    recalled: RecallResult = field(default_factory=lambda: RecallResult("", "fake", ()))

    told: Told | None = None

    def shown(self) -> Answer | None:
        return self.told.answer if self.told else None

    def follow(self) -> None:
        if self.events or self.facts:
            says(self.server, *self.events, **self.facts)


def _ask(script: Script, path: str, hello: dict[str, Any]) -> None:
    script.path, script.hello = path, hello


def _tell(script: Script, channel: str, said: Any) -> None:
    call = TypeAdapter(ToolCall).validate_python(said) if isinstance(said, dict) else None
    text = "" if call is not None else said
    script.events.append(TokenEvent(None if call else len(script.events) + 1, text, channel, call))  # type: ignore[arg-type]


def _end(script: Script, facts: dict[str, Any]) -> None:
    calls = facts.get("tool_calls", [])
    script.facts = {**facts, "tool_calls": tuple(TypeAdapter(list[ToolCall]).validate_python(calls))}


def _recall(script: Script, told: dict[str, Any]) -> None:
    script.recalled = TypeAdapter(RecallResult).validate_json(json.dumps(told))

    async def recall(request: RecallRequest) -> RecallResult:
        ids = {message.answer_id for message in script.recalled.messages}
        if request.answer_id is not None and request.answer_id not in ids:
            raise errors.AnswerNotFound("There is none.", answer_id=request.answer_id)
        return script.recalled

    script.server.service.answers[RecallRequest] = recall


def _doubt(script: Script, roles: list[str]) -> None:
    told = script.recalled
    messages = tuple(dataclasses.replace(each, certain=each.role not in roles) for each in told.messages)
    script.recalled = dataclasses.replace(told, messages=messages)


SCRIPT: Final[dict[str, Callable[..., object]]] = {
    "asks": _ask,
    "tells reasoning": lambda script, text: _tell(script, "reasoning", text),
    "tells text": lambda script, text: _tell(script, "text", text),
    "tells call": lambda script, call: _tell(script, "call", call),
    "reads": lambda script, done: script.events.append(ProgressEvent("prefill", done, 100)),
    "names": lambda script, told: script.events.append(SessionEvent(**told)),
    "tells likelihoods": lambda script, _: script.events.extend(likelihoods()),
    "ends": _end,
    "measures": lambda script, told: measures(script.server, MeasureResult(**told)),
    "measuring fails with": lambda script, name: measures(script.server, getattr(errors, name)("So it is.", model="x")),
    "recalls": _recall,
    "doubts": _doubt,
}
"""What a line `-- ` does; JSON goes on with it."""


def play(case: Case, server: HttpThread) -> None:
    """Do what a case says, line by line. Raises AssertionError, with file and line, where something else was told."""
    script, headers = Script(server), {}
    for number, line in [*case.lines, (case.lines[-1][0], "--")]:
        mark, _, text = line.partition(" ")
        with at_line(case, number, line, script.shown):
            if script.told is not None and mark in ("--", "@", "POST", "GET", "DELETE"):
                script.told.end()
                script.told, headers = None, {}
            if mark == "@":
                name, _, value = text.partition(": ")
                headers[name.replace("-", "_")] = value
            elif mark in ("POST", "GET", "DELETE"):
                script.follow()
                script.told = Told(server, _asked(script, mark, text, headers))
            elif text and mark == "--":
                begin = next(each for each in SCRIPT if f"{text} ".startswith(f"{each} "))
                SCRIPT[begin](script, *_values(text.removeprefix(begin)))
            elif script.told is not None:
                script.told.compare(mark, text, line)


def _values(text: str) -> Iterator[Any]:
    """The JSON values that stand one behind the other; null where there is none."""
    rest = text.strip() or "null"
    while rest:
        value, end = json.JSONDecoder().raw_decode(rest)
        yield value
        rest = rest[end:].strip()


def _asked(script: Script, method: str, text: str, headers: dict[str, str]) -> Answer:
    if text.startswith("/"):
        path, _, body = text.partition(" ")
        return script.server.ask(method, path, json.loads(body) if body else None, **headers)
    more = json.loads(text) if text else {}
    return script.server.ask(method, script.path, {**script.hello, **more}, **headers)


@dataclass
class Told:
    """An answer, and how much of it was compared."""

    server: HttpThread
    answer: Answer
    status: int = 200
    events: list[Any] | None = None
    passes_any: bool = False

    def compare(self, mark: str, text: str, line: str) -> None:
        match mark:
            case "<":
                name, _, value = text.partition(":")
                assert self.answer.headers.get(name, "") == value.strip(), self.answer.headers
            case "!":
                error = self.answer.json["error"]
                assert (error.get("param") or error["message"]).startswith(text), error
            case "no":
                assert text not in self.answer.body.decode()
            case "~":
                self._compare_event(text)
            case "->" if text.startswith("no "):
                assert not asked_for(self.server, text.removeprefix("no ")), "it was asked"
            case "->":
                self._compare_call(*text.split(" ", 1))
            case _ if line.startswith("["):
                self.status = int(line[1:-1])
            case _:
                has_at_least(self.answer.json, json.loads(line))

    def _compare_event(self, wanted: str) -> None:
        if self.events is None:
            parts = self.answer.body.decode().removesuffix("\n\n").split("\n\n")
            lines = [part.rpartition("data: ")[2] for part in parts]
            self.events = [each if each == "[DONE]" else json.loads(each) for each in lines]
            assert len({each["id"] for each in self.events if "id" in each}) <= 1, "the events have several ids"
        if wanted == "...":
            self.passes_any = True
            return
        expected = wanted if wanted == "[DONE]" else json.loads(wanted)
        while self.passes_any and not _has(self.events[0] if self.events else None, expected):
            assert self.events, "no event has it"
            self.events.pop(0)
        assert self.events, "no event is left"
        has_at_least(self.events.pop(0), expected)
        self.passes_any = False

    def _compare_call(self, verb: str, facts: str) -> None:
        asked = asked_for(self.server, verb)
        assert asked, f"{verb} was not asked"
        given = json.loads(json.dumps(asked[-1], default=dataclasses.asdict))
        wanted = json.loads(facts)
        found = {name: given.get(name) for name in wanted}
        assert found == wanted, f"it was asked {found}"

    def end(self) -> None:
        """Compare what can be compared only once all lines below a request are read."""
        assert self.answer.status == self.status, f"the request before was answered with {self.answer.status}"
        assert self.passes_any or not self.events, f"not all events are told: {self.events}"


def _has(value: Any, wanted: Any) -> bool:
    try:
        has_at_least(value, wanted)
    except AssertionError:
        return False
    return True
