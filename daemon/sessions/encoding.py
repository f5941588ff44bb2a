"""Texts and turns of a chat to tokens, on a thread of its own, so that the event loop and the engine do not wait.

`chat_template.py` renders turns. A text that cannot fit in any tokenization is refused before that work.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, TypeVar

from blake3 import blake3

from ...memvid.units import format_plural
from ..api.dialogue import Role
from ..errors import ContextOverflow, TemplateUnusable
from ..models import chat_template
from ..models.chat_template import NO_ROOT, Message, Root
from ..models.control_tokens import any_of, edges_of
from ..models.grammars import AnswerForm, Matcher, Steps
from ..models.models import LoadedModel
from ..models.token_bytes import BYTE_SYMBOLS
from ..views.why import Detokenizer
from .compiling import GrammarThread
from .sessions import Session

# NFC makes a text at most 3.5 times shorter in UTF-8 (iota with dialytika and tonos; Hangul: 3 times).
_NFC_SHRINKS_AT_MOST = 4

# Stands for a message's text while a template is rendered, with a number of fixed width: no template strips or moves
# it.
_PLACEHOLDER = "torporwordsplaceholder2b6e"
_PLACEHOLDERS = re.compile(f"({_PLACEHOLDER}[0-9]{{8}})")
# An assistant's text that begins with its thinking, as some clients send it: templates look for these tags. Any other
# tag is quoted.
_THINKING = re.compile(r"(\s*<think>)(.*?)(?:(</think>)(.*))?", re.DOTALL)
_TAGS = ("<think>", "</think>")
# Signs that JSON writes otherwise within a text. No control token is made of them alone.
_ESCAPED = re.compile(r"""(["'\\\x00-\x1f]+)""")

# What a template writes of the present time.
_TIMES = re.compile(r"""strftime_now\(\s*["']([^"']+)["']""")

_MOST_ROOTS = 64
"""Roots whose digests are kept, each with its text."""

_MOST_SEAM_TRIES = 64
"""Renderings, to find the seams that change nothing."""

Seam = tuple[str, int]
"""A client's word, and its beginning (0) or its end (1)."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a ledger messages are read. held: tokens before them. last: the token just before; None at the beginning
    of a conversation. turn_open: whether an assistant's turn has to be closed first. follows: the role of the message
    before, if these follow it with no answer between, or the first of them is that answer; None else. called: whether
    the answer before them is known to have calls."""

    held: int
    last: int | None
    turn_open: bool
    follows: Role | None = None
    called: bool = False


class Encoder:
    """Turns text into the tokens of a session's model. Callers hold the session alone (`sessions.Turns`). The event
    loop's, but for `close`.
    """

    def __init__(self) -> None:
        self._thread = _new_thread()
        self._compiling = GrammarThread()
        self._shown_roots: dict[tuple[bytes, str], bytes] = {}
        self._most_bytes: dict[bytes, int | None] = {}  # by identity: a name may get another model

    async def text(self, live: Session, text: str, *, raw: bool = False) -> list[int]:
        """The tokens of a text that continues the ledger. raw: as the model's own. Raises as `plain`."""
        held = len(live.state.tokens)
        return await self.plain(live.model, text, opening=not held, held=held, raw=raw)

    async def plain(
        self, model: LoadedModel, text: str, *, opening: bool, held: int = 0, raw: bool = False
    ) -> list[int]:
        """The tokens of a text: plain, or, raw, as the model's own. held: tokens before it. Raises ContextOverflow: it
        cannot fit in any tokenization."""

        def encode() -> list[int]:
            self._require_could_fit(model, text, held=held)
            return (model.encode if raw else model.encode_plain)(text, opening=opening)

        return await self.aside(encode)

    async def messages(
        self, model: LoadedModel, messages: Sequence[Message], place: Place, root: Root = NO_ROOT
    ) -> list[int]:
        """The tokens of new messages, up to the start of the assistant's turn. Earlier turns are in the ledger already.

        Raises:
            TemplateUnusable: the model has no template, or one that refuses the messages.
            ContextOverflow: they cannot fit in any tokenization.
        """

        def render_and_encode() -> list[int]:
            self._require_could_fit(model, rendered(model, messages, place, root), held=place.held)
            return _encoded(model, messages, place, root)

        return await self.aside(render_and_encode)

    async def shown_root(self, model: LoadedModel, root: Root) -> bytes:
        """The digest of what the model's template shows of a root: of its tools and arguments, in the words around
        them, but for the opening of the answer. Empty where it shows nothing."""
        if not root:
            return b""
        key = (model.identity.digest, root.to_text())
        if key not in self._shown_roots:
            while len(self._shown_roots) >= _MOST_ROOTS:
                del self._shown_roots[next(iter(self._shown_roots))]
            self._shown_roots[key] = await self.aside(lambda: _shown_root(model, root))
        return self._shown_roots[key]

    async def lengths(
        self,
        model: LoadedModel,
        messages: Sequence[Message],
        place: Place,
        ids: Sequence[int],
        root: Root = NO_ROOT,
    ) -> Sequence[int]:
        """The lengths within `ids`, the tokens of messages, at the end of each message: an assistant's text ends at its
        end token, another message at the end of the next such text, or of all. Empty if that cannot be told, or if the
        conversation could not be continued there token by token."""
        if not any(message["role"] == "assistant" for message in messages[:-1]):
            return ()
        return await self.aside(lambda: _lengths(model, messages, place, ids, root))

    async def taken_back(self, model: LoadedModel, asked: Role, messages: Sequence[Message], root: Root) -> list[int]:
        """The tokens at a ledger's end, in a turn that was opened for an answer, that are not there where these
        messages follow. asked: the role of the message before. Raises TemplateUnusable."""

        def find() -> list[int]:
            names = any_of(model.control_texts)
            back, _ = chat_template.following(model.render, asked, messages, names, root)
            return model.encode(back, opening=False)

        return await self.aside(find)

    async def answer_end(
        self, model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int], root: Root = NO_ROOT
    ) -> int:
        """The length within `ids`, the tokens of messages, at the end of the last of them, an assistant's: behind its
        end token, or behind its words where the template sets none. Raises as `messages`."""
        return await self.aside(lambda: _answer_end(model, messages, place, ids, root))

    async def with_detokenizer(self, model: LoadedModel, work: Callable[[Detokenizer], Result]) -> Result:
        """Do work that needs a model's tokenizer; no other work uses it meanwhile."""

        def do() -> Result:
            vocabulary = model.tokenizer.get_vocab()
            controls = frozenset(vocabulary[text] for text in model.control_texts if text in vocabulary)
            return work(Detokenizer(lambda tokens: str(model.tokenizer.decode(list(tokens))), controls))

        return await self.aside(do)

    async def matcher(self, model: LoadedModel, form: AnswerForm) -> Matcher | None:
        """A matcher for one answer; None if it is free. Its grammar is compiled on another thread: neither texts nor
        the engine wait. Raises InvalidConstraint."""
        return await self._compiled(model, model.grammars.matcher(form, model.marks)) if form else None

    async def unheld(self, model: LoadedModel, form: AnswerForm) -> frozenset[str]:
        """Which of the strict tools the model cannot be held to, found as `matcher` works."""
        if not form.choice.strict:
            return frozenset()
        return await self._compiled(model, model.grammars.unheld(form, model.marks))

    async def _compiled(self, model: LoadedModel, steps: Steps[Result]) -> Result:
        await self.aside(model.grammars.describe)
        return await self._compiling.run(steps)

    def let_go(self) -> None:
        """A model has left memory: end the thread after its work, and begin another. A tokenizer caches words for each
        calling thread, half a megabyte and more, and the library frees that only when the thread ends.
        """
        before, self._thread = self._thread, _new_thread()
        before.shutdown(wait=False)
        self._thread.submit(before.shutdown)  # first of all, so that still no two calls use one tokenizer

    def close(self) -> None:
        """End the threads after their running work. A grammar that is compiled is not waited for."""
        self._compiling.close()
        self._thread.shutdown(cancel_futures=True)

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Do work over many texts on the thread for them, where neither the loop nor the engine waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _require_could_fit(self, model: LoadedModel, text: str, *, held: int) -> None:
        most = self._most_bytes_of(model)
        size_bytes = len(text.encode("utf-8", "surrogatepass"))
        if most is not None and held + -(-size_bytes // most) > model.context_tokens:
            least = -(-size_bytes // most)
            fold = ", or fold the session into a smaller one (torpor fold)" if held else ""
            raise ContextOverflow(
                f"The text has {format_plural(size_bytes, 'byte')}, which are {format_plural(least, 'token')} or more, "
                f"and the session holds {held}, but the context of model {model.name!r} ends at "
                f"{model.context_tokens}. Give a shorter text{fold}.",
                token_count=held,
                wanted_tokens=least,
                at_least=True,  # of the text alone, without the tokens to write behind it
                context_tokens=model.context_tokens,
            )

    def _most_bytes_of(self, model: LoadedModel) -> int | None:
        identity = model.identity.digest
        if identity not in self._most_bytes:
            backend = getattr(model.tokenizer, "backend_tokenizer", None)
            described = json.loads(backend.to_str()) if backend is not None else {}
            self._most_bytes[identity] = most_bytes_per_token(described)
        return self._most_bytes[identity]


def _new_thread() -> ThreadPoolExecutor:
    # One: a call may change a tokenizer's settings, so no two calls may use one tokenizer.
    return ThreadPoolExecutor(1, thread_name_prefix="torpor-text")


def rendered(model: LoadedModel, messages: Sequence[Message], place: Place, root: Root) -> str:
    """The text of messages at a place, up to the start of the assistant's turn. Raises TemplateUnusable."""
    if place.last is None:
        return chat_template.opening(model.render, messages, root)
    if place.follows:
        return chat_template.following(model.render, place.follows, messages, any_of(model.control_texts), root)[1]
    end_text = str(model.tokenizer.decode([place.last])) if place.last in model.end_tokens else ""
    return chat_template.continuation(
        model.render, messages, root, turn_open=place.turn_open, end_text=end_text, called=place.called
    )


def _encoded(model: LoadedModel, messages: Sequence[Message], place: Place, root: Root) -> list[int]:
    # If a text spells a control token, only the template's own control tokens count. A template may join one out of its
    # own signs and a client's word, too.
    def form_with(seams: Collection[Seam]) -> _Form:
        blanks = _Placeholders(model, seams)
        copies, under = [blanks.of_message(message) for message in messages], blanks.of_root(root)
        return _Form(rendered(model, copies, place, under), blanks.words, blanks.seams)

    form = form_with(())
    if form.seams:
        form = form_with(_seams_that_show(form_with, form.filled(), form.seams))
    # A template writes the first token itself, so none is added.
    return _encode_around(model, form) if form.words else model.encode(form.text, opening=False)


def _seams_that_show(
    form_with: Callable[[Collection[Seam]], _Form], text: str, seams: Collection[Seam]
) -> frozenset[Seam]:
    """Those seams that change nothing in a template's text; a word that a template compares or sorts by may. Raises
    TemplateUnusable: too many do."""
    tries = iter(range(_MOST_SEAM_TRIES))

    def shown(some: Sequence[Seam]) -> list[Seam]:
        if next(tries, None) is None:
            raise TemplateUnusable(
                "Too many words of the tools or messages are parts of control tokens' names, and the model's chat "
                "template goes by them. Give them other names."
            )
        if form_with(some).filled() == text:
            return list(some)
        half = len(some) // 2
        return shown(some[:half]) + shown(some[half:]) if half else []

    return frozenset(shown(sorted(seams)))


def _shown_root(model: LoadedModel, root: Root) -> bytes:
    """`Encoder.shown_root`: render a talk that has all kinds of messages with the root and without one."""
    call = {"name": _PLACEHOLDER, "arguments": {}, "id": "placehold"}
    talk: list[Message] = [
        {"role": "system", "content": _PLACEHOLDER},
        {"role": "user", "content": _PLACEHOLDER},
        {"role": "assistant", "content": _PLACEHOLDER, "reasoning": _PLACEHOLDER},
        {"role": "user", "content": _PLACEHOLDER},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning": _PLACEHOLDER},
        {"role": "tool", "content": _PLACEHOLDER, "tool_call_id": "placehold"},
    ]

    def shown(under: Root) -> list[str]:
        return [_undated(model, _rendered_or_none(model, messages, under)) for messages in beginnings]

    beginnings = (talk[1:], talk[1:2], talk[1:4], talk)
    with_root = shown(root)
    if with_root == shown(NO_ROOT) and any(with_root):
        return b""
    texts = with_root if any(with_root) else [root.to_text()]
    if _undated(model, root.to_text()) != root.to_text():  # that date is the client's own word
        texts = [*texts, root.to_text()]
    return blake3("\0".join(texts).encode("utf-8", "surrogatepass")).digest(16)


def _rendered_or_none(model: LoadedModel, messages: Sequence[Message], root: Root) -> str:
    """The text of messages; empty where the template refuses them: it shows nothing of them then."""
    with suppress(TemplateUnusable):
        return model.render(messages, False, root)
    return ""


def _undated(model: LoadedModel, text: str) -> str:
    """A text without the time that a template has written: a day later it is the same conversation."""
    now = datetime.now().astimezone()
    for form in _TIMES.findall(str(getattr(model.tokenizer, "chat_template", ""))):
        text = text.replace(now.strftime(form) or "\0", "")
    return text


def _lengths(
    model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int], root: Root
) -> Sequence[int]:
    """`Encoder.lengths`: count the template's end tokens behind each message, and find them in `ids`."""
    names = [f"{_PLACEHOLDER}{at:08}" for at in range(len(messages))]
    named: list[Message] = [{**message, "content": name} for message, name in zip(messages, names, strict=True)]
    pieces = _PLACEHOLDERS.split(rendered(model, named, place, root))
    if pieces[1::2] != names:
        return ()
    behind = [_end_tokens_in(model, piece) for piece in pieces[::2]]
    ends = [at + 1 for at, token in enumerate(ids) if token in model.end_tokens]
    if sum(behind) != len(ends):
        return ()
    before = list(accumulate(behind))
    own = [
        ends[before[at]] if message["role"] == "assistant" and behind[at + 1] else None
        for at, message in enumerate(messages)
    ]
    last = max((at for at, end in enumerate(own[:-1]) if end is not None), default=None)
    if last is None:
        return ()
    called = bool(messages[last].get("tool_calls"))
    there = Place(place.held + (own[last] or 0), ids[(own[last] or 0) - 1], turn_open=True, called=called)
    if not _goes_on_at(model, messages[last + 1 :], there, root, ids[own[last] or 0 :]):
        return ()
    lengths = [len(ids)]
    for end in reversed(own[:-1]):
        lengths.append(lengths[-1] if end is None else end)
    return lengths[::-1]


def _answer_end(model: LoadedModel, messages: Sequence[Message], place: Place, ids: Sequence[int], root: Root) -> int:
    """`Encoder.answer_end`: an end token behind the words is its own. One before them may be another turn's: in some
    families the next role ends a turn."""
    *before, last = messages
    calls = last.get("tool_calls", ())
    named: Message = {**last, "content": _PLACEHOLDER if last["content"] or not calls else ""}
    if calls:
        named = {**named, "tool_calls": [{**call, "name": _PLACEHOLDER} for call in calls]}
    others = _encoded(model, [*before, named], place, root)
    behind = _alike(ids[::-1], others[::-1])
    ends = [at + 1 for at in range(len(ids) - behind, len(ids)) if ids[at] in model.end_tokens]
    if ends:
        return ends[-1]
    end = len(ids)
    # What goes on behind the answer closes it: that is no end token here, so it would be written twice.
    for around in (chat_template.answer_opening(model.render, root), chat_template.answer_closing(model.render, root)):
        tokens = model.encode(around, opening=False)
        end -= len(tokens) if tokens and list(ids[end - len(tokens) : end]) == tokens else 0
    return end


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (first, second) in pairs if first != second), min(len(one), len(other)))


