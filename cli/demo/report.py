"""The demo's evidence, its checks, and how they are drawn. Knows no daemon, and measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...daemon.api.waking import SleepResult, WakeResult
from ...memvid.units import format_bytes, format_count
from ..view.formatting import format_id, format_rate, format_seconds
from ..view.output import plain
from ..view.table import Column, PlainTable, rows_table
from .daemon import Death

ORDER_CHECK = "the woken first token came before the cold one"
NOTE = (
    "cold: from the first append sent, with the document and the tokens written before the sleep to read, to the first"
    " token received. woken: from the wake sent to the first token received. Same client, same daemon, model loaded"
    " and warmed up. The bundle is in the page cache, as after a crash; after a reboot, add the time your disk takes"
    " for its bytes."
)


@dataclass(frozen=True, slots=True)
class Writing:
    """The tokens that a session wrote, with the digests of the logits before each and after the last. first_token_at:
    by `time.perf_counter`."""

    tokens: tuple[int, ...]
    text: str
    logits_blake3: tuple[str, ...]
    prefilled_tokens: int
    first_token_at: float


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to hold, and whether it did."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """All observations. Times are seconds as the client sees them. A time to a first token begins with the first
    request: the wake, or the first append of the cold session."""

    model: dict[str, Any]
    blas: str
    document: str
    document_tokens: int
    seconds_to_read: float
    before_sleep: Writing
    control_before: Writing
    control_after: Writing
    receipt: SleepResult
    seconds_to_sleep: float
    death: Death
    wake: WakeResult
    seconds_to_wake: float
    woken_first_token_s: float
    after_wake: Writing
    cold_tokens: int
    cold_first_token_s: float
    store_bytes_checked: int
    store_findings: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """How many times sooner the first token came by waking than by reading again."""
        return self.cold_first_token_s / self.woken_first_token_s

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks on the evidence; the demo succeeds if all pass."""
        before, woken, control, receipt = self.before_sleep, self.after_wake, self.control_after, self.receipt
        prefilled = self.wake.tokens_prefilled + woken.prefilled_tokens
        times = f"{format_seconds(self.woken_first_token_s)}, and {format_seconds(self.cold_first_token_s)} cold"
        sound = f"every byte of {self.store_bytes_checked:,} verified"
        return (
            Check(
                "the daemon was killed with SIGKILL",
                self.death.proven,
                f"pid {self.death.pid} ended by signal {self.death.exit_signal}, and nothing answers on its socket",
            ),
            _equal("token ids written before the sleep", before.tokens, self.control_before.tokens),
            _equal("logits before the sleep", before.logits_blake3, self.control_before.logits_blake3),
            Check(
                "woken: is the state of the receipt",
                (self.wake.bundle_id, self.wake.token_count) == (receipt.bundle_id, receipt.token_count),
                f"{self.wake.token_count:,} tokens of bundle {format_id(self.wake.bundle_id)}",
            ),
            Check("woken: tokens prefilled", prefilled == 0, str(prefilled)),
            _equal(
                "woken: goes on from the very logits that slept", woken.logits_blake3[:1], before.logits_blake3[-1:]
            ),
            _equal("woken: token ids", woken.tokens, control.tokens),
            _equal("woken: logits of every token, and after the last", woken.logits_blake3, control.logits_blake3),
            _equal("woken: text", woken.text, control.text, "characters "),
            Check(
                "the cold run read everything again",
                self.cold_tokens == receipt.token_count,
                f"{self.cold_tokens:,} of {receipt.token_count:,} tokens",
            ),
            # How much quicker a wake is, is shown and not judged; but it must be quicker.
            Check(ORDER_CHECK, self.woken_first_token_s < self.cold_first_token_s, times),
            Check("the store is sound afterwards", not self.store_findings, "; ".join(self.store_findings) or sound),
        )

    @property
    def failed(self) -> list[str]:
        """The names of the failed checks."""
        return [check.name for check in self.checks if not check.passed]

    def to_map(self) -> dict[str, Any]:
        """The evidence as plain data, with its checks and figures."""
        figures = {name: value for name, value in asdict(self).items() if isinstance(value, float)}
        return {
            "passed": not self.failed,
            "figures": {**figures, "ratio": self.ratio},
            "checks": [asdict(check) for check in self.checks],
            "evidence": asdict(self),
        }


