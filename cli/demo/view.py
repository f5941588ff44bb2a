"""The demo's report on the terminal: the table, the two texts, what was equal. Draws, and measures nothing."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...memvid.units import format_bytes, format_count
from ..serve.doctor import describe_blas, describe_device
from ..view.formatting import format_seconds
from ..view.output import facts_table, neutralise, plain
from .report import Check, DemoReport, Spread, Writing, first_difference

MAX_WIDTH = 110  # columns; wider lines are hard to read


def render_report(report: DemoReport, width: int) -> RenderableType:
    """Draw everything that the demo found out."""
    width = min(width, MAX_WIDTH)
    return Group(
        Text(""),
        _machine(report),
        Text(""),
        _table(report, width),
        _notes(report),
        Text(""),
        _texts(report, width),
        Text(""),
        _checks(report.checks, width),
        Text(""),
        _verdict(report),
    )


def _machine(report: DemoReport) -> RenderableType:
    machine = report.machine
    model = report.status["models"][0]
    packages = machine.get("packages", {})
    facts = facts_table()
    facts.add_row("machine", f"{plain(str(machine.get('platform')))}, {plain(machine.get('cpu_count'))} cores")
    facts.add_row("versions", plain(_versions(machine, packages)))
    facts.add_row("device", describe_device(machine))
    facts.add_row("BLAS", describe_blas(machine))
    size = format_count(model["parameters"])
    facts.add_row("model", f"{plain(model['name'])}, {size} parameters, computed in {plain(model['compute_dtype'])}")
    return facts


def _versions(machine: dict[str, Any], packages: dict[str, Any]) -> str:
    named = ", ".join(f"{name} {packages[name]}" for name in ("mlx", "mlx-lm") if packages.get(name))
    return f"torpor {machine.get('torpor')}, {named}, Python {machine.get('python')}"


def _table(report: DemoReport, width: int) -> RenderableType:
    evidence, figures = report.evidence, report.figures
    reading, sleep, waking = evidence.reading, evidence.sleep, evidence.wakings[0]
    table = Table(box=box.ROUNDED, width=width, show_header=False, border_style="dim")
    table.add_column("", ratio=1)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("", ratio=1, style="dim")
    rate = f"{reading.tokens / reading.seconds:,.0f} tokens/s, the first time"
    table.add_row("tokens read", format_count(reading.tokens), f"of {plain(reading.name)}")
    written = f"{len(evidence.before_sleep.tokens)} + {len(waking.writing.tokens)}"
    table.add_row("tokens written", written, "before the sleep + after the wake")
    table.add_row("bytes on disk", format_bytes(sleep.bytes_written), f"{sleep.blocks} blocks, one bundle")
    table.add_section()
    table.add_row("time to read", format_seconds(reading.seconds), f"{rate}")
    table.add_row("time to sleep", format_seconds(sleep.seconds), "until durable and read back")
    table.add_row("time to wake", *_spread(figures.seconds_to_wake))
    table.add_row("tokens prefilled by the wake", f"[bold]{waking.tokens_prefilled}[/]", f"of {sleep.token_count:,}")
    table.add_section()
    table.add_row("first token, cold", *_spread(figures.cold_first_token_s))
    table.add_row("first token, woken", *_spread(figures.woken_first_token_s))
    ranged = f"{figures.ratio_lowest:,.0f}× to {figures.ratio_highest:,.0f}× in the pairs" if _repeated(report) else ""
    table.add_row("[bold]cold ÷ woken[/]", f"[bold green]{figures.ratio:,.1f}×[/]", ranged)
    return table


def _spread(spread: Spread) -> tuple[str, str]:
    if len(spread.values) == 1:
        return format_seconds(spread.median), "once"
    lowest, highest = format_seconds(spread.lowest), format_seconds(spread.highest)
    return format_seconds(spread.median), f"median of {len(spread.values)}, {lowest} to {highest}"


def _repeated(report: DemoReport) -> bool:
    return len(report.evidence.wakings) > 1


def _notes(report: DemoReport) -> RenderableType:
    pairs = "each pair in a new daemon after a SIGKILL" if _repeated(report) else "both in the second daemon"
    return Text(
        f"cold: from the first append sent, with the document and {len(report.evidence.before_sleep.tokens)} written"
        f" tokens to read, to the first token received. woken: from the wake sent, through the wake, to the first token"
        f" received. Same client, same daemon, model loaded and warmed up, {pairs}. The bundle is in the page cache, as"
        " after a crash; after a reboot, add the time your disk takes for its bytes.",
        style="dim",
    )


def _texts(report: DemoReport, width: int) -> RenderableType:
    """Set the two texts side by side; what differs, from the first difference on, is red."""
    woken, control = report.evidence.wakings[0].writing, report.evidence.control_after
    difference = first_difference(woken.text, control.text)
    table = Table(box=box.ROUNDED, width=width, border_style="dim", show_lines=False)
    table.add_column("woken after SIGKILL", ratio=1, overflow="fold")
    table.add_column("control, never slept", ratio=1, overflow="fold")
    table.add_row(_shown(woken.text, difference), _shown(control.text, difference))
    lead = Text("what they wrote after the point of sleep", style="dim")
    if report.evidence.reading.name:
        lead.append(f", going on from: …{_ending(report.evidence.before_sleep)}")
    return Group(lead, table)


def _ending(before: Writing) -> str:
    return neutralise(" ".join(before.text.split()))[-40:]


def _shown(text: str, difference: int | None) -> Text:
    clean = neutralise(text)
    if difference is None:
        return Text(clean)
    return Text.assemble(clean[:difference], (clean[difference:] or "∅", "bold red"))


def _checks(checks: tuple[Check, ...], width: int) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0), width=width)
    table.add_column(width=1)
    table.add_column(ratio=3)
    table.add_column(ratio=2, style="dim", overflow="fold")
    for name, found in _folded(checks):
        bad = next((check for check in found if not check.passed), None)
        mark = "[green]✓[/]" if bad is None else "[bold red]✗[/]"
        title = plain(name) if bad is None else f"[bold red]{plain(bad.name)}[/]"
        table.add_row(mark, title, plain((bad or found[0]).detail))
    return table


def _folded(checks: tuple[Check, ...]) -> list[tuple[str, list[Check]]]:
    """Show the same check of several wakes as one line; a failed one keeps its own name."""
    of_wakes: dict[str, list[Check]] = {}
    lines: list[tuple[str, list[Check]]] = []
    for is_wake, group in groupby(checks, key=lambda check: check.name.startswith("wake")):
        if not is_wake:
            lines += [(check.name, [check]) for check in group]
            continue
        for check in group:
            of_wakes.setdefault(check.name.partition(": ")[2], []).append(check)
        for name, found in of_wakes.items():
            which = f", in all {len(found)} wakes" if len(found) > 1 else ""
            lines.append((f"woken: {name}{which}", found))
    return lines


def _verdict(report: DemoReport) -> RenderableType:
    took = f"The whole demo took {format_seconds(report.seconds)}."
    if report.passed:
        ratio = report.figures.ratio
        said = Text.assemble(
            ("Bit for bit the same", "bold green"),
            f": token ids and logits of the woken session equal those of the one that never slept, and its first token"
            f" came {ratio:,.0f} times sooner than by reading again. {took}",
        )
        return Panel(said, border_style="green", box=box.ROUNDED, width=MAX_WIDTH)
    failed = [check.name for check in report.checks if not check.passed]
    said = Text.assemble(("Not the same", "bold red"), f": {'; '.join(failed)}. {took}")
    return Panel(said, border_style="red", box=box.ROUNDED, width=MAX_WIDTH)
