"""Machines that share a remote: daemons in processes of their own, each with a store, and with its own network.

The remote is a bucket in this process (`bucket_server`). Each machine reaches it by a proxy of its own (`fault_proxy`),
so that one of them can be cut off, and is seen at each request.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torpor.daemon.models.models import DEMO_MODEL_FOLDER
from torpor.tests.load.killable import Killable
from torpor.tests.load.set_clock import set_clock
from torpor.tests.memvid.remote.fault_proxy import Fault, FaultProxy

REMOTE: Final = "s3://torpor-tests/load"


class Machine(Killable):
    """A daemon with a store of its own. bucket_port: of the bucket, on loopback. turns: as --remote-turns. up: it is
    not about to be killed. clock_is_off_s: by how much its date is off. more: options of `torpor serve`."""

    def __init__(
        self, folder: Path, bucket_port: int, *, lease_s: int, turns: str = "0", more: Sequence[str] = ()
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.proxy = FaultProxy(bucket_port)
        self.up = threading.Event()
        self.set_clock(0)
        command = [sys.executable, "-m", "torpor.tests.load.set_clock", str(folder / "clock"), "serve"]
        command += ["--store", str(folder / "store"), "--socket", str(folder / "t.sock"), "--json", "--deterministic"]
        command += ["--model", f"demo={DEMO_MODEL_FOLDER}", "--remote", REMOTE]
        command += ["--remote-lease", str(lease_s), "--remote-turns", turns, *more]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")} | {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}",
            "AWS_ACCESS_KEY_ID": "AKIATORPORTESTS",
            "AWS_SECRET_ACCESS_KEY": "no-secret-at-all",
            "AWS_REGION": "us-east-1",
        }
        super().__init__(folder / "t.sock", command, environment=environment, log=folder / "log")

    def set_clock(self, offset_s: float) -> None:
        """Set its clock: the date is off by so many seconds then."""
        self.clock_is_off_s = offset_s
        set_clock(self.folder / "clock", offset_s)

    def cut_off(self, fault: Fault | None) -> None:
        """Let each of its requests meet a fault from now on; None: none."""
        self.proxy.plan = {} if fault is None else lambda _: fault

    def close(self) -> None:
        """Kill it, and end its network. Its store stays."""
        if self.is_running:
            self.kill()
        self.proxy.__exit__()
