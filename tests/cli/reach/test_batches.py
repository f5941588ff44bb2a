"""One verb on several sessions: what ends a batch, and what does not."""

from __future__ import annotations

import json

import pytest
from torpor.cli.reach.batches import run_batch
from torpor.cli.view.output import Output
from torpor.errors import TorporError
from torpor.memvid.answers import Finding
from torpor.socket_api.errors import ConnectionLost, DaemonUnreachable, ProtocolError, RemoteError, ShuttingDown


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionLost("It is gone."),
        DaemonUnreachable("Nobody answers."),
        ProtocolError("It said nonsense."),
        ShuttingDown("It stops."),
        RemoteError("service_closed", "It has stopped."),
    ],
    ids=lambda error: error.code,
)
def test_a_batch_ends_where_nobody_is_left_to_ask(error: TorporError, as_json: bool) -> None:
    asked = []

    def act(session: str) -> None:
        asked.append(session)
        raise error

    with pytest.raises(type(error)):
        run_batch(Output(as_json=as_json), "sleep", ["a", "b", "c"], act, str)
    assert asked == ["a"]


def test_a_batch_goes_on_behind_a_session_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def act(session: str) -> str:
        asked.append(session)
        if session == "b":
            raise RemoteError("session_not_found", "There is no session 'b'.")
        return session

    assert run_batch(Output(as_json=False), "sleep", ["a", "b", "c"], act, str) == 3
    assert asked == ["a", "b", "c"]
    assert capsys.readouterr().out == "a\nc\n"


@pytest.mark.parametrize(("lacking", "status"), [("a", 3), ("ab", 1)])
def test_a_result_that_lacks_something_is_told_whole_and_is_a_failure(
    capsys: pytest.CaptureFixture[str], lacking: str, status: int
) -> None:
    def problem_of(result: str) -> Finding | None:
        return Finding("file:///r", "remote_unreachable", "It is away.") if result in lacking else None

    for as_json in (False, True):
        assert run_batch(Output(as_json=as_json), "sleep", ["a", "b"], str, str, problem_of) == status
    shown = capsys.readouterr()
    lines, document = shown.out.split("{", 1)
    assert lines == "a\nb\n"
    told = json.loads("{" + document)
    assert told["results"] == ["a", "b"]
    assert [(each["session"], each["code"]) for each in told["failures"]] == [
        (session, "remote_unreachable") for session in lacking
    ]
    assert shown.err.count("It is away.") == len(lacking)