def _end_tokens_in(model: LoadedModel, text: str) -> int:
    return sum(token in model.end_tokens for token in model.encode(text, opening=False)) if text else 0


def _goes_on_at(model: LoadedModel, messages: Sequence[Message], behind: Place, root: Root, ids: Sequence[int]) -> bool:
    """Whether a conversation continued there with these messages has the same tokens."""
    try:
        return _encoded(model, messages, behind, root) == ids
    except TemplateUnusable:
        return False


@dataclass(frozen=True, slots=True)
class _Form:
    """A template's text with placeholders in it. words: what they stand for. seams: where a client's word begins or
    ends that may be a part of a control token's name."""

    text: str
    words: Mapping[str, str]
    seams: Collection[Seam]

    def filled(self) -> str:
        """The text with the words in their places."""
        return "".join(self.words.get(piece, piece) for piece in _PLACEHOLDERS.split(self.text))


def _encode_around(model: LoadedModel, form: _Form) -> list[int]:
    """The tokens of a template's text. A control token counts where no placeholder stands in it. What stands between
    two of them is plain text if it spells others."""
    parts: list[list[str]] = [[]]  # a text and a control token in turns
    names = any_of(model.control_texts)
    for piece in _PLACEHOLDERS.split(form.text):
        if piece in form.words:
            parts[-1].append(form.words[piece])
            continue
        first, *rest = names.split(piece)
        parts[-1].append(first)
        parts += [[each] for each in rest]
    tokens: list[int] = []
    own: list[str] = []
    for at, part in enumerate(map("".join, parts)):
        if at % 2 or not model.holds_control(part):
            own.append(part)
            continue
        tokens += model.encode("".join(own), opening=False) + model.encode_plain(part, opening=False)
        own.clear()
    return tokens + model.encode("".join(own), opening=False)


