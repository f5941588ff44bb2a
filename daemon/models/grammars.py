"""Grammars that answers must match: compiled for the tokenizer of one model, and walked token by token.

llguidance does both. It is imported when the first request has a constraint. Its work is bounded by fuel, not by a
clock, so that a grammar is refused on each machine or on none; `costs.py` has what fuel does not count. Only the search
for what cannot be compiled, of many tools or parts of a schema, has a clock.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..api.constraints import Constraint, ToolChoice
from ..api.limits import MAX_SCHEMA_CHARS
from ..errors import InvalidConstraint
from .call_formats import CallRules, call_rules
from .costs import require_light_grammar
from .marks import Marks
from .rules import JSON_FORM, Literal, Rules, quoted, text_without
from .schemas import NotForcible, Schema, binding, parts_of, with_definitions

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Allowed = NDArray[np.bool_]
"""Which tokens may come next: `[vocabulary]`."""

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work that yields before each compilation, so that its thread can turn to other work, or leave it there."""

MOST_KEPT: Final = 16
"""Compiled grammars that a model keeps: clients send the same schemas again and again."""

_INITIAL_FUEL: Final = 100_000
_MOST_SYMBOLS: Final = 20_000
"""Of a compiled grammar. With more a short source took 15 s to compile."""

_STEP_FUEL: Final = 100_000
_STEP_ITEMS: Final = 25_000
"""As above, for the mask of one token: some 10 ms."""

_MOST_LEXER_STATES: Final = 50_000
"""1 to 2 KB each."""

_STACK_BYTES: Final = 64 * 1024 * 1024
_MOST_REASON_CHARS: Final = 500
_OTHER: Final = b"~"
"""A character that ends no mark."""

_SEARCH_S: Final = 5.0
"""For one request, to find which of its tools, or which part of a schema, cannot be compiled: of the thread's own time,
in which no other request counts."""

_LISTING: Final = re.compile(r"\n\s*\d+ \| ")
"""What the compiler tells behind its reason: the grammar."""

_SPECIAL: Final = b"\xff"
"""Begins a control token in the compiler's bytes; no text has it."""

