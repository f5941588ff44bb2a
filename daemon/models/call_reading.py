"""Reads the calls of tools that a model wrote: one reader for each form of mlx-lm's parsers.

Those parsers search a text for what they know and leave out the rest, so a call may lose an argument, or a text its
blanks. A reader here accounts for each character, or there is no call. Where a form writes two values alike, the tool's
schema says which is meant.
"""

from __future__ import annotations

import ast
import io
import json
import math
import re
import tokenize
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from ..api.limits import MAX_JSON_DEPTH
from . import call_quotes, call_tags
from .call_quotes import Quote
from .call_tags import Tags
from .marks import Marks
from .schemas import kind_of, kinds_of, of_property, texts_of

Schema = Mapping[str, Any]
Call = Mapping[str, Any]
"""name, arguments, and perhaps the id that the model gave it."""

INTEGERS: Final = range(-(2**63), 2**64)
"""Those that each transport carries."""


class NoCall(ValueError):
    """A text is no call in a form, or it is not clear which one."""


def read_calls(marks: Marks, body: str, tools: Sequence[Mapping[str, Any]], *, is_ended: bool) -> list[Call]:
    """The calls between two marks. is_ended: whether the second mark stands there; if not, the answer ended. Raises any
    error: it is no call."""
    form = _form_of(marks.parser, body)
    if form is None:
        calls = _read_by_parser(marks, body, tools, is_ended=is_ended)
    elif not is_ended and marks.call[1] and not form.closes_itself:
        raise NoCall("it may have had more arguments")
    else:
        calls = form.read(body, {tool["name"]: tool.get("parameters") or {} for tool in tools})
    if not calls:
        raise NoCall("there is none in it")
    return calls


def require_carried(value: object, depth: int = 0) -> None:
    """Refuse arguments that are not JSON, or that some transport cannot carry. Raises ValueError: they are nested too
    deep, or have an integer of more than 64 bits, a number beyond floats, or half a pair of surrogates."""
    if depth > MAX_JSON_DEPTH:
        raise NoCall(f"it is nested more than {MAX_JSON_DEPTH} deep")
    if isinstance(value, str):
        value.encode()
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NoCall("a key is no text")
            key.encode()
            require_carried(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            require_carried(item, depth + 1)
    elif isinstance(value, int) and value not in INTEGERS:
        raise NoCall("an integer has more than 64 bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise NoCall("a number is beyond floats")
    elif not kind_of(value):
        raise NoCall("a value is no JSON")


def _read_by_parser(marks: Marks, body: str, tools: Sequence[Mapping[str, Any]], *, is_ended: bool) -> list[Call]:
    """As mlx-lm's parser reads it, for a form that is not known here."""
    offered = [{"type": "function", "function": dict(tool)} for tool in tools]
    try:
        calls = marks.parse(body.strip(), offered)
    except Exception:  # noqa: BLE001 - a parser may raise any error for what a model writes
        calls = marks.parse(marks.call[0] + body + marks.call[1] * is_ended, offered)
    return calls if isinstance(calls, list) else [calls]


# --- where a call ends


class CallEnd:
    """Finds the mark that ends a call: the first that stands in no argument. Each character is looked at once, though
    the call grows while it is looked at."""

    def __init__(self, marks: Marks) -> None:
        self._parser, self._mark = marks.parser, marks.call[1]
        self._quotes: tuple[Quote, ...] = ()
        self._openers: re.Pattern[str] | None = None  # None until a mark has come
        self._quote: Quote | None = None
        self._at = 0
        self._seen = 0  # no mark before it ends the call

    def find(self, text: str) -> int:
        """Where the mark begins in what stands behind the first mark; -1 if it has not come. Each text begins with the
        last."""
        while self._mark and (end := text.find(self._mark, self._seen)) >= 0:
            if not self._is_quoted(text, end):
                return end
            self._seen = end + len(self._mark)
        self._seen = max(self._seen, len(text) - len(self._mark) + 1)
        return -1

    def _is_quoted(self, text: str, end: int) -> bool:
        openers = self._openers = self._openers or self._openers_of(text)
        while True:
            if self._quote is None:
                opened = openers.search(text, self._at, end)
                if opened is None:
                    return False
                assert opened.lastindex is not None
                self._quote, self._at = self._quotes[opened.lastindex - 1], opened.end()
            self._at, is_closed = self._quote.end_in(text, self._at, end)
            if not is_closed:
                return self._quote.hides
            self._quote = None

    def _openers_of(self, text: str) -> re.Pattern[str]:
        form = _form_of(self._parser, text)
        self._quotes = form.quotes if form is not None else ()
        return re.compile("|".join(f"({each.opens})" for each in self._quotes) or "(?!)")


# --- values


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise NoCall("a key stands twice")
    return values


def _refused(constant: str) -> None:
    raise NoCall(f"{constant} is no JSON")


_JSON: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refused)
_LENIENT: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refused, strict=False)
"""Between tags, where line feeds stand as they are."""

