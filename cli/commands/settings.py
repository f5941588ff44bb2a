"""`torpor set`: change how a session draws its tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.generation_options import (
    FrequencyPenaltyOption,
    LogitBiasOption,
    PresencePenaltyOption,
    SeedOption,
    TemperatureOption,
    TopPOption,
    sampling_of,
)
from ..reach.options import JsonOption, SessionArgument, SocketOption, option
from ..view.damage import naming_the_intact
from ..view.formatting import format_sampling
from ..view.output import Output, plain

TopKOption = Annotated[int | None, option("--top-k N", "Draw from the N likeliest; 0: from all.", min=0)]
MinPOption = Annotated[
    float | None, option("--min-p X", "Leave out tokens less likely than X times the likeliest.", min=0, max=1)
]
PenaltyOption = Annotated[
    float | None, option("--repetition-penalty X", "Above 1: tokens that were just said become less likely.", min=0)
]


def set_(
    session: SessionArgument,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    min_p: MinPOption = None,
    repetition_penalty: PenaltyOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    logit_bias: LogitBiasOption = None,
    seed: SeedOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """The options of [cyan]generate[/] and [cyan]chat[/] hold for one request; these belong to the session, and sleep
    with it. A given seed starts its random numbers anew. A sleeping session is woken, and the change is durable once
    it has slept again.

    [bold]Examples[/]

    [cyan]torpor set tale --temperature 0.8 --top-p 0.95[/]
    [cyan]torpor set tale --seed 7 --json | jq .sampling[/]
    """
    output = Output(as_json=as_json)
    sampling = sampling_of(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        seed=seed,
    )
    if sampling is None:
        raise InvalidUsage("Name what is to change, such as --temperature 0.8.")
    with connect(socket) as client, naming_the_intact(client, session), progress_of(output, "wake") as on_event:
        info = client.set(session, sampling=sampling, on_event=on_event)
    if output.told("set", info):
        return
    values = asdict(info.sampling) if info.sampling else {}
    output.line(f"{plain(info.session)}  draws with {format_sampling(values)}")
