"""The double of the service has the shape of the real one; else tests that pass with it say nothing."""

from __future__ import annotations

import inspect

import pytest
from torpor.daemon.api.results import AppendResult
from torpor.daemon.service import Service
from torpor.socket_api.server.dispatch import Backend
from torpor.socket_api.server.serving import ClosableBackend

from .fake_service import FakeService

VERBS = sorted(
    name
    for shape in (Backend, ClosableBackend)
    for name, member in inspect.getmembers(shape, inspect.isfunction)
    if not name.startswith("_")
)


def shape_of(verb: object) -> dict[str, tuple[object, object]]:
    """What callers see of it: names, ways and defaults of its parameters. A wrapped verb is looked through."""
    assert callable(verb)
    parameters = inspect.signature(verb).parameters.values()
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in list(parameters)[1:]), "so their order is none"
    return {each.name: (each.kind, each.default) for each in list(parameters)[1:]}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_of_the_double_takes_what_that_of_the_service_and_of_its_shape_take(name: str) -> None:
    shape = next(getattr(each, name) for each in (Backend, ClosableBackend) if hasattr(each, name))
    real, double = getattr(Service, name), getattr(FakeService, name)
    assert shape_of(double) == shape_of(real) == shape_of(shape)
    assert inspect.iscoroutinefunction(double) == inspect.iscoroutinefunction(real)


def test_a_drift_of_a_name_or_a_default_would_be_seen() -> None:
    class Drifted:
        async def append(self, *, session: str, text: str = "", tokens: object = None, emit: object) -> AppendResult:
            raise NotImplementedError

    assert shape_of(Drifted.append) != shape_of(Service.append)