class _Placeholders:
    """Puts placeholders where texts spell control tokens (or placeholders), as a template writes the text around them
    in its way; and empty ones at the wanted seams. words: what they stand for. seams: all that there are."""

    def __init__(self, model: LoadedModel, wanted: Collection[Seam]) -> None:
        self.words: dict[str, str] = {}
        self.seams: set[Seam] = set()
        self._model = model
        self._wanted = wanted

    def of_message(self, message: Message) -> Message:
        copy: dict[str, Any] = {**message, "content": self._of_content(message)}
        for name in ("reasoning", "tool_call_id"):
            if name in message:
                copy[name] = self._of_text(message[name])
        if "tool_calls" in message:
            copy["tool_calls"] = [self._of_record(call) for call in message["tool_calls"]]
        return copy

    def of_root(self, root: Root) -> Root:
        return Root(tuple(map(self._of_record, root.tools)), self._of_record(root.arguments))

    def _of_record(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A call, a tool, or a template's arguments. Its fields keep their names, for the template goes by them."""
        return {name: self._of_value(value) for name, value in record.items()}

    def _of_content(self, message: Message) -> str:
        text: str = message["content"]
        if message["role"] != "assistant":
            return self._of_text(text)
        if (thinks := _THINKING.fullmatch(text)) is None:
            return self._of_text(text, _TAGS)
        opens, thought, closes, words = thinks.groups(default="")
        return f"{opens}{self._of_text(thought, _TAGS)}{closes}{self._of_text(words, _TAGS)}"

    def _of_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._of_text(value)
        if isinstance(value, Mapping):
            return {self._of_value(key): self._of_value(item) for key, item in value.items()}
        return [self._of_value(item) for item in value] if isinstance(value, list | tuple) else value

    def _of_text(self, text: str, tags: tuple[str, ...] = ()) -> str:
        """tags: those that this text quotes: they say nothing to a template."""
        core = text.strip()
        joins = edges_of(self._model.control_texts).joins(core)
        before, behind = (self._seam(core, at) if joins[at] else "" for at in range(2))
        if any(each in core for each in (_PLACEHOLDER, *tags)) or self._model.holds_control(core):
            names = any_of(self._model.control_texts.union((_PLACEHOLDER, *tags)))
            form = names.sub(lambda name: self._without_name(name[0]), core)
        else:
            form = core
        if form == core and not before and not behind:
            return text
        size = len(text) - len(text.lstrip())
        return f"{text[:size]}{before}{form}{behind}{text[size + len(core) :]}"

    def _seam(self, text: str, at: int) -> str:
        self.seams.add((text, at))
        return self._placeholder("") if (text, at) in self._wanted else ""

    def _without_name(self, name: str) -> str:
        """A placeholder for a control token's name, but for signs that a template may escape."""
        parts = enumerate(_ESCAPED.split(name))
        return "".join(each if at % 2 else self._placeholder(each) for at, each in parts if each)

    def _placeholder(self, text: str) -> str:
        name = f"{_PLACEHOLDER}{len(self.words):08}"
        self.words[name] = text
        return name


def most_bytes_per_token(tokenizer: Mapping[str, Any]) -> int | None:
    """The most bytes of a text that one token can stand for; None if that is not certain. tokenizer: the content of a
    tokenizer.json. Certain only for byte-level BPE that keeps every byte: no unknown token swallows a word, and no step
    strips, replaces or cuts text.
    """
    model = tokenizer.get("model") or {}
    normalizer = tokenizer.get("normalizer") or {}
    added = tokenizer.get("added_tokens") or []
    vocabulary = model.get("vocab") or {}
    steps = _steps(tokenizer.get("pre_tokenizer") or {})
    if (
        model.get("type") != "BPE"
        or normalizer.get("type", "NFC") != "NFC"
        or not any(step.get("type") == "ByteLevel" for step in steps)
        or not all(_keeps_every_byte(step) for step in steps)
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
        or not BYTE_SYMBOLS.keys() <= vocabulary.keys()
    ):
        return None
    # A byte is one character of a byte-level token; an added token is plain text.
    longest = max([len(token) for token in vocabulary] + [len(token["content"].encode()) for token in added])
    return longest * (_NFC_SHRINKS_AT_MOST if normalizer else 1)


def _steps(pre_tokenizer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if pre_tokenizer.get("type") == "Sequence":
        return [step for each in pre_tokenizer["pretokenizers"] for step in _steps(each)]
    return [pre_tokenizer]


def _keeps_every_byte(step: Mapping[str, Any]) -> bool:
    if step.get("type") == "Split":
        return step.get("behavior") != "Removed"
    return step.get("type") in ("ByteLevel", "Digits")
