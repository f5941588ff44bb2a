"""A daemon of the demo: the daemon itself, and a thread that ends it when the demo is gone.

Standard input is a pipe whose other end only the demo holds. It ends when the demo does, whatever ended it, SIGKILL
included; so no daemon of a demo outlives it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from ..socket_api.main import main

GRACE_S = 10.0  # for a graceful stop; the demo's store is of no use without the demo


def _end_with_the_demo() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)  # a daemon thread: it ends with the process, which is expected within this time
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_demo, daemon=True).start()
    sys.exit(main())
