"""A Ray that does not start at once, with a program in its place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from torpor.socket_api.cluster import own_cluster
from torpor.socket_api.errors import DaemonNotStarted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="serve-ray is for Linux")

PROGRAM = """\
import os, pathlib, sys, time
tried = pathlib.Path(os.environ["TRIED"])
tried.open("a").write(" ".join([str(os.getpid()), *sys.argv]) + "\\n")
if len(tried.read_text().splitlines()) <= int(os.environ["FAILS"]):
    sys.exit("The current node timed out during startup.")
print("Ray runtime started.", flush=True)
time.sleep(600)
"""


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which each try leaves a line: its process, and what it was given."""
    scripts = tmp_path / "ray" / "scripts"
    scripts.mkdir(parents=True)
    for package in (scripts, scripts.parent):
        (package / "__init__.py").touch()
    (scripts / "scripts.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRIED", str(tmp_path / "tried"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
    return tmp_path / "tried"


def test_it_is_tried_again_until_it_starts_and_ends_with_the_cluster(
    tried: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAILS", "2")
    with own_cluster.own_cluster(3) as address:
        tries = [line.split() for line in tried.read_text().splitlines()]
        assert len(tries) == 3
        assert f"--port={address.rpartition(':')[2]}" in tries[-1]
        assert f"--num-cpus={max(3, os.cpu_count() or 1)}" in tries[-1]
        assert os.environ["RAY_AUTH_TOKEN"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(tries[-1][0]), 0)


def test_one_that_never_starts_is_told_with_what_it_said(tried: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1000")
    told = r"RAY_ADDRESS=auto[^$]*The current node timed out"
    with pytest.raises(DaemonNotStarted, match=told) as refused, own_cluster.own_cluster(1):
        raise AssertionError
    assert f"{len(tried.read_text().splitlines())} tries" in str(refused.value)
