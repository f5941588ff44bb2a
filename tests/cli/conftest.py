"""Fixtures of the command line's tests."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.registry import run
from torpor.cli.serve import doctor
from torpor.memvid.store import Store
from torpor.tests.cli.cli_rig import MadeStore, Ran, Torpor
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread


@pytest.fixture
def torpor(capsys: pytest.CaptureFixture[str]) -> Torpor:
    """Runs a command line in this process: `torpor("ls", "--json")`."""

    def runner(*arguments: object) -> Ran:
        capsys.readouterr()
        status = run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return runner


@pytest.fixture(autouse=True)
def nothing_of_this_user(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    """No test may see the daemon of whoever runs it; nor the store, of which tests/conftest.py takes care. A variable
    would name a store, and no daemon of another one would be asked."""
    monkeypatch.setenv("TORPOR_SOCKET", str(short_path / "run" / "t.sock"))
    monkeypatch.setenv("COLUMNS", "120")


_examine_once = functools.cache(doctor.examine_machine)


@pytest.fixture
def examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stays as it is between two tests; a process that examines it imports MLX for seconds."""
    monkeypatch.setattr(doctor, "examine_machine", _examine_once)


@pytest.fixture(autouse=True)
def interrupts_that_arrive() -> Iterator[None]:
    """A run in the background of a shell ignores SIGINT, and so would every process that a test starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def daemon(short_path: Path) -> Iterator[ServerThread]:
    """A daemon on the default socket of this test."""
    running = ServerThread(short_path / "run" / "t.sock")
    yield running
    running.stop()


@pytest.fixture
def made_store(torpor: Torpor, short_path: Path) -> MadeStore:
    path = short_path / "store"
    with Store.open(path, writable=True) as store:
        first = making.sleep(store, 300)
        second = making.sleep(store, 600, before=first)
        other = making.sleep(store, 5, uri=making.OTHER_URI, seed=1)
        made = (first, second, other)
        manifests = tuple(making.manifest_path(store, receipt.bundle_id) for receipt in made)
        packs = tuple(making.pack_of(store, receipt, -1) for receipt in made)
    return MadeStore(path, manifests, packs, torpor)
