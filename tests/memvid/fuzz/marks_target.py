"""marks.json: the one file of a store that is JSON and truth. Its digest is made right again after each change."""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from random import Random
from typing import Any, Final

from blake3 import blake3
from torpor.memvid.folder.marks import Marks, decode_marks, encode_marks
from torpor.memvid.uri import SessionUri
from torpor.tests.memvid.fuzz.mutation import TEXTS, change_bytes
from torpor.tests.memvid.fuzz.target import SOUND, Target, again, require

STORE_UUID: Final = "6b1f7f0e-9b4e-4e6e-8d3c-0123456789ab"
VALUES: Final = (
    None, True, False, 0, 1, -1, 2, 1 << 63, 1 << 64, 1e308, 0.5, [], {}, [[]], "0" * 64, "f" * 64, "F" * 64, "0" * 63,
    {"pins": [], "stripped": [], "tags": {}}, {"pins": ["0" * 64], "stripped": ["1" * 64], "tags": {}},
    {"pins": [], "stripped": [], "tags": {"a": "1" * 64}},
)  # fmt: skip
HOSTILE: Final = (
    b"[" * 9000, b'{"a":' * 9000, b"1" * 5000, b"-" + b"9" * 4301, b"1e999", b"NaN", b"Infinity", b'"\\ud800"',
    b'"\\u0000"', b"[" + b"0," * 130_000 + b"0]", b'{"a":1,"a":2}', b"\xff", b"\xef\xbb\xbf{}", b"1.0", b"01",
    b'"\x01"',
)  # fmt: skip


def canonical(document: Any) -> bytes:
    return (json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode("ascii")


def sealed(document: dict[str, Any]) -> bytes:
    """A file with a right digest over whatever it says: what a check behind the digest has to stand against."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    return canonical({**rest, "digest": blake3(canonical(rest)).hexdigest()})


class MarksTarget(Target):
    name = "marks"
    max_bytes = 1 << 18

    def seeds(self) -> Iterable[bytes]:
        marks = Marks(STORE_UUID)
        yield encode_marks(marks)
        marks = marks.tag(SessionUri("default", "agent"), "00" * 32, "before-refactor")
        marks = marks.pin(SessionUri("a", "b"), "01" * 32).strip({SessionUri("a", "c"): ["02" * 32, "03" * 32]})
        yield encode_marks(marks)
        for number in range(20):
            uri = SessionUri("many", f"s{number % 4}")
            marks = marks.tag(uri, f"{number:02x}" * 32, f"tag.{number}")
            marks = marks.pin(uri, f"{number + 1:02x}" * 32)
        yield encode_marks(marks)

    def change(self, data: bytes, rng: Random) -> bytes:
        return change_document(data, rng, self.max_bytes)

    def check(self, data: bytes) -> str:
        marks = decode_marks(data, STORE_UUID, "input")
        require(again(lambda: encode_marks(marks)) == data, "accepted marks are encoded otherwise")
        document = json.loads(data)
        require(sealed(document) == data, "the digest is not that of the content")
        listed = {uri: of for uri, of in document["sessions"].items() if any(of.values())}
        found = {
            str(uri): {"pins": sorted(of.pins), "tags": dict(of.tags), "stripped": sorted(of.stripped)}
            for uri, of in marks.sessions.items()
        }
        require(listed == found, "other marks are found")
        for uri, of in marks.sessions.items():
            require(all(marks.tagged(uri, tag) == named for tag, named in of.tags.items()), "a tag is not found")
            require(all(marks.of(pin).pinned for pin in of.pins), "a pin is not found")
        return SOUND


def change_document(data: bytes, rng: Random, most_bytes: int) -> bytes:
    """A sealed document with values changed, sealed again most of the time, and now and then with something hostile."""
    try:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_json(document, rng)
        changed = sealed(document) if rng.random() < 0.9 else canonical(document)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return change_bytes(data, rng)
    if rng.random() < 0.1:
        place = rng.randrange(len(changed))
        return changed[:place] + rng.choice(HOSTILE)[:most_bytes] + changed[place + rng.randrange(3) :]
    return change_bytes(changed, rng) if rng.random() < 0.1 else changed


def change_json(document: Any, rng: Random) -> None:
    """One value somewhere in a JSON document replaced, removed, renamed or copied."""
    places: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(places) < 2000:
        item = waiting.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        places.extend((item, key) for key in keys)
        waiting.extend(item[key] for key in keys)
    if not places:
        raise ValueError("there is nothing in it to change")
    holder, key = rng.choice(places)
    value = holder[key]
    choice = rng.randrange(6)
    if choice == 0:
        del holder[key]
    elif choice == 1 and isinstance(holder, dict):
        holder[_text(str(key), rng)] = holder.pop(key)
    elif choice == 2 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), value)
    elif choice == 3 and isinstance(holder, dict):
        holder[_text(str(key), rng)] = value
    elif isinstance(value, str) and rng.random() < 0.6:
        holder[key] = _text(value, rng)
    elif isinstance(value, int) and rng.random() < 0.6:
        holder[key] = value + rng.choice((-1, 1, 1 << 40))
    else:
        holder[key] = deepcopy(rng.choice(VALUES))  # which the next change may change


def _text(text: str, rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(TEXTS)
    return change_bytes(text.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace")


TARGETS: Final[tuple[type[Target], ...]] = (MarksTarget,)
