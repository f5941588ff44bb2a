"""The server's entry point: `python -m torpor.socket_api.main`, and what `torpor serve` hands over to.

Owns the arguments and what is printed. The one module of this folder that makes a service. It raises TorporError from
`run`; a caller that has a table of exit codes maps it, `main` knows only 0 and 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..daemon.adapters import AdapterChoice
from ..daemon.canary import POLICIES, Policy
from ..daemon.models import DEFAULT_KV_GROUP, KV_BITS, KV_GROUPS, KvChoice
from ..daemon.quantising import QUANTISE_BITS, AgePolicy
from ..daemon.results import CloseReport
from ..daemon.reuse import REUSE_POLICIES, ReusePolicy
from ..daemon.service import Service
from ..errors import TorporError
from .address import default_socket_path
from .serving import serve_until_signal


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve. No store means the default one, no models the demo model that Torpor ships. `json` prints one JSON
    object a line. `adapters` are folders by the name of their model, fused into it or not. `check_models` reads every
    model file anew. `kv_bits` and `kv_group` quantise keys and values. `canary`: when a wake proves its state by
    computing one token. `trusting`: wakes do not hash the KV that they read. `prefix_reuse`: what a new
    session takes over of others that begin alike. What has slept for `quantise_after` days
    is kept in `quantise_bits` bits. The budgets are bytes: what the store may hold, may write in a day, and leaves free
    on the disk. `memory_budget`: bytes of memory for models and sessions, a share of what is available if None;
    `idle_sleep`: after how many seconds a session that nobody uses is put to sleep, never if None."""

    store: Path | None = None
    socket: Path = field(default_factory=default_socket_path)
    models: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    fuse: bool = False
    kv_bits: int | None = None
    kv_group: int = DEFAULT_KV_GROUP
    check_models: bool = False
    canary: Policy = "always"
    trusting: bool = False
    prefix_reuse: ReusePolicy = "exact"
    quantise_after: float | None = None
    quantise_bits: int = 8
    json: bool = False
    store_budget: int | None = None
    daily_write_budget: int | None = None
    keep_free: int = 0
    memory_budget: int | None = None
    idle_sleep: float | None = None


def run(options: ServeOptions) -> None:
    """Serve until SIGTERM, SIGINT, SIGHUP or a client's `shutdown`, in this process and thread.

    Raises:
        TorporError: why it could not start, or that it stopped with sessions it could not put to sleep.
    """

    warnings: tuple[str, ...] = ()

    async def open_service() -> Service:
        nonlocal warnings
        service = await Service.open(
            store_path=options.store,
            models=options.models,
            kv=None if options.kv_bits is None else KvChoice(options.kv_bits, options.kv_group),
            adapters={name: AdapterChoice(path, options.fuse) for name, path in options.adapters.items()},
            check_models=options.check_models,
            canary=options.canary,
            trusting=options.trusting,
            prefix_reuse=options.prefix_reuse,
            quantise=_age_policy(options),
            store_budget=options.store_budget,
            daily_write_budget=options.daily_write_budget,
            keep_free=options.keep_free,
            memory_budget=options.memory_budget,
            idle_sleep_s=options.idle_sleep,
        )
        warnings = service.warnings
        for warning in warnings:
            print(f"torpor serve: warning: {warning}", file=sys.stderr, flush=True)
        return service

    def on_ready(socket: str) -> None:
        sentence = (
            f"torpor serves {options.store or 'the default store'} on {socket} (pid {os.getpid()}); stop it with Ctrl-C"
        )
        _print(options, sentence, {"event": "ready", "socket": socket, "pid": os.getpid(), "warnings": len(warnings)})

    def on_stopped(report: CloseReport) -> None:
        _print(options, describe_stop(report), {"event": "stopped", **asdict(report)})

    serve_until_signal(open_service, options.socket, on_ready=on_ready, on_stopped=on_stopped)


def _age_policy(options: ServeOptions) -> AgePolicy | None:
    return None if options.quantise_after is None else AgePolicy(options.quantise_after, options.quantise_bits)


def describe_stop(report: CloseReport) -> str:
    """What became of the sessions, as a sentence."""
    slept, empty = len(report.slept), len(report.empty)
    sentence = f"torpor stopped; {slept} {'session was' if slept == 1 else 'sessions were'} put to sleep"
    if empty:
        sentence += f"; {empty} had read nothing and {'is' if empty == 1 else 'are'} gone"
    return sentence


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
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, help="quantise keys and values to so many bits")
    parser.add_argument(
        "--kv-group", type=int, choices=KV_GROUPS, default=DEFAULT_KV_GROUP, help="how many numbers share a scale"
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
    parser.add_argument("--quantise-after", type=float, metavar="DAYS", help="keep what slept so long in fewer bits")
    parser.add_argument("--quantise-bits", type=int, choices=QUANTISE_BITS, default=8, help="in how many")
    parser.add_argument(
        "--idle-sleep", type=_duration, metavar="SECONDS", help="put sessions to sleep that nobody has used for so long"
    )
    for option, meaning in _BUDGETS:
        parser.add_argument(option, type=int, metavar="BYTES", help=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parsed = parser.parse_args(arguments)
    for option, given in (("--model", parsed.model), ("--adapter", parsed.adapter)):
        if len(dict(given)) != len(given):
            parser.error(f"{option}: each name can be given once")
    if parsed.fuse and not parsed.adapter:
        parser.error("--fuse: there is no --adapter to fuse")
    return ServeOptions(
        store=parsed.store,
        socket=parsed.socket or default_socket_path(),
        models=dict(parsed.model),
        adapters=dict(parsed.adapter),
        kv_bits=parsed.kv_bits,
        kv_group=parsed.kv_group,
        fuse=parsed.fuse,
        check_models=parsed.check_models,
        canary=parsed.canary,
        trusting=parsed.trusting,
        prefix_reuse=parsed.prefix_reuse,
        quantise_after=parsed.quantise_after,
        quantise_bits=parsed.quantise_bits,
        json=parsed.json,
        store_budget=parsed.store_budget,
        daily_write_budget=parsed.daily_write_budget,
        keep_free=parsed.keep_free or 0,
        memory_budget=parsed.memory_budget,
        idle_sleep=parsed.idle_sleep,
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


def _named_folder(text: str) -> tuple[str, str]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return name, path


def _print(options: ServeOptions, sentence: str, document: Mapping[str, object]) -> None:
    try:
        print(json.dumps(document) if options.json else sentence, flush=True)
    except OSError:  # nobody reads: a closed terminal or pipe must not keep the daemon from serving, or from its end
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, sys.stdout.fileno())
        os.close(silence)


if __name__ == "__main__":
    sys.exit(main())
