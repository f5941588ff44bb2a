"""A command that is tied to the process that started it: `python -m torpor.cli.tied serve ...` is the daemon itself,
and a thread that ends it when that process is gone.

Standard input is a pipe whose other end only the starter holds. It ends when the starter does, whatever ended it,
SIGKILL included; so no daemon of a demo outlives it.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from .main import main

GRACE_S = 10.0  # for a graceful stop; a store that is made for one process is of no use without it


def _end_with_the_starter() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # a daemon thread: it ends with the process, which is expected within this time
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    main()
