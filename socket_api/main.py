"""The server's entry point: `python -m torpor.socket_api.main`, and what `torpor serve` hands over to.

Owns the arguments and what is printed. The one module of this folder that makes a service. It raises TorporError from
`run`; a caller that has a table of exit codes maps it, `main` knows only 0 and 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from ..daemon.api.process import ShutdownResult
from ..daemon.api.waking import RECOMPUTE_POLICIES, RecomputePolicy
from ..daemon.config.configuration import Configuration, LoadPolicy, ModelTable, read_configuration
from ..daemon.config.configuring import ConfigFile, Settings
from ..daemon.engine.admission import MAX_WAITING, MOST_WAITING_EVER
from ..daemon.engine.decoding import MOST_ROWS, MOST_ROWS_EVER
from ..daemon.errors import InvalidConfiguration, UnknownModel
from ..daemon.memory.model_registry import ModelChoice
from ..daemon.memory.watching import CHANGE_POLICIES, ChangePolicy
from ..daemon.models.adapters import AdapterChoice
from ..daemon.models.canary import POLICIES, Policy
from ..daemon.models.models import DEFAULT_KV_GROUP, DEMO_MODEL_FOLDER, DEMO_MODEL_NAME, KV_BITS, KV_GROUPS, KvChoice
from ..daemon.prefixes.reuse import REUSE_POLICIES, ReusePolicy
from ..daemon.service import Service
from ..daemon.sleep.quantising import QUANTISE_BITS, AgePolicy
from ..daemon.upkeep.scrubbing import DEFAULT_BYTES_PER_S, ScrubPolicy
from ..errors import TorporError
from .limits import STOP_WITHIN_S
from .server.serving import serve_until_signal
from .wire.address import default_socket_path

LOAD_POLICIES: tuple[LoadPolicy, ...] = ("first", "start", "use")
Value = TypeVar("Value", int, float)


_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"
"""How a line of the daemon's log begins: with the time."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve. No store means the default one, no models the demo model that Torpor ships. `json` prints one JSON
    object a line. `adapters` are folders by the name of their model, fused into it or not. `check_models` reads every
    model file anew. `kv_bits` and `kv_group` quantise the keys and
    values of models, by their names ("" for the only one). `canary`: when a wake proves its state by
    computing one token. `trusting`: wakes do not hash the KV that they read. `prefix_reuse`: what a new session takes
    over of others that begin alike. `recompute`: when a wake computes the tokens again instead. `batch`: how many
    sessions of a model may decode in one call. `max_waiting`: how many requests may wait, `admission.MAX_WAITING` if
    None. What has slept for `quantise_after` days is kept in `quantise_bits` bits. The budgets are bytes: what the
    store may hold, may write in a day, and leaves free on the disk. `memory_budget`: bytes of memory for models and
    sessions, a share of what is available if None; `idle_sleep`: after how many seconds a session that nobody uses is
    put to sleep, never if None; `stop_within`: how many seconds a stop takes at most to put sessions to sleep,
    `STOP_WITHIN_S` if None. `load`: which models are loaded at the start, the `first`, all (`start`) or none (`use`);
    the others are when they are first used. `pinned`: names of those that stay loaded; they are at the start, too,
    unless it is `use`. `model_ttl`: after how many seconds a model that nobody uses is unloaded, never if None.
    `on_model_change`: what becomes of a loaded model whose files change. `scrub_rate`: bytes of sleeping sessions that
    are read again in a second in which nobody wants anything; none if 0. `config`: a file that says what is None, empty
    or not given here, and is read anew when it changes."""

    store: Path | None = None
    socket: Path = field(default_factory=default_socket_path)
    models: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    fuse: bool = False
    kv_bits: Mapping[str, int] = field(default_factory=dict)
    kv_group: Mapping[str, int] = field(default_factory=dict)
    check_models: bool = False
    canary: Policy = "always"
    trusting: bool = False
    prefix_reuse: ReusePolicy = "exact"
    recompute: RecomputePolicy = "off"
    batch: int = MOST_ROWS
    quantise_after: float | None = None
    quantise_bits: int = 8
    json: bool = False
    store_budget: int | None = None
    daily_write_budget: int | None = None
    keep_free: int | None = None
    memory_budget: int | None = None
    idle_sleep: float | None = None
    stop_within: float | None = None
    load: LoadPolicy | None = None
    pinned: tuple[str, ...] = ()
    model_ttl: float | None = None
    on_model_change: ChangePolicy | None = None
    max_waiting: int | None = None
    scrub_rate: int = DEFAULT_BYTES_PER_S
    config: Path | None = None


def run(options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT, SIGHUP or a client's `shutdown`, in this process and thread. With a configuration
    file, SIGHUP has that read anew instead.

    Raises:
        TorporError: why it could not start, or that it stopped with sessions it could not put to sleep.
    """

    logging.basicConfig(format=_LOG_FORMAT)
    warnings: tuple[str, ...] = ()

    async def open_service() -> Service:
        nonlocal warnings
        settings = settings_of(options)
        service = await Service.open(
            store_path=options.store,
            models=settings.models,
            check_models=options.check_models,
            canary=options.canary,
            trusting=options.trusting,
            prefix_reuse=options.prefix_reuse,
            recompute=options.recompute,
            batch_rows=options.batch,
            max_waiting=settings.max_waiting,
            scrub=ScrubPolicy(options.scrub_rate) if options.scrub_rate else None,
            quantise=_age_policy(options),
            memory_budget=settings.memory_budget,
            idle_sleep_s=settings.idle_sleep_s,
            stop_within_s=settings.stop_within_s,
            on_model_change=settings.on_model_change,
            store_budget=settings.fixed["store_budget"],
            daily_write_budget=settings.fixed["daily_write_budget"],
            keep_free=settings.fixed["keep_free"] or 0,
        )
        if options.config is not None:
            service.follow(ConfigFile(options.config, lambda: settings_of(options)), settings)
        warnings = service.warnings
        for warning in warnings:
            print(f"torpor serve: warning: {warning}", file=sys.stderr, flush=True)
        return service

    def on_ready(socket: str) -> None:
        sentence = (
            f"torpor serves {options.store or 'the default store'} on {socket} (pid {os.getpid()}); stop it with Ctrl-C"
        )
        _print(options, sentence, {"event": "ready", "socket": socket, "pid": os.getpid(), "warnings": len(warnings)})

    def on_stopped(report: ShutdownResult) -> None:
        _print(options, describe_stop(report), {"event": "stopped", **asdict(report)})

    serve_until_signal(
        open_service, options.socket, on_ready=on_ready, on_stopped=on_stopped, rereads=options.config is not None
    )


