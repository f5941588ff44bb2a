"""Dialogues as agents lead them, made from a number: roles, tools, parallel calls, results, thinking, edits, retries,
in texts that quote what they should not.

Which turns follow each other, and what tools look like, is taken from the recorded requests of real clients. Texts are
worse than theirs: marks of every model, code with its indentation, every Unicode plane, blanks at the ends, large
numbers. All values are plain, and follow from the number alone. `Reach` says what may be in them beside text.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType
from typing import Any, Final, Literal

MARKS: Final = (
    *("<think>", "</think>", "<|channel>thought", "<channel|>", "<longcat_think>", "</longcat_think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|tool_call>", "<tool_call|>"),
    *("<function=run>", "</function>", "<parameter=path>", "</parameter>", "\n</parameter>\n", '<function name="run">'),
    *('<param name="path">', "</param>", '<invoke name="run">', "</invoke>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<longcat_arg_value>"),
    *("</longcat_arg_value>", "</longcat_tool_call>", "<atem:invoke>", "</atem:invoke>", "</atem:parameter>"),
    *("</atem:function_calls>", "<escape>", "<start_function_call>", "<end_function_call>", '<|"|>', "<![CDATA["),
    *("]]>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_calls_section_end|>", "<|open|>", "<|close|>"),
    *("<|close|>json<|sep|>", "<|close|>call<|sep|>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<｜User｜>", "<｜end▁of▁sentence｜>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "</s>"),
    *("<|end_of_text|>", "<|start_of_role|>", "<system>", "</system>"),
)
"""Control tokens and marks of the models that mlx-lm reads, which any text may quote."""

_OFTEN: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>", "</parameter>", "</arg_value>", "<|im_end|>")
_WORDS: Final = (
    "open",
    "read",
    "write",
    "the",
    "file",
    "of",
    "line",
    "name",
    "a",
    "list",
    "is",
    "Straße",
    "naïve",
    "if",
)
_CODE: Final = (
    "def f(x):\n    if x:\n        return {'a': [1, 2]}\n\n    return None\n",
    "    indented\n\tby a tab\n      by six  \n",
    'for (;;) { s += "\\"" + \'\\n\'; }  // }}\n',
    '{"name": "run", "arguments": {"path": "a"}}',
    "{% for m in messages %}{{ m }}{% endfor %}",
    "```python\nprint('</x>')\n```",
    '<a href="?x=1&amp;y=2">it\'s</a>\r\n',
    "null",
    "true",
    "5",
    "[1, 2]",
    "a,b=c:d;e|f",
    "\\u003c \\ud83d \\x00 \\",
)
_BLANKS: Final = (" ", "\n", "\n\n", "  ", "\t", "    ", "\n\n\n", "\r\n")
_ODD: Final = ("\0", "\x1b[0m", "\u0085", "\u2028", "\u2029", "\ufeff", "\ufffd", "e\u0301", "\u200d", "\u202e", "\x7f")
_NOT_CHARACTERS: Final = range(0xD800, 0xE000)

NUMBERS: Final[tuple[int | float, ...]] = (
    *(0, 1, -1, 7, 2**31, 2**53 - 1, 2**53, 2**53 + 1, 10**15, 10**15 + 1, 175928847299117063, 2**63 - 1, -(2**63)),
    *(2**64 - 1, 0.5, -0.25, 1e-7, 1.5e300, 0.1, 123456.789, 1e21),
)
BEYOND: Final = (2**64, 10**30, -(10**25))
"""Integers that no 64 bits hold."""


@dataclass(frozen=True)
class Reach:
    """What a dialogue may have in it. halves: half surrogate pairs. beyond: integers beyond 64 bits. nulls: contents
    that are None, and broken: arguments that are no JSON object, as clients send both. neighbours: two messages of one
    role, and system texts in the midst."""

    halves: bool = False
    beyond: bool = False
    nulls: bool = False
    broken: bool = False
    neighbours: bool = True


PLAIN: Final = Reach()
ALL: Final = Reach(halves=True, beyond=True, nulls=True, broken=True)


@dataclass(frozen=True)
class Request:
    """One request of a dialogue: the whole of its messages, with the answers as the client has them. kind: why it is
    sent. A message is a map of role and content, with an assistant's reasoning and tool_calls (name, arguments, id) and
    a tool's tool_call_id."""

    messages: tuple[dict[str, Any], ...]
    kind: Literal["turn", "retry", "edit", "again"]


