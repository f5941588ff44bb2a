"""Servers of S3 for tests: our own in this process, and those of `make remote`, which judge the same tests.

`TORPOR_SERVERS="moto ministack"` names more. Each of these has an environment of its own, for they pin what they need.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from torpor.memvid.remote import cloud_objects
from torpor.memvid.remote.objects import Objects
from torpor.memvid.remote.opening import open_objects
from torpor.tests.memvid.remote.bucket_server import BucketServer

SERVERS: Final = ("own", *os.environ.get("TORPOR_SERVERS", "").split())
BUCKET: Final = "torpor-tests"

_ENVIRONMENTS: Final = Path(__file__).parents[3] / ".venv-remote"
_READY_S: Final = 60


@contextlib.contextmanager
def s3_server(name: str) -> Iterator[int]:
    """A server that has the bucket; gives its port on loopback."""
    if name == "own":
        with BucketServer() as server:
            yield server.port
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = _ENVIRONMENTS / name / "bin"
    command = {"moto": ["moto_server", "-H", "127.0.0.1", "-p", str(port)], "ministack": ["ministack"]}[name]
    with subprocess.Popen(
        [folder / command[0], *command[1:]],
        env={**os.environ, "GATEWAY_PORT": str(port), "AWS_ENDPOINT_URL": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _make_bucket(port, process)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def _make_bucket(port: int, process: subprocess.Popen[bytes]) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
    until = time.monotonic() + _READY_S
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.05)


def open_s3(patched: pytest.MonkeyPatch, port: int, prefix: str, *, seconds: float = 10) -> Objects:
    """The objects under a prefix of the bucket, by a port of loopback. seconds: for each request."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3"):
        patched.delenv(name, raising=False)
    patched.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    patched.setenv("AWS_ACCESS_KEY_ID", "AKIATORPORTESTS")
    patched.setenv("AWS_SECRET_ACCESS_KEY", "no-secret-at-all")
    patched.setenv("AWS_REGION", "us-east-1")
    patched.setattr(cloud_objects, "_SMALL_S", seconds)
    patched.setattr(cloud_objects, "_LARGE_S", seconds)
    return open_objects(f"s3://{BUCKET}/{prefix}")
