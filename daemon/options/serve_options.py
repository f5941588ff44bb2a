"""How a daemon serves: every option, declared once.

From these declarations come the options of `torpor serve` with their help, the arguments of a daemon in the background,
the keys of a configuration file, the changes that a running daemon takes over, and the tables of
docs/reference/settings.md. A new option costs one declaration, and the code that uses it.
`tests/daemon/options/test_an_option_once.py` adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

from ...memvid.disk.daily_budget import DailyBudget
from ...memvid.limits import MAX_LEASE_S
from ..api.limits import MAX_DAYS
from .kinds import (
    Choice,
    CommandLine,
    Daily,
    Days,
    Duration,
    Flag,
    Kind,
    LinePatterns,
    Names,
    Number,
    Place,
    Size,
    Source,
    Url,
)

LoadPolicy = Literal["first", "start", "use"]
ChangePolicy = Literal["refuse", "reload"]
Durability = Literal["turn", "sleep"]
ReusePolicy = Literal["exact", "longest", "off"]
Change = Literal["at once", "at the next start", "at the next load of the model"]
Group = Literal[
    "Models", "Memory and turns", "Sleep and wake", "The store", "The remote", "HTTP", "The cluster", "Options"
]

MAX_WAITING_EVER: Final = 65_536
"""The greatest limit of waiting requests: each holds its client's bytes."""

MAX_PORT: Final = 65_535

MAX_REPLICAS_EVER: Final = 1024
"""The greatest number of daemons of a cluster."""

MAX_BATCH_EVER: Final = 256
"""The greatest limit of sessions in one model call."""

