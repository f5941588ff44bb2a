"""`torpor set`: change how a session draws its tokens."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidUsage
from ..reach.daemon_link import connect, progress_of
from ..reach.generation_options import SAMPLING, sampling_of
from ..reach.options import JsonOption, SessionArgument, SocketOption, takes
from ..view.formatting import format_sampling
from ..view.output import Output, plain


@takes(SAMPLING)
def set_(session: SessionArgument, socket: SocketOption = None, as_json: JsonOption = False, **drawing: Any) -> None:
    """The options of [cyan]generate[/] and [cyan]chat[/] hold for one request; these belong to the session, and sleep
    with it. A given seed starts its random numbers anew. A sleeping session is woken, and the change is durable once
    it has slept again.

    [bold]Examples[/]

    [cyan]torpor set tale --temperature 0.8 --top-p 0.95[/]
    [cyan]torpor set tale --seed 7 --json | jq .sampling[/]
    """
    output = Output(as_json=as_json)
    sampling = sampling_of(drawing)
    if sampling is None:
        raise InvalidUsage("Name what is to change, such as --temperature 0.8.")
    with connect(socket) as client, progress_of(output, "wake") as on_event:
        info = client.set(session, sampling=sampling, on_event=on_event)
    if output.told("set", info):
        return
    told = format_sampling(vars(info.sampling)) if info.sampling else ""
    output.line(f"{plain(info.session)}  draws with {told}")
