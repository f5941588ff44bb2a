"""Comparing JSON with what a text says of it: the transcripts of commands and the exchanges over HTTP."""

from __future__ import annotations

from typing import Any


def has_at_least(value: Any, wanted: Any) -> None:
    """Compare a JSON value: maps may have more keys, lists have as many members, `"..."` is anything but null. Raises
    AssertionError."""
    if isinstance(wanted, dict):
        assert isinstance(value, dict), f"{value} for {wanted}"
        assert wanted.keys() <= value.keys(), f"{value} has not all of {wanted}"
        for key, each in wanted.items():
            has_at_least(value[key], each)
    elif isinstance(wanted, list):
        assert isinstance(value, list), f"{value} for {wanted}"
        assert len(value) == len(wanted), f"{value} for {wanted}"
        for one, each in zip(value, wanted, strict=True):
            has_at_least(one, each)
    else:
        assert value == wanted or (wanted == "..." and value is not None), f"{value} for {wanted}"
