"""The demo proves what it says: every check fails when what it checks is not so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torpor.cli.demo.daemon import Death
from torpor.cli.demo.report import ORDER_CHECK, Evidence, Writing, render_report
from torpor.cli.view.output import Output
from torpor.daemon.api.session import Provenance
from torpor.daemon.api.waking import SleepResult, WakeResult
from torpor.tests.cli.cli_rig import Torpor, pretend_terminal, unstyled

BEFORE = Writing((1, 2), "ab", ("d1", "d2", "d3"), 0, 1.0)
AFTER = Writing((3, 4), "cd", ("d3", "d4", "d5"), 0, 2.0)
RECEIPT = SleepResult("torpor://default/reader", 1, "ab" * 32, None, 6002, 40_000_000, 40_000_000, 24, 0, 0.3)
WAKE = WakeResult(
    "torpor://default/reader", 1, "ab" * 32, 6002, 0, 4096, 0.1, already_awake=False, provenance=Provenance()
)
DEATH = Death(1, 9, socket_refuses=True)
EVIDENCE = Evidence(
    model={"name": "demo", "parameters": 5_000_000, "compute_dtype": "float32"},
    blas="libopenblas.so.0",
    document="argparse.py",
    document_tokens=6000,
    seconds_to_read=6.0,
    before_sleep=BEFORE,
    control_before=BEFORE,
    control_after=AFTER,
    receipt=RECEIPT,
    seconds_to_sleep=0.3,
    death=DEATH,
    wake=WAKE,
    seconds_to_wake=0.1,
    woken_first_token_s=0.2,
    after_wake=AFTER,
    cold_tokens=6002,
    cold_first_token_s=8.0,
    store_bytes_checked=1000,
    store_findings=(),
)
GOES_ON, LOGITS = "woken: goes on from the very logits that slept", "woken: logits of every token, and after the last"


def woken(**changes: object) -> Evidence:
    return replace(EVIDENCE, after_wake=replace(AFTER, **changes))


def test_good_evidence_passes_every_check() -> None:
    assert EVIDENCE.failed == []
    assert len(EVIDENCE.checks) == 12
    assert EVIDENCE.ratio == pytest.approx(40)


@pytest.mark.parametrize(
    ("evidence", "names"),
    [
        (replace(EVIDENCE, wake=replace(WAKE, token_count=6001)), ["woken: is the state of the receipt"]),
        (replace(EVIDENCE, wake=replace(WAKE, bundle_id="cd" * 32)), ["woken: is the state of the receipt"]),
        (replace(EVIDENCE, cold_first_token_s=0.2), [ORDER_CHECK]),
        (replace(EVIDENCE, death=replace(DEATH, exit_signal=15)), ["the daemon was killed with SIGKILL"]),
        (replace(EVIDENCE, death=replace(DEATH, socket_refuses=False)), ["the daemon was killed with SIGKILL"]),
        (replace(EVIDENCE, before_sleep=replace(BEFORE, tokens=(1, 9))), ["token ids written before the sleep"]),
        (
            replace(EVIDENCE, before_sleep=replace(BEFORE, logits_blake3=("d1", "xx", "d3"))),
            ["logits before the sleep"],
        ),
        (
            replace(EVIDENCE, before_sleep=replace(BEFORE, logits_blake3=("d1", "d2", "xx"))),
            ["logits before the sleep", GOES_ON],
        ),
        (replace(EVIDENCE, wake=replace(WAKE, tokens_prefilled=1)), ["woken: tokens prefilled"]),
        (woken(prefilled_tokens=1), ["woken: tokens prefilled"]),
        (woken(tokens=(3, 9)), ["woken: token ids"]),
        (woken(tokens=(3,)), ["woken: token ids"]),
        (woken(logits_blake3=("d3", "xx", "d5")), [LOGITS]),
        (woken(logits_blake3=("d3", "d4", "xx")), [LOGITS]),
        (woken(logits_blake3=("d3", "d4")), [LOGITS]),
        (woken(text="ce"), ["woken: text"]),
        (replace(EVIDENCE, cold_tokens=2), ["the cold run read everything again"]),
        (replace(EVIDENCE, store_findings=("a flipped bit",)), ["the store is sound afterwards"]),
    ],
)
def test_each_check_fails_for_what_it_checks_and_for_nothing_else(evidence: Evidence, names: list[str]) -> None:
    assert evidence.failed == names


def test_nothing_compared_is_no_proof() -> None:
    """Empty on both sides is equal, and proves nothing."""
    nothing = Writing((), "", (), 0, 0.0)
    empty = replace(EVIDENCE, before_sleep=nothing, control_before=nothing, control_after=nothing, after_wake=nothing)
    assert len(empty.failed) == 6


Draw = Callable[[Evidence, int], str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draw:
    """Draws a report at a width, as the terminal would get it."""

    def drawer(evidence: Evidence, width: int) -> str:
        pretend_terminal(monkeypatch, width)
        Output(as_json=False).show(*render_report(evidence))
        return unstyled(capsys.readouterr().out)

    return drawer


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_report_is_drawn_within_any_width(draw: Draw, width: int) -> None:
    drawn = draw(EVIDENCE, width)
    assert max(map(len, drawn.splitlines())) <= width
    assert "Bit for bit the same" in drawn
    assert "40.0×" in drawn


def test_lines_of_the_two_texts_are_lines(draw: Draw) -> None:
    drawn = draw(woken(text="one\n  two\nthree"), 100)
    assert [line.split()[0] for line in drawn.splitlines() if line.strip().startswith(("one", "two", "three"))] == [
        *("one", "two", "three")
    ]


def test_a_disproof_is_drawn_with_what_failed(draw: Draw) -> None:
    drawn = draw(woken(text="cX", tokens=(3, 9)), 100)
    assert "Not the same" in drawn
    assert "woken: token ids" in drawn
    assert "first difference at 1" in drawn


def test_a_demo_that_disproves_itself_writes_its_report_and_an_error(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torpor.cli.demo.demo.Demo.tell", lambda _: woken(tokens=(3, 9)))
    ran = torpor("demo", "--json")
    assert ran.status == 6
    assert ran.document["passed"] is False
    assert ran.document["figures"]["ratio"] == pytest.approx(40)
    assert ran.document["evidence"]["after_wake"]["logits_blake3"] == ["d3", "d4", "d5"]
    assert {check["name"] for check in ran.document["checks"] if not check["passed"]} == {"woken: token ids"}
    assert ran.error["error"]["code"] == "demo_disproved"
    assert "woken: token ids" in ran.error["error"]["message"]
