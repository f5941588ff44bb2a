"""The options of commands that read or write: how many tokens, how they are drawn, at which priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from ...daemon.api.limits import MAX_BIAS, MAX_GENERATED_TOKENS, MAX_STOP_CHARS, MAX_STOPS
from ...daemon.api.records import Priority
from ...daemon.api.sampling import Sampling, TokenBias
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
SAMPLING: Final = {
    "temperature": TemperatureOption,
    "top_p": Annotated[
        float | None,
        option("--top-p X", "Draw from the likeliest tokens whose probabilities add up to X.", min=0, max=1),
    ],
    "top_k": Annotated[int | None, option("--top-k N", "Draw from the N likeliest; 0: from all.", min=0)],
    "min_p": Annotated[
        float | None, option("--min-p X", "Leave out tokens less likely than X times the likeliest.", min=0, max=1)
    ],
    "repetition_penalty": Annotated[
        float | None,
        option("--repetition-penalty X", "Above 1: tokens that were just said become less likely.", min=0),
    ],
    "presence_penalty": Annotated[
        float | None,
        option("--presence-penalty X", "Take X (-2 to 2) off the logit of each token that the answer has already."),
    ],
    "frequency_penalty": Annotated[
        float | None,
        option("--frequency-penalty X", "Take X (-2 to 2) off a token's logit for each time that the answer has it."),
    ],
    "logit_bias": Annotated[
        list[str] | None,
        option(
            "--logit-bias ID=X", "Add X to the logit of a token; ID=never rules it out, none clears. Can be repeated."
        ),
    ],
    "seed": Annotated[int | None, option("--seed N", "Where the random numbers begin.", min=0)],
}
"""How tokens are drawn: the fields of `Sampling`."""


def _biases_of(given: list[str]) -> list[TokenBias]:
    if given == ["none"]:
        return []
    pairs = [each.partition("=")[::2] for each in given]
    try:
        return [TokenBias(int(token), None if bias == "never" else float(bias)) for token, bias in pairs]
    except (ValueError, InvalidSampling):
        raise InvalidUsage(
            f"--logit-bias takes the id of a token and a number of at most {MAX_BIAS:g} up or down, such as "
            "15496=-2.5, or 15496=never.",
            option="--logit-bias",
        ) from None


def sampling_of(given: Mapping[str, Any]) -> Sampling | None:
    """Gather the given options of `SAMPLING`; None if there are none. Raises InvalidUsage: a value that no sampler
    takes."""
    chosen = {name: value for name, value in given.items() if value not in (None, [])}
    if "logit_bias" in chosen:
        chosen["logit_bias"] = _biases_of(chosen["logit_bias"])
    if not chosen:
        return None
    try:
        return Sampling(**chosen)
    except InvalidSampling as error:
        option = f"--{str(error.details['field']).replace('_', '-')}"
        raise InvalidUsage(f"{option}: {error.message}", option=option) from None
