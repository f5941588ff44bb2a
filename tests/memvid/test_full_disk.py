"""On a full disk what is there can be read and deleted: the index lives in memory, and a delete writes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torpor.tests.memvid import full_disk_child
from torpor.tests.memvid.store_making import OTHER_URI

FREE_KIB = (0, 4, 8, 16, 64)
OPERATIONS = ("list", "wake", "delete", "wake again", "close")


def namespace() -> list[str]:
    """How to run a program that may mount; empty where this user or system does not allow it."""
    command = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    tried = [*command, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if shutil.which("unshare") is None or subprocess.run(tried, capture_output=True, check=False).returncode:
        return []
    return command


def test_reading_and_deleting_work_however_little_a_disk_has_free(tmp_path: Path) -> None:
    command = namespace()
    if not command:
        pytest.skip("no file system can be mounted here")
    sizes = [str(size) for size in FREE_KIB]
    done = subprocess.run(
        [*command, sys.executable, full_disk_child.__file__, str(tmp_path), *sizes], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for size, line in zip(sizes, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == {**dict.fromkeys(OPERATIONS, "ok"), "left": OTHER_URI.name}, f"{size} KiB"
