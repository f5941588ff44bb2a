"""A generation on the terminal: a bar while it reads or wakes, then the text as it comes. Ctrl-C stops it.

The common part of `generate` and `chat`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from ...daemon.api.events import SessionEvent, TokenEvent, WorkEvent
from ...daemon.api.reading import GenerateResult
from ...memvid.units import format_count, format_plural
from ...socket_api.client.client import TextStream
from ...socket_api.errors import LocalProtocolError
from ..errors import Interrupted
from ..exit_codes import OK
from ..reach.daemon_link import STAGE_NAMES, OnEvent
from ..view.formatting import format_rate, format_seconds
from ..view.output import OnProgress, Output, plain
from ..view.wake_remarks import remark_on_branch, remark_on_wake_in_passing


def stream_to_end(output: Output, begin: Callable[[OnEvent], TextStream]) -> GenerateResult:
    """Run a generation, show it, and return its result.

    Raises:
        Interrupted: it was stopped, and the daemon gave no result.
        TorporError: the daemon refused it, or it failed.
    """
    with _Screen(output) as screen, begin(screen.on_event) as stream:
        _drain(stream)
        try:
            return stream.result
        except LocalProtocolError as error:
            look = error.details.get("branched")
            back = "History branches here. To go back: torpor sleep NAME, then torpor wake NAME@{newest_version}."
            branches = f" {back.format(**look)}" if look else ""
            raise Interrupted(
                f"Stopped. The session is at its last committed token, and can go on.{branches}", **error.details
            ) from None


def finish_generation(output: Output, command: str, result: GenerateResult) -> int:
    """Write the remarks after the text, and return the exit status."""
    if output.told(command, result):
        return OK.number
    remark_on_wake_in_passing(output, result.woken)
    remark_on_branch(output, result.session, result.branched)
    if result.rewound_to is not None:
        output.remark(
            f"[dim]the transcript had diverged: the session went back to token {format_count(result.rewound_to)}; its"
            " former state is an earlier version[/]"
        )
    written = len(result.tokens)
    if not written and result.finish_reason == "stop":
        output.remark(
            "the model ends its text here, so it wrote nothing; give it a text to go on from (torpor generate NAME"
            " TEXT), or talk with it (torpor chat NAME)"
        )
    output.remark(
        f"[dim]{format_plural(written, 'token')} in {format_seconds(result.seconds)}{_speed_of(result)},"
        f" {plain(result.finish_reason)};"
        f" {plain(result.session)} has {format_count(result.token_count)}[/]"
    )
    return OK.number


def _speed_of(result: GenerateResult) -> str:
    """When the first token came, what was computed before it, and the rate from there on: waiting, waking and reading
    have no part in that rate."""
    first_s, others = result.time_to_first_token_s, len(result.tokens) - 1
    if first_s is None or others < 1:
        return ""
    counts = ((result.recomputed_tokens, "recomputed"), (result.prefilled_tokens, "read"))
    before = "".join(f", {format_count(count)} {how}" for count, how in counts if count)
    rate = format_rate(others, result.seconds - first_s)
    return f" (the first after {format_seconds(first_s)}{before}, then {rate})"


class _Screen:
    """Shows the events of one generation."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._stage: str | None = None
        self._bar = ExitStack()
        self._report: OnProgress | None = None
        self._line_is_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.close()
        self._end_line()

    def on_event(self, event: WorkEvent) -> None:
        """Show one event."""
        if isinstance(event, TokenEvent):
            self._bar.close()
            if not self._output.as_json:
                self._show(event)
            return
        if isinstance(event, SessionEvent):
            return
        if event.stage != self._stage or self._report is None:
            self._bar.close()
            what, unit = STAGE_NAMES[event.stage]
            self._stage, self._report = event.stage, self._bar.enter_context(self._output.progress(what, unit=unit))
        self._report(event.done, event.total)

    def _show(self, event: TokenEvent) -> None:
        if event.call is not None:
            self._end_line()
            self._output.remark(f"[dim]calls[/] {plain(event.call.name)} {plain(json.dumps(event.call.arguments))}")
        elif event.text and event.channel == "text":
            self._output.stream(event.text)
            self._line_is_open = not event.text.endswith("\n")

    def _end_line(self) -> None:
        if self._line_is_open:
            self._output.stream("\n")
        self._line_is_open = False


def _drain(stream: TextStream) -> None:
    """Read a stream to its end. The first Ctrl-C cancels, so that a result still comes; the second interrupts.

    The cancel goes between whole frames: the request is out, and an interrupted wait has read nothing.
    """
    try:
        _read_on(stream)
    except KeyboardInterrupt:
        stream.cancel()
        _read_on(stream)


def _read_on(stream: TextStream) -> None:
    for _ in stream:
        pass  # the screen shows the pieces as their events come
