"""How a benchmark of the store leaves its figures: JSON, and the axes of a plot."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from machine import describe


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
    """Write the figures with the machine and the versions; returns all of it."""
    document = {"benchmark": name, "machine": describe(), **figures}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return document


@contextlib.contextmanager
def plotted(path: Path, document: dict[str, Any], title: str, width: float = 7.0) -> Iterator[Any]:
    """Axes to draw on; the plot is saved at the end."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(width, 4.2))
    try:
        machine = document["machine"]
        axes.set_title(f"{title}\n{machine['processor']}, {machine['cpu_count']} cores", fontsize=9)
        yield axes
        axes.grid(visible=True, which="both", axis="y", alpha=0.3)
        figure.tight_layout()
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)
