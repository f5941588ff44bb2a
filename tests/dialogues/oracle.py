"""The ledger is the transcript: what a session holds of a dialogue, compared with mlx-lm's own rendering of all of it.

A dialogue is led turn by turn as a daemon leads it, by the code that it has for that, without computing: answers are
what the model would have written by its template, token by token. Its client sends back what it was shown. Behind each
read the ledger is compared with the tokens of mlx-lm's rendering of the whole transcript. Where they differ, one of
`DIFFERENCES` explains it, and is counted, or there is a fault. What was written is compared with what was shown.

Tokenizers here have a token for each byte, and their control tokens. So two renderings are alike token by token if
their texts are, and a control token that a text only quotes stands out.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from torpor.daemon.chat.conversing import Conversing
from torpor.daemon.chat.prompt_io import Known, UnderWay
from torpor.daemon.engine.channels import Shown
from torpor.daemon.engine.generation import WriteOrder, Written
from torpor.daemon.errors import TemplateUnusable
from torpor.daemon.models.chat_template import Root, rules_of
from torpor.daemon.models.models import LoadedModel
from torpor.daemon.models.turn_rules import as_taken
from torpor.daemon.sessions.encoding import Encoder
from torpor.daemon.sessions.sessions import Session
from torpor.daemon.sessions.transcripts import TextMap
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.calls import is_clear, is_meant
from torpor.tests.dialogues.generator import Dialogue

Message = Mapping[str, Any]
Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Any]], Any]

DIFFERENCES: Final[Mapping[str, str]] = {
    "quoted names": "The name of a control token in a text is the text's bytes, and not that token.",
    "tools as texts": "Tools that a template does not show stand in the system's text, calls and results in texts.",
    "taken otherwise": "Messages that a template refuses stand in a form that it takes.",
    "thinking": "An answer's thinking stays where it was written; a template drops it, or writes an empty one.",
    "blanks": "Blanks around an answer's words stay as they were written; a template strips them, or sets its own.",
    "another end": "An answer's end token is the one that was written; a template sets its own.",
    "quoted thinking": "An answer's words in front of a `</think>` that it quotes stay; some templates drop them.",
    "spelled anew": "Calls and words beside them stand as they were written; a template spells and orders them anew.",
    "cut off": "A call that the limit of tokens cut off stays in the ledger, and no client is shown it.",
}
"""What may differ between a ledger and mlx-lm's rendering of its transcript."""

_STAND_INS: Final = {"<": "~", "[": "^"}
"""For the first character of a quoted name: no dialogue and no template has them."""


class NotToBeTried(Exception):
    """A dialogue has a stand-in in it, or the template refuses it as mlx-lm's does."""


@dataclass
class Findings:
    """What a sweep has seen. differences: how often each was. seen: other counts. faults: sentences."""

    differences: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class InlineEncoder(Encoder):
    """Does its work where it is called, for nothing else wants the loop."""

    async def aside(self, work: Callable[[], Result]) -> Result:
        return work()


