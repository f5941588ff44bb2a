"""Kills a process at every step of a store operation and checks what the next one finds. Run by test_crash.py.

For n = 1, 2, 3, …: a forked child performs the scenario and sends itself SIGKILL at its n-th call that changes (or
reads back) something; the parent reopens the store and compares. It ends at the first n that the child outlives.
Prints one JSON line: the points killed, and every point at which something was wrong.

A kill cannot show a missing flush (the page cache survives); the order of flushes is pinned in test_durable.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from store_making import OTHER_URI, URI, Receipt, Store, require_awake, sleep
from torpor.memvid.index import Index
from torpor.memvid.retention import Retention

CALLS = ("writev", "pwrite", "fsync", "rename", "unlink", "mkdir", "open", "preadv", "ftruncate", "close")
INDEX_CALLS = ("add", "drop", "_insert", "_delete", "create", "reconcile")


def kill_at(point: int, *, torn: bool) -> None:
    """From now on count steps, and die before the `point`-th; a torn write happens by half first."""
    seen = 0

    def step(real: Callable[..., object], name: str) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal seen
            seen += 1
            if seen == point:
                if torn and name == "writev":
                    data = b"".join(map(bytes, args[1]))
                    os.write(args[0], data[: len(data) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, step(getattr(os, name), name))
    for name in INDEX_CALLS:
        bound = name == "create"
        wrapped = step(getattr(Index, name), name)
        setattr(Index, name, staticmethod(wrapped) if bound else wrapped)


def prepared(path: Path) -> Receipt:
    with Store.open(path, writable=True) as store:
        first = sleep(store, 300)
        second = sleep(store, 600, before=first)
        sleep(store, 700, uri=OTHER_URI, before=second)  # a fork that needs blocks of both
        return second


def run_new(path: Path, before: Receipt) -> None:
    with Store.open(path, writable=True) as store:
        sleep(store, 700, before=before)


def run_delete(path: Path, before: Receipt) -> None:
    with Store.open(path, writable=True) as store:
        store.delete_session(URI)


def run_prune(path: Path, before: Receipt) -> None:
    with Store.open(path, writable=True) as store:
        store.prune(Retention(keep_last=1))


def run_rebuild(path: Path, before: Receipt) -> None:
    os.remove(path / "index.sqlite")
    Store.open(path, writable=True).close()


def run_create(path: Path, before: Receipt) -> None:
    with Store.open(path, writable=True) as store:
        sleep(store, 300)


def check(path: Path, scenario: str, acknowledged: bool) -> None:
    """What must hold after a crash: what was acknowledged is there; else the old state, or the new one, whole."""
    with Store.open(path, writable=True) as store:
        assert not list(path.rglob("*.tmp"))
        row = store.find_session(URI)
        if scenario == "delete":
            assert not (acknowledged and row)
        elif scenario == "create":
            assert row is not None or not acknowledged
        else:
            assert row is not None
        if row is not None:
            allowed = {"new": {700} if acknowledged else {600, 700}, "create": {300}}.get(scenario, {600})
            assert row.token_count in allowed, row.token_count
            require_awake(store, row.token_count)
        if scenario != "create":
            require_awake(store, 700, uri=OTHER_URI)
        if scenario == "prune":
            assert not acknowledged or len(store.versions(URI)) == 1
            store.prune(Retention(keep_last=1))  # a second one does the rest
            assert [row.token_count for row in store.versions(URI)] == [600]
        report = store.verify(deep=True)
        assert report.ok, report.findings
        sleep(store, 20)
        require_awake(store, 20)
    with Store.open(path, writable=False) as store:
        require_awake(store, 20)


SCENARIOS = {"new": run_new, "delete": run_delete, "prune": run_prune, "rebuild": run_rebuild, "create": run_create}


def sweep(base: Path, scenario: str, *, torn: bool) -> dict[str, object]:
    original = base / "original"
    receipt = prepared(original)
    point, wrong = 0, []
    while True:
        point += 1
        path = base / "work"
        shutil.rmtree(path, ignore_errors=True)
        if scenario != "create":
            shutil.copytree(original, path)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                kill_at(point, torn=torn)
                SCENARIOS[scenario](path, receipt)
                os.write(writer, b"!")
                status = 0
            finally:
                os._exit(status)
        os.close(writer)
        acknowledged = os.read(reader, 1) == b"!"
        os.close(reader)
        _, status = os.waitpid(child, 0)
        survived = os.WIFEXITED(status)
        if survived and os.WEXITSTATUS(status):
            wrong.append((point, "the child failed"))
            break
        try:
            check(path, scenario, acknowledged)
        except Exception as error:
            wrong.append((point, f"{type(error).__name__}: {error}"))
        if survived or len(wrong) > 5:
            break
    return {"points": point - 1, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(sweep(Path(sys.argv[1]), sys.argv[2], torn=sys.argv[3] == "torn")))