MAX_KEPT_EVER: Final = 1_000_000
"""The greatest number of versions to keep: more than a session ever has."""


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of an option beside its type and default.

    help: a sentence or two. changes: when a daemon takes it over from a changed file; None if it cannot stand in a
    file. flag: on a command line; empty: made of the field's name; None: only in a file. unless: the default in words,
    if it is no value. alone: whether a command line may leave out the name of the model.
    """

    help: str
    group: Group
    changes: Change | None = "at the next start"
    flag: str | None = ""
    unless: str | None = None
    alone: bool = False


_OfModel = partial(Option, group="Models", changes="at the next load of the model")


@dataclass(frozen=True, slots=True)
class Declared:
    """An option with its key in a file, the kind of its values, and its default.

    of_model: whether it is an option of a model.
    """

    key: str
    kind: Kind
    default: Any
    of_model: bool
    option: Option

    @property
    def flag(self) -> str | None:
        """Its flag on a command line; None if it stands only in a file."""
        return f"--{self.key.replace('_', '-')}" if self.option.flag == "" else self.option.flag

    @property
    def name(self) -> str:
        """Its parameter on a command line."""
        return (self.flag or "").removeprefix("--").replace("-", "_")

    @property
    def is_named(self) -> bool:
        """Whether a command line gives it as NAME=VALUE, once for each model; a flag without a name is for all."""
        return self.of_model and self.flag is not None and not (self.option.alone and isinstance(self.kind, Flag))

    @property
    def left_out(self) -> str:
        """The default as text; empty if there is none."""
        if self.option.unless is not None or self.default in (None, False, 0, MISSING):
            return self.option.unless or ""
        return self.kind.told(self.default)

    @property
    def meaning(self) -> str:
        """The help, with the default."""
        return f"{self.option.help} Default: {self.left_out}." if self.left_out else self.option.help


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """How one model is served: the table `[models.NAME]` of a file."""

    path: Annotated[
        str,
        Source(),
        _OfModel(
            "Serve the model in this folder (or of this hub name) as NAME. Can be repeated; the first is the default.",
            flag="--model",
        ),
    ]
    adapter: Annotated[
        str | None,
        Source(),
        _OfModel("Load the LoRA or DoRA adapter in this folder on the model NAME. Can be repeated, once for each."),
    ] = None
    fuse: Annotated[
        bool, _OfModel("Add the adapters to the weights once, instead of applying them each step.", alone=True)
    ] = False
    kv_bits: Annotated[
        Literal[8, 4] | None,
        _OfModel(
            "Keep keys and values of this model in so many bits, 8 or 4: less memory and disk, and no longer the "
            "model's own numbers. Can be repeated. N alone is for the only model.",
            alone=True,
        ),
    ] = None
    kv_group: Annotated[
        Literal[32, 64, 128], _OfModel("How many of these numbers share a scale: 32, 64 or 128.", alone=True)
    ] = 64
    pin: Annotated[
        bool,
        _OfModel(
            "Keep the model NAME in memory once it is loaded, even where others need the room. Can be repeated.",
            changes="at once",
        ),
    ] = False
    load: Annotated[
        Literal["start", "use"] | None,
        _OfModel(
            "Load this model at the start, or when a request needs it.",
            changes="at once",
            flag=None,
            unless="as `load` of the file has it",
        ),
    ] = None
    ttl: Annotated[
        float | None,
        Duration(),
        _OfModel(
            "Unload this model when it was not used for so long.",
            changes="at once",
            flag=None,
            unless="`model_ttl` of the file",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How a daemon serves all its models. None: without a bound, or as `unless` says; sizes are bytes, durations
    seconds."""

    config: Annotated[
        Path | None,
        Place(metavar="FILE"),
        Option(
            "A TOML file with models, budgets and policies, read anew at SIGHUP. Options given here hold over it.",
            "Options",
            changes=None,
        ),
    ] = None
    store: Annotated[
        Path | None, Place(), Option("Folder of the store, if not $TORPOR_STORE.", "Options", changes=None)
    ] = None
    socket: Annotated[
        Path | None, Place(), Option("The daemon's Unix socket, if not $TORPOR_SOCKET.", "Options", changes=None)
    ] = None
    load: Annotated[
        LoadPolicy,
        Option(
            "Which models are loaded at the start: the first and the pinned ones, all, or none. The others are "
            "when a request needs them.",
            "Models",
            changes="at once",
        ),
    ] = "first"
    model_ttl: Annotated[
        float | None,
        Duration(),
        Option("Unload a model when it was not used for so long, as in 900 or 15min.", "Models", changes="at once"),
    ] = None
    aliases: Annotated[
        tuple[tuple[str, str], ...],
        Names(),
        Option(
            "Other names of models for clients that choose one by its name; `*` and `?` stand for any characters. A "
            "model's own name holds over them, and of several the first.",
            "Models",
            changes="at once",
            flag=None,
            unless="none",
        ),
    ] = ()
    on_model_change: Annotated[
        ChangePolicy,
        Option(
            "When files of a loaded model change: begin nothing on it until they are back, or put its sessions to "
            "sleep and load it anew.",
            "Models",
            changes="at once",
        ),
    ] = "refuse"
    check_models: Annotated[
        bool,
        Option(
            "Read every model file anew, even where size and times say that nothing has changed.",
            "Models",
            changes=None,
        ),
    ] = False
    memory_budget: Annotated[
        int | None,
        Size(not_0="would hold no model. Leave it out for a share of what is available"),
        Option(
            "Memory for models and sessions; what does not fit sleeps until it is asked for.",
            "Memory and turns",
            changes="at once",
            unless="the models, and 0.7 of what is available beside them",
        ),
    ] = None
    idle_sleep: Annotated[
        float | None,
        Duration(),
        Option(
            "Put a session to sleep when it was not used for so long, as in 900 or 15min.",
            "Memory and turns",
            changes="at once",
        ),
    ] = None
    max_waiting: Annotated[
        int,
        Number(metavar="REQUESTS", least=1, most=MAX_WAITING_EVER),
        Option(
            "How many requests may wait for their turn, for memory or the engine. The next one is refused before "
            "anything has happened.",
            "Memory and turns",
            changes="at once",
        ),
    ] = 512
    batch: Annotated[
        int,
        Number(metavar="SESSIONS", least=1, most=MAX_BATCH_EVER),
        Option("Sessions of a model that may decode in one call. 1: each alone.", "Memory and turns"),
    ] = 16
    prefix_reuse: Annotated[
        ReusePolicy,
        Option(
            "What a new session takes over from others that begin alike. exact: tokens whose state is to the bit "
            "what it would have computed; longest: all tokens in common; off: nothing.",
            "Memory and turns",
        ),
    ] = "exact"
    volatile: Annotated[
        tuple[str, ...],
        LinePatterns(),
        Option(
            "Lines of a client's system text that change with each request, as regular expressions. They are said "
            "behind what was read before. Those of known agents are, too.",
            "Memory and turns",
            changes="at once",
            flag=None,
            unless="none but those of known agents",
        ),
    ] = ()
    durability: Annotated[
        Durability,
        Option(
            "When an answer is durable. turn: before it is given, in a journal of the store; sleep: once the session "
            "sleeps, so a crash loses what was said since.",
            "Sleep and wake",
            changes="at once",
        ),
    ] = "turn"
    # An operating system that shuts down usually waits 90 s before it kills.
    stop_within: Annotated[
        float,
        Duration(),
        Option(
            "How long a stop may take to write sessions. Of the others it keeps the ledgers, and their next use "
            "computes the rest again.",
            "Sleep and wake",
            changes="at once",
        ),
    ] = 60.0
    store_budget: Annotated[
        int | None,
        Size(not_0="would refuse every sleep. Say none for no bound", word="none"),
        Option(
            "How much the store may hold, as in 20GiB. none: no bound.",
            "The store",
            unless="a fifth of the space that was free at the store's first start, at most 100GiB; it stays the same",
        ),
    ] = None
    strip_named: Annotated[
        bool,
        Option(
            "Where that is reached, keys and values go that were used longest ago: those that the remote has, then of "
            "sessions that nobody named, then of earlier versions. With this, at last also of the newest versions of "
            "named sessions.",
            "The store",
            changes="at once",
        ),
    ] = False
    keep_unnamed: Annotated[
        float,
        Days(most=MAX_DAYS, word="none"),
        Option(
            "Delete a session that nobody named once the store was in use on so many days without it. none: keep all.",
            "The store",
            changes="at once",
        ),
    ] = 30.0
    daily_write_budget: Annotated[
        int | None,
        Size(not_0="would refuse every sleep. Leave it out for no bound"),
        Option("Refuse a sleep with which more than this would be written in a day (UTC).", "The store"),
    ] = None
    keep_free: Annotated[
        int, Size(), Option("Refuse a sleep after which the disk would have less than this left.", "The store")
    ] = 0
    keep_last: Annotated[
        int | None,
        Number(metavar="VERSIONS", least=1, most=MAX_KEPT_EVER),
        Option(
            "Prune each session to so many of its newest versions, at the start and behind each new one. Those with a "
            "tag or a pin stay.",
            "The store",
            changes="at once",
        ),
    ] = None
    keep_days: Annotated[
        float | None,
        Days(most=MAX_DAYS, not_0="would keep the newest version alone: --keep-last 1 does"),
        Option(
            "The same for versions older than so many days before the newest one. With --keep-last, a version that "
            "either keeps stays.",
            "The store",
            changes="at once",
        ),
    ] = None
    # A tenth of what a slow disk reads, or a hundredth of a fast one: a store of 100 GiB in three and a half hours.
    scrub_rate: Annotated[
        int,
        Size(word="off"),
        Option(
            "How much of the sleeping sessions to read again in a second, while no request runs. Damage is "
            "healed. off reads nothing.",
            "The store",
        ),
    ] = 8 << 20
    remote: Annotated[
        str | None,
        Url(),
        Option(
            "Keep the sessions in an object store too, as s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER: other "
            "machines with the same remote can wake them, one at a time. Credentials come from the environment.",
            "The remote",
        ),
    ] = None
    remote_lease: Annotated[
        float,
        Duration(most=MAX_LEASE_S),
        Option(
            "How long this machine may go on with a session while the remote does not answer; and, if it dies, how "
            "long others wait for its sessions.",
            "The remote",
        ),
    ] = 60.0
    remote_turns: Annotated[
        float | None,
        Duration(most=MAX_LEASE_S, word="off"),
        Option(
            "Send answered turns of awake sessions to the remote after so long, so that they survive this machine. 0: "
            "each before it is told; off: with the next version.",
            "The remote",
        ),
    ] = 5.0
    remote_key: Annotated[
        Path | None,
        Place(metavar="FILE"),
        Option(
            "Seal the remote: encrypt all that goes there by the key in this file, 64 hex digits that you alone may "
            "read. Each machine needs the same, from the remote's first object on.",
            "The remote",
        ),
    ] = None
    remote_key_command: Annotated[
        str | None,
        CommandLine(),
        Option(
            "The same, by the key that this command writes: of a keychain, say. It is run at the start, without a "
            "shell.",
            "The remote",
        ),
    ] = None
    remote_daily_budget: Annotated[
        DailyBudget | None,
        Daily(),
        Option(
            "Send versions to the remote behind sleeps until so much was used of it in a day (UTC): bytes, requests or "
            "dollars, as in '20GB, 10000 requests, $2'. The rest waits for the next day; who waits for the remote "
            "(wake, push, sleep --remote) does not.",
            "The remote",
            changes="at once",
        ),
    ] = None
    http: Annotated[
        int | None,
        Number(metavar="PORT", least=0, most=MAX_PORT),
        Option(
            "Serve the APIs of OpenAI and Anthropic too, on this port of 127.0.0.1, to clients with a token of the "
            "file that the start names. 0: any free port.",
            "HTTP",
        ),
    ] = None
    http_socket: Annotated[
        Path | None,
        Place(),
        Option("Serve them on this Unix socket too, to you alone and without a token.", "HTTP", changes=None),
    ] = None
    no_inspector: Annotated[
        bool,
        Option("Leave out the page on the port of HTTP that shows what memory holds (torpor inspect).", "HTTP"),
    ] = False


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """How `torpor serve-ray` serves: the table `[cluster]` of a file, which one daemon leaves alone."""

    replicas: Annotated[
        int,
        Number(metavar="N", least=1, most=MAX_REPLICAS_EVER),
        Option("How many daemons there are; with --most-replicas the fewest.", "The cluster"),
    ] = 2
    most_replicas: Annotated[
        int | None,
        Number(metavar="N", least=1, most=MAX_REPLICAS_EVER),
        Option(
            "Have Ray start more daemons, up to so many, while requests wait or awake sessions fill the memory.",
            "The cluster",
        ),
    ] = None
    host: Annotated[str, Source(metavar="ADDRESS"), Option("Where requests are taken.", "The cluster")] = "127.0.0.1"
    port: Annotated[int, Number(metavar="PORT", least=1, most=MAX_PORT), Option("On which port.", "The cluster")] = 8000


