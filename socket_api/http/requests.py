"""Reading a request: its body within a bound, the fields of a foreign API with their own names in refusals, and what a
client holds its answer to.

Bodies (threats 41 to 43): a decoded body takes its text, of at most MAX_BODY_BYTES (four times that where each text has
a character beyond the first 65,536 of Unicode), and some 100 bytes for each of at most MAX_BODY_VALUES values. All
bodies together are bounded in bytes, too. A long body is decoded and read on a thread: the loop and the engine get
their turn every few milliseconds, for no call there is long.

Fields: one that is not known has no effect, and is named in the answer's `x-torpor-ignored`.

Marks for a cache never change a token (`cache_control` of Anthropic's API and of gateways, `prompt_cache_breakpoint` of
OpenAI's). They are the places to which a client will come back, and for how long. A model that cannot go back to every
token keeps its state there, and the session stays awake for the longest time given.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain, islice
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, WithJsonSchema
from starlette.requests import Request
from starlette.types import Receive

from ...daemon.api.limits import MAX_CALL_ID_CHARS, MAX_CHECKPOINTS, MAX_KEEP_AWAKE_S, MAX_STOPS
from ...daemon.api.reading import Stop
from ...daemon.tasks.cancellation import to_the_end
from ..errors import HttpRefused, InvalidRequest
from ..server.budget import Held, RequestBudget
from ..wire.checking import checked
from .connections import MAX_BODY_BYTES, HttpLimits
from .json_reading import object_of


class ClientLeft(Exception):
    """The client is gone, so there is nobody to answer. Never leaves the server."""


async def has_left(receive: Receive) -> None:
    """Wait until the client of a request leaves; its body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def in_path(request: Request, name: str) -> str:
    """What the path of a request names. Its escapes are read here alone: paths are matched with them, so that a name
    may have a slash (`app.py`)."""
    return unquote(request.path_params[name])


# --- bodies


T = TypeVar("T")
Fill = Callable[[Request, dict[str, Any], int], Awaitable[tuple[dict[str, Any], int]]]
"""Puts in what the body of a request only names. It gets the bytes that this may take, and gives those that it does."""

_SHORT_BYTES: Final = 16 * 1024
"""Of a body that is decoded and read on the loop: some milliseconds, whatever it says."""

_LONG_AT_ONCE: Final = 3
"""Long bodies that are decoded at a time: for each of them the loop may wait some milliseconds for its turn."""


