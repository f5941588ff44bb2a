"""The double of the service answers what the real one does; else tests that pass with it say nothing."""

from __future__ import annotations

import inspect

import pytest
from torpor.daemon.api.verbs import SUBSCRIBE, VERBS
from torpor.daemon.service import Service
from torpor.daemon.verbs import HANDLERS
from torpor.socket_api.server.dispatch import Backend
from torpor.socket_api.server.serving import ClosableBackend
from torpor.tests.socket_api.fake_service import FakeService

OF_THE_PROCESS = {VERBS["shutdown"], SUBSCRIBE}
LIFE = sorted(
    name
    for shape in (Backend, ClosableBackend)
    for name, member in inspect.getmembers(shape, inspect.isfunction)
    if not name.startswith("_")
)


def test_every_verb_but_those_of_the_process_has_a_handler() -> None:
    requests = {verb.request for verb in VERBS.values() if verb not in OF_THE_PROCESS}
    assert len(requests) == len(VERBS) - len(OF_THE_PROCESS), "each verb has a request of its own"
    assert set(HANDLERS) == requests


@pytest.mark.parametrize(
    "verb", [verb for verb in VERBS.values() if verb not in OF_THE_PROCESS], ids=lambda verb: verb.name
)
def test_a_handler_takes_the_record_of_its_row_and_gives_that_of_its_answer(verb: object) -> None:
    double = FakeService().answers.get(verb.request)  # type: ignore[attr-defined]
    for handler in filter(None, (HANDLERS[verb.request].carry_out, double)):  # type: ignore[attr-defined]
        signature = inspect.signature(handler)
        taken, given = list(signature.parameters.values())[-1].annotation, signature.return_annotation
        assert taken.rpartition(".")[2] == verb.request.__name__  # type: ignore[attr-defined]
        assert given.rpartition(".")[2] == verb.result.__name__  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LIFE)
def test_the_double_lives_as_the_service_does(name: str) -> None:
    real, double = getattr(Service, name), getattr(FakeService, name)
    assert list(inspect.signature(double).parameters) == list(inspect.signature(real).parameters)
    assert inspect.iscoroutinefunction(double) == inspect.iscoroutinefunction(real)
