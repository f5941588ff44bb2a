"""`torpor generate`: let a session go on writing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from ...daemon.api.reading import GenerateResult
from ...socket_api.client.client import TextStream
from ..reach.daemon_link import OnEvent, connect, require_labels, require_model, with_session
from ..reach.generation_options import (
    FrequencyPenaltyOption,
    LogitBiasOption,
    MaxTokensOption,
    PresencePenaltyOption,
    PriorityOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopPOption,
    sampling_of,
)
from ..reach.inputs import require_no_file
from ..reach.options import JsonOption, ModelOption, NewLabelOption, SessionArgument, SocketOption, argument, option
from ..view.damage import naming_the_intact
from ..view.output import Output
from .streaming import finish_generation, stream_to_end

ProveOption = Annotated[bool, option("--prove", "Give a digest of the logits behind every token.")]


def generate(
    session: SessionArgument,
    text: Annotated[str | None, argument("TEXT", "Read this first, then go on.")] = None,
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    presence_penalty: PresencePenaltyOption = None,
    frequency_penalty: FrequencyPenaltyOption = None,
    logit_bias: LogitBiasOption = None,
    stop: StopOption = None,
    prove: ProveOption = False,
    priority: PriorityOption = "normal",
    model: ModelOption = None,
    label: NewLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """The text streams to stdout. Ctrl-C stops it: the tokens written so far are kept, and the session can go on.
    A sleeping session wakes by itself. The sampling options hold for this request; [cyan]torpor set[/] changes those of
    the session.

    [bold]Examples[/]

    [cyan]torpor generate notes -n 200[/]
    [cyan]torpor generate tale "Once upon a time" --temperature 0.8 --seed 7[/]
    [cyan]torpor generate notes --prove --json | jq .final_logits_blake3[/]
    """
    require_no_file(text)
    output = Output(as_json=as_json)
    sampling = sampling_of(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
    )
    with connect(socket) as client:

        def begin(on_event: OnEvent, new: Mapping[str, Any]) -> TextStream:
            return client.stream_generate(
                session,
                max_tokens=max_tokens,
                text=text,
                sampling=sampling,
                stop=stop or (),
                prove=prove,
                priority=priority,
                on_event=on_event,
                **new,
            )

        def act(new: Mapping[str, Any]) -> GenerateResult:
            return stream_to_end(output, partial(begin, new=new))

        # No session is made without a text: it would have nothing to go on from.
        with naming_the_intact(client, session):
            if model is not None and not text:
                require_model(client, session, model)
            if label and not text:
                require_labels(client, session, label)
            result = with_session(output, client, session, model, act, labels=label) if text else act({})
    return finish_generation(output, "generate", result)
