"""The ledger is the transcript: what a session holds of a dialogue, compared with mlx-lm's own rendering of all of it.

A dialogue is led turn by turn as a daemon leads it, by the code that it has for that, without computing: answers are
what the model would have written by its template, token by token. Its client sends back what it was shown. Behind each
read the ledger is compared with the tokens of mlx-lm's rendering of the whole transcript. Where they differ, one of
`DIFFERENCES` explains it, and is counted, or there is a fault. What was written is compared with what was shown.

"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from torpor.daemon.chat.conversing import Conversing
from torpor.daemon.chat.prompt_io import Known, UnderWay
from torpor.daemon.engine.channels import Shown
from torpor.daemon.engine.generation import WriteOrder, Written
from torpor.daemon.errors import TemplateUnusable
from torpor.daemon.models.chat_template import Root, rules_of
from torpor.daemon.models.models import LoadedModel
from torpor.daemon.sessions.chats import Chat
from torpor.daemon.sessions.encoding import Encoder
from torpor.daemon.sessions.sessions import Session
from torpor.tests.daemon.models.template_families import Family
from torpor.tests.dialogues.calls import is_clear, is_meant
from torpor.tests.dialogues.comparing import Said, compare
from torpor.tests.dialogues.generator import Dialogue, edited
from torpor.tests.dialogues.rendering import STAND_INS, Message, Rendering

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


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
                chat=Chat(),
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
        self.live.chat = replace(self.live.chat, text_map=turn.text_map, root=turn.root)
        self.said = [each for each in self.said if each.end <= turn.at]

    def write(
        self, number: int, opening: int, meant: Message, tokens: Sequence[int], root: Root, *, is_cut: bool
    ) -> Said:
        """Write an answer, and show it."""
        start = len(self.tokens)
        output = shown_of(self.model, self.tokens, tokens, root, is_cut=is_cut)
        self.tokens += tokens
        order = cast(WriteOrder, SimpleNamespace(keep_end=True, logprobs=None, seeded=False))
        UnderWay(order, output, start, Known(), cast(Any, None)).note(self.live, goes_on=False)
        self.said.append(Said(number, meant, message_in(output), opening, start, len(self.tokens), is_cut))
        return self.said[-1]


def shown_of(model: LoadedModel, before: Sequence[int], tokens: Sequence[int], root: Root, *, is_cut: bool) -> Written:
    """What a client is shown of the tokens of an answer. before: the ledger before it."""
    output = Written()
    shown = Shown(model, before[:], root, (), answer=len(before).to_bytes(16, "little"))
    for token in tokens:
        if token not in model.end_tokens:
            for piece in shown.push(token):
                output.add(piece)
    for piece in shown.finish(is_cut=is_cut):
        output.add(piece)
    return output


def message_in(output: Written) -> dict[str, Any]:
    """What was shown, as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning:
        message["reasoning"] = output.reasoning
    if output.calls:
        message["tool_calls"] = [
            {"name": each.name, "arguments": each.arguments, "id": each.id} for each in output.calls
        ]
    return message


def sweep(model: LoadedModel, family: Family, dialogues: Iterable[Dialogue]) -> Findings:
    """Lead dialogues with a model of a family."""
    found, rendering = Findings(), Rendering(model, family)
    with asyncio.Runner() as runner, closing(InlineEncoder()) as encoder:
        for dialogue in dialogues:
            if any(stand_in in json.dumps([dialogue.messages, dialogue.tools]) for stand_in in STAND_INS.values()):
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
            if self._chance.random() < 0.1:  # another model has answered it
                history.append(dict(meant))
                ids = [call["id"] for call in meant.get("tool_calls", ())]
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
        changed = edited(history, self._chance)
        ledger, turn = talk.would_read(changed, self._root)
        self._require_alike(ledger, changed, [each for each in talk.said if each.end <= turn.at], "edited")

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
            if _is_spelled(call, self._model.marks.call[0], meant["content"]):
                seen["calls that a text ends with"] += 1
            elif not any(is_meant(parser, each, call, schemas) for each in left):
                self._fault(f"of the calls {wanted} the model is said to have written {call}")
        if is_short:
            return
        seen["calls meant"] += len(wanted)
        seen["calls shown"] += len(got)
        marks = self._model.marks
        starts, closes = marks.reasoning or ("", "")
        words, thought = meant["content"], meant.get("reasoning", "")
        spelled = [*filter(None, (marks.call[0], *marks.scaffold))]
        begins_thinking = bool(starts) and words.lstrip().startswith(starts)
        if (
            begins_thinking
            or any(mark in text for mark in spelled for text in (words, thought))
            or (closes and closes in thought)
        ):
            seen["answers that spell a mark"] += 1
            return
        if len(got) < len(wanted):
            seen["answers with calls told as text"] += 1
            is_ours = parser == "marks" and rules_of(self._model.tokenizer).tools
            if not is_ours and all(is_clear(parser, call) for call in wanted):
                self._fault(f"a clear call is told as text: {wanted} {shown}")
            return
        if "<|channel|>" in self._rendering.family.controls:
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


def _is_spelled(call: dict[str, Any], mark: str, text: str) -> bool:
    """Whether a text ends with a whole call behind its mark: that is one, for only what closes it is missing."""
    _, found, said = text.rstrip().rpartition(mark)
    try:
        value = json.loads(said)
    except ValueError:
        return False
    return bool(found) and value == {"name": call["name"], "arguments": call["arguments"]}
