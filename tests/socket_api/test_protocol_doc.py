"""docs/reference/protocol.md is true: every method, parameter, result field, message, error code and limit is in it."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import pytest
from pydantic import TypeAdapter, ValidationError
from torpor.daemon.api import branching, events, forking, process, reading, session, store, waking
from torpor.daemon.api import limits as api_limits
from torpor.daemon.api.dialogue import Message
from torpor.daemon.api.events import NEVER_SENT
from torpor.daemon.api.records import NamedSampling
from torpor.daemon.api.sampling import LOWEST_TEMPERATURE, Sampling
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.events.events import EVENTS, Event
from torpor.records import Record, Result
from torpor.socket_api import errors, limits
from torpor.socket_api.limits import ServerLimits
from torpor.socket_api.wire import messages

TEXT = Path(__file__).parents[2].joinpath("docs", "reference", "protocol.md").read_text()


RULES = "### What holds for every parameter"


def section(heading: str) -> str:
    assert f"{heading}\n" in TEXT, f"docs/reference/protocol.md lacks {heading}"
    return re.split(r"\n#+ ", TEXT.split(f"{heading}\n", 1)[1], maxsplit=1)[0]


FAMILIES = (events, session, waking, forking, branching, reading, store, process)
RESULTS = [
    record
    for family in FAMILIES
    for _, record in inspect.getmembers(family, inspect.isclass)
    if issubclass(record, Result) and record is not Result and record.__module__ == family.__name__
]


def fields_of(record: type[Record]) -> dict[str, dataclasses.Field[Any]]:
    """What of a record crosses the wire."""
    return {each.name: each for each in dataclasses.fields(record) if each.name not in NEVER_SENT}


@pytest.mark.parametrize("name", VERBS)
def test_every_method_is_described_with_all_its_parameters_and_result_fields(name: str) -> None:
    text = section(f"### `{name}`")
    for field in fields_of(VERBS[name].request):
        assert f"`{field}`" in text, field
    result = VERBS[name].result
    assert f"`{result.__name__}`" in text or all(f"`{field}`" in text for field in fields_of(result))


@pytest.mark.parametrize("record", RESULTS)
def test_every_field_of_every_result_is_described(record: type[Result]) -> None:
    assert len(RESULTS) > 30
    row = re.search(rf"^\| `{record.__name__}` \|.*$", TEXT, re.MULTILINE)
    text = row[0] if row is not None and " as `" not in row[0][:40] else TEXT
    for field in fields_of(record):
        assert f"`{field}`" in text, f"{record.__name__}.{field}"


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_every_event_is_listed_with_its_facts_and_no_others(event: type[Event]) -> None:
    rows = [line.split("|") for line in section("### What happens in the daemon").splitlines() if line[:3] == "| `"]
    (facts,) = [row[2] for row in rows if row[1].strip() == f"`{event.name}`"]
    expected = {field.name for field in dataclasses.fields(event)} - {"session"}
    assert set(re.findall(r"`(\w+)`", facts)) == expected


def told_behind(words: str) -> set[str]:
    """The names in the rest of the sentence that begins so."""
    rest = section(RULES).split(words, 1)[1]
    return set(re.findall(r"`(\w+)`", rest.split(". ", 1)[0]))


@functools.cache
def _adapter_of(record: type[Record]) -> TypeAdapter[Any]:
    return TypeAdapter(NamedSampling if record is Sampling else record)


def takes(record: type[Record], name: str, value: object) -> bool:
    """Whether a parameter takes a value, whatever else is missing or does not go with it."""
    try:
        _adapter_of(record).validate_python({name: value})
    except ValidationError as error:
        return not any(each["loc"][:1] == (name,) for each in error.errors())
    return True


PARAMETERS = [
    (record, name, field)
    for record in [*{verb.request for verb in VERBS.values()}, Sampling, Message]
    for name, field in fields_of(record).items()
]


def needed(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@pytest.mark.one_in(1)
def test_the_parameters_that_are_optional_and_not_null_are_listed() -> None:
    refuse = {
        (record, name) for record, name, field in PARAMETERS if not needed(field) and not takes(record, name, None)
    }
    told = told_behind("These may only be left out: ")
    assert told == {name for _, name in refuse}, RULES
    assert {record for record, name in refuse if name == "labels"} == {VERBS["create"].request}
    assert not any(takes(record, name, None) for record, name, field in PARAMETERS if needed(field))


def test_the_parameters_that_may_be_empty_are_listed() -> None:
    assert told_behind("The empty text is refused, ") == {
        name for record, name, _ in PARAMETERS if takes(record, name, "")
    }, RULES
    empty = {name for record, name, _ in PARAMETERS if takes(record, name, ())}
    assert told_behind("So is an empty list, ") == empty, RULES


def test_the_parameters_that_may_have_a_fraction_are_listed() -> None:
    fractions = {name for record, name, _ in PARAMETERS if takes(record, name, 0.5)}
    assert told_behind("These may have a fraction") - {"sampling"} == fractions, RULES
    assert all(takes(record, name, 1) for record, name, _ in PARAMETERS if name in fractions)
    assert not any(takes(record, name, 2.0) for record, name, _ in PARAMETERS if name not in fractions)
    assert not any(takes(record, name, True) for record, name, _ in PARAMETERS if name in fractions)


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


@pytest.mark.one_in(1)
@pytest.mark.filterwarnings("ignore:Default value")
def test_the_ranges_of_all_parameters_are_those_that_a_request_is_held_to() -> None:
    held = {
        (name, told)
        for record in {record for record, _, _ in PARAMETERS}
        for name, schema in TypeAdapter(record).json_schema()["properties"].items()
        if (told := range_of(schema))
    }
    table = section(RULES).split("| parameter | range |", 1)[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:3] == "| `"]
    assert {(name, told) for names, told in rows for name in re.findall(r"`(\w+)`", names)} == held, RULES
    assert len(rows) == len({told for _, told in rows}), "a range stands in one row"
    assert f"`temperature` above 0 is at least {as_told(LOWEST_TEMPERATURE)} " in " ".join(TEXT.split())


def test_the_defaults_of_the_sampling_are_told() -> None:
    [row] = [line for line in TEXT.splitlines() if line.startswith("| `Sampling` |")]
    told = dict(re.findall(r"`(\w+)` \(([\d.]+)", row))
    assert told == {name: str(value) for name, value in vars(Sampling()).items() if value != ()}


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
    for verb in VERBS.values():
        told = section(f"### `{verb.name}`")
        assert verb.cancellable == ("an be cancelled" in told or "until it is cancelled" in told), verb.name


def test_the_stated_limits_are_those_of_the_code() -> None:
    stated = section("## Limits")
    defaults = ServerLimits()
    for value in (
        limits.MAX_REQUEST_FRAME_BYTES // 2**20,
        limits.MAX_REPLY_FRAME_BYTES // 2**20,
        limits.MAX_DEPTH,
        f"{api_limits.MAX_MESSAGES:,}",
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


def test_a_version_is_stated_by_hello() -> None:
    assert messages.Hello(protocol=limits.PROTOCOL_VERSION).protocol == 1
