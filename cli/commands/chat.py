"""`torpor chat`: a conversation, one message or a whole evening."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from ...daemon.api.reading import GenerateResult
from ...errors import TorporError
from ...socket_api.client.client import Client, TextStream
from ..errors import Interrupted, InvalidUsage
from ..exit_codes import INTEGRITY, INTERRUPTED, OK, exit_status_of
from ..reach.batches import ends_everything
from ..reach.daemon_link import OnEvent, connect, with_session
from ..reach.dialogue import ask, unseen_typing
from ..reach.generation_options import SAMPLING, MaxTokensOption, PriorityOption, StopOption, sampling_of
from ..reach.inputs import load_text, load_transcript
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
from ..view.output import Output, plain, report_error
from .streaming import finish_generation, stream_to_end

TranscriptOption = Annotated[
    Path | None, option("--transcript PATH", "The whole chat, a JSON list of messages; - is stdin.")
]
DivergenceOption = Annotated[
    Literal["refuse", "rewind"] | None,
    option(
        "--on-divergence",
        "What to do if a transcript differs from the session: refuse it, or take the session back.",
    ),
]


@takes(SAMPLING)
def chat(
    session: SessionArgument,
    message: Annotated[str | None, argument("MESSAGE", "One message, - is stdin; without it, a dialogue.")] = None,
    transcript: TranscriptOption = None,
    on_divergence: DivergenceOption = None,
    max_tokens: MaxTokensOption = None,
    stop: StopOption = None,
    priority: PriorityOption = "normal",
    model: ModelOption = None,
    label: NewLabelOption = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
    **drawing: Any,
) -> int:
    """With a MESSAGE, or with text on standard input, it answers once. On a terminal without either it is a dialogue:
    Ctrl-C stops an answer, Ctrl-D ends the dialogue. The session is made if there is none of that name.

    With --transcript the whole chat is given, as agent frameworks send it: a JSON list of messages, each with role and
    content. The last one is answered. What the session has already is not read again. A chat that differs from the
    session's is refused; with --on-divergence rewind the session goes back to the first difference.

    [bold]Examples[/]

    [cyan]torpor chat helper[/]
    [cyan]torpor chat helper "What does os.fsync promise?"[/]
    [cyan]torpor chat helper --json < question.txt | jq -r .text[/]
    [cyan]torpor chat helper --transcript messages.json --on-divergence rewind[/]
    """
    output = Output(as_json=as_json)
    sampling = sampling_of(drawing)
    if transcript is None and on_divergence is not None:
        raise InvalidUsage("--on-divergence is for --transcript: one new message cannot diverge.")
    if transcript is not None and message is not None:
        raise InvalidUsage("Give either a MESSAGE or --transcript: its last message is the one to be answered.")
    with connect(socket) as client:
        how = {"max_tokens": max_tokens, "sampling": sampling, "stop": stop or (), "priority": priority}
        turn = _Turn(output, client, session, model, label, **how)
        if transcript is not None:
            asked = {"messages": load_transcript(transcript), "on_divergence": on_divergence or "refuse"}
            return finish_generation(output, "chat", turn.answer(None, **asked))
        if message is None and sys.stdin.isatty():
            if as_json:
                raise InvalidUsage("With --json, give the MESSAGE as an argument or on standard input.")
            return _dialogue(output, turn)
        return finish_generation(output, "chat", turn.answer(load_text(message, None, what="message")))


class _Turn:
    """Asks one session, each time with the same options."""

    def __init__(
        self, output: Output, client: Client, session: str, model: str | None, labels: list[str] | None, **asked: Any
    ) -> None:
        self._output = output
        self._client = client
        self.session = session
        self._model = model
        self._labels = labels
        self._asked = asked

    def answer(self, message: str | None, **transcript: Any) -> GenerateResult:
        """Send a message or a transcript, stream the answer, and give its result."""

        def begin(on_event: OnEvent, new: Mapping[str, Any]) -> TextStream:
            asked = {**self._asked, **transcript, **new}
            return self._client.stream_chat(self.session, message, on_event=on_event, **asked)

        def act(new: Mapping[str, Any]) -> GenerateResult:
            return stream_to_end(self._output, partial(begin, new=new))

        return with_session(self._output, self._client, self.session, self._model, act, labels=self._labels)


def _dialogue(output: Output, turn: _Turn) -> int:
    """Answer lines until the input ends. Ctrl-C at the prompt gives the interrupted status."""
    output.remark("[dim]Ctrl-C stops an answer, Ctrl-D ends the dialogue.[/]")
    while True:
        try:
            message = ask(output)
        except EOFError:
            output.remark("")
            return OK.number
        except KeyboardInterrupt:
            output.remark("")
            return INTERRUPTED.number
        if not message.strip():
            continue
        try:
            with unseen_typing():
                finish_generation(output, "chat", turn.answer(message))
        except Interrupted:
            output.remark("[dim]stopped[/]")
        except TorporError as error:
            if ends_everything(error):
                output.remark(f"[dim]When a daemon runs again, `torpor chat {plain(turn.session)}` goes on.[/]")
                raise
            if exit_status_of(error.code) == INTEGRITY.number:
                raise  # each further message would meet it, too
            report_error(error, as_json=False)