_BLANKS: Final = re.compile(r"\s*")


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """A JSON value, and where what follows its blanks begins."""
    value, at = _JSON.raw_decode(text, at)
    return value, _skip(text, at)


def _skip(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]  # it matches no text, too


@dataclass(frozen=True, slots=True)
class _Allowed:
    """What a schema allows. kinds: of values. texts: None for any."""

    kinds: frozenset[str]
    texts: frozenset[str] | None

    @classmethod
    def of(cls, schema: Any, root: Schema) -> _Allowed:
        """What a part of a schema allows. The texts count where it allows other values, too."""
        kinds = kinds_of(schema, root)
        return cls(kinds, texts_of(schema, root) if kinds > {"string"} else None)


def _fitting(text: str, allowed: _Allowed, *, quoted: bool) -> Any:
    """The value that a text between tags stands for. quoted: whether a text may be JSON. Raises NoCall: it is none that
    its schema allows."""
    kinds = allowed.kinds
    try:
        value = _LENIENT.decode(text.strip())
    except ValueError:
        pass
    else:
        if _may_be_text(value, text, allowed):
            return text
        if quoted or not isinstance(value, str):
            if kind_of(value) in kinds:
                return value
            if isinstance(value, int | float) and not isinstance(value, bool) and kinds & {"integer", "number"}:
                return value if isinstance(value, int) else _whole(text)
    if "string" in kinds:
        return text
    value = _python_value(_parsed(text))  # as some models write what is no text
    if kind_of(value) not in kinds:
        raise NoCall(f"{text!r:.80} is no value of its schema")
    return value


def _may_be_text(value: Any, text: str, allowed: _Allowed) -> bool:
    """Whether a text that reads like a number, where it is allowed, is not how that number is written: so "1.0" and a
    long id stay as they are."""
    kinds = allowed.kinds
    if "string" not in kinds or kind_of(value) not in ("integer", "number"):
        return False
    if allowed.texts is not None and text.strip() not in allowed.texts:
        return False
    is_large = isinstance(value, int) and value not in INTEGERS
    return (
        is_large
        or kind_of(value) not in kinds | ({"integer"} if "number" in kinds else set())
        or repr(value) != text.strip()
    )


def _whole(text: str) -> int:
    """The integer that a text with a point or an exponent stands for."""
    value = Decimal(text.strip())
    if not INTEGERS.start <= value < INTEGERS.stop or value != value.to_integral_value():
        raise NoCall(f"{text!r:.80} is no integer of {INTEGERS.stop.bit_length() - 1} bits")
    return int(value)


# --- the forms

Schemas = Mapping[str, Schema]
"""Of the arguments, by the tools' names."""


def _each(body: str, one: Callable[[str, int], tuple[Call, int]]) -> list[Call]:
    """The calls that stand one behind the other, at least one. one: reads the call at a place, and gives where the next
    one begins."""
    calls: list[Call] = []
    at = _skip(body, 0)
    while at < len(body) or not calls:
        call, at = one(body, at)
        calls.append(call)
    return calls