@dataclass(frozen=True)
class Dialogue:
    """A dialogue. messages: from the first to a last one that waits for an answer. tools: maps of name, description and
    parameters. arguments: of the template."""

    seed: int
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def requests(self, given: Mapping[int, dict[str, Any]] = MappingProxyType({})) -> Iterator[Request]:
        """The requests that lead it: one for each of its turns, and among them retries, edits of an earlier message,
        and requests that ask for an answer again. Each is a whole history. given: the answers that a client was given
        meanwhile, by their places: they stand in its history instead."""
        chance = Random(f"requests {self.seed}")
        for end in self.ends:
            history = tuple(given.get(at, message) for at, message in enumerate(self.messages[:end]))
            yield Request(history, "turn")
            drawn = chance.random()
            if drawn < 0.1:
                yield Request(history, "retry")
            elif drawn < 0.25 and end > 2:
                yield Request(edited(history, chance), "edit")
            elif drawn < 0.3 and len(earlier := [each for each in self.ends if each < end]):
                yield Request(history[: chance.choice(earlier)], "again")

    @property
    def ends(self) -> tuple[int, ...]:
        """How many messages stand before each answer, and before the last, which is open."""
        answers = [at for at, each in enumerate(self.messages) if each["role"] == "assistant"]
        return (*answers, len(self.messages))


TURNS: Final = (1, 1, 2, 2, 3, 4)


def dialogue(seed: int, reach: Reach = PLAIN, *, turns: Sequence[int] = TURNS) -> Dialogue:
    """The dialogue of a number. turns: how many questions it may have before the last."""
    return _Maker(seed, reach).made(turns)


def text(chance: Random, reach: Reach = PLAIN, *, most: int = 6) -> str:
    """A text of up to so many pieces, in which anything may stand."""
    return "".join(_piece(chance, reach) for _ in range(chance.randint(0, most)))


def edited(messages: Sequence[dict[str, Any]], chance: Random) -> tuple[dict[str, Any], ...]:
    """A history in which a client changed an earlier message: it shortened a result, a person wrote anew, or, mostly,
    the words of an answer to a person are others."""
    answers = [at for at, each in enumerate(messages) if each["role"] == "assistant" and not each.get("tool_calls")]
    at = chance.choice(answers) if answers and chance.random() < 0.5 else chance.randrange(len(messages))
    content = "[removed to save room]"
    if messages[at]["role"] == "assistant":
        was = messages[at]["content"] or ""
        content = chance.choice((f"Other words. {was}", f"Other words.</think>{was}", f"{was}</think>Other words."))
    return (*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :])


