"""The options that hold now."""

from __future__ import annotations

from dataclasses import dataclass

from .serve_options import ServeOptions


@dataclass(slots=True)
class CurrentOptions:
    """What command line and file say now. A part that keeps this reads `now` at each use, and so follows a
    configuration file that is read again."""

    now: ServeOptions