def _read_json(body: str, _: Schemas) -> list[Call]:
    document = _JSON.decode(body.strip())
    return [_call_of(each) for each in (document if isinstance(document, list) else [document])]


def _call_of(document: Any) -> Call:
    """A call that a model wrote as an object."""
    if not isinstance(document, dict) or document.keys() - {"name", "arguments", "parameters", "id", "type"}:
        raise NoCall("it has more than a name, arguments and an id")
    if document.get("type", "function") != "function" or {"arguments", "parameters"} <= document.keys():
        raise NoCall("it is no call of a function, or has two sets of arguments")
    arguments = _unwrapped(document.get("arguments", document.get("parameters")))
    own_id = {"id": document["id"]} if "id" in document else {}
    return {"name": document.get("name"), "arguments": {} if arguments in (None, "") else arguments, **own_id}


def _unwrapped(arguments: Any) -> Any:
    """Arguments that may stand as a text of JSON."""
    return _JSON.decode(arguments) if isinstance(arguments, str) and arguments else arguments


_MISTRAL_HEAD: Final = re.compile(r"(?:\[TOOL_CALLS\]\s*)?([\w.-]+)\s*\[ARGS\]\s*")


_MISTRAL_MARK: Final = re.compile(r"(?:\[TOOL_CALLS\]\s*)?(?=\[)")


def _read_mistral(body: str, _: Schemas) -> list[Call]:
    at = _skip(body, 0)
    if not body.startswith("[", at):
        return _each(body, _mistral_call)
    calls: list[Call] = []
    while at < len(body):
        call, at = _json_at(body, _matched(_MISTRAL_MARK, body, at).end())
        calls += map(_call_of, call)
    return calls


def _mistral_call(body: str, at: int) -> tuple[Call, int]:
    head = _matched(_MISTRAL_HEAD, body, at)
    arguments, at = _json_at(body, head.end())
    return {"name": head[1], "arguments": _unwrapped(arguments)}, at


_KIMI_HEAD: Final = re.compile(
    r"(<\|tool_call_begin\|>)?\s*((?:functions\.)?([\w.-]+?):\d+)\s*<\|tool_call_argument_begin\|>\s*"
)
_KIMI_TAIL: Final = re.compile(r"<\|tool_call_end\|>\s*")


def _read_kimi_k2(body: str, _: Schemas) -> list[Call]:
    return _each(body, _kimi_k2_call)


def _kimi_k2_call(body: str, at: int) -> tuple[Call, int]:
    head = _matched(_KIMI_HEAD, body, at)
    arguments, at = _json_at(body, head.end())
    if head[1]:
        at = _matched(_KIMI_TAIL, body, at).end()
    return {"name": head[3], "arguments": _unwrapped(arguments), "id": head[2]}, at


_ATTRIBUTES: Final = r'((?:\s+\w+="[^"]*")*)\s*<\|sep\|>'
_K3_CALL: Final = re.compile(r"<\|open\|>call" + _ATTRIBUTES + r"\s*")
_K3_JSON: Final = re.compile(r"<\|open\|>json" + _ATTRIBUTES + r"\s*")
_K3_ARGUMENT: Final = re.compile(r"<\|open\|>argument" + _ATTRIBUTES)
_K3_CLOSED: Final = {name: re.compile(rf"<\|close\|>{name}<\|sep\|>\s*") for name in ("call", "json")}
_K3_ARGUMENT_END: Final = "<|close|>argument<|sep|>"
_ATTRIBUTE: Final = re.compile(r'(\w+)="([^"]*)"')


def _read_kimi_k3(body: str, _: Schemas) -> list[Call]:
    return _each(body, _kimi_k3_call)