def settings_of(options: ServeOptions) -> Settings:
    """What is to be served and how: what the configuration file says, and over it what the command line does.

    Raises:
        InvalidConfiguration: the file is wrong.
        UnknownModel: an adapter or a pin is for a model that is not served.
    """
    config = Configuration() if options.config is None else read_configuration(options.config)
    return Settings(
        models=_choices_of(options, config),
        memory_budget=_first(options.memory_budget, config.memory_budget),
        idle_sleep_s=_first(options.idle_sleep, config.idle_sleep),
        on_model_change=options.on_model_change or config.on_model_change or "refuse",
        stop_within_s=_first(options.stop_within, config.stop_within, STOP_WITHIN_S),
        max_waiting=options.max_waiting or config.max_waiting or MAX_WAITING,
        fixed={
            "store_budget": _first(options.store_budget, config.store_budget),
            "daily_write_budget": _first(options.daily_write_budget, config.daily_write_budget),
            "keep_free": _first(options.keep_free, config.keep_free) or 0,
        },
    )


def _choices_of(options: ServeOptions, config: Configuration) -> dict[str, ModelChoice]:
    """How each model is served. Models of the command line stand in the place of those of the file."""
    tables = {name: ModelTable(path=path) for name, path in options.models.items()} or config.models
    tables = tables or {DEMO_MODEL_NAME: ModelTable(path=str(DEMO_MODEL_FOLDER))}
    bits, groups = _of_models("--kv-bits", options.kv_bits, tables), _of_models("--kv-group", options.kv_group, tables)
    named = {"--adapter": options.adapters, "--pin": options.pinned, "--kv-bits": bits, "--kv-group": groups}
    for option, names in named.items():
        for name in names:
            if name not in tables:
                raise UnknownModel(
                    f"{option} is for {name!r}, and no such model is to be served, only "
                    f"{', '.join(map(repr, tables))}. Give it the name of a model.",
                    model=name,
                    served=list(tables),
                )
    policy = options.load or config.load or "first"
    choices = {}
    for at, (name, table) in enumerate(tables.items()):
        pinned = table.pin or name in options.pinned
        by_policy = policy == "start" or (policy == "first" and (not at or pinned))
        choices[name] = ModelChoice(
            table.path,
            _adapter_of(options, name, table),
            _kv_of(name, table, bits, groups),
            at_start=by_policy if table.load is None or options.load is not None else table.load == "start",
            pinned=pinned,
            ttl_s=_first(options.model_ttl, table.ttl, config.model_ttl),
        )
    return choices


