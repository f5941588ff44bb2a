"""The rates that append, generate and chat tell: those of the work, and not of a wait for others."""

from __future__ import annotations

import pytest
from torpor.cli.commands import append, streaming
from torpor.cli.view.output import Output
from torpor.daemon.api.reading import AppendResult, GenerateResult


@pytest.mark.parametrize(
    ("prefilled", "reading_s", "told"),
    [
        (192, 3.0, "read 200 tokens in 60.0 s (64/s), now 200"),
        (31, 0.5, "read 200 tokens in 60.0 s, now 200"),
        (1, 0.024, "read 200 tokens in 60.0 s, now 200"),
        (0, None, "read 200 tokens in 60.0 s, now 200"),
    ],
)
def test_the_rate_of_reading_is_of_the_tokens_and_the_time_that_the_model_read(
    prefilled: int, reading_s: float | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = AppendResult("torpor://default/a", 200, 200, prefilled, 60.0, reading_seconds=reading_s)
    append._say(Output(as_json=False), result)
    assert told in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("tokens", "first_s", "told"),
    [
        (21, 10.0, "21 tokens in 12.0 s (the first after 10.0 s, then 10/s), length; torpor://default/a has 21"),
        (1, 10.0, "1 token in 12.0 s, length; torpor://default/a has 1"),
        (0, None, "0 tokens in 12.0 s, length; torpor://default/a has 0"),
    ],
)
def test_what_came_before_the_first_token_has_no_part_in_the_rate_of_writing(
    capsys: pytest.CaptureFixture[str], tokens: int, first_s: float | None, told: str
) -> None:
    result = GenerateResult(
        session="torpor://default/a",
        text="",
        tokens=tuple(range(tokens)),
        finish_reason="length",
        token_count=tokens,
        prefilled_tokens=0,
        time_to_first_token_s=first_s,
        seconds=12.0,
    )
    streaming.finish_generation(Output(as_json=False), "generate", result)
    assert " ".join(capsys.readouterr().err.split()) == told


def test_what_was_computed_before_the_first_token_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    result = GenerateResult(
        session="torpor://default/a",
        text="",
        tokens=(1, 2),
        finish_reason="length",
        token_count=2000,
        prefilled_tokens=12,
        recomputed_tokens=1700,
        time_to_first_token_s=10.0,
        seconds=10.5,
    )
    streaming.finish_generation(Output(as_json=False), "chat", result)
    assert "(the first after 10.0 s, 1,700 recomputed, 12 read, then 2/s)" in " ".join(capsys.readouterr().err.split())
