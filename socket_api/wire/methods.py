"""The methods of the protocol: the parameters each takes, the result it gives, and whether a client may stop it.

Owns the table `METHODS`, the one place where a method is declared for server, clients and documentation. Parameters are
strict: no unknown field, no conversion, no NaN, every length bounded (threat 48). Does not know who carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from .. import limits
from ..errors import InvalidRequest
from . import results
from .framing import Pieces, whole
from .results import MinP, RepetitionPenalty, Seed, Temperature, TokenId, TopK, TopP

_Checked = TypeVar("_Checked")

SessionText = Annotated[str, Field(min_length=1, max_length=limits.MAX_SESSION_CHARS)]
ModelName = Annotated[str, Field(min_length=1, max_length=limits.MAX_MODEL_CHARS)]
Label = Annotated[str, Field(min_length=1, max_length=limits.MAX_LABEL_CHARS)]
Tag = Annotated[str, Field(min_length=1, max_length=limits.MAX_TAG_CHARS)]
EventName = Annotated[str, Field(min_length=1, max_length=limits.MAX_EVENT_NAME_CHARS)]
Stop = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]
Text = Annotated[str, Field(min_length=1, max_length=limits.MAX_REQUEST_FRAME_BYTES)]
MaxTokens = Annotated[int, Field(ge=1, le=limits.MAX_GENERATED_TOKENS)]
Priority = Literal["normal", "background"]
Role = Literal["user", "system", "tool"]
OnDivergence = Literal["refuse", "rewind"]
Days = Annotated[float, Field(ge=0, le=limits.MAX_DAYS)]
DaysKept = Annotated[float, Field(gt=0, le=limits.MAX_DAYS)]
Count = Annotated[int, Field(ge=1, le=limits.MAX_REQUEST_ID)]
Operation = Literal["gc", "empty_quarantine", "compact", "repair", "rebuild_index", "prune", "forget", "quantise"]
Bits = Literal[8, 4]

# What an operation may be told beside `dry_run`; all of it is optional but for what `MaintainParams` asks for.
OPERATION_OPTIONS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "gc": frozenset(),
        "empty_quarantine": frozenset(),
        "compact": frozenset({"session", "cold_after_days"}),
        "repair": frozenset(),
        "rebuild_index": frozenset(),
        "prune": frozenset({"session", "keep_last", "keep_days"}),
        "forget": frozenset({"session"}),
        "quantise": frozenset({"session", "bits", "after_days"}),
    }
)


_STRICT: Final = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Params(BaseModel):
    """Base of everything that a client asks."""

    model_config = _STRICT


class SamplingFields(Params):
    """Those parameters of the sampling that a request names; the others are the session's, or the defaults of a new
    one."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    seed: Seed | None = None

    def named(self) -> dict[str, float | int]:
        return self.model_dump(exclude_none=True)


class StatusParams(Params):
    """`status` takes nothing."""


class ShutdownParams(Params):
    """Whether the daemon stops also where that loses what a session did since its last sleep."""

    force: bool = False


class CreateParams(Params):
    """A new, empty session; `system` opens its chat."""

    session: SessionText
    model: ModelName | None = None
    labels: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_LABELS)] = ()
    sampling: SamplingFields | None = None
    system: Text | None = None


class AppendParams(Params):
    """Text or token ids that the session reads; `background` gives way to what is `normal`."""

    session: SessionText
    text: Text | None = None
    tokens: Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=limits.MAX_ARRAY_ITEMS)] | None = None
    create: bool = False
    priority: Priority = "normal"

    @model_validator(mode="after")
    def _require_one_source(self) -> Self:
        if (self.text is None) == (self.tokens is None):
            raise ValueError("give either text or tokens")
        return self


class GenerateParams(Params):
    """Continue the session's text; `text` is appended first, `sampling` overrides the session's for this request."""

    session: SessionText
    max_tokens: MaxTokens | None = None
    text: Text | None = None
    sampling: SamplingFields | None = None
    stop: Annotated[tuple[Stop, ...], Field(max_length=limits.MAX_STOPS)] = ()
    prove: bool = False
    create: bool = False
    priority: Priority = "normal"


class SetParams(Params):
    """What is other in the sampling of a session from now on."""

    session: SessionText
    sampling: SamplingFields

    @model_validator(mode="after")
    def _require_one_field(self) -> Self:
        if not self.sampling.named():
            raise ValueError("name at least one of the sampling's parameters")
        return self


