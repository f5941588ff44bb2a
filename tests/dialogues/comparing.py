"""A ledger compared with mlx-lm's rendering of its dialogue, token by token: where they differ, and by which of the
`DIFFERENCES` that is right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torpor.tests.dialogues.rendering import Message, Rendering, alike

DIFFERENCES: Final[Mapping[str, str]] = {
    "quoted names": "The name of a control token in a text is the text's bytes, and not that token.",
    "tools as texts": "Tools that a template does not show stand in the system's text, calls and results in texts.",
    "taken otherwise": "Messages that a template refuses stand in a form that it takes.",
    "thinking": "An answer's thinking stays where it was written or read; a template drops it, or writes an empty one.",
    "blanks": "Blanks around an answer's words stay as they were written; a template strips them, or sets its own.",
    "another end": "An answer's end token is the one that was written, or of a last answer; a template sets its own.",
    "quoted thinking": "An answer's words in front of a `</think>` that it quotes stay; some templates drop them.",
    "spelled anew": "Calls, words beside them and half a character stay as written; a template spells them anew.",
    "cut off": "A call that the limit of tokens cut off stays in the ledger, and no client is shown it.",
}
"""What may differ between a ledger and mlx-lm's rendering of its transcript."""


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
        ids = rendering.model.marks.reasoning_ids
        self._thinks = [list(each) for each in ids or ()]
        self._thoughts = _thoughts_in(rendering, messages) if ids else set()

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
        size = alike(self._ledger[at:end], self._whole[there:])
        at, there = at + size, there + size
        self._furthest = max(self._furthest, (at, there))
        if number == len(self._said) and at == end and there == len(self._whole):
            return Counter()
        names = self._behind_answer(number, at, there)
        if names is None and at < end and self._is_end(self._ledger, at) and self._is_end(self._whole, there):
            names = self._from(number, at + 1, there + 1)
            return None if names is None else names + Counter(("another end",))
        if names is None and (behind := self._behind_thinking(at, there, size)) is not None and behind[0] <= end:
            names = self._from(number, *behind)
            return None if names is None else names + Counter(("thinking",))
        return names

    def _behind_answer(self, number: int, at: int, there: int) -> Counter[str] | None:
        """The differences, if both go on here in an answer."""
        if number == len(self._said) or at < self._said[number].start - self._said[number].opening:
            return None
        answer = self._said[number]
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
        behind = behind[: _place(behind, self._thinks[0])] if self._thinks else behind
        for end in range(there, len(self._whole) - len(behind) + 1):
            if (
                self._whole[end : end + len(behind[:1])] == behind[:1]
                and self._whole[end : end + len(behind)] == behind
            ):
                yield end

    def _behind_thinking(self, at: int, there: int, size: int) -> tuple[int, int] | None:
        """Where both go on behind the thinking of an answer that was read, which a template drops once another turn
        follows; None if they do not differ by that. size: tokens in front of here that are alike."""
        begins = max((b for b in range(at - size, at + 1) if self._opens(self._ledger, b)), default=None)
        if begins is None:
            return None
        opens, closes = self._thinks
        closed = begins + _place(self._ledger[begins:], closes)
        thought = self._rendering.text(self._ledger[begins + len(opens) : closed]).strip()
        if closed < at or closed == len(self._ledger) or thought not in self._thoughts:
            return None
        behind = there - (at - begins)
        if self._opens(self._whole, behind):
            behind = self._behind_blanks(self._whole, behind + len(opens))
            if self._whole[behind : behind + len(closes)] != closes:
                return None
            behind += len(closes)
        return self._behind_blanks(self._ledger, closed + len(closes)), self._behind_blanks(self._whole, behind)

    def _is_end(self, tokens: Sequence[int], at: int) -> bool:
        return at < len(tokens) and _ends_turn(self._rendering, tokens[at])

    def _opens(self, tokens: Sequence[int], at: int) -> bool:
        return bool(self._thinks) and tokens[at : at + len(self._thinks[0])] == self._thinks[0]

    def _behind_blanks(self, tokens: Sequence[int], at: int) -> int:
        while at < len(tokens) and self._rendering.text(tokens[at : at + 1]) == "\n":
            at += 1
        return at


def _place(tokens: Sequence[int], mark: Sequence[int]) -> int:
    """Where a mark stands; behind all if it does not."""
    return next((at for at in range(len(tokens)) if tokens[at : at + len(mark)] == mark), len(tokens))


def _thoughts_in(rendering: Rendering, messages: Sequence[Message]) -> set[str]:
    """What was thought in answers, as a template finds it, each without blanks around it."""
    answers = [message for message in messages if message["role"] == "assistant"]
    texts = [message.get("reasoning", "") for message in answers]
    texts += [message["content"].split("</think>")[0].split("<think>")[-1] for message in answers]
    return {rendering.text(rendering.quoted(core)).strip() for text in texts for core in (text, text.strip())}


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
        elif _shown_as_half(answer.shown, message):
            names["spelled anew"] += 1
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


def _shown_as_half(shown: Message, message: Message) -> bool:
    """Whether the client brings back the thinking that it was shown, with a sign in place of half a character."""
    thought = shown.get("reasoning", "").strip()
    return "\ufffd" in thought and thought == message.get("reasoning", "").strip()


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


def _ends_turn(rendering: Rendering, token: int) -> bool:
    return token in rendering.model.end_tokens or rendering.controls.get(token) == "<|end|>"


@dataclass
class _Answer:
    """thought: between the marks at its beginning; None without them. words: behind it. end: its end token's name."""

    thought: str | None
    words: str
    end: str

    @classmethod
    def of(cls, rendering: Rendering, tokens: Sequence[int]) -> _Answer:
        tokens, end = list(tokens), ""
        while tokens and _ends_turn(rendering, tokens[-1]):
            end = rendering.controls[tokens.pop()]
        text, marks = rendering.text(tokens), rendering.model.marks.reasoning
        if marks and text.lstrip().startswith(marks[0]):
            thought, closes, words = text.lstrip()[len(marks[0]) :].partition(marks[1])
            return cls(thought, words if closes else "", end)
        return cls(None, text, end)
