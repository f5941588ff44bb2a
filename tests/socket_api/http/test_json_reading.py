"""Long JSON is read in short calls, as the library reads it in one (threats 41, 42)."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from pydantic_core import from_json
from torpor.socket_api.errors import InvalidRequest
from torpor.socket_api.http import json_reading
from torpor.socket_api.http.json_reading import InnerJson, object_of


def value_of(chance: Random, levels: int) -> Any:
    kind = chance.random() if levels else 0
    if kind < 0.4:
        text = "".join(chance.choices('ab"\\\n\u00e9\u2028\U0001f600[]{},: ', k=chance.choice([0, 1, 5, 30, 200])))
        return chance.choice([1, -2.5, None, True, text, text])
    inner = [value_of(chance, levels - 1) for _ in range(chance.choice([0, 1, 3, 8]))]
    return inner if kind < 0.7 else {"".join(chance.choices("ab\u00e9", k=1)): each for each in inner}


def changed(chance: Random, body: bytes) -> bytes:
    """JSON with a byte or two that are other ones; mostly none any more."""
    found = bytearray(body)
    for _ in range(chance.choice([0, 1, 1, 2])):
        at, put = chance.randrange(len(found)), chance.choice([b",", b'"', b"[", b"]", b"{", b"}", b":", b"\\", b" 1"])
        found[at : at + chance.choice([0, 1, 1])] = put
    return bytes(found)


@pytest.mark.parametrize("at_once", [12, 30, 90])
def test_what_is_read_in_pieces_is_what_the_library_reads(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reading, "BYTES_AT_ONCE", at_once)
    chance, read, refused = Random(at_once), 0, 0
    for _ in range(1_000):
        is_ascii, indent = chance.random() < 0.5, chance.choice([None, 1])
        value = {"": value_of(chance, chance.choice([1, 2, 4]))}
        body = changed(chance, json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode())
        expected, found = whole_outcome(body), outcome(body)
        assert found == expected or found == "long name", body
        read, refused = read + (expected is not None), refused + (expected is None)
    assert min(read, refused) > 200


def outcome(body: bytes) -> Any:
    try:
        return object_of(body)
    except InvalidRequest as refusal:
        return "long name" if "a long value" in str(refusal) else None  # a change has made one of a text


def whole_outcome(body: bytes) -> Any:
    """None for what is no object."""
    try:
        found = json_reading._read(body) if body.strip() else {}
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


LARGE = 1024**2


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    "body",
    [
        '{"a": "' + "\\u00e9" * (LARGE // 6) + '"}',
        '{"a": [' + ",".join(['{"role": "user", "content": "' + "x\\n" * 600 + '"}'] * 500) + "]}",
        '{"a": {"b": {' + ",".join(f'"{at}": [{at}]' for at in range(15_000)) + "}}}",
        '{"a": "' + "\\ud83d\\ude00" * (LARGE // 12) + '", "b": "' + "\\ud83d" * (LARGE // 60) + '"}',
        '{"a": [' + '"' + "x" * LARGE + '", 1, "' + "\u00e9" * (LARGE // 2) + '"]}',
    ],
    ids=["escapes", "messages", "objects", "pairs", "texts in a list"],
)
def test_no_call_of_the_reader_is_long(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one reads, neither the loop nor the engine goes on."""
    read: list[int] = []

    def counted(raw: bytes, **options: Any) -> Any:
        read.append(len(raw))
        return from_json(raw, **options)

    monkeypatch.setattr(json_reading, "from_json", counted)
    raw = body.encode()
    found = object_of(raw)
    assert max(read) <= 2 * json_reading.BYTES_AT_ONCE
    monkeypatch.undo()
    assert found == json_reading._read(raw)
    assert InnerJson().find(body) == found


def test_what_does_not_end_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_reading, "from_json", None)
    with pytest.raises(InvalidRequest, match="not JSON: it does not end"):
        object_of(b'{"a": [' + b"1," * 50_000)


def test_a_fault_in_a_long_body_is_told_with_its_place() -> None:
    good = '{"role": "user"}'
    body = '{"messages": [' + ",".join([good] * 9_000) + ',{"role" "user"}]}'
    with pytest.raises(InvalidRequest, match=r"not JSON: expected `:` at line 1 column \d+, counted from byte \d+"):
        object_of(body.encode())


def test_a_name_is_not_as_long_as_a_text() -> None:
    with pytest.raises(InvalidRequest, match="a long value stands behind byte 1"):
        object_of(b'{"' + b"n" * 70_000 + b'": 1}')