def value(chance: Random, schema: Mapping[str, Any], reach: Reach = PLAIN) -> Any:
    """A value that a schema of `tool` allows."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return chance.choice(schema["enum"])
    if options := schema.get("anyOf"):
        return value(chance, chance.choice(options), reach)
    kind = schema.get("type", "string")
    return _VALUES[chance.choice(kind) if isinstance(kind, list) else kind](chance, schema, reach)


def tool(chance: Random, name: str) -> dict[str, Any]:
    """An offered tool."""
    keys = chance.sample(_KEYS, chance.randint(0, 4))
    properties = {key: copy.deepcopy(chance.choice(_SCHEMAS)) for key in keys}
    required = [key for key in keys if chance.random() < 0.7]
    about = text(chance, most=2) if chance.random() < 0.2 else f"Does {name}."
    return {
        "name": name,
        "description": about,
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


_KEYS: Final = ("path", "content", "count", "flag", "old_string", "items", "unit", "query")
_NAMES: Final = ("run", "read_file", "edit", "search", "todo_write")
_SCHEMAS: Final[tuple[dict[str, Any], ...]] = (
    *({"type": "string"},) * 4,
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "string", "enum": ["low", "high", "null", "5"]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "object", "properties": {"old": {"type": "string"}}, "required": ["old"]}},
    {"type": "object", "properties": {"on": {"type": "boolean"}, "of": {"type": "string"}}},
)


def _number(chance: Random, reach: Reach) -> int | float:
    return chance.choice((*NUMBERS, *BEYOND) if reach.beyond else NUMBERS)


def _whole(chance: Random, _: Mapping[str, Any], reach: Reach) -> int:
    return next(each for each in iter(lambda: _number(chance, reach), None) if isinstance(each, int))


def _object(chance: Random, schema: Mapping[str, Any], reach: Reach) -> dict[str, Any]:
    required = schema.get("required", ())
    properties = schema.get("properties", {})
    return {
        key: value(chance, each, reach) for key, each in properties.items() if key in required or chance.random() < 0.5
    }


_VALUES: Final[Mapping[str, Callable[[Random, Mapping[str, Any], Reach], Any]]] = {
    "string": lambda chance, _, reach: text(chance, reach, most=4),
    "integer": _whole,
    "number": lambda chance, _, reach: _number(chance, reach),
    "boolean": lambda chance, *_: chance.random() < 0.5,
    "null": lambda *_: None,
    "array": lambda chance, schema, reach: [value(chance, schema["items"], reach) for _ in range(chance.randint(0, 2))],
    "object": _object,
}


def _piece(chance: Random, reach: Reach) -> str:
    drawn = chance.random()
    if drawn < 0.5:
        return " ".join(chance.choices(_WORDS, k=chance.randint(1, 5))) + chance.choice((" ", ". ", ""))
    if drawn < 0.65:
        mark = chance.choice(MARKS if chance.random() < 0.7 else _OFTEN)
        return mark if chance.random() < 0.85 else mark[: chance.randrange(1, len(mark) + 1)]
    if drawn < 0.77:
        return chance.choice(_CODE)
    if drawn < 0.87:
        return chance.choice(_BLANKS)
    if drawn < 0.95:
        return _character(chance, chance.randrange(17))
    if reach.halves and drawn < 0.97:
        return chr(chance.choice(_NOT_CHARACTERS))
    return chance.choice(_ODD)


def _character(chance: Random, plane: int) -> str:
    found = chance.randrange(plane << 16, (plane + 1) << 16)
    return "\u00e9" if found in _NOT_CHARACTERS else chr(found)


class _Maker:
    def __init__(self, seed: int, reach: Reach) -> None:
        self._chance, self._reach, self._seed = Random(f"dialogue {seed}"), reach, seed
        self._messages: list[dict[str, Any]] = []
        self._calls = 0
        names = self._chance.sample(_NAMES, self._chance.choice((0, 0, 1, 2, 3)))
        self._tools = tuple(tool(self._chance, name) for name in names)

    def made(self, turns: Sequence[int]) -> Dialogue:
        chance = self._chance
        if chance.random() < 0.5:
            self._say("system", self._text() or "Be brief.")
        for _ in range(chance.choice(turns)):
            self._turn()
        self._ask()
        arguments = {"enable_thinking": chance.random() < 0.5} if chance.random() < 0.15 else {}
        return Dialogue(self._seed, tuple(self._messages), self._tools, arguments)

    def _turn(self) -> None:
        """A question to its answer, with calls and results between them."""
        chance = self._chance
        self._ask()
        while self._tools and chance.random() < 0.6:
            calls = [self._call() for _ in range(chance.choice((1, 1, 1, 2, 3)))]
            self._say("assistant", self._said(0.5), tool_calls=calls)
            for call in calls:
                self._say("tool", self._text(), tool_call_id=call["id"])
            if self._reach.neighbours and chance.random() < 0.1:
                self._say("user", self._text() or "and?")  # a client's remark behind the results
        self._say("assistant", self._said(0.05))

    def _ask(self) -> None:
        self._say("user", self._text() or "Go on.")
        if not self._reach.neighbours:
            return
        if self._chance.random() < 0.08:
            self._say("user", self._text() or "And this.")
        if self._chance.random() < 0.08:
            self._say("system", self._text() or "# Environment")  # as Claude Code tells its environment

    def _said(self, empty: float) -> str | None:
        """An answer's words."""
        if self._chance.random() < empty:
            return None if self._reach.nulls and self._chance.random() < 0.5 else ""
        return self._text()

    def _say(self, role: str, content: str | None, **more: Any) -> None:
        message = {"role": role, "content": content, **more}
        if role == "assistant" and self._chance.random() < 0.4:
            message["reasoning"] = self._text() or "Hm."
        self._messages.append(message)

    def _text(self) -> str:
        return text(self._chance, self._reach)

    def _call(self) -> dict[str, Any]:
        offered = self._chance.choice(self._tools)
        self._calls += 1
        arguments: Any = value(self._chance, offered["parameters"], self._reach)
        if self._reach.broken and self._chance.random() < 0.05:
            arguments = self._chance.choice(('{"path": "a', "", "[1]", "null", json.dumps(json.dumps({"path": "a"}))))
        return {"name": offered["name"], "arguments": arguments, "id": f"call{self._seed % 1000:03}{self._calls:02}"}