class Rendering:
    """mlx-lm's own rendering of dialogues by one model, with quoted names as their bytes."""

    def __init__(self, model: LoadedModel, family: Family) -> None:
        self.model, self.family, self._rules = model, family, rules_of(model.tokenizer)
        self._names = re.compile("|".join(map(re.escape, sorted(family.controls, key=len, reverse=True))))
        vocabulary = model.tokenizer.get_vocab()
        self._back = {vocabulary[stand_in]: vocabulary[first] for first, stand_in in _STAND_INS.items()}
        self.controls = {vocabulary[name]: name for name in family.controls}
        self._bytes = {vocabulary[symbol]: chr(byte) for byte, symbol in _byte_symbols().items()}

    def tokens(
        self, messages: Sequence[Message], root: Root, *, prompt: bool = True, seen: Counter[str] | None = None
    ) -> list[int]:
        """The tokens of a whole dialogue. seen: counts what had to be done for it."""
        seen = Counter() if seen is None else seen
        told, tools = as_taken(messages, root.tools, self._rules)
        if tools != root.tools:
            seen["tools as texts"] += 1
        elif told != list(messages):
            seen["taken otherwise"] += 1
        return self._tokens(told, Root(tools, root.arguments), prompt, seen)

    def _tokens(self, messages: Sequence[Message], root: Root, prompt: bool, seen: Counter[str]) -> list[int]:
        plain = [self._neutral(_as_mlx_lm_takes(each), each["role"]) for each in messages]
        tools = [{"type": "function", "function": dict(tool)} for tool in root.tools]
        given = {"tools": self._neutral(tools)} if tools else {}
        ids = self.model.tokenizer.apply_chat_template(
            plain, tokenize=True, add_generation_prompt=prompt, **given, **root.arguments
        )
        seen["quoted names"] += any(token in self._back for token in ids)
        return [self._back.get(token, token) for token in ids]

    def _neutral(self, value: Any, role: str = "") -> Any:
        """A value without names of control tokens, but for the tags around the thinking that an assistant's text begins
        with: a template finds it by them."""
        if isinstance(value, str):
            return self._names.sub(lambda found: _STAND_INS[found[0][0]] + found[0][1:], value)
        if isinstance(value, dict):
            if role == "assistant" and isinstance(value.get("content"), str):
                opens, thought = re.fullmatch(r"(\s*<think>)?(.*)", value["content"], re.DOTALL).groups("")
                thought, closes, words = thought.partition("</think>" if opens else "\0")
                plain = [self._without_tags(self._neutral(each)) for each in (thought, words)]
                content = f"{opens}{plain[0]}{closes}{plain[1]}"
                return {**self._neutral({**value, "content": ""}), "content": content}
            return {self._neutral(key): self._neutral(item) for key, item in value.items()}
        return [self._neutral(item) for item in value] if isinstance(value, list | tuple) else value

    def quoted(self, text: str) -> list[int]:
        """The tokens of a text that a model writes: names of control tokens as bytes."""
        ids = self.model.tokenizer.encode(self._neutral(text), add_special_tokens=False)
        return [self._back.get(token, token) for token in ids]

    def text(self, tokens: Iterable[int]) -> str:
        """The text of tokens, a character for each byte, and control tokens by their names."""
        return "".join(self.controls.get(token) or self._bytes.get(token, "\n\n") for token in tokens)

    # --- what a model would write

    def answer(
        self, history: Sequence[Message], message: Message, root: Root, *, is_open: bool
    ) -> tuple[int, list[int]]:
        """How many tokens open an answer's turn, and those with which a model says a message, its end token with them.
        is_open: whether its thinking has begun. Raises TemplateUnusable."""
        marks, thought = self.model.marks.reasoning, message.get("reasoning", "")
        before = self.tokens(history, root)
        quoting = {**message, "content": self._without_tags(message["content"])}
        opening, shown = self._behind(before, [*history, quoting], root)
        if marks and marks[1] in self.text(before[-8:]):  # what closes it there is left out of an earlier turn
            opening = len(before) - _alike(before, self.tokens(history, root, prompt=False))
        if marks and thought and not self.text(shown).lstrip().startswith(marks[0]):
            opened = [] if is_open else self.model.encode(f"{marks[0]}\n", opening=False)
            closed = self.model.encode(f"\n{marks[1]}\n\n", opening=False)
            shown = [*opened, *self.quoted(thought), *closed, *shown]
        elif marks and is_open:
            shown = [*self.model.encode(f"\n{marks[1]}\n\n", opening=False), *shown]
        return opening, [self._back.get(token, token) for token in shown]

    def _without_tags(self, text: str) -> str:
        return re.sub("<(/?think>)", r"~\1", text)

    def _behind(self, before: Sequence[int], messages: Sequence[Message], root: Root) -> tuple[int, list[int]]:
        """What a template writes for the last message, up to its end token, and how much less opens its turn there."""
        whole = self.tokens(messages, root, prompt=False)
        alike = _alike(before, whole)
        rest, opening = whole[alike:], len(before) - alike
        ends = self.model.end_tokens
        at = next((at for at, token in enumerate(rest) if token in ends), None)
        if at is not None:
            return opening, rest[: at + 1]
        # A role that comes next ends the turn.
        ends_by = self.family.ends[2 if messages[-1].get("tool_calls") else 1] if len(self.family.ends) > 2 else ""
        name = ends_by if ends_by in ("<|user|>", "<|observation|>") else self.family.ends[0]
        return opening, [*rest, *self.model.encode(name, opening=False)]