def _adapter_of(options: ServeOptions, name: str, table: ModelTable) -> AdapterChoice | None:
    if name in options.adapters:
        return AdapterChoice(options.adapters[name], options.fuse)
    return None if table.adapter is None else AdapterChoice(table.adapter, table.fuse)


def _of_models(option: str, given: Mapping[str, int], tables: Mapping[str, ModelTable]) -> dict[str, int]:
    """Numbers by the names of models; one that is given without a name is for the only model that is served."""
    if "" in given and len(tables) != 1:
        raise InvalidConfiguration(
            f"{option} {given['']} does not say for which model: {', '.join(map(repr, tables))} are served. Write "
            f"{option} NAME={given['']} for each that it is for.",
            option=option,
        )
    only = next(iter(tables))
    return {name or only: number for name, number in given.items()}


def _kv_of(name: str, table: ModelTable, bits: Mapping[str, int], groups: Mapping[str, int]) -> KvChoice | None:
    """What the command line says of a model outdoes its table. A group is for what is quantised."""
    chosen = bits.get(name, table.kv_bits)
    if chosen is not None:
        return KvChoice(chosen, groups.get(name, DEFAULT_KV_GROUP if name in bits else table.kv_group))
    if name in groups:
        raise InvalidConfiguration(
            f"--kv-group is for --kv-bits, and {name!r} has none. Give both, or neither.", option="--kv-group"
        )
    return None


def _first(*given: Value | None) -> Value | None:
    """The first that is said at all."""
    return next((value for value in given if value is not None), None)


def _age_policy(options: ServeOptions) -> AgePolicy | None:
    return None if options.quantise_after is None else AgePolicy(options.quantise_after, options.quantise_bits)


def describe_stop(report: ShutdownResult) -> str:
    """What became of the sessions, as a sentence."""
    slept, empty = len(report.slept), len(report.empty)
    sentence = f"torpor stopped; {slept} {'session was' if slept == 1 else 'sessions were'} put to sleep"
    if ledgers := len(report.ledgers):
        sentence += f"; of {ledgers} the ledger is kept, and read again at the next use"
    if empty:
        sentence += f"; {empty} had read nothing and {'is' if empty == 1 else 'are'} gone"
    return "\n".join([sentence, *(f"  {session}: {reason}" for session, reason in report.ledgers.items())])


