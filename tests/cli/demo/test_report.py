"""The demo proves what it says: every check fails when what it checks is not so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from cli_rig import Torpor, pretend_terminal, unstyled
from torpor.cli.demo.daemon import Death
from torpor.cli.demo.report import (
    Check,
    ColdRun,
    DemoReport,
    Evidence,
    Reading,
    Sleep,
    Waking,
    Writing,
    check_evidence,
    figures_of,
    first_difference,
)
from torpor.cli.demo.view import render_report
from torpor.cli.view.output import Output

BEFORE = Writing((1, 2), "ab", ("d1", "d2"), "d3", 1.0, 0)
AFTER = Writing((3, 4), "cd", ("d3", "d4"), "d5", 1.0, 0)
CONTROL = Writing((1, 2, 3, 4), "abcd", ("d1", "d2", "d3", "d4"), "d5", 1.0, 0)
WAKING = Waking(2, 0.1, 0.2, 0, 4096, 6002, "ab" * 32, AFTER)
COLD = ColdRun(2, 6002, 7.0, 8.0, 3)
DEATH = Death(1, 9, True, True, True, 0.01)

EVIDENCE = Evidence(
    reading=Reading("argparse.py", "/usr/lib/argparse.py", 20_000, 6000, 6.0),
    before_sleep=BEFORE,
    control=CONTROL,
    control_pieces=("a", "b", "c", "d"),
    sleep=Sleep("ab" * 32, 1, 6002, 40_000_000, 40_000_000, 24, 0.3),
    deaths=(DEATH,),
    wakings=(WAKING,),
    cold_runs=(COLD,),
    store_findings=(),
    store_bytes_checked=1000,
    minimum_document_tokens=6000,
)


def woken(**changes: object) -> Evidence:
    return replace(EVIDENCE, wakings=(replace(WAKING, writing=replace(AFTER, **changes)),))


def failed(evidence: Evidence) -> list[str]:
    return [check.name for check in check_evidence(evidence) if not check.passed]


def test_good_evidence_passes_every_check() -> None:
    assert failed(EVIDENCE) == []
    assert len(check_evidence(EVIDENCE)) == 14


@pytest.mark.parametrize(
    ("evidence", "names"),
    [
        (replace(EVIDENCE, minimum_document_tokens=6001), ["the document is long enough"]),
        (
            replace(EVIDENCE, wakings=(replace(WAKING, token_count=6001),)),
            ["wake: is the state of the receipt"],
        ),
        (
            replace(EVIDENCE, wakings=(replace(WAKING, bundle_id="cd" * 32),)),
            ["wake: is the state of the receipt"],
        ),
        (
            replace(EVIDENCE, cold_runs=(replace(COLD, seconds_to_first_token=0.2),)),
            ["the woken first token came before the cold one"],
        ),
        (replace(EVIDENCE, deaths=()), ["the daemon was killed with SIGKILL"]),
        (replace(EVIDENCE, deaths=(replace(DEATH, exit_signal=15),)), ["the daemon was killed with SIGKILL"]),
        (replace(EVIDENCE, deaths=(replace(DEATH, process_gone=False),)), ["the daemon was killed with SIGKILL"]),
        (replace(EVIDENCE, deaths=(replace(DEATH, socket_refuses=False),)), ["the daemon was killed with SIGKILL"]),
        (
            replace(EVIDENCE, before_sleep=replace(BEFORE, tokens=(1, 9))),
            ["token ids written before the sleep"],
        ),
        (
            replace(EVIDENCE, before_sleep=replace(BEFORE, logits_blake3=("d1", "xx"))),
            ["logits of every token before the sleep"],
        ),
        (
            replace(EVIDENCE, before_sleep=replace(BEFORE, final_logits_blake3="xx")),
            ["wake: goes on from the very logits that slept"],
        ),
        (replace(EVIDENCE, wakings=(replace(WAKING, tokens_prefilled=1),)), ["wake: tokens prefilled"]),
        (woken(prefilled_tokens=1), ["wake: tokens prefilled"]),
        (woken(tokens=(3, 9)), ["wake: token ids"]),
        (woken(tokens=(3,)), ["wake: token ids"]),
        (woken(logits_blake3=("d3", "xx")), ["wake: logits of every token"]),
        (woken(logits_blake3=("d3",)), ["wake: logits of every token"]),
        (woken(final_logits_blake3="xx"), ["wake: logits after the last token"]),
        (woken(text="ce"), ["wake: text"]),
        (replace(EVIDENCE, cold_runs=(replace(COLD, tokens_prefilled=2),)), ["the cold run read everything again"]),
        (replace(EVIDENCE, store_findings=("a flipped bit",)), ["the store is sound afterwards"]),
    ],
)
def test_each_check_fails_for_what_it_checks_and_for_nothing_else(evidence: Evidence, names: list[str]) -> None:
    assert failed(evidence) == names


def test_nothing_compared_is_no_proof() -> None:
    """Empty on both sides is equal, and proves nothing."""
    nothing = Writing((), "", (), "", 0.0, 0)
    empty = replace(
        EVIDENCE,
        before_sleep=nothing,
        control=nothing,
        control_pieces=(),
        wakings=(replace(WAKING, writing=nothing),),
    )
    assert len(failed(empty)) == 7


def test_of_several_wakes_the_one_that_failed_is_named() -> None:
    bad = replace(WAKING, writing=replace(AFTER, tokens=(3, 9)))
    assert failed(replace(EVIDENCE, wakings=(WAKING, bad), cold_runs=(COLD, COLD))) == ["wake 2: token ids"]


def test_figures_are_medians_and_the_ratio_is_of_them() -> None:
    wakings = tuple(replace(WAKING, seconds_to_first_token=s) for s in (0.1, 0.4, 0.2))
    colds = tuple(replace(COLD, seconds_to_first_token=s) for s in (8.0, 10.0, 9.0))
    figures = figures_of(replace(EVIDENCE, wakings=wakings, cold_runs=colds))
    assert figures.woken_first_token_s.median == 0.2
    assert figures.cold_first_token_s.median == 9.0
    assert figures.ratio == pytest.approx(45)
    assert (figures.ratio_lowest, figures.ratio_highest) == (pytest.approx(25), pytest.approx(80))


@pytest.mark.parametrize(
    ("ours", "theirs", "index"),
    [("abc", "abc", None), ("abc", "axc", 1), ("ab", "abc", 2), ("abc", "ab", 2), ("", "", None)],
)
def test_first_difference(ours: str, theirs: str, index: int | None) -> None:
    assert first_difference(ours, theirs) == index


def make_report(evidence: Evidence) -> DemoReport:
    machine = {
        "torpor": "0.1.0",
        "python": "3.11",
        "platform": "Linux",
        "cpu_count": 2,
        "packages": {"mlx": "0.32.4"},
        "device": "Device(cpu, 0)",
        "blas": {"fast": True, "gflops": 115.0, "product": "512x512x512 float32", "library": "libopenblas.so.0"},
    }
    model = {"name": "demo", "parameters": 5_000_000, "compute_dtype": "float32"}
    return DemoReport(
        machine, {"models": [model]}, evidence, [{"step": "x", "seconds": 1.0}], 60.0, None, check_evidence(evidence)
    )


Draw = Callable[[DemoReport, int], str]


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Draw:
    """Draws a report at a width, as the terminal would get it."""

    def drawer(report: DemoReport, width: int) -> str:
        pretend_terminal(monkeypatch, width)
        output = Output(as_json=False)
        output.stdout.print(render_report(report, output.stdout.width))
        return unstyled(capsys.readouterr().out)

    return drawer


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_report_is_drawn_within_any_width(draw: Draw, width: int) -> None:
    drawn = draw(make_report(EVIDENCE), width)
    assert max(map(len, drawn.splitlines())) <= width
    assert "Bit for bit the same" in drawn
    assert "40.0×" in drawn


def test_a_disproof_is_drawn_with_what_failed(draw: Draw) -> None:
    report = make_report(woken(text="cX", tokens=(3, 9)))
    drawn = draw(report, 100)
    assert not report.passed
    assert "Not the same" in drawn
    assert "wake: token ids" in drawn
    assert "first difference at 1" in drawn


def test_the_report_as_json_has_every_observation() -> None:
    document = json.loads(json.dumps(make_report(EVIDENCE).to_map()))
    assert document["passed"] is True
    assert document["figures"]["ratio"] == pytest.approx(40)
    assert document["evidence"]["wakings"][0]["writing"]["logits_blake3"] == ["d3", "d4"]
    assert document["steps"] == [{"step": "x", "seconds": 1.0}]
    assert all(check.keys() == {"name", "passed", "detail"} for check in document["checks"])
    assert isinstance(make_report(EVIDENCE).checks[0], Check)


def test_a_demo_that_disproves_itself_writes_its_report_and_an_error(
    torpor: Torpor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = woken(tokens=(3, 9))
    model = {"name": "demo", "parameters": 1, "compute_dtype": "float32"}
    report = DemoReport({}, {"models": [model]}, bad, [], 1.0, None, check_evidence(bad))
    monkeypatch.setattr("torpor.cli.demo.demo.examine_machine", dict)
    monkeypatch.setattr("torpor.cli.demo.demo.Demo.tell", lambda _: report)
    ran = torpor("demo", "--json")
    assert ran.status == 6
    assert ran.document["passed"] is False
    assert ran.error["error"]["code"] == "demo_disproved"
    assert "wake: token ids" in ran.error["error"]["message"]