def _kimi_k3_call(body: str, at: int) -> tuple[Call, int]:
    head = _matched(_K3_CALL, body, at)
    at = head.end()
    if block := _K3_JSON.match(body, at):
        arguments, at = _json_at(body, block.end())
        at = _matched(_K3_CLOSED["json"], body, at).end()
    else:
        arguments, at = _k3_arguments(body, at)
    at = _matched(_K3_CLOSED["call"], body, at).end()
    return {"name": _attributes(head[1]).get("tool"), "arguments": _unwrapped(arguments)}, at


def _k3_arguments(body: str, at: int) -> tuple[dict[str, Any], int]:
    pairs = []
    while opened := _K3_ARGUMENT.match(body, at):
        attributes, end = _attributes(opened[1]), body.find(_K3_ARGUMENT_END, opened.end())
        text = body[opened.end() : end]
        if end < 0 or "<|open|>argument" in text:
            raise NoCall("an argument is not closed")
        value = text if attributes.get("type", "string") == "string" else _LENIENT.decode(text.strip())
        pairs.append((attributes["key"], value))
        at = _skip(body, end + len(_K3_ARGUMENT_END))
    return _once(pairs), at


def _attributes(text: str) -> dict[str, str]:
    pairs = [(key, value.replace("&quot;", '"').replace("&amp;", "&")) for key, value in _ATTRIBUTE.findall(text)]
    return _once(pairs)


def _read_pythonic(body: str, _: Schemas) -> list[Call]:
    tree = _parsed(body)
    if not isinstance(tree, ast.List):
        raise NoCall("it is no list of calls")
    source = body.strip()
    # Python takes other letters for some in a name, such as a Greek mu for the micro sign.
    changed = None if unicodedata.is_normalized("NFKC", source) else source
    return [_pythonic_call(each, changed) for each in tree.elts]


def _pythonic_call(node: ast.expr, source: str | None) -> Call:
    """source: the text of the node, if Python has other names for some in it."""
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise NoCall("it is no call with names before its arguments")
    name, keys = ast.unparse(node.func), [each.arg for each in node.keywords]
    if source is not None:
        name = ast.get_source_segment(source, node.func) or name
        keys = [(ast.get_source_segment(source, each) or "").partition("=")[0].strip() for each in node.keywords]
    values = [_joined(_python_value(_OtherNames().visit(each.value))) for each in node.keywords]
    return {"name": name, "arguments": _once(list(zip(keys, values, strict=True)))}


class _OtherNames(ast.NodeTransformer):
    """Puts values in place of names of JSON that Python does not have."""

    _values: Final = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._values[node.id]) if node.id in self._values else node


def _parsed(text: str) -> ast.expr:
    """An expression of Python. Raises NoCall: it has a comment, which no value would tell."""
    lines = io.StringIO(text.strip()).readline
    if "#" in text and any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(lines)):
        raise NoCall("a comment stands beside it")
    return ast.parse(text.strip(), mode="eval").body


def _python_value(node: ast.expr) -> Any:
    """The value of a literal of Python. Raises NoCall: a key stands twice in it."""
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            _once([(ast.literal_eval(key), None) for key in each.keys if key is not None])
    return ast.literal_eval(node)


