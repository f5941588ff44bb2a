"""What the demo measured and what it proves, as values. Knows neither daemons nor terminals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..view.formatting import format_seconds
from .daemon import Death

ORDER_CHECK = "the woken first token came before the cold one"


@dataclass(frozen=True, slots=True)
class Writing:
    """What a session wrote: token by token, with the digest of the logits that each was drawn from."""

    tokens: tuple[int, ...]
    text: str
    logits_blake3: tuple[str, ...]
    final_logits_blake3: str
    seconds: float
    prefilled_tokens: int

    def tail(self, count: int, pieces: Sequence[str]) -> Writing:
        """The same writing without its first tokens; `pieces` is the text of each token."""
        return Writing(
            tokens=self.tokens[count:],
            text="".join(pieces[count:]),
            logits_blake3=self.logits_blake3[count:],
            final_logits_blake3=self.final_logits_blake3,
            seconds=self.seconds,
            prefilled_tokens=self.prefilled_tokens,
        )


@dataclass(frozen=True, slots=True)
class Waking:
    """One wake after one death: times are seconds from the wake request being sent, seen from the client."""

    daemon_pid: int
    seconds_to_wake: float
    seconds_to_first_token: float
    tokens_prefilled: int
    bytes_read: int
    token_count: int
    bundle_id: str | None
    writing: Writing


@dataclass(frozen=True, slots=True)
class ColdRun:
    """One reading of everything again: seconds from the first append being sent, seen from the client."""

    daemon_pid: int
    tokens_prefilled: int
    seconds_to_read: float
    seconds_to_first_token: float
    first_token: int


@dataclass(frozen=True, slots=True)
class Reading:
    """How the document was read the first time."""

    name: str
    path: str
    chars: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """The receipt of the sleep, and its time seen from the client."""

    bundle_id: str
    version: int
    token_count: int
    bytes_written: int
    logical_bytes: int
    blocks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and whether it did."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was observed."""

    reading: Reading
    before_sleep: Writing
    control: Writing
    control_pieces: tuple[str, ...]
    sleep: Sleep
    deaths: tuple[Death, ...]
    wakings: tuple[Waking, ...]
    cold_runs: tuple[ColdRun, ...]
    store_findings: tuple[str, ...]
    store_bytes_checked: int
    minimum_document_tokens: int

    @property
    def control_before(self) -> Writing:
        """The control's tokens that stand beside those written before the sleep."""
        count = len(self.before_sleep.tokens)
        pieces = self.control_pieces
        return Writing(
            tokens=self.control.tokens[:count],
            text="".join(pieces[:count]),
            logits_blake3=self.control.logits_blake3[:count],
            final_logits_blake3=self.control.logits_blake3[count] if len(self.control.tokens) > count else "",
            seconds=0.0,
            prefilled_tokens=0,
        )

    @property
    def control_after(self) -> Writing:
        """The control's tokens that stand beside those written after the wake."""
        return self.control.tail(len(self.before_sleep.tokens), self.control_pieces)


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure measured several times."""

    median: float
    lowest: float
    highest: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values), tuple(values))


@dataclass(frozen=True, slots=True)
class Figures:
    """What the table shows beyond single observations."""

    seconds_to_wake: Spread
    woken_first_token_s: Spread
    cold_first_token_s: Spread
    ratio: float
    ratio_lowest: float
    ratio_highest: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The demo's result: where it ran, what was seen, what follows."""

    machine: dict[str, Any]
    status: dict[str, Any]
    evidence: Evidence
    steps: list[dict[str, Any]]
    seconds: float
    folder: str | None
    checks: tuple[Check, ...] = field(default=())

    @property
    def passed(self) -> bool:
        """Whether everything that has to hold did."""
        return all(check.passed for check in self.checks)

    @property
    def figures(self) -> Figures:
        """The figures of the table."""
        return figures_of(self.evidence)

    def to_map(self) -> dict[str, Any]:
        """The report as plain data, everything in it."""
        return {"passed": self.passed, "figures": asdict(self.figures), **asdict(self)}


def figures_of(evidence: Evidence) -> Figures:
    """Summarise what was measured repeatedly. The ratio is of medians; its range is that of the pairs in one daemon."""
    woken = Spread.of([waking.seconds_to_first_token for waking in evidence.wakings])
    cold = Spread.of([run.seconds_to_first_token for run in evidence.cold_runs])
    pairs = [
        run.seconds_to_first_token / waking.seconds_to_first_token
        for run, waking in zip(evidence.cold_runs, evidence.wakings, strict=True)
    ]
    return Figures(
        seconds_to_wake=Spread.of([waking.seconds_to_wake for waking in evidence.wakings]),
        woken_first_token_s=woken,
        cold_first_token_s=cold,
        ratio=cold.median / woken.median,
        ratio_lowest=min(pairs),
        ratio_highest=max(pairs),
    )


