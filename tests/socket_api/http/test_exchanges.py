"""Each case of the exchanges, and that the runner sees what is not so."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.tests.socket_api.http.exchange import FOLDER, play
from torpor.tests.socket_api.http.http_rig import HttpThread
from torpor.tests.text_cases import Case, cases_in

CASES = [pytest.param(case, id=f"{case.file.stem}: {case.title}") for case in cases_in(FOLDER)]


@pytest.mark.one_in(1)
@pytest.mark.parametrize("case", CASES)
def test_a_client_is_told_what_the_exchange_says(server: HttpThread, case: Case) -> None:
    play(case, server)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("[404]", "answered with 200"),
        ("< x-torpor-ignored:", "x-torpor-ignored"),
        ('{"type": "message", "role": "user"}', "assistant for user"),
        ("no hi", "body"),
        ("-> no converse", "it was asked"),
        ('-> converse {"max_tokens": 8}', "9"),
        ('~ {"type": "message"}', None),
        ('~ {"type": "ping"}', "message for ping"),
    ],
)
def test_an_exchange_that_is_not_so_fails_at_its_line(server: HttpThread, line: str, fault: str | None) -> None:
    hello = '{"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "foo": 1}'
    lines = [(1, '-- ends {"text": "hi"}'), (2, f"POST /v1/messages {hello}"), (3, line)]
    case = Case(Path("x.txt"), "", lines)
    if fault is None:
        play(case, server)
    else:
        with pytest.raises(AssertionError, match=rf"x.txt:3: (?s:.*){fault}"):
            play(case, server)
