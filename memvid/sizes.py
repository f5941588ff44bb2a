"""How sizes and counts are written for people, here and in the command line's tables. Pure functions."""

from __future__ import annotations


def format_bytes(size_bytes: int) -> str:
    """Write a size with a binary unit and three significant digits: `41.2 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1000:
            return f"{three_digits(size)} {unit}"
    return f"{size / 1024:.1f} TiB"


def three_digits(figure: float) -> str:
    """Write a figure of at least one with three significant digits, and no decimals past 100: `9.99`, `41.2`, `340`."""
    decimals = 2 if figure < 9.995 else 1 if figure < 99.95 else 0
    return f"{figure:.{decimals}f}"


def format_count(count: int) -> str:
    """Write a count with thousands set apart: `6,912`."""
    return f"{count:,}"


def format_plural(count: int, one: str) -> str:
    """Write a count with its noun: `1 block`, `2 blocks`."""
    return f"{format_count(count)} {one if count == 1 else one + 's'}"