class Bodies:
    """Reads the bodies of all requests. One holds its bytes of the common bound while it is read; until it is answered,
    as many as what was made of it takes."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._budget = RequestBudget(limits.max_bodies_bytes, largest_bytes=MAX_BODY_BYTES)
        self._decoding = asyncio.Semaphore(_LONG_AT_ONCE)

    @contextlib.asynccontextmanager
    async def read(self, request: Request, fill: Fill | None = None) -> AsyncIterator[dict[str, Any]]:
        """The JSON object in the body of a request; an empty one for an empty body.

        Raises:
            HttpRefused: it is too large, comes too slowly, or is encoded.
            InvalidRequest: it is no JSON object, or nested too deep.
            TorporError: as `fill`.
        """
        async with self._held() as held:
            yield (await self._filled(request, held, fill))[0]

    @contextlib.asynccontextmanager
    async def whole(self, request: Request) -> AsyncIterator[bytes]:
        """The bytes of the body as they came. Raises HttpRefused, ClientLeft."""
        async with self._held() as held:
            raw = await self._whole(request, held)
            self._budget.complete(held)
            yield raw

    @contextlib.asynccontextmanager
    async def made(
        self, request: Request, make: Callable[[dict[str, Any]], T], fill: Fill | None = None
    ) -> AsyncIterator[T]:
        """As `read`, what is made of the body. The body goes: fields without effect take no room from others while the
        answer is written. Raises as `read` and `make`."""
        async with self._held() as held:
            value, size_bytes = await self._made(await self._filled(request, held, fill), make)
            self._budget.give_back(held, but_bytes=size_bytes)
            yield value

    async def _made(self, body: tuple[dict[str, Any], int], make: Callable[[dict[str, Any]], T]) -> tuple[T, int]:
        values, size_bytes = body
        return await self._worked(size_bytes, lambda: with_memory(make(values)))

    async def _filled(self, request: Request, held: Held, fill: Fill | None) -> tuple[dict[str, Any], int]:
        """The body with what it only names, and the bytes of both."""
        raw = await self._whole(request, held)
        size_bytes = len(raw)
        values = await self._worked(size_bytes, lambda: object_of(raw))
        if fill is not None:
            values, more_bytes = await fill(request, values, MAX_BODY_BYTES - size_bytes)
            await self._take(held, size_bytes, more_bytes)
            size_bytes += more_bytes
        self._budget.complete(held)
        return values, size_bytes

    async def _worked(self, size_bytes: int, work: Callable[[], T]) -> T:
        """Work over a body of a size."""
        if size_bytes <= _SHORT_BYTES:
            return work()
        async with self._decoding:
            return await to_the_end(asyncio.to_thread(work))

    async def _take(self, held: Held, had_bytes: int, more_bytes: int) -> None:
        """Take room for more of a body that has so many bytes."""
        counted = min(more_bytes, had_bytes + more_bytes - self._limits.free_body_bytes)
        if counted > 0:
            await self._budget.take(held, counted)

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[Held]:
        held = Held()
        try:
            yield held
        finally:
            self._budget.give_back(held)

    async def _whole(self, request: Request, held: Held) -> bytes:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HttpRefused("The body has a Content-Encoding. Send it as plain JSON.", status=415)
        if int_of(request.headers.get("content-length")) > MAX_BODY_BYTES:
            raise _too_large()
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                raw = await self._receive(request, held)
        except TimeoutError:
            raise HttpRefused(
                f"The body was not complete after {self._limits.body_timeout_s:g} s.", status=408
            ) from None
        return raw

    async def _receive(self, request: Request, held: Held) -> bytes:
        pieces, size_bytes = [], 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            piece = message.get("body", b"")
            if size_bytes + len(piece) > MAX_BODY_BYTES:
                raise _too_large()
            pieces.append(piece)
            await self._take(held, size_bytes, len(piece))
            size_bytes += len(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)


def with_memory(value: T) -> tuple[T, int]:
    """A value, and the bytes that it takes."""
    return value, memory_of(value)


def memory_of(value: object) -> int:
    """The bytes that the texts, lists and numbers in a value take, about; in records, those of their fields."""
    size_bytes, values = 0, [value]
    while values:
        each = values.pop()
        size_bytes += sys.getsizeof(each)
        if is_dataclass(each):
            values += [getattr(each, field.name) for field in fields(each)]
        elif isinstance(each, Mapping):
            values += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            values += each
    return size_bytes


def int_of(header: str | None) -> int:
    """The number in a header; 0 for another text."""
    return int(header) if header is not None and re.fullmatch(r"[0-9]{1,20}", header) else 0


def _too_large() -> HttpRefused:
    return HttpRefused(f"The body has more than {MAX_BODY_BYTES // 1024**2} MiB. Send less at a time.", status=413)


# --- fields


IGNORED_HEADER: Final = "x-torpor-ignored"
MAX_IGNORED_TOLD: Final = 32
"""Names in one header."""

MAX_IGNORED_KEPT: Final = 256
"""Unknown fields of a request."""

_ITEMS_AT_ONCE: Final = 256
"""Of a list that is checked in one call: a few milliseconds."""

_SAFE: Final = re.compile(r"[A-Za-z0-9_.:-]{1,64}")

B = TypeVar("B", bound="Body")


class Body(BaseModel):
    """Base of each object of a request. It keeps what it does not know."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def read_fields(kind: type[B], raw: Mapping[str, Any]) -> B:
    """Check a request. What is long is checked in pieces: no other thread goes on while one is checked. Raises
    InvalidRequest: with the first field at fault."""
    values = {name: raw[name] for name in kind.model_fields.keys() & raw.keys()}
    ignored = dict(islice(((name, value) for name, value in raw.items() if name not in values), MAX_IGNORED_KEPT))
    long = {name: value for name, value in values.items() if type(value) is list and len(value) > _ITEMS_AT_ONCE}
    lists = {name: _read_list(name, reader, long[name]) for name, reader in _lists(kind).items() if name in long}
    short = {name: value[-1:] if name in lists else value for name, value in values.items()}
    whole: TypeAdapter[B] = _reader(kind)
    return checked("request", whole.validate_python, {**short, **ignored}).model_copy(update=lists)


def _read_list(name: str, reader: TypeAdapter[list[Any]], items: list[Any]) -> list[Any]:
    values: list[Any] = []
    for start in range(0, len(items), _ITEMS_AT_ONCE):
        piece = items[start : start + _ITEMS_AT_ONCE]
        values += checked("request", reader.validate_python, piece, within=(name, start))
    return values


