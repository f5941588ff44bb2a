"""`torpor serve`: become the daemon. The one command whose process loads MLX, and only once it is called."""

from __future__ import annotations

import contextlib
import gc
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from ...daemon.api.limits import MAX_DAYS
from ...memvid.disk.location import default_store_path
from ...memvid.units import format_plural, parse_bytes, parse_seconds
from ...socket_api.limits import STOP_WITHIN_S
from ...socket_api.wire.address import default_socket_path
from ...socket_api.wire.listener import require_free
from ..errors import InvalidUsage
from ..exit_codes import OK
from ..reach import background
from ..reach.options import JsonOption, SocketOption
from ..view.output import Output, plain, write_failure

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME=PATH",
        show_default=False,
        help="Serve the model in this folder (or of this hub name) as NAME. Can be repeated; the first is the default.",
    ),
]
AdaptersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=PATH",
        show_default=False,
        help="Load the LoRA or DoRA adapter in this folder on the model NAME. Can be repeated, once a model.",
    ),
]
FuseOption = Annotated[
    bool,
    typer.Option(
        "--fuse", show_default=False, help="Add the adapters to the weights once, instead of applying them each step."
    ),
]
CheckModelsOption = Annotated[
    bool,
    typer.Option(
        "--check-models",
        show_default=False,
        help="Read every model file anew, even where size and times say that nothing has changed.",
    ),
]
ServedStoreOption = Annotated[
    Path | None,
    typer.Option("--store", metavar="PATH", show_default=False, help="Folder of the store, if not $TORPOR_STORE."),
]
DetachOption = Annotated[
    bool,
    typer.Option("--detach", "-d", show_default=False, help="Start it in the background, and return when it answers."),
]


LogOption = Annotated[
    Path | None,
    typer.Option(
        "--log", metavar="PATH", show_default=False, help="Where a detached daemon writes; torpor doctor names it."
    ),
]


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def _rate(text: str) -> int:
    return 0 if text.strip().lower() == "off" else _size(text)


DEFAULT_QUANTISE_BITS = 8
BUDGETS = ("--store-budget", "--daily-write-budget", "--keep-free", "--memory-budget")
NOTHING_FITS_INTO_0 = {
    "--store-budget": "would refuse every sleep. Leave it out for no bound",
    "--daily-write-budget": "would refuse every sleep. Leave it out for no bound",
    "--memory-budget": "would hold no model. Leave it out for a share of what is available",
}
StoreBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--store-budget",
        metavar="SIZE",
        parser=_size,
        show_default=False,
        help="Refuse a sleep with which the store would hold more than this, as in 20GiB.",
    ),
]
DailyWriteBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--daily-write-budget",
        metavar="SIZE",
        parser=_size,
        show_default=False,
        help="Refuse a sleep with which more than this would be written in a day (UTC).",
    ),
]
KeepFreeOption = Annotated[
    int | None,
    typer.Option(
        "--keep-free",
        metavar="SIZE",
        parser=_size,
        show_default=False,
        help="Refuse a sleep after which the disk would have less than this left.",
    ),
]


MemoryBudgetOption = Annotated[
    int | None,
    typer.Option(
        "--memory-budget",
        metavar="SIZE",
        parser=_size,
        show_default=False,
        help="Memory for models and sessions; what does not fit sleeps until it is asked for. Default: the models, and"
        " 0.7 of what is available beside them.",
    ),
]
IdleSleepOption = Annotated[
    float | None,
    typer.Option(
        "--idle-sleep",
        metavar="SECONDS",
        parser=_seconds,
        show_default=False,
        help="Put a session to sleep when it was not used for so long, as in 900 or 15min.",
    ),
]
StopWithinOption = Annotated[
    float | None,
    typer.Option(
        "--stop-within",
        metavar="SECONDS",
        parser=_seconds,
        show_default=False,
        help="How long a stop may take to write sessions. Of the others it keeps the ledgers, and their next use"
        f" computes the rest again. Default: {STOP_WITHIN_S:g}.",
    ),
]


ScrubRateOption = Annotated[
    int | None,
    typer.Option(
        "--scrub-rate",
        metavar="SIZE",
        parser=_rate,
        show_default=False,
        help="How much of the sleeping sessions to read again in a second, while no request runs. Damage is healed. off"
        " reads nothing. Default: 8MiB.",
    ),
]


KvBitsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-bits",
        metavar="NAME=BITS",
        show_default=False,
        help="Keep keys and values of this model in so many bits, 8 or 4: less memory and disk, and no longer the"
        " model's own numbers. Can be repeated. BITS alone is for the only model.",
    ),
]
KvGroupOption = Annotated[
    list[str] | None,
    typer.Option(
        "--kv-group",
        metavar="NAME=N",
        show_default=False,
        help="How many of these numbers share a scale: 32, 64 or 128; 64 unless given.",
    ),
]
KV_BITS, KV_GROUPS = ("8", "4"), ("32", "64", "128")
TrustingOption = Annotated[
    bool,
    typer.Option(
        "--trusting",
        show_default=False,
        help="Wake without hashing keys and values: faster, but damage on the disk is not found.",
    ),
]
QuantiseAfterOption = Annotated[
    float | None,
    typer.Option(
        "--quantise-after",
        metavar="DAYS",
        show_default=False,
        help="Keep what has slept for so many days in fewer bits, as torpor quantise does.",
    ),
]
QuantiseBitsOption = Annotated[
    Literal["8", "4"] | None,
    typer.Option("--quantise-bits", show_default=False, help="In how many bits, with --quantise-after. Default: 8."),
]
CanaryPolicy = Literal["always", "changed", "never"]
CanaryOption = Annotated[
    CanaryPolicy,
    typer.Option(
        "--canary",
        help="When a wake computes one token to prove its state: always, changed (if it was computed elsewhere), or"
        " never.",
    ),
]


PrefixReusePolicy = Literal["exact", "longest", "off"]
PrefixReuseOption = Annotated[
    PrefixReusePolicy,
    typer.Option(
        "--prefix-reuse",
        help="What a new session takes over from others that begin alike. exact: tokens whose state is to the bit what"
        " it would have computed; longest: all tokens in common; off: nothing.",
    ),
]


RecomputePolicy = Literal["off", "exact", "fastest"]
RecomputeOption = Annotated[
    RecomputePolicy,
    typer.Option(
        "--recompute",
        help="Whether a wake may compute the tokens again where that is measured to be faster than reading the state."
        " off: never; exact: if the very bits result; fastest: also if other bits may result, and the session then says"
        " so.",
    ),
]


DEFAULT_BATCH = 16
BatchOption = Annotated[
    int | None,
    typer.Option(
        "--batch", min=1, max=256, metavar="SESSIONS", help="Sessions of a model that may decode in one call (16)."
    ),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Each session decodes alone: replies are to the bit those of a daemon that serves no other session.",
    ),
]


MaxWaitingOption = Annotated[
    int | None,
    typer.Option(
        "--max-waiting",
        min=1,
        max=65_536,
        metavar="REQUESTS",
        show_default=False,
        help="How many requests may wait for their turn, for memory or the engine. The next one is refused before"
        " anything has happened. Default: 512.",
    ),
]


LoadPolicy = Literal["first", "start", "use"]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        show_default=False,
        help="A TOML file with models, budgets and policies, read anew when it changes. Options given here hold over"
        " it.",
    ),
]
LoadOption = Annotated[
    LoadPolicy | None,
    typer.Option(
        "--load",
        show_default=False,
        help="Which models are loaded at the start: the first and the pinned ones, all, or none. The others are when a"
        " request needs them. Default: first.",
    ),
]
PinOption = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="NAME",
        show_default=False,
        help="Keep the model NAME in memory once it is loaded, even where others need the room. Can be repeated.",
    ),
]
ModelTtlOption = Annotated[
    float | None,
    typer.Option(
        "--model-ttl",
        metavar="SECONDS",
        parser=_seconds,
        show_default=False,
        help="Unload a model when it was not used for so long, as in 900 or 15min.",
    ),
]


ChangePolicy = Literal["refuse", "reload"]
ChangeOption = Annotated[
    ChangePolicy | None,
    typer.Option(
        "--on-model-change",
        show_default=False,
        help="When files of a loaded model change: begin nothing on it until they are back, or put its sessions to"
        " sleep and load it anew. Default: refuse.",
    ),
]


