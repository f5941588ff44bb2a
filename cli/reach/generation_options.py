"""The options of commands that read or write: how many tokens, how they are drawn, at which priority."""

from __future__ import annotations

from typing import Annotated, Any

from ...daemon.api.limits import MAX_GENERATED_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from ...daemon.api.records import Priority
from ...daemon.api.sampling import Sampling
from ...daemon.errors import InvalidSampling
from ..errors import InvalidUsage
from .options import option

MaxTokensOption = Annotated[
    int | None,
    option(
        "--max-tokens -n N",
        "Write at most N tokens. Default: 512, or what still fits into the context.",
        min=1,
        max=MAX_GENERATED_TOKENS,
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
    option(
        "--stop TEXT",
        "End when the model writes this. It stays in the session's context but is not shown. Can be repeated.",
        callback=_require_stops,
    ),
]
PriorityOption = Annotated[Priority, option("--priority", "background gives way to normal requests. Default: normal.")]
TemperatureOption = Annotated[
    float | None, option("--temperature -t X", "0 takes the likeliest token; more makes rarer ones likelier.", min=0)
]
TopPOption = Annotated[
    float | None, option("--top-p X", "Draw from the likeliest tokens whose probabilities add up to X.", min=0, max=1)
]
SeedOption = Annotated[int | None, option("--seed N", "Where the random numbers begin.", min=0)]


def sampling_of(**given: float | int | None) -> Sampling | None:
    """Gather the given sampling options; None if there are none. Raises InvalidUsage: a value that no sampler takes."""
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return None
    try:
        return Sampling(**chosen)
    except InvalidSampling as error:
        option = f"--{str(error.details['field']).replace('_', '-')}"
        raise InvalidUsage(f"{option}: {error.message}", option=option) from None
