"""What crosses the wire is a record of the table, or refused by its field."""

from __future__ import annotations

from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.errors import InvalidSampling
from torpor.socket_api.errors import InvalidRequest, MalformedMessage
from torpor.socket_api.wire.checking import load_request, load_result


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("wake", {}, "session: it is missing; give it."),
        ("wake", {"session": "a", "on_event": None}, "on_event: there is no such field; leave it out."),
        ("wake", {"session": "a", "more": 1}, "more: there is no such field; leave it out."),
        ("wake", {"session": "a", "strict": 1}, "strict: it must be a valid boolean."),
        ("create", {"session": "a", "labels": "x"}, "labels: it is no list; give a list."),
        ("create", {"session": "a", "labels": ["x"]}, "labels: it is no list; give a list."),
        ("append", {"session": "a"}, "give either text, tokens or messages."),
        (
            "set",
            {"session": "a", "sampling": {"top_p": 2.0}},
            "sampling.top_p: it must be less than or equal to 1.",
        ),
    ],
)
def test_what_is_no_request_is_refused_by_its_field(name: str, raw: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        load_request(VERBS[name], raw)
    assert refusal.value.message == said


def test_a_temperature_that_no_sampler_takes_is_refused_as_such() -> None:
    with pytest.raises(InvalidSampling):
        load_request(VERBS["set"], {"session": "a", "sampling": {"temperature": 1e-9}})


def test_a_sampling_names_what_was_given_the_defaults_too() -> None:
    asked: Any = load_request(VERBS["generate"], {"session": "a", "sampling": {"temperature": 0.0, "seed": 3}})
    assert asked.sampling == Sampling(seed=3)
    assert asked.sampling.named() == {"temperature": 0.0, "seed": 3}


def test_a_client_passes_over_fields_of_a_newer_daemon_and_misses_none_of_its_own() -> None:
    removed = {"session": "s", "versions_deleted": 1, "bundles_deleted": 1, "bytes_freed": 5, "newer": {"x": 1}}
    assert load_result(VERBS["delete"], removed).bytes_freed == 5  # type: ignore[attr-defined]
    with pytest.raises(MalformedMessage, match="delete is not what this client knows: bytes_freed"):
        load_result(VERBS["delete"], {name: value for name, value in removed.items() if name != "bytes_freed"})
