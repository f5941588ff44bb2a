"""Each figure of `/metrics` has a sentence of its own."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from torpor.daemon.api.process import ModelInfo, StatusResult
from torpor.socket_api.http.figures import SENTENCES


def _gauges(record: Any, prefix: str = "") -> set[str]:
    """The names of the gauges that a record and those in it may have, by the types of its fields."""
    hints, found = get_type_hints(record), set()
    for each in fields(record):
        kinds = {hints[each.name], *get_args(hints[each.name])}
        if kinds & {int, float, bool} and each.name != "pid":
            found.add(prefix + each.name)
        for inner in kinds if get_origin(hints[each.name]) is not tuple else ():  # a list is no figure
            if is_dataclass(inner):
                found |= _gauges(inner, f"{prefix}{each.name}_")
    return found


def test_each_figure_has_a_sentence_of_its_own() -> None:
    status = _gauges(StatusResult)
    assert len(status) > 25
    assert status | _gauges(ModelInfo, "model_") == SENTENCES.keys()
    assert len(set(SENTENCES.values())) == len(SENTENCES)
    assert all(each[0].isupper() or each[0] == "1" for each in SENTENCES.values())