def serve(
    model: ModelsOption = None,
    adapter: AdaptersOption = None,
    fuse: FuseOption = False,
    config: ConfigOption = None,
    load: LoadOption = None,
    pin: PinOption = None,
    model_ttl: ModelTtlOption = None,
    on_model_change: ChangeOption = None,
    kv_bits: KvBitsOption = None,
    kv_group: KvGroupOption = None,
    check_models: CheckModelsOption = False,
    canary: CanaryOption = "always",
    trusting: TrustingOption = False,
    prefix_reuse: PrefixReuseOption = "exact",
    recompute: RecomputeOption = "off",
    batch: BatchOption = None,
    deterministic: DeterministicOption = False,
    max_waiting: MaxWaitingOption = None,
    quantise_after: QuantiseAfterOption = None,
    quantise_bits: QuantiseBitsOption = None,
    store: ServedStoreOption = None,
    socket: SocketOption = None,
    detach: DetachOption = False,
    log: LogOption = None,
    store_budget: StoreBudgetOption = None,
    daily_write_budget: DailyWriteBudgetOption = None,
    keep_free: KeepFreeOption = None,
    memory_budget: MemoryBudgetOption = None,
    idle_sleep: IdleSleepOption = None,
    stop_within: StopWithinOption = None,
    scrub_rate: ScrubRateOption = None,
    as_json: JsonOption = False,
) -> int:
    """With no --model it serves the small model that comes with Torpor, as [cyan]demo[/]. Stopping puts every session
    to sleep first. With --detach it runs in the background, and this command returns once it answers. With --json it
    writes one line when it is ready and one when it has stopped. Sessions that do not fit into --memory-budget sleep,
    and wake when they are asked for. Idle models are unloaded for others, and loaded when they are needed. If a budget
    of the store refuses a sleep, its session stays awake. Deleting is never refused. At a stop only --keep-free
    refuses a sleep, and the session's ledger is kept then. A session wakes only on the very model, adapter and
    precision it slept with.

    [bold]Examples[/]

    [cyan]torpor serve --detach[/]
    [cyan]torpor serve --model qwen=~/models/Qwen3-0.6B --store ~/agents/store[/]
    [cyan]torpor serve --model small=~/models/small --model large=~/models/large --pin small --memory-budget 12GiB[/]
    [cyan]torpor serve --model qwen=~/models/Qwen3-0.6B --adapter qwen=~/adapters/support --fuse[/]
    """
    models, adapters = named_folders("--model", model), named_folders("--adapter", adapter)
    bits, groups = _named_numbers("--kv-bits", kv_bits, KV_BITS), _named_numbers("--kv-group", kv_group, KV_GROUPS)
    if fuse and not adapters:
        raise InvalidUsage("--fuse is for --adapter; without one there is nothing to fuse.", option="--fuse")
    if deterministic and batch not in (None, 1):
        raise InvalidUsage("--deterministic is --batch 1; give one of them.", option="--deterministic")
    batch = 1 if deterministic else batch or DEFAULT_BATCH
    _require_age(quantise_after, quantise_bits)
    store, socket = store or default_store_path(), socket or default_socket_path()
    budgets = dict(zip(BUDGETS, (store_budget, daily_write_budget, keep_free, memory_budget), strict=True))
    for option, value in budgets.items():
        if value is not None and value < 0:
            raise InvalidUsage(f"{option} takes a number of bytes, not {value}.", option=option)
        if value == 0 and option in NOTHING_FITS_INTO_0:
            raise InvalidUsage(f"{option} 0 {NOTHING_FITS_INTO_0[option]}, or give a size, as in 20GiB.", option=option)
    if log is not None and not detach:
        raise InvalidUsage("--log is for --detach; without it, redirect the output yourself.", option="--log")
    require_free(socket)  # the daemon looks again, but only once MLX is loaded
    if detach:
        log = log or background.default_log_path()
        arguments = ["--store", str(store.absolute()), "--socket", str(socket.absolute())]
        for option, folders in (("--model", models), ("--adapter", adapters)):
            for name, path in folders.items():
                arguments += [option, f"{name}={path}"]
        for option, value in budgets.items():
            arguments += [] if value is None else [option, str(value)]
        arguments += ["--fuse"] * fuse + ["--check-models"] * check_models
        arguments += [part for each in kv_bits or () for part in ("--kv-bits", each)]
        arguments += [part for each in kv_group or () for part in ("--kv-group", each)]
        arguments += [] if canary == "always" else ["--canary", canary]
        arguments += ["--trusting"] * trusting
        arguments += [] if prefix_reuse == "exact" else ["--prefix-reuse", prefix_reuse]
        arguments += [] if recompute == "off" else ["--recompute", recompute]
        arguments += [] if batch == DEFAULT_BATCH else ["--batch", str(batch)]
        arguments += [] if max_waiting is None else ["--max-waiting", str(max_waiting)]
        arguments += [] if quantise_after is None else ["--quantise-after", str(quantise_after)]
        arguments += [] if quantise_bits is None else ["--quantise-bits", quantise_bits]
        arguments += [] if idle_sleep is None else ["--idle-sleep", str(idle_sleep)]
        arguments += [] if stop_within is None else ["--stop-within", str(stop_within)]
        arguments += [] if config is None else ["--config", str(config.absolute())]
        arguments += [] if load is None else ["--load", load]
        arguments += [part for name in pin or () for part in ("--pin", name)]
        arguments += [] if on_model_change is None else ["--on-model-change", on_model_change]
        arguments += [] if model_ttl is None else ["--model-ttl", str(model_ttl)]
        arguments += [] if scrub_rate is None else ["--scrub-rate", str(scrub_rate)]
        return _serve_in_background(arguments, store, log, as_json=as_json)
    # Here and nowhere else the command line becomes the daemon; at the top of the module the import would load MLX
    # for every command (test_hygiene.py).
    with _nothing_collected():
        from ...socket_api.main import ServeOptions, run

    run(
        ServeOptions(
            store=store,
            socket=socket,
            models=models,
            adapters=adapters,
            fuse=fuse,
            kv_bits=bits,
            kv_group=groups,
            check_models=check_models,
            canary=canary,
            trusting=trusting,
            prefix_reuse=prefix_reuse,
            recompute=recompute,
            batch=batch,
            max_waiting=max_waiting,
            quantise_after=quantise_after,
            quantise_bits=int(quantise_bits or DEFAULT_QUANTISE_BITS),
            json=as_json,
            store_budget=store_budget,
            daily_write_budget=daily_write_budget,
            keep_free=keep_free,
            memory_budget=memory_budget,
            idle_sleep=idle_sleep,
            stop_within=stop_within,
            config=config,
            load=load,
            pinned=tuple(pin or ()),
            model_ttl=model_ttl,
            on_model_change=on_model_change,
            **({} if scrub_rate is None else {"scrub_rate": scrub_rate}),
        )
    )
    return OK.number