def parse_arguments(arguments: Sequence[str] | None = None) -> ServeOptions:
    """Read the command line; leaves with status 2 and a usage line if it is wrong."""
    parser = argparse.ArgumentParser(prog="torpor serve", description="Serve sessions on a Unix socket.")
    parser.add_argument("--store", type=Path, default=None, help="folder of the store")
    parser.add_argument("--socket", type=Path, default=None, help="path of the socket")
    parser.add_argument(
        "--model", action="append", default=[], type=_named_folder, metavar="NAME=PATH", help="a model to serve"
    )
    parser.add_argument(
        "--adapter", action="append", default=[], type=_named_folder, metavar="NAME=PATH", help="an adapter for it"
    )
    parser.add_argument("--fuse", action="store_true", help="add the adapters to the weights")
    for option, choices, meaning in (
        ("--kv-bits", KV_BITS, "quantise keys and values of a model to so many bits"),
        ("--kv-group", KV_GROUPS, "how many numbers share a scale"),
    ):
        parser.add_argument(
            option, action="append", default=[], type=_named_number(choices), metavar="[NAME=]N", help=meaning
        )
    parser.add_argument("--check-models", action="store_true", help="read every model file anew")
    parser.add_argument(
        "--trusting", action="store_true", help="take stored KV for what was written, without hashing it"
    )
    parser.add_argument(
        "--canary", choices=POLICIES, default="always", help="when a wake computes one token to prove its state"
    )
    parser.add_argument(
        "--prefix-reuse",
        choices=REUSE_POLICIES,
        default="exact",
        help="what a new session takes over of others that begin alike",
    )
    parser.add_argument(
        "--recompute",
        choices=RECOMPUTE_POLICIES,
        default="off",
        help="when a wake computes the tokens again instead of reading the state, where that is faster",
    )
    parser.add_argument(
        "--batch",
        type=int,
        choices=range(1, MOST_ROWS_EVER + 1),
        default=MOST_ROWS,
        metavar="SESSIONS",
        help="how many sessions of a model may decode in one call",
    )
    parser.add_argument("--max-waiting", type=_waiting, metavar="REQUESTS", help="how many requests may wait")
    parser.add_argument("--quantise-after", type=float, metavar="DAYS", help="keep what slept so long in fewer bits")
    parser.add_argument("--quantise-bits", type=int, choices=QUANTISE_BITS, default=8, help="in how many")
    parser.add_argument(
        "--idle-sleep", type=_duration, metavar="SECONDS", help="put sessions to sleep that were not used for so long"
    )
    parser.add_argument(
        "--stop-within", type=_duration, metavar="SECONDS", help="keep only the ledger of what takes longer at a stop"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file that says what is not said here")
    parser.add_argument("--load", choices=LOAD_POLICIES, help="which models are loaded at the start")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME", help="a model that stays loaded")
    parser.add_argument("--on-model-change", choices=CHANGE_POLICIES, help="what to do when files of a model change")
    parser.add_argument(
        "--model-ttl", type=_duration, metavar="SECONDS", help="unload models that were not used for so long"
    )
    parser.add_argument(
        "--scrub-rate",
        type=_rate,
        default=DEFAULT_BYTES_PER_S,
        metavar="BYTES",
        help="read so much a second of what sleeps again while no request runs; 0 for nothing",
    )
    for option, meaning in _BUDGETS:
        parser.add_argument(option, type=int, metavar="BYTES", help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parsed = parser.parse_args(arguments)
    once = (("--model", parsed.model), ("--adapter", parsed.adapter))
    for option, given in (*once, ("--kv-bits", parsed.kv_bits), ("--kv-group", parsed.kv_group)):
        if len(dict(given)) != len(given):
            parser.error(f"{option}: each name can be given once")
    if parsed.fuse and not parsed.adapter:
        parser.error("--fuse: there is no --adapter to fuse")
    return ServeOptions(
        store=parsed.store,
        socket=parsed.socket or default_socket_path(),
        models=dict(parsed.model),
        adapters=dict(parsed.adapter),
        kv_bits=dict(parsed.kv_bits),
        kv_group=dict(parsed.kv_group),
        fuse=parsed.fuse,
        check_models=parsed.check_models,
        canary=parsed.canary,
        trusting=parsed.trusting,
        prefix_reuse=parsed.prefix_reuse,
        recompute=parsed.recompute,
        batch=parsed.batch,
        quantise_after=parsed.quantise_after,
        quantise_bits=parsed.quantise_bits,
        json=parsed.json,
        store_budget=parsed.store_budget,
        daily_write_budget=parsed.daily_write_budget,
        keep_free=parsed.keep_free,
        memory_budget=parsed.memory_budget,
        idle_sleep=parsed.idle_sleep,
        stop_within=parsed.stop_within,
        load=parsed.load,
        pinned=tuple(parsed.pin),
        model_ttl=parsed.model_ttl,
        on_model_change=parsed.on_model_change,
        max_waiting=parsed.max_waiting,
        scrub_rate=parsed.scrub_rate,
        config=parsed.config,
    )


_BUDGETS = (
    ("--store-budget", "refuse to sleep where the store would hold more than this"),
    ("--daily-write-budget", "refuse to sleep where more than this would be written in a day (UTC)"),
    ("--keep-free", "refuse to sleep where the disk would have less than this left"),
    ("--memory-budget", "put sessions to sleep where models and sessions would take more memory than this"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as a process of its own; returns its exit status."""
    options = parse_arguments(arguments)
    try:
        run(options)
    except TorporError as error:
        print(f"torpor serve: {error.code}: {error.message}", file=sys.stderr)
        return 1
    return 0


def _duration(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _waiting(text: str) -> int:
    count = int(text)
    if not 1 <= count <= MOST_WAITING_EVER:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to {MOST_WAITING_EVER}")
    return count


def _rate(text: str) -> int:
    size = int(text)
    if size < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is less than nothing")
    return size


def _named_folder(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _named_number(choices: Sequence[int]) -> Callable[[str], tuple[str, int]]:
    """Reads NAME=N, or N alone, which has an empty name."""

    def read(text: str) -> tuple[str, int]:
        name, separator, number = text.rpartition("=")
        if (separator and not name) or number not in map(str, choices):
            told = " or ".join(map(str, choices))
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=N, where N is {told}")
        return name, int(number)

    return read


def _print(options: ServeOptions, sentence: str, document: Mapping[str, object]) -> None:
    try:
        print(json.dumps(document) if options.json else sentence, flush=True)
    except OSError:  # nobody reads: a closed terminal or pipe must not keep the daemon from serving, or from its end
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)


if __name__ == "__main__":
    sys.exit(main())
