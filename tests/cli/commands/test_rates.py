"""The rates that append, generate and chat tell: those of the work, and not of a wait for others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torpor.cli.commands import append, streaming
from torpor.cli.view.output import Output
from torpor.daemon.api.events import ProgressEvent
from torpor.daemon.api.reading import GenerateResult


def test_a_wait_before_the_first_piece_has_no_part_in_the_rate_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter((60.0, 61.0, 62.0))
    monkeypatch.setattr(append, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    pace = append._Pace()
    pace.note(ProgressEvent("wake", 5, 10))
    for done in (64, 128, 192):
        pace.note(ProgressEvent("prefill", done, 192))
    assert pace.told() == " (64/s)"


def test_of_what_was_read_in_one_piece_no_rate_is_told() -> None:
    pace = append._Pace()
    assert pace.told() == ""
    pace.note(ProgressEvent("prefill", 4, 4))
    assert pace.told() == ""


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