def _declared(record: type[Any], *, of_model: bool) -> dict[str, Declared]:
    hints = get_type_hints(record, include_extras=True)
    found = {}
    for each in fields(record):
        kind, *more = get_args(hints[each.name])
        (option,) = (one for one in more if isinstance(one, Option))
        written = next((one for one in more if isinstance(one, Kind)), None) or _kind_of(kind)
        found[each.name] = Declared(each.name, written, each.default, of_model, option)
    return found


def _kind_of(declared: Any) -> Kind:
    """The kind of a bool or a Literal, which may also be None."""
    if declared is bool:
        return Flag()
    choice = next(each for each in (declared, *get_args(declared)) if get_origin(each) is Literal)
    return Choice(values=get_args(choice))


SERVE_OPTIONS: Final[Mapping[str, Declared]] = MappingProxyType(_declared(ServeOptions, of_model=False))
MODEL_OPTIONS: Final[Mapping[str, Declared]] = MappingProxyType(_declared(ModelOptions, of_model=True))
CLUSTER_OPTIONS: Final[Mapping[str, Declared]] = MappingProxyType(_declared(ClusterOptions, of_model=False))
GIVEN_OPTIONS: Final[Mapping[str, Declared]] = MappingProxyType(
    {each.name: each for each in (*MODEL_OPTIONS.values(), *SERVE_OPTIONS.values()) if each.flag is not None}
)
"""The options of a command line, by the names of their parameters."""
