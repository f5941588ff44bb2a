"""Ctrl-C after the work is done: too late to stop anything, and it must not look as if it had."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def ignore_interrupts() -> None:
    """From here on Ctrl-C changes nothing: the work is done, and only its report is left."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _take)  # unlike SIG_IGN, no child would inherit this


def _take(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
