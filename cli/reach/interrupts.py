"""Ctrl-C that comes when the work is done: it is too late to stop anything, and must not look as if it had."""

from __future__ import annotations

import signal
import threading
from types import FrameType


def ignore_interrupts() -> None:
    """From here on a Ctrl-C changes nothing: the work is done, and only has to be told."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _take)  # unlike SIG_IGN, no child would inherit this


def _take(number: int, frame: FrameType | None) -> None:
    """Take a Ctrl-C and do nothing about it."""