class Message(Params):
    """A message of a transcript."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, Field(max_length=limits.MAX_REQUEST_FRAME_BYTES)]


class ChatParams(Params):
    """One turn of a chat; the daemon renders the template. `message` is what is new, `messages` the whole transcript up
    to what is to be answered; the daemon finds out what is new of it."""

    session: SessionText
    message: Text | None = None
    max_tokens: MaxTokens | None = None
    role: Role = "user"
    messages: Annotated[tuple[Message, ...], Field(min_length=1, max_length=limits.MAX_MESSAGES)] | None = None
    on_divergence: OnDivergence = "refuse"
    sampling: SamplingFields | None = None
    stop: Annotated[tuple[Stop, ...], Field(max_length=limits.MAX_STOPS)] = ()
    prove: bool = False
    create: bool = False
    priority: Priority = "normal"

    @model_validator(mode="after")
    def _require_one_source(self) -> Self:
        if (self.message is None) == (self.messages is None):
            raise ValueError("give either message or messages")
        if self.messages is None and self.on_divergence != "refuse":
            raise ValueError("on_divergence is for messages; one new message cannot diverge")
        if self.messages is not None and self.role != "user":
            raise ValueError("role is that of message; messages have theirs")
        if self.messages is not None and self.messages[-1].role == "assistant":
            raise ValueError("the last of messages is the assistant's, so there is nothing to answer")
        return self


class SessionParams(Params):
    """A session and nothing else: `sleep`, `show`, `why`, `delete`."""

    session: SessionText


class ModelParams(Params):
    """A model by its name: `load_model`, `unload_model`."""

    model: ModelName


class ForkParams(Params):
    """A session, or a version of it behind an `@`, the `name` of the new one, and with how many tokens if not all."""

    session: SessionText
    name: SessionText
    at_token: Annotated[int, Field(ge=1, le=limits.MAX_REQUEST_ID)] | None = None
    labels: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_LABELS)] | None = None


class FoldParams(Params):
    """A session, the `name` of the smaller one that goes on from it, a summary or in how many tokens the model writes
    one, and how many of the last tokens go along as they are."""

    session: SessionText
    name: SessionText
    summary: Text | None = None
    summarise: MaxTokens | None = None
    tail: Annotated[int, Field(ge=0, le=limits.MAX_REQUEST_ID)] = 0
    labels: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_LABELS)] | None = None
    priority: Priority = "normal"

    @model_validator(mode="after")
    def _require_one_summary(self) -> Self:
        if (self.summary is None) == (self.summarise is None):
            raise ValueError("give either summary or summarise")
        return self


class WakeParams(Params):
    """A session and, if not the latest, which version of it: by `version`, or behind an `@` of `session`; if not all,
    how many of its tokens. `strict` refuses what may differ too. For `wake` and `plan_wake`."""

    session: SessionText
    version: Annotated[int, Field(ge=0, le=limits.MAX_REQUEST_ID)] | None = None
    at_token: Annotated[int, Field(ge=1, le=limits.MAX_REQUEST_ID)] | None = None
    strict: bool = False

    @model_validator(mode="after")
    def _require_one_version(self) -> Self:
        if self.version is not None and "@" in self.session:
            raise ValueError("name the version once: behind the @ of session, or in version")
        return self


class AnalyseParams(Params):
    """A session, perhaps with a version behind an `@`, and how the artifact is called if not by default."""

    session: SessionText
    kind: Annotated[str, Field(min_length=1, max_length=limits.MAX_KIND_CHARS)] | None = None
    labels: Annotated[tuple[Label, ...], Field(max_length=limits.MAX_LABELS)] | None = None


class ListParams(Params):
    """All sessions, or those of one namespace."""

    namespace: SessionText | None = None


class SubscribeParams(Params):
    """What happens in the daemon from now on: events of these names, or all; of a session or a namespace only."""

    names: Annotated[tuple[EventName, ...], Field(min_length=1, max_length=limits.MAX_EVENT_NAMES)] | None = None
    session: SessionText | None = None
    namespace: SessionText | None = None


class StatsParams(Params):
    """All sessions, or those of one label or namespace."""

    label: Label | None = None
    namespace: SessionText | None = None


class WarmParams(Params):
    """Sessions by name, by `label` (in one `namespace`, or all), or both."""

    sessions: Annotated[tuple[SessionText, ...], Field(max_length=limits.MAX_NAMED_SESSIONS)] = ()
    label: Label | None = None
    namespace: SessionText | None = None

    @model_validator(mode="after")
    def _require_some(self) -> Self:
        if not self.sessions and self.label is None:
            raise ValueError("name sessions, or a label")
        if self.namespace is not None and self.label is None:
            raise ValueError("a namespace is for a label")
        return self


class ClearParams(Params):
    """The sessions of a label, in one `namespace` or all."""

    label: Label
    namespace: SessionText | None = None
    dry_run: bool = False


class MaintainParams(Params):
    """One of the store's operations, and what that one takes; anything else is refused rather than passed over."""

    operation: Operation
    session: SessionText | None = None
    dry_run: bool = False
    keep_last: Count | None = None
    keep_days: DaysKept | None = None
    cold_after_days: Days | None = None
    bits: Bits | None = None
    after_days: Days | None = None

    @model_validator(mode="after")
    def _require_what_the_operation_takes(self) -> Self:
        given = {name for name in _ALL_OPTIONS if getattr(self, name) is not None}
        if strange := sorted(given - OPERATION_OPTIONS[self.operation]):
            raise ValueError(f"{self.operation} takes no {' and no '.join(strange)}")
        if self.operation == "forget" and self.session is None:
            raise ValueError("forget needs the session to forget")
        if self.operation == "prune" and self.keep_last is None and self.keep_days is None:
            raise ValueError("prune needs keep_last, keep_days or both; without them every version stays")
        if self.operation == "quantise" and self.bits is None:
            raise ValueError("quantise needs bits, 8 or 4")
        if self.operation == "quantise" and self.session is None and self.after_days is None:
            raise ValueError("quantise needs a session, or after how many days of sleep it takes all: after_days")
        return self


