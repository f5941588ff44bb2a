"""The shape that every error has, held for every class of every layer."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torpor
from torpor.errors import TorporError
from torpor.socket_api.errors import DaemonUnreachable, RemoteError

LAYERS = ("memvid", "snapshot", "daemon", "socket_api", "cli")


def kinds_of(root: type[TorporError]) -> list[type[TorporError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in kinds_of(child))]


def every_kind() -> list[type[TorporError]]:
    for layer in LAYERS:
        for module in pkgutil.iter_modules([f"{torpor.__path__[0]}/{layer}"]):
            if module.name == "errors":
                importlib.import_module(f"torpor.{layer}.errors")
    ours = ("torpor.errors", *(f"torpor.{layer}." for layer in LAYERS))  # not the tests' own
    return sorted({kind for kind in kinds_of(TorporError) if kind.__module__.startswith(ours)}, key=str)


def made(kind: type[TorporError]) -> TorporError:
    if issubclass(kind, RemoteError):
        return kind("session_busy", "It is in use.", session="notes", waits=[1, 2])
    return kind("It is in use.", session="notes", waits=[1, 2])


def test_each_error_comes_whole_out_of_a_pickle_and_a_copy() -> None:
    """Else a pool of processes hangs, or tells of the pickle instead of the failure."""
    for kind in every_kind():
        error = made(kind)
        error.add_note("while it slept")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert str(again) == str(error) == "It is in use.", kind
            assert (again.code, again.message, again.details) == (error.code, error.message, error.details), kind
            assert (again.session, again.waits, again.args) == ("notes", [1, 2], error.args), kind
            assert again.__notes__ == error.__notes__, kind


def _refused_elsewhere() -> None:
    raise RemoteError("session_not_found", "There is no session 'x'.", suggestions=["y"])


@pytest.mark.one_in(2)
def test_an_error_crosses_from_one_process_to_another() -> None:
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        pytest.raises(RemoteError, match="There is no session 'x'") as caught,
    ):
        pool.submit(_refused_elsewhere).result(timeout=60)
    assert (caught.value.code, caught.value.suggestions) == ("session_not_found", ["y"])


def test_every_layer_has_errors_among_these() -> None:
    assert {kind.__module__.split(".")[1] for kind in every_kind()} == {*LAYERS, "errors"}
    assert {TorporError, DaemonUnreachable} <= set(every_kind())