def _joined(value: Any) -> Any:
    """A value with JSON's pairs of surrogates as the one character that each stands for."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16")
    if isinstance(value, dict):
        return _once([(_joined(key), _joined(item)) for key, item in value.items()])
    return [_joined(item) for item in value] if isinstance(value, list | tuple) else value


class _Bare:
    """Reads calls with bare keys, and texts between marks of their own."""

    def __init__(self, quote: str) -> None:
        self._text = re.compile(rf"{re.escape(quote)}((?s:.*?)){re.escape(quote)}\s*")

    def __call__(self, body: str, _: Schemas) -> list[Call]:
        return _each(body, self._call)

    def _call(self, body: str, at: int) -> tuple[Call, int]:
        head = _matched(_BARE_HEAD, body, at)
        arguments, at = self._value(body, head.end())
        return {"name": head[1], "arguments": arguments}, at

    def _value(self, body: str, at: int) -> tuple[Any, int]:
        if text := self._text.match(body, at):
            return text[1], text.end()
        if body.startswith("{", at):
            pairs, at = self._items(body, at, "}", self._pair)
            return _once(pairs), at
        if body.startswith("[", at):
            return self._items(body, at, "]", self._value)
        word = _matched(_BARE_WORD, body, at)
        return _JSON.decode(word[1]), word.end()

    def _pair(self, body: str, at: int) -> tuple[tuple[str, Any], int]:
        if key := self._text.match(body, at):
            name, colon = key[1], key.end()
        else:
            bare = _matched(_BARE_KEY, body, at)
            name, colon = bare[1], bare.end()
        if not body.startswith(":", colon):
            raise NoCall("a key has no colon")
        value, at = self._value(body, _skip(body, colon + 1))
        return (name, value), at

    def _items(self, body: str, at: int, end: str, one: Callable[[str, int], tuple[Any, int]]) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = _skip(body, at + 1)
        while not body.startswith(end, at):
            if items:
                if not body.startswith(",", at):
                    raise NoCall("a comma is missing")
                at = _skip(body, at + 1)
            item, at = one(body, at)
            items.append(item)
        return items, _skip(body, at + 1)


_BARE_HEAD: Final = re.compile(r"call:\s*([\w.-]+)(?=\{)")
_BARE_KEY: Final = re.compile(r"([^\s:,{}\[\]<>\"]+)\s*")
_BARE_WORD: Final = re.compile(r"([-+.\w]+)\s*")


class _Tagged:
    """Reads calls with tags around their arguments."""

    def __init__(self, tags: Tags) -> None:
        self._tags = tags
        self._head, self._opens, self._tail = map(_pattern, (tags.head, tags.opens, tags.tail))
        self._closes = re.compile(re.escape(tags.closes) + r"\s*")

    def __call__(self, body: str, schemas: Schemas) -> list[Call]:
        return _each(body, partial(self._call, schemas))

    def _call(self, schemas: Schemas, body: str, at: int) -> tuple[Call, int]:
        head = _matched(self._head, body, at)
        arguments, at = self._arguments(body, _skip(body, head.end()), schemas.get(head["name"], {}))
        at = _skip(body, _matched(self._tail, body, at).end())
        if not self._tags.tail and at < len(body):
            raise NoCall("more stands behind its arguments")
        return {"name": head["name"], "arguments": arguments}, at

    def _arguments(self, body: str, at: int, schema: Schema) -> tuple[dict[str, Any], int]:
        pairs = []
        while opened := self._opens.match(body, at):
            key = opened["key"].strip()
            if not key:
                raise NoCall("an argument has no name")
            own = of_property(schema, key, schema)
            value, at = self._value(body, opened.end(), _Allowed.of(own, schema))
            pairs.append((key, value))
        return _once(pairs), at

    def _value(self, body: str, at: int, allowed: _Allowed) -> tuple[Any, int]:
        tags, is_text = self._tags, allowed.kinds == {"string"}
        if tags.cdata and (section := _CDATA.match(body, at)):
            end = body.find(_CDATA_END, section.end())
            if end < 0:
                raise NoCall("a section is not closed")
            text, end = body[section.end() : end], _skip(body, end + len(_CDATA_END))
        elif (not is_text or tags.quoted == "always") and (value_and_end := self._json(body, at, allowed)):
            return value_and_end
        else:
            end = body.find(tags.closes, at)
            text = body[at : max(at, end)].removeprefix(tags.before).removesuffix(tags.before)
            if tags.begins in text:
                raise NoCall("an argument is not closed")
        closed = _matched(self._closes, body, end)
        return (text if is_text else _fitting(text, allowed, quoted=tags.quoted != "never")), closed.end()

    def _json(self, body: str, at: int, allowed: _Allowed) -> tuple[Any, int] | None:
        """A value as JSON up to the closing tag; None if that stands elsewhere, or another kind is meant."""
        try:
            value, end = _json_at(body, _skip(body, at))
        except ValueError:
            return None
        closed = self._closes.match(body, end)
        may_be = allowed.kinds - ({"string"} if self._tags.quoted == "never" else set())
        if closed is None or kind_of(value) not in may_be or _may_be_text(value, body[at:end], allowed):
            return None
        return value, closed.end()


_CDATA: Final = re.compile(r"\s*<!\[CDATA\[")
_CDATA_END: Final = "]]>"


def _pattern(template: str) -> re.Pattern[str]:
    """The expression of a template of tags, with blanks between them and any quotes around a name. It never goes back
    over a name or key, so that a text is read in time that its length bounds."""
    escaped = re.escape(template.strip()).replace("><", r">\s*<").replace('"', "[\"']?")
    named = escaped.replace("NAME", r"(?P<name>[^\s<>\"']++)").replace("KEY", r"(?P<key>[^<>\"']++)")
    return re.compile(named)


def _matched(pattern: re.Pattern[str], body: str, at: int) -> re.Match[str]:
    if at < 0 or (match := pattern.match(body, at)) is None:
        raise NoCall(f"the form has no place for {body[at:]!r:.80}")
    return match


@dataclass(frozen=True, slots=True)
class _Form:
    """A form of calls. quotes: the pieces that are read as one. closes_itself: whether a call without its end mark is
    known to be whole. or_json: whether a call that begins as an object of JSON is one."""

    read: Callable[[str, Schemas], list[Call]]
    quotes: tuple[Quote, ...]
    closes_itself: bool = True
    or_json: bool = False


def _bare(quote: str) -> _Form:
    return _Form(_Bare(quote), (Quote(re.escape(quote), quote),))


def _tagged(tags: Tags, *quotes: Quote) -> _Form:
    values = Quote(re.escape(tags.begins), tags.closes)
    or_json = tags.quoted == "mixed"
    return _Form(_Tagged(tags), (*quotes, values), closes_itself=bool(tags.tail), or_json=or_json)


def _form_of(parser: str, body: str) -> _Form | None:
    """The form in which a call is both read and told from what follows it; None if it is not known. body: at least its
    first character that is no blank."""
    form = _FORMS.get(parser)
    return _WRITTEN_JSON if form is not None and form.or_json and body.lstrip().startswith("{") else form


_MUSE_TEXT: Final = Quote(re.escape(call_tags.MUSE.begins) + r'[^<>]*>\s*+(?!["\[{])', call_tags.MUSE.closes)

_WRITTEN_JSON: Final = _Form(_read_json, call_quotes.JSON)

# By the last part of the parser's module; `marks` is our own form, for models without one.
_FORMS: Final[Mapping[str, _Form]] = MappingProxyType(
    {
        "function_gemma": _bare(call_tags.FUNCTION_GEMMA_QUOTE),
        "gemma4": _bare(call_tags.GEMMA_4_QUOTE),
        "glm47": _tagged(call_tags.GLM),
        "json_tools": _WRITTEN_JSON,
        "kimi_k2": _Form(_read_kimi_k2, call_quotes.JSON),
        "kimi_k3": _Form(_read_kimi_k3, (Quote(r"<\|open\|>argument", _K3_ARGUMENT_END), *call_quotes.JSON)),
        "longcat": _tagged(call_tags.LONGCAT),
        "marks": _WRITTEN_JSON,
        "minicpm5": _tagged(call_tags.MINICPM, Quote(rf"<param name=[^<>]*>{_CDATA.pattern}", _CDATA_END)),
        "minimax_m2": _tagged(call_tags.MINIMAX),
        "mistral": _Form(_read_mistral, ()),
        "muse_spark": _Form(_Tagged(call_tags.MUSE), (_MUSE_TEXT, *call_quotes.JSON)),
        "pythonic": _Form(_read_pythonic, call_quotes.PYTHON),
        "qwen3_coder": _tagged(call_tags.QWEN_CODER),
    }
)
