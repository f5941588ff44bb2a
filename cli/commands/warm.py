"""`torpor warm`: wake sessions ahead of their use."""

from __future__ import annotations

from typing import Annotated

from ...daemon.api.waking import Warmed
from ...memvid.units import format_plural
from ..errors import InvalidUsage
from ..exit_codes import OK, PARTIAL
from ..reach.daemon_link import connect, progress_of
from ..reach.interrupts import ignore_interrupts
from ..reach.options import JsonOption, LabelChoice, NamespaceChoice, SocketOption, argument, require_sessions
from ..view.output import Output, plain

WHY_LEFT = {
    "no_room": "there is no free memory for it; put others to sleep, or just use it",
    "model_not_loaded": "its model is not loaded; torpor models load does that",
}
SessionsToWarm = Annotated[
    list[str] | None,
    argument("[SESSION]...", "NAME, NAMESPACE/NAME or torpor://NAMESPACE/NAME.", callback=require_sessions),
]


def warm(
    sessions: SessionsToWarm = None,
    label: LabelChoice = None,
    namespace: NamespaceChoice = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """The sessions of a label that were used last are woken first. They take free memory alone: no other session goes
    to sleep for them, and no model is loaded. The status is 3 if some were left asleep.

    [bold]Examples[/]

    [cyan]torpor warm helper notes[/]
    [cyan]torpor warm --label morning[/]
    """
    if not sessions and label is None:
        raise InvalidUsage("Name the sessions to warm, or a --label.")
    output = Output(as_json=as_json)
    with connect(socket) as client, progress_of(output, "wake") as on_event:
        result = client.warm(sessions or (), label=label, namespace=namespace if label else None, on_event=on_event)
        ignore_interrupts()
    if not output.told("warm", result):
        for each in result.sessions:
            output.line(_line(each))
        if not result.sessions:
            output.remark(f"No session has the label {plain(label)}.")
    return PARTIAL.number if any(each.left for each in result.sessions) else OK.number


def _line(each: Warmed) -> str:
    info = each.info
    if each.left:
        return f"{plain(info.session)}  [yellow]left asleep[/]: {plain(WHY_LEFT.get(each.left, each.left))}"
    how = "awake already" if each.hit else "woken"
    labels = f"  [dim]{plain(' '.join(info.labels))}[/]" if info.labels else ""
    return f"{plain(info.session)}  {how}, {format_plural(info.token_count, 'token')}, found {each.hits}×{labels}"