def _as_mlx_lm_takes(message: Message) -> dict[str, Any]:
    found = {"role": message["role"], "content": message["content"]}
    if message.get("reasoning"):
        found["reasoning_content"] = message["reasoning"]
    if message.get("tool_calls"):
        found["tool_calls"] = [
            {"type": "function", "id": call["id"], "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    return found


@dataclass
class Said:
    """An answer in a ledger: what was to be said, and what was shown of it. number: of its message. opening: tokens in
    front of it that open its turn. start, end: of its tokens. is_cut: whether its limit ended it."""

    number: int
    meant: Message
    shown: dict[str, Any]
    opening: int
    start: int
    end: int
    is_cut: bool


class Talk:
    """A session, led as a daemon leads it."""

    def __init__(self, model: LoadedModel, encoder: Encoder, run: Run) -> None:
        self.model, self._run = model, run
        self._conversing = Conversing(encoder, *cast(Any, (None, None, None)))
        self.tokens: list[int] = []
        self.said: list[Said] = []
        self.live = cast(
            Session,
            SimpleNamespace(
                model=model,
                state=SimpleNamespace(tokens=self.tokens),
                text_map=TextMap(),
                system=None,
                left_midway=None,
                uri="torpor://sweep/a",
            ),
        )

    def would_read(self, messages: Sequence[Message], root: Root) -> tuple[list[int], Any]:
        """The ledger behind a transcript, and the turn that leads there. Raises TemplateUnusable, ContextOverflow."""
        turn = self._run(self._conversing.transcript(self.live, messages, root))
        return [*self.tokens[: turn.at], *turn.ids], turn

    def read(self, messages: Sequence[Message], root: Root) -> None:
        """Read a transcript."""
        ledger, turn = self.would_read(messages, root)
        self.tokens[:] = ledger
        self.live.text_map, self.live.root = turn.text_map, turn.root
        self.said = [each for each in self.said if each.end <= turn.at]

    def write(
        self, number: int, opening: int, meant: Message, tokens: Sequence[int], root: Root, *, is_cut: bool
    ) -> Said:
        """Write an answer, and show it."""
        output, start = Written(), len(self.tokens)
        shown = Shown(self.model, self.tokens[:], root, (), answer=start.to_bytes(16, "little"))
        for token in tokens:
            self.tokens.append(token)
            if token not in self.model.end_tokens:
                for piece in shown.push(token):
                    output.add(piece)
        for piece in shown.finish(is_cut=is_cut):
            output.add(piece)
        order = cast(WriteOrder, SimpleNamespace(keep_end=True, logprobs=None, seeded=False))
        UnderWay(order, output, start, Known(), cast(Any, None)).note(self.live, goes_on=False)
        message: dict[str, Any] = {"role": "assistant", "content": output.text}
        if output.reasoning:
            message["reasoning"] = output.reasoning
        if output.calls:
            message["tool_calls"] = [
                {"name": each.name, "arguments": each.arguments, "id": each.id} for each in output.calls
            ]
        self.said.append(Said(number, meant, message, opening, start, len(self.tokens), is_cut))
        return self.said[-1]


# --- comparing


@dataclass
class Explained:
    """A ledger compared with a rendering. names: of the differences. fault: what nothing explains; empty for none."""

    names: Counter[str]
    fault: str = ""


def compare(
    rendering: Rendering, ledger: Sequence[int], whole: Sequence[int], said: Sequence[Said], messages: Sequence[Message]
) -> Explained:
    """Walk along a ledger and the rendering of its transcript. said: the answers in the ledger, in order."""
    return _Walk(rendering, list(ledger), list(whole), said, messages).explained()


class _Walk:
    def __init__(
        self,
        rendering: Rendering,
        ledger: list[int],
        whole: list[int],
        said: Sequence[Said],
        messages: Sequence[Message],
    ) -> None:
        self._rendering, self._ledger, self._whole = rendering, ledger, whole
        self._said, self._messages = said, messages
        self._furthest = (0, 0)

    def explained(self) -> Explained:
        names = self._from(0, 0, 0)
        if names is not None:
            return Explained(names)
        at, there = self._furthest
        has = self._rendering.text(self._ledger[max(0, at - 20) : at + 60])
        wants = self._rendering.text(self._whole[max(0, there - 20) : there + 60])
        return Explained(Counter(), f"the ledger has {has!r}, mlx-lm {wants!r}")

    def _from(self, number: int, at: int, there: int) -> Counter[str] | None:
        """The differences from places in both on, where the answer of a number comes next; None if there is one that
        nothing explains."""
        end = self._said[number].start if number < len(self._said) else len(self._ledger)
        size = _alike(self._ledger[at:end], self._whole[there:])
        at, there = at + size, there + size
        self._furthest = max(self._furthest, (at, there))
        if number == len(self._said):
            return Counter() if at == end and there == len(self._whole) else None
        answer = self._said[number]
        if at < answer.start - answer.opening:
            return None
        for ends in self._ends(number, there):
            ours, theirs = self._ledger[at : answer.end], self._whole[there:ends]
            names = _explain(self._rendering, ours, theirs, answer, self._messages[answer.number])
            if names is not None and (more := self._from(number + 1, answer.end, ends)) is not None:
                return names + more
        return None

    def _ends(self, number: int, there: int) -> Iterator[int]:
        """Where in the rendering an answer may end: where what was read behind it stands."""
        is_last = number + 1 == len(self._said)
        following = len(self._ledger) if is_last else self._said[number + 1].start - self._said[number + 1].opening
        behind = self._ledger[self._said[number].end : max(self._said[number].end, following)]
        for end in range(there, len(self._whole) - len(behind) + 1):
            if (
                self._whole[end : end + len(behind[:1])] == behind[:1]
                and self._whole[end : end + len(behind)] == behind
            ):
                yield end


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _explain(
    rendering: Rendering, ours: Sequence[int], theirs: Sequence[int], answer: Said, message: Message
) -> Counter[str] | None:
    """The differences between an answer as it was written and as a template writes it; None if they say different
    things."""
    if list(ours) == list(theirs):
        return Counter()
    names: Counter[str] = Counter()
    one, other = (_Answer.of(rendering, each) for each in (ours, theirs))
    if one.end != other.end:
        names["another end"] += 1
    if "</think>" in answer.shown["content"] and said_alike(answer.shown, message):
        names["quoted thinking"] += 1
        return names
    if one.thought != other.thought:
        if not (other.thought or "").strip():
            names["thinking"] += 1
        elif other.thought is not None and other.thought.strip() == (one.thought or "").strip():
            names["blanks"] += 1
        else:
            return None
    if one.words == other.words:
        return names
    call, words = rendering.model.marks.call[0], other.words.rstrip()
    if one.words.strip() == other.words.strip():
        names["blanks"] += 1
    elif answer.is_cut and one.words.startswith(words) and one.words[len(words) :].lstrip().startswith(call):
        names["cut off"] += 1
    elif said_alike(answer.shown, message):
        names["spelled anew"] += 1
    else:
        return None
    return names


def said_alike(one: Message, other: Message) -> bool:
    """Whether two answers have the same words and calls."""
    words, calls = (
        [each["content"].strip() for each in (one, other)],
        [
            [(call["name"], json.dumps(call["arguments"])) for call in each.get("tool_calls", ())]
            for each in (one, other)
        ],
    )
    return words[0] == words[1] and calls[0] == calls[1]


@dataclass
class _Answer:
    """thought: between the marks at its beginning; None without them. words: behind it. end: its end token's name."""

    thought: str | None
    words: str
    end: str

    @classmethod
    def of(cls, rendering: Rendering, tokens: Sequence[int]) -> _Answer:
        tokens, end = list(tokens), ""
        while tokens and (tokens[-1] in rendering.model.end_tokens or rendering.controls.get(tokens[-1]) == "<|end|>"):
            end = rendering.controls[tokens.pop()]
        text, marks = rendering.text(tokens), rendering.model.marks.reasoning
        if marks and text.lstrip().startswith(marks[0]):
            thought, closes, words = text.lstrip()[len(marks[0]) :].partition(marks[1])
            return cls(thought, words if closes else "", end)
        return cls(None, text, end)


def _byte_symbols() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


# --- sweeping


def sweep(model: LoadedModel, family: Family, dialogues: Iterable[Dialogue]) -> Findings:
    """Lead dialogues with a model of a family."""
    found, rendering = Findings(), Rendering(model, family)
    with asyncio.Runner() as runner, closing(InlineEncoder()) as encoder:
        for dialogue in dialogues:
            if any(stand_in in json.dumps([dialogue.messages, dialogue.tools]) for stand_in in _STAND_INS.values()):
                found.seen["passed over"] += 1
                continue
            _Sweep(model, rendering, encoder, runner.run, found, dialogue).go()
    return found


class _Sweep:
    """Leads one dialogue."""

    def __init__(
        self,
        model: LoadedModel,
        rendering: Rendering,
        encoder: Encoder,
        run: Run,
        found: Findings,
        dialogue: Dialogue,
    ) -> None:
        self._model, self._rendering, self._encoder, self._run = model, rendering, encoder, run
        self._found, self._dialogue = found, dialogue
        self._chance = Random(f"sweep {dialogue.seed} {rendering.family.name}")
        self._root = Root(dialogue.tools, dialogue.arguments)

    def go(self) -> None:
        self._found.seen["dialogues"] += 1
        try:
            self._read_at_once()
            self._lead()
        except (AssertionError, TemplateUnusable) as fault:
            self._found.faults.append(f"{self._rendering.family.name} {self._dialogue.seed}: {fault}")

    def _fault(self, what: str) -> None:
        raise AssertionError(what)

    def _require_alike(
        self, ledger: Sequence[int], messages: Sequence[Message], said: Sequence[Said], what: str
    ) -> None:
        whole = self._rendering.tokens(messages, self._root, seen=self._found.differences)
        explained = compare(self._rendering, ledger, whole, said, messages)
        self._found.seen[what] += 1
        self._found.differences += explained.names
        if explained.fault:
            self._fault(f"{what}: {explained.fault}")

    def _read_at_once(self) -> None:
        """The whole of a dialogue that another client has led."""
        talk = Talk(self._model, self._encoder, self._run)
        ledger, _ = talk.would_read(self._dialogue.messages, self._root)
        self._require_alike(ledger, self._dialogue.messages, (), "read at once")

    def _lead(self) -> None:
        """Turn by turn, with the answers that the model writes; and at the end with a history that was edited."""
        talk = Talk(self._model, self._encoder, self._run)
        history: list[dict[str, Any]] = []
        ids: list[str] = []
        for meant in self._dialogue.messages:
            if meant["role"] != "assistant":
                history.append(_as_result(meant, ids))
                continue
            talk.read(history, self._root)
            said = self._answered(talk, history, meant)
            kept = dict(said.shown)
            if self._chance.random() < 0.3:
                kept.pop("reasoning", None)
            history.append(kept)
            ids = [call["id"] for call in said.shown.get("tool_calls", ())]
        talk.read(history, self._root)
        self._require_alike(talk.tokens, history, talk.said, "turn by turn")
        edited = _edited(history, self._chance)
        ledger, turn = talk.would_read(edited, self._root)
        self._require_alike(ledger, edited, [each for each in talk.said if each.end <= turn.at], "edited")

    def _answered(self, talk: Talk, history: Sequence[Message], meant: dict[str, Any]) -> Said:
        """What the model writes, and what is shown of it; sometimes it comes not so far."""
        thinking = self._model.marks.thought_behind(talk.tokens, self._model.end_tokens)
        if thinking == "done":
            meant = {**meant, "reasoning": ""}
        opening, tokens = self._rendering.answer(history, meant, self._root, is_open=thinking == "open")
        is_cut, is_short = False, self._chance.random() < 0.15
        if is_short:
            # What closes a turn cut off within its scaffold is not known, so there the model ends it itself.
            is_cut = self._chance.random() < 0.3 and not self._model.marks.scaffold
            size = self._chance.randrange(len(tokens))
            tokens = [*tokens[:size], *([] if is_cut else tokens[-1:])]
        said = talk.write(len(history), opening, meant, tokens, self._root, is_cut=is_cut)
        self._require_meant(said, is_short)
        return said

    def _require_meant(self, said: Said, is_short: bool) -> None:
        """Compare what was shown with what the model meant."""
        meant, shown = said.meant, said.shown
        wanted, got = list(meant.get("tool_calls", [])), shown.get("tool_calls", [])
        seen = self._found.seen
        schemas = {each["name"]: each["parameters"] for each in self._dialogue.tools}
        parser, left = self._model.marks.parser, iter(wanted)
        for call in got:
            # What is not clear is text, so some may not be there; but what is there is whole.
            if not any(is_meant(parser, each, call, schemas) for each in left):
                self._fault(f"of the calls {wanted} the model is said to have written {call}")
        if is_short:
            return
        seen["calls meant"] += len(wanted)
        seen["calls shown"] += len(got)
        marks = self._model.marks
        starts, closes = marks.reasoning or ("", "")
        words, thought = meant["content"], meant.get("reasoning", "")
        spelled = [*filter(None, (marks.call[0], *marks.scaffold))]
        if any(mark in text for mark in spelled for text in (words, thought)) or (closes and closes in thought):
            seen["answers that spell a mark"] += 1
            return
        if len(got) < len(wanted):
            seen["answers with calls told as text"] += 1
            is_ours = parser == "marks" and rules_of(self._model.tokenizer).tools
            if not is_ours and all(is_clear(parser, call) for call in wanted):
                self._fault(f"a clear call is told as text: {wanted} {shown}")
            return
        if "<|channel|>" in self._rendering.family.controls or (starts and words.lstrip().startswith(starts)):
            return  # mlx-lm does not tell the channels of gpt-oss apart: all is text, with their names
        if shown["content"].strip() != words.strip():
            self._fault(f"the words {words!r} were shown as {shown['content']!r}")
        if starts and shown.get("reasoning", "").strip() != thought.strip():
            self._fault(f"the thinking {thought!r} was shown as {shown.get('reasoning')!r}")


def _as_result(message: Mapping[str, Any], ids: list[str]) -> dict[str, Any]:
    """A message behind an answer: a result by the id that the answer's call has; where no call was shown, the person
    tells it."""
    if message["role"] != "tool":
        return dict(message)
    if not ids:
        return {"role": "user", "content": message["content"]}
    return {**message, "tool_call_id": ids.pop(0)}


def _edited(history: Sequence[dict[str, Any]], chance: Random) -> list[dict[str, Any]]:
    """A history with other words at the beginning of a message, or at its end."""
    at = chance.randrange(len(history))
    text = history[at]["content"]
    return [
        *history[:at],
        {**history[at], "content": chance.choice((f"Other words. {text}", f"{text} Other words."))},
        *history[at + 1 :],
    ]
