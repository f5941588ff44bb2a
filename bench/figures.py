"""How a benchmark of the store leaves its figures: JSON, and the axes of a plot."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from machine import describe

OURS, PEER = "tab:blue", "tab:gray"
"""One colour a thing, in all plots: Torpor, and what it is compared with."""


def parser_for(document: str | None, rounds: int) -> argparse.ArgumentParser:
    """The arguments that each benchmark of the store takes."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"interleaved rounds ({rounds} unless told, 2 if quick)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, not how fast it is")
    parser.add_argument("--folder", type=Path, help="where the store is made: the file system that is measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for the JSON file and the plot")
    parser.set_defaults(usual_rounds=rounds)
    return parser


def rounds_of(options: argparse.Namespace) -> int:
    """The rounds that were asked for."""
    return options.rounds or (2 if options.quick else options.usual_rounds)


def save(name: str, figures: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write the figures with the machine and the versions, and print these; returns all of it."""
    machine = describe()
    document = {"benchmark": name, "machine": machine, **figures}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    versions = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    print(f"{_named(machine)}, load average {machine['load_average']:.1f}; {versions}")
    return document


def _named(machine: dict[str, Any]) -> str:
    cores = f"{machine['processor']}, {machine['cpu_count']} cores"
    return f"{machine['gpu']}, {cores}" if machine["gpu"] else cores


@contextlib.contextmanager
def plotted(path: Path, document: dict[str, Any], title: str, width: float = 7.0) -> Iterator[Any]:
    """Axes to draw on; the plot is saved at the end. title: the finding, as a sentence."""
    with panels(path, document, title, (1, 1), (width, 4.2)) as axes:
        yield axes[0]


@contextlib.contextmanager
def panels(
    path: Path, document: dict[str, Any], title: str, shape: tuple[int, int], size: tuple[float, float], **shared: bool
) -> Iterator[list[Any]]:
    """As `plotted`, with several axes: `shape` rows and columns of them, row by row. size: inches. shared: `sharex`,
    `sharey`."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(*shape, figsize=size, squeeze=False, **shared)
    try:
        figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
        figure.text(0.01, 0.01, _named(document["machine"]), fontsize=7, color="gray", ha="left")
        yield list(grid.flat)
        for axes in grid.flat:
            axes.grid(visible=True, which="major", alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.tight_layout(rect=(0, 0.03, 1, 1))
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def label_at_end(axes: Any, xs: Sequence[float], ys: Sequence[float], text: str, colour: str) -> None:
    """Name a line at its right end, in its colour."""
    axes.annotate(
        text, (xs[-1], ys[-1]), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8, color=colour
    )
