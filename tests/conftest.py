"""What tests of several folders share: a tiny model with random weights, of a real architecture."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import inspect
import itertools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings
from torpor.tests.model_making import write_model, write_model_like
from torpor.tests.shares import leave_to_other_commits

# `make clients` runs these, with the clients installed.
collect_ignore = ["clients"]

# How long a case takes says more of what else the machine does than of the code: no test is failed for it.
settings.register_profile("torpor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("torpor")

# Tests compare float32 in its own precision. On a GPU MLX would multiply in TF32, which has that of float16.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

_LONGEST = (
    *("dialogues/test_company.py", "socket_api/test_invariants.py", "socket_api/http/inspector/test_inspector.py"),
    *("socket_api/http/test_clients.py", "test_documents.py", "memvid/test_state_machine.py", "bench/test_run.py"),
    *("socket_api/http/test_shapes.py", "socket_api/http/test_threats.py", "memvid/faults/test_faults.py"),
    *("dialogues/test_ledger.py", "socket_api/fronts/test_verbs.py", "memvid/recovery/test_opening.py"),
    *("daemon/verbs/test_recalling.py", "daemon/verbs/test_retries.py", "daemon/test_exactness.py", "test_layers.py"),
)
"""The files that take longest. They begin, so that no worker has one left when the others have nothing more to do."""


@pytest.hookimpl(tryfirst=True)  # before pytest looks at which marks were asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_other_commits(items)
    places = {Path(__file__).parent / name: place for place, name in enumerate(_LONGEST)}
    assert all(path.exists() for path in places), "a file that takes long is called otherwise"
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on a loop of its own, within those of its fixtures that are asynchronous
    context managers."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run() -> None:
        async with AsyncExitStack() as within:
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in given.items():
                if isinstance(value, AbstractAsyncContextManager):
                    given[name] = await within.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(run())
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Where a test hangs in C, its timeout cannot fail it: a minute later the threads are shown and the process ends.

    Not as pytest's `faulthandler_timeout` has it, while a test still runs: to show threads that run may kill them all.
    """
    faulthandler.dump_traceback_later(
        settings.timeout + 60, file=item.config.stash[fault_handler_stderr_fd_key], exit=True
    )


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer() -> None:
    faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    """Thousands of tests lie in memory until the end: what looks for garbage, as each unloading of a model does, need
    not look at them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def models_of_kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models by architecture, each made once; tests must not write into them."""
    root = tmp_path_factory.mktemp("kinds")

    def folder_of(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else write_model_like(folder, name)

    return folder_of


@pytest.fixture(scope="session")
def model_writer() -> Callable[..., Path]:
    """`write_model`, for the fixtures of other folders."""
    return write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random-weight Qwen3; tests must not write into it."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def another_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_model`, with other weights; tests must not write into it."""
    return write_model(tmp_path_factory.mktemp("models") / "another", seed=9)


@pytest.fixture(scope="session")
def quantisable_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose heads can be quantized in groups of 32; tests must not write into it."""
    return write_model(tmp_path_factory.mktemp("models") / "quantisable", head_dim=32)


@pytest.fixture(scope="session")
def thin_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two of the 28 layers of the Qwen3-0.6B shape, with random weights; tests must not write into it."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 2, "intermediate_size": 3072, "rope_theta": 1e6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    return write_model(tmp_path_factory.mktemp("models") / "thin", **shape, **heads)


@pytest.fixture
def own_tiny_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose name leaves room for a socket's: pytest's own are too long for the 107 bytes of the kernel."""
    folder = Path(tempfile.mkdtemp(prefix="tw", dir="/tmp" if len(tempfile.gettempdir()) > 40 else None))
    yield folder
    shutil.rmtree(folder)


EditUnseen = Callable[..., None]


@pytest.fixture
def edit_unseen() -> EditUnseen:
    """Changes bytes of a file so that nothing but they tell it: size and mtime are put back, and the change time that
    is remembered of it, if it is, becomes the one that it has now, as if the clock had stood still."""

    def edit(file: Path, memory: Path, old: bytes | None = None, new: bytes = b"") -> None:
        before, data = file.stat(), file.read_bytes()
        edited = data[:-1] + bytes([data[-1] ^ 1]) if old is None else data.replace(old, new, 1)
        assert edited != data
        assert len(edited) == len(data)
        file.write_bytes(edited)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        remembered = json.loads(memory.read_bytes())
        if (path := str(file.resolve())) in remembered["files"]:
            remembered["files"][path][-2] = file.stat().st_ctime_ns
            memory.write_text(json.dumps(remembered))

    return edit


@pytest.fixture(scope="session")
def xdg_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own for each test, counted: `mktemp` would list all those before it each time."""
    base = tmp_path_factory.mktemp("xdg")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _own_folders(monkeypatch: pytest.MonkeyPatch, xdg_folders: Iterator[Path]) -> None:
    """No test reads or writes the caches and stores of the person who runs it."""
    base = next(xdg_folders)
    for name in ("CACHE", "DATA", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(base / name.lower()))
    for name in ("TORPOR_STORE", "TORPOR_SOCKET", "TORPOR_BLAS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="session")
def _a_hangup_means_what_it_does_in_a_terminal() -> Iterator[None]:
    """Under nohup every process inherits that SIGHUP is ignored, and torpor lets it be so. A handler that does nothing
    spares the tests' own process as well, and is not inherited by the programs that they start."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)
