"""A detached daemon that ends with its starter: that of the demo.

Standard input is a pipe, and only the starter holds its other end. The pipe ends when the starter does, even by
SIGKILL. So no daemon of a demo outlives the demo.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from .detached import main
from .view.streams import leave

GRACE_S = 10.0  # for a graceful stop; then it is killed: a store made for one process is of no use without it


def _end_with_the_starter() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # the process should end within this time, and this daemon thread with it
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    leave(main())
