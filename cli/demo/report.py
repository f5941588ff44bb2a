"""The demo's evidence, its checks, and how they are drawn. Knows no daemon, and measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...daemon.api.waking import SleepResult, WakeResult
from ...memvid.units import format_bytes, format_count
from ..view.formatting import format_id, format_rate, format_seconds
from ..view.output import neutralise, plain
from .daemon import Death

MAX_WIDTH = 110  # columns; wider lines are hard to read
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


def render_report(evidence: Evidence, width: int) -> RenderableType:
    """Draw the whole report."""
    width = min(width, MAX_WIDTH)
    figures, texts, checks = _figures(evidence, width), _texts(evidence, width), _checks(evidence, width)
    return Group("", figures, Text(NOTE, style="dim"), "", texts, "", checks, "", _verdict(evidence, width))


def _figures(evidence: Evidence, width: int) -> RenderableType:
    receipt, tokens, model = evidence.receipt, len(evidence.before_sleep.tokens), evidence.model
    table = Table(box=box.ROUNDED, width=width, show_header=False, border_style="dim")
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(ratio=1, style="dim")
    computes = f"{format_count(model['parameters'])} parameters, {model['compute_dtype']}, {evidence.blas}"
    table.add_row("model", plain(model["name"]), plain(computes))
    table.add_row("tokens read", format_count(evidence.document_tokens), f"of {plain(evidence.document)}")
    table.add_row(
        "tokens written", f"{tokens} + {len(evidence.after_wake.tokens)}", "before the sleep + after the wake"
    )
    table.add_row("bytes on disk", format_bytes(receipt.bytes_written), f"{receipt.blocks_new} blocks, one bundle")
    table.add_section()
    rate = format_rate(evidence.document_tokens, evidence.seconds_to_read)
    table.add_row("time to read", format_seconds(evidence.seconds_to_read), f"{rate}, the first time")
    table.add_row("time to sleep", format_seconds(evidence.seconds_to_sleep), "until durable and read back")
    table.add_row("time to wake", format_seconds(evidence.seconds_to_wake), "every byte hashed, one token computed")
    prefilled = f"[bold]{evidence.wake.tokens_prefilled}[/]"
    table.add_row("tokens prefilled by the wake", prefilled, f"of {receipt.token_count:,}")
    table.add_section()
    table.add_row("first token, cold", format_seconds(evidence.cold_first_token_s), "everything read again")
    table.add_row("first token, woken", format_seconds(evidence.woken_first_token_s), "after the SIGKILL")
    table.add_row("[bold]cold ÷ woken[/]", f"[bold green]{evidence.ratio:,.1f}×[/]", "")
    return table


def _texts(evidence: Evidence, width: int) -> RenderableType:
    ending = neutralise(" ".join(evidence.before_sleep.text.split()))[-40:]
    table = Table(box=box.ROUNDED, width=width, border_style="dim")
    table.add_column("woken after SIGKILL", ratio=1, overflow="fold")
    table.add_column("control, never slept", ratio=1, overflow="fold")
    table.add_row(*(Text(neutralise(each.text)) for each in (evidence.after_wake, evidence.control_after)))
    lead = Text("what they wrote after the point of sleep", style="dim").append(f", going on from: …{ending}")
    return Group(lead, table)


def _checks(evidence: Evidence, width: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    table.add_column(width=1)
    table.add_column(ratio=3)
    table.add_column(ratio=2, style="dim", overflow="fold")
    for check in evidence.checks:
        mark, title = ("[green]✓[/]", "{}") if check.passed else ("[bold red]✗[/]", "[bold red]{}[/]")
        table.add_row(mark, title.format(plain(check.name)), plain(check.detail))
    return table


def _verdict(evidence: Evidence, width: int) -> RenderableType:
    if evidence.failed:
        said = Text.assemble(("Not the same", "bold red"), f": {'; '.join(evidence.failed)}.")
        return Panel(said, border_style="red", box=box.ROUNDED, width=width)
    said = Text.assemble(
        ("Bit for bit the same", "bold green"),
        ": token ids and logits of the woken session equal those of the one that never slept, and its first token came"
        f" {evidence.ratio:,.0f} times sooner than by reading again.",
    )
    return Panel(said, border_style="green", box=box.ROUNDED, width=width)