def check_evidence(evidence: Evidence) -> tuple[Check, ...]:
    """Decide what the evidence proves. Each check stands on its own; the demo succeeds if all pass."""
    before, after = evidence.control_before, evidence.control_after
    checks = [
        _check_document(evidence),
        _check_deaths(evidence.deaths),
        _equal("token ids written before the sleep", evidence.before_sleep.tokens, before.tokens),
        _equal("logits of every token before the sleep", evidence.before_sleep.logits_blake3, before.logits_blake3),
    ]
    for number, waking in enumerate(evidence.wakings, start=1):
        wake = f"wake {number}: " if len(evidence.wakings) > 1 else "wake: "
        checks += _check_waking(wake, evidence, waking, after)
    checks.append(_check_cold_runs(evidence))
    checks.append(_check_order(evidence))
    findings = evidence.store_findings
    detail = "; ".join(findings) or f"every byte of {evidence.store_bytes_checked:,} verified"
    checks.append(Check("the store is sound afterwards", not findings, detail))
    return tuple(checks)


def first_difference(ours: Sequence[object], theirs: Sequence[object]) -> int | None:
    """Give the index of the first item that differs or is missing on one side; None if all are equal."""
    for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return index
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def _check_document(evidence: Evidence) -> Check:
    tokens, minimum = evidence.reading.tokens, evidence.minimum_document_tokens
    return Check("the document is long enough", tokens >= minimum, f"{tokens:,} tokens, at least {minimum:,}")


def _check_deaths(deaths: Sequence[Death]) -> Check:
    bad = [death for death in deaths if not death.proven]
    many = f"all {len(deaths)} daemons" if len(deaths) > 1 else "it"
    detail = f"{many} ended by signal 9; process gone, socket stale"
    if bad:
        detail = f"pid {bad[0].pid}: ended by {bad[0].exit_signal}, gone: {bad[0].process_gone}"
    return Check("the daemon was killed with SIGKILL", bool(deaths) and not bad, detail)


def _check_waking(wake: str, evidence: Evidence, waking: Waking, control: Writing) -> list[Check]:
    written = waking.writing
    prefilled = waking.tokens_prefilled + written.prefilled_tokens
    return [
        _check_receipt(wake, evidence.sleep, waking),
        Check(wake + "tokens prefilled", prefilled == 0, f"{prefilled}"),
        _equal_digest(
            wake + "goes on from the very logits that slept",
            "".join(written.logits_blake3[:1]),
            evidence.before_sleep.final_logits_blake3,
        ),
        _equal(wake + "token ids", written.tokens, control.tokens),
        _equal(wake + "logits of every token", written.logits_blake3, control.logits_blake3),
        _equal_digest(wake + "logits after the last token", written.final_logits_blake3, control.final_logits_blake3),
        _equal(wake + "text", written.text, control.text, "characters "),
    ]


def _check_receipt(wake: str, sleep: Sleep, waking: Waking) -> Check:
    """What woke is what the receipt of the sleep promised."""
    same = (waking.bundle_id, waking.token_count) == (sleep.bundle_id, sleep.token_count)
    woken = f"{waking.token_count:,} tokens of bundle {(waking.bundle_id or 'none')[:12]}"
    detail = woken if same else f"{woken}, not {sleep.token_count:,} of {sleep.bundle_id[:12]}"
    return Check(wake + "is the state of the receipt", same, detail)


def _check_order(evidence: Evidence) -> Check:
    """By how much a wake is quicker is shown, not judged; that it is quicker at all is the point of sleeping."""
    figures = figures_of(evidence)
    woken, cold = figures.woken_first_token_s.median, figures.cold_first_token_s.median
    return Check(ORDER_CHECK, woken < cold, f"{format_seconds(woken)}, and {format_seconds(cold)} cold")


def _check_cold_runs(evidence: Evidence) -> Check:
    """A cold run that did not read everything would make the comparison a lie."""
    expected = evidence.sleep.token_count
    read = [run.tokens_prefilled for run in evidence.cold_runs]
    passed = all(tokens == expected for tokens in read)
    return Check(
        "the cold run read everything again", passed, f"{', '.join(f'{n:,}' for n in read)} of {expected:,} tokens"
    )


def _equal_digest(name: str, ours: str, theirs: str) -> Check:
    if ours and ours == theirs:
        return Check(name, True, f"BLAKE3 {ours[:16]}…")
    return Check(name, False, f"BLAKE3 {ours[:16] or 'none'}…, not {theirs[:16] or 'none'}…")


def _equal(name: str, ours: Sequence[object], theirs: Sequence[object], unit: str = "") -> Check:
    difference = first_difference(ours, theirs)
    if difference is None and ours:
        return Check(name, True, f"{len(ours)} of {len(theirs)} {unit}equal")
    if difference is None:
        return Check(name, False, "nothing to compare")
    return Check(name, False, f"first difference at {difference} of {len(ours)} and {len(theirs)}")
