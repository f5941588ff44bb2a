"""Words for policies that both the verbs and the options of a daemon have. Imports nothing."""

from __future__ import annotations

from typing import Literal

RecomputePolicy = Literal["off", "exact", "fastest"]
"""Whether a wake computes tokens again where that is faster: never, where the very bits result, or always."""