class MarkParams(Params):
    """One mark put on a version, or taken off: `tag`, `untag` or `pinned`; `move` lets a tag leave another version.

    With `untag`, `session` names a session only: which version has the tag, the tag says.
    """

    session: SessionText
    tag: Tag | None = None
    untag: Tag | None = None
    pinned: bool | None = None
    move: bool = False

    @model_validator(mode="after")
    def _require_one_mark(self) -> Self:
        if [self.tag, self.untag, self.pinned].count(None) != 2:
            raise ValueError("give exactly one of tag, untag and pinned")
        if self.move and self.tag is None:
            raise ValueError("only a tag can be moved")
        if self.untag is not None and "@" in self.session:
            raise ValueError("untag takes a session without a version: the tag says which one has it")
        return self


class ImportParams(Params):
    """A bundle that lies in the store's folder `incoming` under its id, and the session it becomes if not its own."""

    bundle_id: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    session: SessionText | None = None


_ALL_OPTIONS = frozenset().union(*OPERATION_OPTIONS.values())


@dataclass(frozen=True, slots=True)
class _LongList:
    """A parameter of so many items that they are checked in pieces. at_once: about a millisecond's; most: in all."""

    of_items: TypeAdapter[tuple[Any, ...]]
    at_once: int
    most: int

    def takes(self, value: object) -> bool:
        """Whether a value is checked in pieces; what is too long is not, so that it is refused for that."""
        return isinstance(value, tuple) and self.at_once < len(value) <= self.most