def _require_age(days: float | None, bits: str | None) -> None:
    if days is None and bits is not None:
        raise InvalidUsage(
            "--quantise-bits is for --quantise-after; without it every session stays exact.", option="--quantise-bits"
        )
    if days is not None and not 0 <= days <= MAX_DAYS:
        raise InvalidUsage(
            f"--quantise-after takes a number of days from 0 to {MAX_DAYS}, not {days:g}.", option="--quantise-after"
        )


def _serve_in_background(arguments: list[str], store: Path, log: Path, *, as_json: bool) -> int:
    output = Output(as_json=as_json)
    begun = background.start(arguments, log.absolute())
    if isinstance(begun, background.Refused):
        write_failure(begun.code, begun.message, begun.status, {}, as_json=as_json)
        return begun.status
    if as_json:
        output.document(
            "serve", {"socket": begun.socket, "pid": begun.pid, "log": str(begun.log), "warnings": begun.warnings}
        )
    else:
        is_default = begun.socket == str(default_socket_path())
        stop = "torpor stop" if is_default else f"torpor stop --socket {shlex.quote(begun.socket)}"
        serves = f"torpor serves {plain(str(store))} on {plain(begun.socket)} (pid {begun.pid})"
        output.line(f"{serves}; end it with {plain(stop)}")
        output.line(f"it writes to {plain(begun.log)}")
        if begun.warnings:
            output.remark(
                f"[yellow]{format_plural(begun.warnings, 'warning')}[/] about the store or the models, in that log;"
                " torpor verify tells what is still wrong with the store, and what to do"
            )
    return OK.number


def named_folders(option: str, given: list[str] | None) -> dict[str, str]:
    folders: dict[str, str] = {}
    for text in given or []:
        name, separator, path = text.partition("=")
        if not (name and separator and path):
            raise InvalidUsage(f"{option} takes NAME=PATH, not {text!r}.", option=option)
        if name in folders:
            raise InvalidUsage(f"{option} names {name!r} twice.", option=option, name=name)
        folders[name] = str(Path(path).expanduser()) if path.startswith("~") else path
    return folders


def _named_numbers(option: str, given: list[str] | None, choices: Sequence[str]) -> dict[str, int]:
    """Numbers by the names of models; one that stands alone has an empty name."""
    numbers: dict[str, int] = {}
    for text in given or []:
        name, separator, number = text.rpartition("=")
        if (separator and not name) or number not in choices:
            raise InvalidUsage(
                f"{option} takes NAME=N, where N is {' or '.join(choices)}, not {text!r}.", option=option
            )
        if name in numbers:
            raise InvalidUsage(f"{option} is given twice for {name or 'the only model'}.", option=option, name=name)
        numbers[name] = int(number)
    return numbers


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Imports that stay: the hundreds of thousands of objects that they make are not looked through for garbage, now
    nor later. A daemon is ready a tenth of a second sooner, and no request waits for such a look."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