def _equal(name: str, ours: Sequence[object], theirs: Sequence[object], unit: str = "") -> Check:
    """Check that two sequences are equal, or tell the first difference; empty ones prove nothing."""
    pairs = zip(ours, theirs, strict=False)
    parts = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    if not ours or parts < max(len(ours), len(theirs)):
        return Check(name, False, f"first difference at {parts} of {len(ours)} and {len(theirs)}")
    return Check(name, True, f"{len(ours)} of {len(theirs)} {unit}equal")


def render_report(evidence: Evidence) -> Iterator[str | PlainTable]:
    """Draw the whole report."""
    yield from ("", _figures(evidence), "", f"[dim]{NOTE}[/]", "")
    ending = plain(" ".join(evidence.before_sleep.text.split())[-40:])
    yield f"[dim]what they wrote after the point of sleep[/], going on from: …{ending}"
    yield from ("", _texts(evidence), "", _checks(evidence), "", _verdict(evidence))


def _figures(evidence: Evidence) -> PlainTable:
    receipt, model = evidence.receipt, evidence.model
    written = f"{len(evidence.before_sleep.tokens)} + {len(evidence.after_wake.tokens)}"
    computes = f"{format_count(model['parameters'])} parameters, {model['compute_dtype']}, {evidence.blas}"
    rate = format_rate(evidence.document_tokens, evidence.seconds_to_read)
    table = PlainTable([Column("", style="dim"), Column("", right=True, whole=True), Column("")], show_header=False)
    for row in (
        ("model", plain(model["name"]), plain(computes)),
        ("tokens read", format_count(evidence.document_tokens), f"of {plain(evidence.document)}"),
        ("tokens written", written, "before the sleep + after the wake"),
        ("bytes on disk", format_bytes(receipt.bytes_written), f"{receipt.blocks_new} blocks, one bundle"),
        ("time to read", format_seconds(evidence.seconds_to_read), f"{rate}, the first time"),
        ("time to sleep", format_seconds(evidence.seconds_to_sleep), "until durable and read back"),
        ("time to wake", format_seconds(evidence.seconds_to_wake), "every byte hashed, one token computed"),
        ("tokens prefilled by the wake", str(evidence.wake.tokens_prefilled), f"of {receipt.token_count:,}"),
        ("first token, cold", format_seconds(evidence.cold_first_token_s), "everything read again"),
        ("first token, woken", format_seconds(evidence.woken_first_token_s), "after the SIGKILL"),
        ("cold ÷ woken", f"[bold green]{evidence.ratio:,.1f}×[/]", ""),
    ):
        table.add_row(*row)
    return table


def _texts(evidence: Evidence) -> PlainTable:
    table = rows_table("WOKEN AFTER SIGKILL", "CONTROL, NEVER SLEPT")
    texts = (evidence.after_wake.text, evidence.control_after.text)
    table.add_row(*("\n".join(map(plain, text.split("\n"))) for text in texts))
    return table


def _checks(evidence: Evidence) -> PlainTable:
    table = PlainTable([Column("", whole=True), Column(""), Column("", style="dim")], show_header=False)
    for check in evidence.checks:
        mark, title = ("[green]✓[/]", "{}") if check.passed else ("[bold red]✗[/]", "[bold red]{}[/]")
        table.add_row(mark, title.format(plain(check.name)), plain(check.detail))
    return table


def _verdict(evidence: Evidence) -> str:
    if evidence.failed:
        return f"[bold red]Not the same[/]: {'; '.join(evidence.failed)}."
    return (
        "[bold green]Bit for bit the same[/]: token ids and logits of the woken session equal those of the one that"
        f" never slept, and its first token came {evidence.ratio:,.0f} times sooner than by reading again."
    )
