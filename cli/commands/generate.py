"""`torpor generate`: let a session go on writing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

from ...daemon.api.reading import GenerateResult
from ...socket_api.client.client import TextStream
from ..reach.daemon_link import OnEvent, connect, with_session
from ..reach.generation_options import SAMPLING, MaxTokensOption, PriorityOption, StopOption, sampling_of
from ..reach.inputs import require_no_file
from ..reach.options import (
    JsonOption,
    ModelOption,
    NewLabelOption,
    SessionArgument,
    SocketOption,
    argument,
    option,
    takes,
)
from ..view.output import Output
from .streaming import finish_generation, stream_to_end

ProveOption = Annotated[bool, option("--prove", "Give a digest of the logits behind every token.")]


@takes(SAMPLING)
def generate(
    session: SessionArgument,
    text: Annotated[str | None, argument("TEXT", "Read this first, then go on.")] = None,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    prove: ProveOption = False,
    priority: PriorityOption = "normal",
    model: ModelOption = None,
    label: NewLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
    **drawing: Any,
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
    sampling = sampling_of(drawing)
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
        result = with_session(output, client, session, model, act, labels=label, creates=bool(text))
    return finish_generation(output, "generate", result)