_LONG_LISTS: Mapping[str, _LongList] = MappingProxyType(
    {
        "tokens": _LongList(TypeAdapter(tuple[TokenId, ...], config=_STRICT), 4096, limits.MAX_ARRAY_ITEMS),
        "messages": _LongList(
            TypeAdapter(tuple[Message, ...], config=ConfigDict(defer_build=True)), 128, limits.MAX_MESSAGES
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Method:
    """One line of the table.

    `leaves`: a sentence on what a cancel message, or the end of the connection, leaves of the work that it stops. None:
    it stops nothing, for the work is short or must not be left half done, and runs to its end.
    `always`: also taken while the daemon stops, and on the connections that are held in reserve: who looks after the
    daemon must get through.
    `watches`: it goes on until it is cancelled or the service has ended, so a stop neither cancels it nor waits for it.
    """

    name: str
    params: type[Params]
    result: type[results.Reply]
    leaves: str | None = None
    always: bool = False
    watches: bool = False

    @property
    def cancellable(self) -> bool:
        return self.leaves is not None

    def load_params(self, raw: Mapping[str, Any]) -> Params:
        """Check raw parameters.

        Raises:
            InvalidRequest: with `field`, the first field at fault.
        """
        return whole(self.load_params_in_pieces(raw))

    def load_params_in_pieces(self, raw: Mapping[str, Any]) -> Pieces[Params]:
        """As `load_params`, for what may be large: yields behind each piece of a long list. Of that a piece is checked
        like a list of its own, and one of its items stands for it where the parameters are checked together."""
        found: dict[str, tuple[Any, ...]] = {}
        for name in self.params.model_fields.keys() & _LONG_LISTS.keys():
            if (long := _LONG_LISTS[name]).takes(raw.get(name)):
                found[name] = yield from self._checked(name, long, raw[name])
        short = {name: value[-1:] if name in found else value for name, value in raw.items()}
        return self._validated(self.params.model_validate, short).model_copy(update=found)

    def _checked(self, name: str, long: _LongList, items: Sequence[Any]) -> Pieces[tuple[Any, ...]]:
        found: list[Any] = []
        for start in range(0, len(items), long.at_once):
            piece = items[start : start + long.at_once]
            found += self._validated(long.of_items.validate_python, piece, within=(name, start))
            yield
        return tuple(found)

    def _validated(
        self, check: Callable[[Any], _Checked], raw: Any, *, within: tuple[str, int] | None = None
    ) -> _Checked:
        """within: the list that this is a piece of, and where it begins there."""
        try:
            return check(raw)
        except ValidationError as error:
            first: dict[str, Any] = {**error.errors(include_url=False, include_input=False)[0]}
            if within is not None:
                name, start = within
                at, *rest = first["loc"]
                first["loc"] = name, start + at, *rest
            raise _invalid_request(self.name, first) from None  # the cause would carry the client's text into logs


_TABLE = (
    Method("status", StatusParams, results.StatusResult, always=True),
    Method("create", CreateParams, results.SessionInfo),
    Method("append", AppendParams, results.AppendResult, leaves="Nothing of it was read."),
    Method("generate", GenerateParams, results.GenerateResult, leaves="Nothing of it was read or written."),
    Method("chat", ChatParams, results.GenerateResult, leaves="Nothing of it was read or written."),
    Method("set", SetParams, results.SessionInfo),
    Method("sleep", SessionParams, results.SleepResult),
    Method("wake", WakeParams, results.WakeResult, leaves="Nothing was woken."),
    Method("plan_wake", WakeParams, results.WakePlanResult),
    Method("fork", ForkParams, results.ForkResult),
    Method("fold", FoldParams, results.FoldResult, leaves="There is no new session."),
    Method("warm", WarmParams, results.WarmResult, leaves="What it had woken stays awake."),
    Method("stats", StatsParams, results.StatsResult),
    Method("clear", ClearParams, results.ClearResult),
    Method("list", ListParams, results.ListResult),
    Method("show", SessionParams, results.SessionDetail),
    Method("why", SessionParams, results.WhyResult),
    Method("analyse", AnalyseParams, results.AnalysisResult, leaves="Nothing has changed."),
    Method("delete", SessionParams, results.DeleteResult),
    Method("maintain", MaintainParams, results.MaintenanceResult),
    Method("mark", MarkParams, results.MarksResult),
    Method("import_bundle", ImportParams, results.SleepResult),
    Method("subscribe", SubscribeParams, results.SubscribeResult, leaves="No more is told.", watches=True),
    Method("load_model", ModelParams, results.ModelInfo, leaves="The model was not loaded."),
    Method("unload_model", ModelParams, results.ModelInfo),
    Method("shutdown", ShutdownParams, results.ShutdownResult, always=True),
)
METHODS: Mapping[str, Method] = MappingProxyType({method.name: method for method in _TABLE})


def _invalid_request(method: str, first: Mapping[str, Any]) -> InvalidRequest:
    """Say which field of a method's parameters is at fault, without repeating what the client sent (threat 60)."""
    place = ".".join(str(part) for part in first["loc"])[:256]
    problem = _problem(first).rstrip(".")
    field = place or "params"
    return InvalidRequest(
        f"{method}: {place}: {problem}." if place else f"{method}: {problem}.",
        method=method,
        field=field,
    )


_PROBLEMS: Mapping[str, str] = MappingProxyType(
    {
        "missing": "it is missing; give it",
        "extra_forbidden": "there is no such field; leave it out",
        "string_type": "it is no text; give a text",
        "string_too_short": "it is too short; give at least {min_length} characters",
        "too_short": "it has {actual_length} entries; give at least {min_length}",
        "too_long": "it has too many entries; give at most {max_length}",
    }
)
_CONTENT_OF_PARTS = "it is no text; give one text for each message: join a list of parts, write a tool call out"


def _problem(first: Mapping[str, Any]) -> str:
    """What is wrong with a field and what to give. Of the context only lengths are used: it has no text of a client."""
    kind, place = first["type"], first["loc"]
    if kind == "string_type" and place[:1] == ("messages",) and place[-1] == "content":
        return _CONTENT_OF_PARTS
    if kind in _PROBLEMS:
        return _PROBLEMS[kind].format_map(first.get("ctx", {}))
    return str(first["msg"]).removeprefix("Value error, ")
