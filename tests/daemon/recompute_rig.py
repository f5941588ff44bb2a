"""Rates as a test wants them."""

from __future__ import annotations

from torpor.daemon.models.rates import WINDOW, RateName
from torpor.tests.daemon.session_rig import Rigged

MUCH = 1e12
"""An amount beside which what was really measured does not count."""


def teach(rig: Rigged, *, slow_disk: bool) -> None:
    """Have the daemon believe that its disk is slow and its model fast, or the other way round."""
    a_byte, a_token = (1.0, 1e-9) if slow_disk else (1e-12, 1.0)
    rates: dict[RateName, float] = {
        "restore": a_byte,
        "prefill": a_token,
        "decode": a_token,
        "fixed": 1e-3,
    }
    for name, seconds in rates.items():
        for _ in range(WINDOW):
            rig.service.measured.add(rig.model, name, MUCH, MUCH * seconds)
