"""docs/reference/protocol.md is true: every method, parameter, result field, message, error code and limit is in it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import BaseModel, ValidationError
from torpor.daemon.api import results as daemon
from torpor.daemon.api.sampling import LOWEST_TEMPERATURE
from torpor.daemon.events.events import EVENTS, Event
from torpor.socket_api import errors, limits
from torpor.socket_api.limits import ServerLimits
from torpor.socket_api.wire import messages, results
from torpor.socket_api.wire.methods import METHODS, Message, SamplingFields

TEXT = Path(__file__).parents[2].joinpath("docs", "reference", "protocol.md").read_text()


def section(heading: str) -> str:
    return re.split(r"\n#+ ", TEXT.split(f"{heading}\n", 1)[1], maxsplit=1)[0]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_described_with_all_its_parameters_and_result_fields(name: str) -> None:
    text = section(f"### `{name}`")
    for field in METHODS[name].params.model_fields:
        assert f"`{field}`" in text, field
    result = METHODS[name].result
    assert f"`{result.__name__}`" in text or all(f"`{field}`" in text for field in result.model_fields)


@pytest.mark.parametrize("model", [m for _, m in inspect.getmembers(results, inspect.isclass) if m is not BaseModel])
def test_every_field_of_every_result_is_described(model: type) -> None:
    for field in getattr(model, "model_fields", {}):
        assert f"`{field}`" in TEXT, f"{model.__name__}.{field}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_event_is_listed_with_its_facts_and_no_others(event: type[Event]) -> None:
    rows = [line.split("|") for line in section("### What happens in the daemon").splitlines() if line[:3] == "| `"]
    (facts,) = [row[2] for row in rows if row[1].strip() == f"`{event.name}`"]
    expected = {field.name for field in dataclasses.fields(event)} - {"session"}
    assert set(re.findall(r"`(\w+)`", facts)) == expected


def told_behind(words: str) -> set[str]:
    """The names in the rest of the sentence that begins so."""
    rest = section("### What holds for every parameter").split(words, 1)[1]
    return set(re.findall(r"`(\w+)`", rest.split(". ", 1)[0]))


def takes(model: type[BaseModel], name: str, value: object) -> bool:
    """Whether a parameter takes a value, whatever else is missing or does not go with it."""
    try:
        model.model_validate({name: value})
    except ValidationError as error:
        return not any(each["loc"][:1] == (name,) for each in error.errors())
    return True


PARAMETERS = [
    (model, name, field)
    for model in [*{method.params for method in METHODS.values()}, SamplingFields, Message]
    for name, field in model.model_fields.items()
]


def test_the_parameters_that_are_optional_and_not_null_are_listed() -> None:
    refuse = {
        (model, name) for model, name, field in PARAMETERS if not field.is_required() and not takes(model, name, None)
    }
    told = told_behind("These may only be left out: ")
    assert told == {name for _, name in refuse}
    assert {model for model, name in refuse if name == "labels"} == {METHODS["create"].params}
    assert not any(takes(model, name, None) for model, name, field in PARAMETERS if field.is_required())


def test_the_parameters_that_may_be_empty_are_listed() -> None:
    assert {name for model, name, _ in PARAMETERS if takes(model, name, "")} == {"content"}
    assert told_behind("The empty text is refused, ") == {"content"}
    empty = {name for model, name, _ in PARAMETERS if takes(model, name, ())}
    assert told_behind("So is an empty list, ") == empty


def test_the_parameters_that_may_have_a_fraction_are_listed() -> None:
    fractions = {name for model, name, _ in PARAMETERS if takes(model, name, 0.5)}
    assert told_behind("These may have a fraction") - {"sampling"} == fractions
    assert all(takes(model, name, 1) for model, name, _ in PARAMETERS if name in fractions)
    assert not any(takes(model, name, 2.0) for model, name, _ in PARAMETERS if name not in fractions)
    assert not any(takes(model, name, True) for model, name, _ in PARAMETERS if name in fractions)


def as_told(number: float) -> str:
    if number > 2**30 and int(number).bit_count() == int(number).bit_length():
        return f"2^{int(number).bit_length()} − 1"
    return f"{number:,.6f}".rstrip("0").rstrip(".")


def range_of(schema: dict[str, Any]) -> str | None:
    """What pydantic holds a value to, in the words of the document; None if to no range."""
    schema = next((each for each in schema.get("anyOf", ()) if each != {"type": "null"}), schema)
    least = next((schema[key] for key in ("minimum", "minLength", "minItems") if key in schema), None)
    most = next((schema[key] for key in ("maximum", "maxLength", "maxItems") if key in schema), None)
    if "exclusiveMinimum" in schema:
        return f"above {as_told(schema['exclusiveMinimum'])}, at most {as_told(most)}"
    if "pattern" in schema:
        return f"as `{schema['pattern']}`"
    if most is None:
        return None
    told = f"at most {as_told(most)}" if least is None else f"{as_told(least)} to {as_told(most)}"
    if schema["type"] == "array":
        each = range_of(schema["items"])
        return f"{told} items, each {each}" if each else f"{told} items"
    return f"{told} characters" if schema["type"] == "string" else told


def test_the_ranges_of_all_parameters_are_those_that_a_request_is_held_to() -> None:
    held = {
        (name, told)
        for model in {model for model, _, _ in PARAMETERS}
        for name, schema in model.model_json_schema()["properties"].items()
        if (told := range_of(schema))
    }
    table = section("### What holds for every parameter").split("| parameter | range |", 1)[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:3] == "| `"]
    assert {(name, told) for names, told in rows for name in re.findall(r"`(\w+)`", names)} == held
    assert len(rows) == len({told for _, told in rows}), "a range stands in one row"
    assert f"`temperature` above 0 is at least {as_told(LOWEST_TEMPERATURE)} " in " ".join(TEXT.split())


def test_the_defaults_of_the_sampling_are_told() -> None:
    [row] = [line for line in TEXT.splitlines() if line.startswith("| `Sampling` |")]
    told = dict(re.findall(r"`(\w+)` \(([\d.]+)", row))
    assert told == {name: str(value) for name, value in results.Sampling().model_dump().items()}


def test_the_ranges_of_the_messages_are_told() -> None:
    properties = messages.Request.model_json_schema()["properties"]
    assert f"`id` is an integer from {range_of(properties['id'])}," in TEXT
    client = messages.Hello.model_json_schema()["properties"]["client"]
    assert f"any text of {range_of(client)}" in section("## Conversation")


def test_every_error_code_is_listed() -> None:
    codes = {
        value.code
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.ApiError) and value is not errors.RemoteError
    }
    for code in codes:
        assert f"| `{code}` |" in TEXT, code


def test_every_message_type_is_listed() -> None:
    for kind in ("hello", "request", "cancel", "event", "result", "error"):
        assert f'"type": "{kind}"' in TEXT
    assert f"version {limits.PROTOCOL_VERSION}" in TEXT.splitlines()[0]


def test_each_method_says_whether_it_can_be_cancelled() -> None:
    for method in METHODS.values():
        told = section(f"### `{method.name}`")
        assert (method.leaves is not None) == ("an be cancelled" in told or "until it is cancelled" in told), (
            method.name
        )


def test_the_stated_limits_are_those_of_the_code() -> None:
    stated = section("## Limits")
    defaults = ServerLimits()
    for value in (
        limits.MAX_REQUEST_FRAME_BYTES // 2**20,
        limits.MAX_REPLY_FRAME_BYTES // 2**20,
        limits.MAX_DEPTH,
        f"{limits.MAX_MESSAGES:,}",
        f"{limits.MAX_ARRAY_ITEMS:,}",
        f"{limits.MAX_REQUEST_VALUES:,}",
        f"{limits.MAX_REPLY_VALUES:,}",
        f"{defaults.max_connections:,}",
        defaults.max_in_flight,
        f"{defaults.hello_timeout_s:g}",
        f"{defaults.frame_timeout_s:g}",
        f"{defaults.max_waiting_event_bytes // 2**20}",
        f"{defaults.max_waiting_notice_bytes // 2**10}",
        f"{defaults.max_connection_request_bytes // 2**20}",
        f"{defaults.max_request_bytes // 2**20}",
        f"{defaults.uncounted_frame_bytes:,}",
        defaults.reserved_connections,
        f"{defaults.min_frame_bytes // 2**10} KiB in a second",
    ):
        assert re.search(rf"(?<![\d,]){value}(?![\d,])", stated), value
    assert defaults.slow_frame_s == 1


def test_the_example_in_hex_is_the_message_beside_it() -> None:
    pairs = re.findall(r"```hex\n(.*?)```\n+```json\n(.*?)```", TEXT, re.DOTALL)
    assert pairs
    for hexes, shown in pairs:
        data = bytes.fromhex("".join(hexes.split()))
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        assert msgpack.unpackb(data[4:]) == json.loads(shown)


def test_the_wire_has_exactly_the_fields_of_the_daemons_records() -> None:
    """A drift between the two would be an internal error on every answer."""
    same = {
        daemon.SessionInfo: results.SessionInfo,
        daemon.VersionInfo: results.VersionInfo,
        daemon.SessionDetail: results.SessionDetail,
        daemon.AppendResult: results.AppendResult,
        daemon.GenerateResult: results.GenerateResult,
        daemon.Reuse: results.Reuse,
        daemon.WhyResult: results.WhyResult,
        daemon.SleepResult: results.SleepResult,
        daemon.FoldResult: results.FoldResult,
        daemon.ForkResult: results.ForkResult,
        daemon.Origin: results.Origin,
        daemon.Recomputed: results.Recomputed,
        daemon.LabelFigures: results.LabelFigures,
        daemon.StatsResult: results.StatsResult,
        daemon.Warmed: results.Warmed,
        daemon.WarmResult: results.WarmResult,
        daemon.ClearResult: results.ClearResult,
        daemon.ScrubInfo: results.ScrubInfo,
        daemon.Salvaged: results.Salvaged,
        daemon.PartDiffers: results.PartDiffers,
        daemon.WakeResult: results.WakeResult,
        daemon.WakePlanResult: results.WakePlanResult,
        daemon.PlannedFile: results.PlannedFile,
        daemon.MeasuredRate: results.MeasuredRate,
        daemon.AnalysisResult: results.AnalysisResult,
        daemon.DeleteResult: results.DeleteResult,
        daemon.MaintenanceAction: results.MaintenanceAction,
        daemon.MaintenanceProblem: results.MaintenanceProblem,
        daemon.MaintenanceResult: results.MaintenanceResult,
        daemon.MarksResult: results.MarksResult,
        daemon.ModelInfo: results.ModelInfo,
        daemon.ConfigInfo: results.ConfigInfo,
        daemon.MemoryInfo: results.MemoryInfo,
        daemon.QueueInfo: results.QueueInfo,
        daemon.Status: results.StatusResult,
        daemon.Sampling: results.Sampling,
    }
    for record, model in same.items():
        assert {field.name for field in dataclasses.fields(record)} == set(model.model_fields), record


def test_a_version_is_stated_by_hello() -> None:
    assert messages.Hello(protocol=limits.PROTOCOL_VERSION).protocol == 1
