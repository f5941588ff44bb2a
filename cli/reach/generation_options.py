"""The options of commands that let a session read or write: how many tokens, how they are drawn, who goes first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ...daemon.api.limits import MAX_GENERATED_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from ...daemon.api.records import Priority
from ...daemon.api.sampling import Sampling
from ...daemon.errors import InvalidSampling
from ..errors import InvalidUsage

MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        min=1,
        max=MAX_GENERATED_TOKENS,
        metavar="N",
        show_default=False,
        help="Write at most N tokens. Default: 512, or what still fits into the context.",
    ),
]


def _require_stops(stops: list[str] | None) -> list[str] | None:
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops or ()) or len(stops or ()) > MAX_STOPS:
        raise InvalidUsage(
            f"--stop takes a text of 1 to {MAX_STOP_CHARS} characters, and can be given {MAX_STOPS} times.",
            option="--stop",
        )
    return stops


StopOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        metavar="TEXT",
        show_default=False,
        callback=_require_stops,
        help="End when the model writes this. It stays in the session's context but is not shown. Can be repeated.",
    ),
]
PriorityOption = Annotated[
    Priority,
    typer.Option("--priority", show_default=False, help="background gives way to normal requests. Default: normal."),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option("--temperature", "-t", min=0, metavar="X", show_default=False, help="0 takes the likeliest token."),
]
TopPOption = Annotated[
    float | None,
    typer.Option("--top-p", min=0, max=1, metavar="X", show_default=False, help="Draw from the likeliest X of 1."),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", min=0, metavar="N", show_default=False, help="Start of the random numbers.")
]


def sampling_of(**given: float | int | None) -> Sampling | None:
    """Gather the sampling options that were given; None if none was.

    Raises:
        InvalidUsage: a value that no sampler takes.
    """
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return None
    try:
        return Sampling(**chosen)
    except InvalidSampling as error:
        option = f"--{str(error.details['field']).replace('_', '-')}"
        raise InvalidUsage(f"{option}: {error.message}", option=option) from None