@cache
def _lists(kind: type[Body]) -> dict[str, TypeAdapter[list[Any]]]:
    """Readers of the fields of a request that are lists of any length."""
    readers = {}
    for name, declared in kind.model_fields.items():
        annotation = declared.annotation
        for each in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,):
            of, *marks = get_args(each) if get_origin(each) is Annotated else (each, *declared.metadata)
            if get_origin(of) is list and not any(getattr(mark, "max_length", None) for mark in _told_by(marks)):
                readers[name] = TypeAdapter(of, config=ConfigDict(strict=True))
    return readers


def _told_by(marks: Iterable[Any]) -> Iterator[Any]:
    return chain.from_iterable(getattr(mark, "metadata", (mark,)) for mark in marks)


@cache
def _reader(kind: type[Body]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def fault_at(field: str, problem: str) -> InvalidRequest:
    """The refusal of a field. problem: a sentence without its full stop."""
    return InvalidRequest(f"{field}: {problem}.", field=field)


def ignored_of(body: Body, also: Iterable[str] = ()) -> str:
    """The names of given fields that have no effect, for a header. also: known fields without one."""
    names = [name for name, value in (body.model_extra or {}).items() if value is not None]
    return ", ".join(told_names((*names, *also)))


def told_names(names: Iterable[str]) -> list[str]:
    """Those of some names that a header can tell, and not too many."""
    return [name for name in names if _SAFE.fullmatch(name)][:MAX_IGNORED_TOLD]


def _is_content(content: object) -> object:
    if content is None or isinstance(content, str | list):
        return content
    raise ValueError("it is neither a text nor a list of parts; give one of them")


Content = Annotated[
    Any,
    BeforeValidator(_is_content),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
"""A text, or a list of parts, for `Words`."""

_TEXT_KINDS: Final = ("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text")


class Words:
    """Reads contents as text. A line stands for a part that is none, so that a dialogue can go on behind a picture;
    only the newest message is refused, for its client can still give another. left_out: the kinds of such parts."""

    def __init__(self) -> None:
        self.left_out: list[str] = []

    def of(self, content: Any, field: str = "", *, is_newest: bool = False) -> str:
        """The text of a content. field: its name, for the refusal of one that is the newest. Raises InvalidRequest."""
        if content is None or isinstance(content, str):
            return content or ""
        texts = []
        for at, part in enumerate(content if isinstance(content, list) else [content]):
            text = words_in(part)
            if text is None and is_newest:
                kind = _kind_of(part)
                raise fault_at(field, f"part {at} is {kind}; this model reads text alone")
            texts.append(self.line_for(part) if text is None else text)
        return "\n".join(texts)

    def line_for(self, part: object) -> str:
        """What stands for a part that is no text."""
        kind = _kind_of(part)
        self.left_out.append(kind)
        return f"[{kind} left out: this model reads text alone]"


def words_in(part: object) -> str | None:
    """The text of a part; of a document or a result of a search that is text, its words. None if it is none."""
    if not isinstance(part, Mapping):
        return None
    kind, source = part.get("type", "text"), part.get("source")
    text: object = part.get("text", part.get("refusal")) if kind in _TEXT_KINDS else None
    if kind == "document" and isinstance(source, Mapping):
        text = source.get({"text": "data", "content": "content"}.get(str(source.get("type")), ""))
    elif kind == "search_result":
        text = part.get("content")
    if isinstance(text, list):
        words = [words_in(each) for each in text]
        return None if None in words else "\n".join(each for each in words if each)
    return text if isinstance(text, str) else None


def _kind_of(part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) and _SAFE.fullmatch(kind) else "something"


def call_id_of(call_id: str | None) -> str:
    """The id of a call as a verb takes it: some gateways keep whole thoughts in it, and such a one is its digest."""
    if call_id is None or len(call_id) <= MAX_CALL_ID_CHARS:
        return call_id or ""
    return hashlib.sha256(call_id.encode()).hexdigest()


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(_listed),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Texts that end an answer; a single one may stand alone."""


# --- what an answer is held to


_ANY_OBJECT: Final = {"json_schema": '{"type": "object"}'}
_MODES: Final = {"auto": "auto", "any": "required", "required": "required", "none": "none"}


def constraint_of(form: Mapping[str, Any] | None, field: str) -> Mapping[str, str] | None:
    """The constraint of a format of answers. field: its name, for a refusal. Raises InvalidRequest: its type is not
    known, or its schema is missing."""
    kind = form.get("type") if form is not None else "text"
    if form is None or kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    if kind != "json_schema":
        raise fault_at(f"{field}.type", "give text, json_object or json_schema")
    outer = form.get("json_schema")
    schema = outer.get("schema") if isinstance(outer, dict) else form.get("schema")
    if not isinstance(schema, dict):
        raise fault_at(field, "it has no schema; give one, a JSON object")
    return {"json_schema": json.dumps(schema, ensure_ascii=False)}


def choice_of(choice: object, *, strict: Sequence[str], parallel: bool | None = None) -> Mapping[str, Any] | None:
    """The choice of tools of a `tool_choice`. strict: the names of the tools whose calls are to match their schemas.
    parallel: False if an answer may have one call alone. Raises InvalidRequest: it has no such form."""
    rule = _choice_of(choice, strict=strict)
    if parallel is not False or (rule or {}).get("mode", "auto") != "auto":  # elsewhere there is one, or none
        return rule
    return {"mode": "auto", **(rule or {}), "parallel": False}


def _choice_of(choice: object, *, strict: Sequence[str]) -> Mapping[str, Any] | None:
    if isinstance(choice, str) or choice is None:
        return _of_mode(choice or "auto", (), strict=strict)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(kind, str):
        raise _unknown()
    if kind in _MODES:
        return _of_mode(kind, (), strict=strict)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if not isinstance(tools, list) or allowed.get("mode") not in ("auto", "required"):
            raise _unknown()
        names = tuple(_name_in(each) for each in tools)
        return _of_mode(allowed["mode"], names if allowed["mode"] == "required" else (), strict=strict)
    return _of_mode("required", (_name_in(choice),), strict=strict)


def has_no_effect(choice: object) -> bool:
    """Whether a choice allows some tools only, and leaves it to the model: then it may call the others, too."""
    allowed = choice.get("allowed_tools", choice) if isinstance(choice, dict) else None
    return isinstance(allowed, dict) and allowed.get("mode") == "auto"


def _of_mode(mode: str, names: tuple[str, ...], *, strict: Sequence[str]) -> Mapping[str, Any] | None:
    if mode not in _MODES:
        raise _unknown()
    rule: dict[str, Any] = {"mode": _MODES[mode], "names": names}
    if rule["mode"] == "auto":
        return {"mode": "auto", "strict": tuple(strict)} if strict else None
    return rule


def _name_in(choice: object) -> str:
    """The name of a tool, on its own or within its function."""
    inner = choice.get("function", choice.get("custom", choice)) if isinstance(choice, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(name, str) or not name:
        raise fault_at("tool_choice", "it names no tool; give the name of one")
    return name


def _unknown() -> Exception:
    return fault_at("tool_choice", "give auto, none, required, or the name of a tool, in the form of this API")


# --- marks for a cache


_NAMES: Final = ("cache_control", "prompt_cache_breakpoint")
_TIME: Final = re.compile(r"([0-9]{1,6})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


class Marks:
    """The marks of one request, in the order of its messages. are_given: whether there are any."""

    def __init__(self) -> None:
        self.are_given = False
        self.keep_awake_s: float | None = None
        self._counts: list[int] = []

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Behind how many messages the newest of them stand."""
        return tuple(self._counts[-MAX_CHECKPOINTS:])

    def add(self, mark: object, count: int) -> None:
        """Add a mark behind so many messages; nothing, if it is null."""
        if mark is None:
            return
        self.are_given = True
        if count not in self._counts[-1:]:
            self._counts.append(count)
        self.keep(mark.get("ttl") if isinstance(mark, Mapping) else None)

    def add_of(self, parts: object, count: int) -> None:
        """Add the marks of a message's parts, as they came."""
        for part in parts if isinstance(parts, list) else ():
            for name in _NAMES:
                self.add(part.get(name) if isinstance(part, Mapping) else None, count)

    def keep(self, ttl: object) -> None:
        """Take a time over: of a mark, or of all."""
        match = _TIME.fullmatch(ttl) if isinstance(ttl, str) else None
        if match is not None:
            seconds = float(min(int(match[1]) * _SECONDS[match[2]], MAX_KEEP_AWAKE_S))
            self.keep_awake_s = max(seconds, self.keep_awake_s or 0.0)


# --- tools that take a string

CUSTOM: Final = "custom"
"""Their type for a client: what calls of them are told as begins with it."""

STRING_PARAMETERS: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
"""The schema of their arguments."""