_PIECE: Final = re.compile(r'<\[\d+\]>|"(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What one answer is held to. tools: those that are offered. unheld: the names of those that no grammar can hold;
    beside a constraint, their arguments are free."""

    constraint: Constraint | None
    choice: ToolChoice
    tools: tuple[Mapping[str, Any], ...] = ()
    unheld: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        """Whether it is held to anything."""
        choice = self.choice
        bound = choice.mode == "required" or (bool(self.tools) and (choice.mode == "none" or bool(choice.strict)))
        return self.constraint is not None or bound

    def called(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that may be called. Raises InvalidConstraint: a named one is not there, or none is."""
        if self.choice.mode == "none":
            return ()
        offered = {tool["name"] for tool in self.tools}
        if missing := [name for name in self.choice.names if name not in offered]:
            raise _refusal(f"the tool {missing[0]!r:.80} is to be called, and the conversation has none of that name")
        if self.choice.mode == "required" and not self.tools:
            raise _refusal("a tool is to be called, and the conversation has none")
        return tuple(tool for tool in self.tools if not self.choice.names or tool["name"] in self.choice.names)

    def loose(self) -> frozenset[str]:
        """The names of those of them whose arguments are free."""
        if self.choice.mode == "required":
            return frozenset()
        if self.constraint is not None:  # a call that cannot be read would be text, which is held to it
            return self.unheld
        return frozenset(tool["name"] for tool in self.tools) - frozenset(self.choice.strict)


class _Search:
    """The time that one request has to find what cannot be compiled."""

    def __init__(self) -> None:
        self._left_s = _SEARCH_S

    @property
    def is_over(self) -> bool:
        return self._left_s <= 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Work within takes of the time."""
        start = time.thread_time()
        try:
            yield
        finally:
            self._left_s -= time.thread_time() - start


class Grammars:
    """Compiles grammars for a model, on one thread at a time, and keeps the last ones. tokenizer: of mlx-lm.
    vocabulary: as many tokens as the model's logits have. ends: the tokens that end an answer."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = sorted(ends)
        self._description: str | None = None
        self._words: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def describe(self) -> None:
        """Note the tokenizer's tables, on the thread that uses it. Raises InvalidConstraint: it has none."""
        if self._words is not None or self._description is not None:
            return
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise _refusal("this model's tokenizer has no tables that the compiler can read; leave the constraint out")
        self._description = backend.to_str()

    def matcher(self, form: AnswerForm, marks: Marks) -> Steps[Matcher]:
        """A matcher at the beginning of an answer. Behind `describe`. Raises InvalidConstraint: what the answer is held
        to is wrong, too large, asks for a file or address, or allows no answer; or this model's form of calls has no
        place for it."""
        free = {tool["name"] for tool in form.tools}.difference(form.choice.strict)
        is_needed = form.constraint is not None and form.choice.mode == "auto"
        search = _Search()

        def without(names: frozenset[str]) -> AnswerForm:
            return replace(form, unheld=names)

        unheld, result = yield from self._let_go(form.tools, free if is_needed else (), without, marks, search)
        if isinstance(result, Matcher):
            return result
        raise (yield from self._with_place(without(unheld), marks, result, search)) from None

    def unheld(self, form: AnswerForm, marks: Marks) -> Steps[frozenset[str]]:
        """Which of the strict tools the model cannot be held to. Behind `describe`."""
        strict = {tool["name"] for tool in form.tools}.intersection(form.choice.strict)

        def without(names: frozenset[str]) -> AnswerForm:
            return AnswerForm(None, ToolChoice(strict=tuple(strict - names)), form.tools)

        unheld, _ = yield from self._let_go(form.tools, strict, without, marks, _Search())
        return unheld

    def _let_go(
        self,
        tools: Sequence[Mapping[str, Any]],
        names: Collection[str],
        without: Callable[[frozenset[str]], AnswerForm],
        marks: Marks,
        search: _Search,
    ) -> Steps[tuple[frozenset[str], Matcher | InvalidConstraint]]:
        """Of the named tools, those that are not held: none, if that can be; else each that cannot be by itself, or
        that no time is left for; else all. And the matcher without them, or why there is none."""
        unheld: frozenset[str] = frozenset()
        result = yield from self._tried(without(unheld), marks, search)
        if names and not isinstance(result, Matcher):
            alone = set()
            for tool in (each for each in tools if each["name"] in names):
                one = AnswerForm(None, ToolChoice(mode="required"), (tool,))
                if search.is_over or not isinstance((yield from self._tried(one, marks, search)), Matcher):
                    alone.add(tool["name"])
            for unheld in filter(None, dict.fromkeys((frozenset(alone), frozenset(names)))):
                result = yield from self._tried(without(unheld), marks, search)
                if isinstance(result, Matcher):
                    break
        return unheld, result

    def _tried(self, form: AnswerForm, marks: Marks, search: _Search) -> Steps[Matcher | InvalidConstraint]:
        yield
        with search.counted():
            try:
                return self._matcher(form, marks)
            except InvalidConstraint as error:
                return error.with_traceback(None)

    def _matcher(self, form: AnswerForm, marks: Marks) -> Matcher:
        words = self._read()
        grammar, guards, _ = self._grammar_of(form, marks)
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = _compiled(words, grammar)
            Matcher(words, compiled.deep_copy(), self._vocabulary).allowed()  # raises if no token may come first
            self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MOST_KEPT:
            self._compiled.popitem(last=False)
        is_plain = form.constraint is not None or form.choice.mode == "required"
        mark = words.decode_bytes(words.tokenize_str(marks.call[0], parse_special=True)) if is_plain else b""
        return Matcher(words, compiled.deep_copy(), self._vocabulary, guards=guards, mark=mark, is_plain=is_plain)

    def _with_place(
        self, form: AnswerForm, marks: Marks, error: InvalidConstraint, search: _Search
    ) -> Steps[InvalidConstraint]:
        """A refusal that names the place: of the schemas that cannot be compiled, the smallest part."""
        try:
            _, _, parts = self._grammar_of(form, marks)
        except InvalidConstraint:  # the refusal itself, which has a place
            return error
        for place, schema in parts:
            if (path := (yield from _fault_in(self._read(), schema, schema, search))) is not None:
                return _refusal(": ".join([place, *path]))
        return error

    def _grammar_of(self, form: AnswerForm, marks: Marks) -> tuple[str, tuple[bytes, ...], _Parts]:
        try:
            return _grammar_of(form, marks, self._read())
        except RecursionError:
            raise _refusal("a schema is nested too deep, or its references are") from None

    def _read(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if self._words is None:
            assert self._description is not None
            try:
                self._words = LLTokenizer(self._description, n_vocab=self._vocabulary, eos_token=self._ends)
            except Exception as error:  # noqa: BLE001 - the library raises any for a tokenizer that it cannot read
                raise _refusal(f"this model's tokenizer cannot be read by the compiler: {error}") from None
            finally:
                self._description = None
        return self._words


class Matcher:
    """Where an answer stands in its grammar. On one thread at a time.

    guards: texts that end a call, and may not stand within its arguments. mark: what an answer begins with if it may
    have a call; empty if text may stand before. is_plain: whether text that has begun is text to its end, with no marks
    in it.
    """

    def __init__(
        self,
        words: LLTokenizer,
        walker: LLMatcher,
        vocabulary: int,
        *,
        guards: Sequence[bytes] = (),
        mark: bytes = b"",
        is_plain: bool = False,
    ) -> None:
        self._words = words
        self._walker = walker
        self._vocabulary = vocabulary
        self._guards = guards
        self._mark = mark
        self.is_plain = is_plain
        self._head = self._tail = b""

    def copy(self) -> Matcher:
        """Another one at the same place."""
        other = copy.copy(self)
        other._walker = self._walker.deep_copy()
        return other

    @property
    def is_at_end(self) -> bool:
        """Whether the grammar allows no more."""
        return bool(self._walker.is_stopped())

    def allowed(self) -> Allowed:
        """The tokens that may come next; an end token where the grammar may end. `accept` may still refuse one. Raises
        InvalidConstraint: there is none, or finding them takes too long."""
        bits = np.frombuffer(self._walker.compute_bitmask(), np.uint8)
        if self._walker.is_error():
            raise _refusal(self._walker.get_error())
        mask = np.unpackbits(bits, count=self._vocabulary, bitorder="little").view(np.bool_)
        require_some(mask)
        if (token := self._in_place_of(mask)) is not None:
            mask[:] = False
            mask[token] = True
        return mask

    def _in_place_of(self, allowed: Allowed) -> int | None:
        """The plain token in place of a control token that alone is allowed and is not taken; None if there is no such
        one. Where a text is fixed, the compiler allows only the tokens of the whole text, control tokens too, though
        these are no text to it."""
        if np.count_nonzero(allowed) != 1:
            return None
        only, fixed = int(allowed.argmax()), bytes(self._walker.compute_ff_bytes())
        if not fixed or fixed.startswith(_SPECIAL) or not self._words.is_special_token(only):
            return None
        return int(self._words.greedy_tokenize(fixed.decode("utf-8", "ignore"))[0])

    def accept(self, token: int) -> bool:
        """Go on behind an allowed token; False if it would put a guarded text where any text may stand within a
        call. Raises InvalidConstraint: it is not allowed, or this takes too long."""
        if self._guards:
            new = self._words.decode_bytes([token])
            head, tail = (self._head + new)[: len(self._mark)], self._tail + new
            if self._mark.startswith(head) and any(self._is_free(tail, guard) for guard in self._guards):
                return False
            self._head, self._tail = head, tail[1 - max(map(len, self._guards)) :]
        if not self._walker.consume_token(token):
            raise _refusal(self._walker.get_error())
        return True

    def _is_free(self, tail: bytes, guard: bytes) -> bool:
        """Whether a guard ends in the last token at a place where any text may stand, and the answer may not end: where
        its last character could be another, and another could follow."""
        at = tail.find(guard)
        if at < 0 or at + len(guard) <= len(self._tail):
            return False
        upto = tail[len(self._tail) : at + len(guard)]
        return all(self._is_within(other + _OTHER) for other in (upto[:-1], upto))

    def _is_within(self, text: bytes) -> bool:
        """Whether a text may come next, and the answer may not end behind it."""
        tokens, walker = self._words.tokenize_bytes(text), self._walker.deep_copy()
        is_allowed = walker.validate_tokens(tokens) == len(tokens) and walker.consume_tokens(tokens)
        return bool(is_allowed and not walker.is_accepting())


@contextlib.contextmanager
def roomy_stack() -> Iterator[None]:
    """Threads that begin within have room for grammars: a compiler goes as deep as a grammar is nested, and the default
    of some systems is half a megabyte. Room that is not used takes no memory."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(before)


def require_some(allowed: Allowed) -> None:
    """Raises InvalidConstraint: no token may come next."""
    if not allowed.any():
        raise _refusal("no token of this model's vocabulary goes on with it")


_Parts = Sequence[tuple[str, Schema]]


def _grammar_of(form: AnswerForm, marks: Marks, words: LLTokenizer) -> tuple[str, tuple[bytes, ...], _Parts]:
    """The grammar of an answer, the guards of its calls, and the schemas in it, each with its place."""
    called = form.called()
    answer, parts = (None, ()) if form.constraint is None else _source_of(form.constraint)
    if answer is not None and not called:
        return json.dumps({"grammars": [answer]}), (), parts
    mark = marks.call[0]

    def literal(text: str) -> str:
        return _literal(words, text)

    free = _free(marks, literal)
    if not called:
        return f"start: free\n{free}", (), ()
    try:
        calls = call_rules(marks, called, literal, form.loose())
    except NotForcible as error:
        raise _refusal(f"this model cannot be held to calls of its tools: {error}") from None
    if (length := len(calls.rules)) > MAX_SCHEMA_CHARS:
        raise _refusal(f"the tools have {length} characters as a grammar, and at most {MAX_SCHEMA_CHARS} are compiled")
    call = f"call_whole: {literal(mark)} {calls.body}\n{calls.rules}"
    guards, parts = tuple(guard.encode() for guard in calls.guards), (*parts, *calls.parts)
    if form.choice.mode == "required":
        return f"start: call_whole\n{call}", guards, parts
    if answer is not None:
        whole = {"name": "whole", "lark_grammar": f"start: @answer | call_whole\n{call}"}
        return json.dumps({"grammars": [whole, answer]}), guards, parts
    mixed = f"{free}\n{_mixed(mark, literal, calls)}"
    if marks.call[1]:
        return f"start: call_begun* free\n{mixed}", guards, parts
    # No mark ends a call, so no text is told from it.
    return (
        f"start: free | call_begun call_whole*\n{mixed}\ncall_whole: {literal(mark)} {calls.body}",
        guards,
        parts,
    )


def _free(marks: Marks, literal: Literal) -> str:
    """The rules of free text: any but the mark of a call. Marks that no channel shows may stand in it: where they are
    control tokens no text has them, so they are named."""
    hidden = [each for each in map(literal, marks.scaffold) if each.startswith("<[")]
    more = f" (({' | '.join(hidden)}) CALL_FREE)*" if hidden else ""
    return f"free: CALL_FREE{more}\nCALL_FREE: {text_without(marks.call[0])}"


def _mixed(mark: str, literal: Literal, calls: CallRules) -> str:
    """The rules of calls in free text."""
    first, *rest = _PIECE.findall(literal(mark))
    call = f"call_begun: call_free {' '.join(rest)} {calls.body}\n{calls.rules}"
    opens = f"call_free: free {first}" if first.startswith("<[") else f"call_free[suffix={first}]: CALL_FREE"
    return f"{opens}\n{call}"


def _source_of(constraint: Constraint) -> tuple[dict[str, Any], _Parts]:
    """A constraint as a grammar of the name `answer`, and the schemas in it. Raises InvalidConstraint."""
    from llguidance import LLMatcher

    if constraint.lark is not None:
        try:
            require_light_grammar(constraint.lark)
        except NotForcible as error:
            raise _refusal(str(error)) from None
        return {"name": "answer", "lark_grammar": constraint.lark}, ()
    if constraint.regex is not None:
        document = json.loads(LLMatcher.grammar_from_regex(constraint.regex))
        return {**document["grammars"][0], "name": "answer"}, ()
    try:
        schema = json.loads(constraint.json_schema or "")
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the schema is not JSON: {error}") from None
    rules = Rules(quoted, "answer", None, is_closed=False)
    try:
        with rules.at("the schema"):
            rules.begin(binding(schema))
            start = rules.json(rules.root)
    except NotForcible as error:
        raise _refusal(str(error)) from None
    return {"name": "answer", "lark_grammar": f"start: {start}\n{rules.text()}"}, rules.parts


def _fault_in(words: LLTokenizer, schema: Schema, root: Schema, search: _Search) -> Steps[list[str] | None]:
    """Where in a schema something cannot be compiled, from without, and why; None if it can, or no time is left."""
    whole = {**with_definitions(schema, root), "x-guidance": {**JSON_FORM}}
    if search.is_over:
        return None
    yield
    try:
        with search.counted():
            _compiled(words, f"start: answer\nanswer: %json {json.dumps(whole)}")
    except InvalidConstraint as error:
        reason = error.reason.rpartition("failed to compile JSON schema: ")[2]
    else:
        return None
    for place, part in parts_of(schema):
        if (path := (yield from _fault_in(words, part, root, search))) is not None:
            return [place, *path]
    return [reason]


def _literal(words: LLTokenizer, text: str) -> str:
    """A text as pieces of a rule: its special tokens by their ids, the rest as strings."""
    pieces: list[str] = []
    plain: list[int] = []
    for token in (*words.tokenize_str(text, parse_special=True), None):
        if token is not None and not words.is_special_token(token):
            plain.append(token)
            continue
        if plain:
            pieces.append(quoted(words.decode_str(plain)))
            plain = []
        if token is not None:
            pieces.append(f"<[{token}]>")
    return " ".join(pieces)


def _compiled(words: LLTokenizer, grammar: str) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        max_items_in_row=_STEP_ITEMS,
        max_lexer_states=_MOST_LEXER_STATES,
        max_grammar_size=_MOST_SYMBOLS,
        verbose_errors=False,
    )
    matcher = LLMatcher(words, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        raise _refusal(matcher.get_error())
    return matcher


def _refusal(reason: str) -> InvalidConstraint:
    reason = _LISTING.split(reason)[0]
    sentence = " ".join(reason.split())[:_MOST_REASON_CHARS].rstrip(".")
    return InvalidConstraint(f"The answer cannot be held to what was asked: {sentence}.", reason=sentence)
