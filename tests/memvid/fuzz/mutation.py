"""Changing values: integers, bytes, packed documents and tables of fixed lines. Pure; all chance comes from `rng`.

Knows nothing of the store's formats. What it makes is meant to be refused, or to be right by accident.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgpack

INTERESTING: Final = sorted(
    {0, 3, 5, 24, 48, 63, 80, 96, 255, 257, 300, 65537}
    | {
        (1 << bits) + off
        for bits in (0, 3, 5, 6, 7, 8, 10, 12, 15, 16, 20, 24, 31, 32, 44, 50, 53, 63)
        for off in (-1, 0, 1)
    }
    | {(1 << 64) - size for size in (1, 2, 63, 64, 128)}
)
TEXTS: Final = (
    "", "\x00", "../../etc/passwd", "/etc/passwd", "torpor://default/agent", "torpor://default/other", "torpor://a/b/c",
    "torpor://default/ａgent", "e\u0301", "x" * 65, "x" * 129, "x" * 1025, "1", "null", "\U0010ffff", "a\nb",
)  # fmt: skip


CONSTANTS: Final = (
    None, True, False, 0.0, -0.0, float("nan"), float("inf"), -1, -(1 << 63), b"", b"\x00", bytes(31), bytes(32),
    bytes(33), b"\xff" * 64,
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """Bytes that stand in a document as they are, whatever they mean."""

    data: bytes


class Pairs(list[tuple[Any, Any]]):
    """A map as the list of its pairs, so that order and duplicates can be changed."""


HOSTILE: Final = (
    Packed(b"\xc1"),  # never used
    Packed(b"\xdd\xff\xff\xff\xff"),  # an array of 2^32 - 1
    Packed(b"\xdf\xff\xff\xff\xff"),
    Packed(b"\xc6\xff\xff\xff\xff"),
    Packed(b"\xdb\x7f\xff\xff\xff"),
    Packed(b"\xdc\xff\xff" + b"\x90" * 64),
    Packed(b"\x91" * 33 + b"\xc0"),
    Packed(b"\x81\xa1a" * 40 + b"\xc0"),
    Packed(b"\x91" * 1100 + b"\xc0"),
    Packed(b"\xd4\x01\x00"),  # extension types
    Packed(b"\xc7\x00\x05"),
    Packed(b"\xd6\xff\x00\x00\x00\x00"),
    Packed(b"\xcd\x00\x01"),  # longer than needed
    Packed(b"\xd9\x01a"),
    Packed(b"\xd0\x01"),
    Packed(b"\xa2\xff\xfe"),  # not UTF-8
    Packed(b"\xa3\xed\xa0\x80"),  # a surrogate
    Packed(b"\xca\x7f\xc0\x00\x00"),  # NaN in four bytes
    Packed(b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00"),
    Packed(b"\x82\xa1a\x01\xa1a\x02"),  # a key twice
    Packed(b"\x81\x01\x02"),  # a key that is not text
    Packed(b"\xdc\x80\x00" + b"\x90" * 0x8000 + b"\x90" * 0x400),
)


def change_int(value: int, bits: int, rng: Random) -> int:
    choice = rng.randrange(7)
    if choice == 0:
        value = rng.choice(INTERESTING)
    elif choice == 1:
        value += rng.choice((-64, -8, -2, -1, 1, 2, 8, 64))
    elif choice == 2:
        value ^= 1 << rng.randrange(bits)
    elif choice == 3:
        value = value * 2 if rng.random() < 0.5 else value // 2
    elif choice == 4:
        value = rng.getrandbits(rng.randrange(1, bits + 1))
    elif choice == 5:
        value = ((1 << bits) - value) % (1 << bits)
    else:
        value = rng.randrange(4)
    return value % (1 << bits)


def change_bytes(data: bytes, rng: Random) -> bytes:
    """One small change; now and then of the length."""
    buffer = bytearray(data)
    at = rng.randrange(len(buffer)) if buffer else 0
    choice = rng.randrange(10 if buffer else 1)
    if choice == 0:
        buffer[at:at] = rng.randbytes(rng.choice((1, 2, 4, 8, 32)))
    elif choice in (1, 2):
        buffer[at] ^= 1 << rng.randrange(8)
    elif choice == 3:
        buffer[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    elif choice == 4:
        del buffer[at : at + rng.choice((1, 2, 4, 32))]
    elif choice == 5:
        size = rng.choice((2, 4, 8))
        buffer[at : at + size] = (rng.choice(INTERESTING) % (1 << 8 * size)).to_bytes(size, "little")
    elif choice == 6:
        other = rng.randrange(len(buffer))
        buffer[at:at] = buffer[other : other + rng.choice((1, 4, 16, 64))]
    elif choice == 7:
        del buffer[at:]
    elif choice == 8:
        del buffer[-rng.randrange(1, 10) :]
    else:
        buffer[at : at + rng.choice((1, 8, 32))] = bytes(rng.choice((1, 8, 32)))
    return bytes(buffer)


# --- packed documents


def parse(data: bytes, most: int = 1 << 17) -> Any:
    """A document as a tree with `Pairs` for maps. Raises ValueError (and what msgpack raises) for what is none.

    `most` elements a list or a map may claim: msgpack takes the memory for them before it has read one.
    """
    return msgpack.unpackb(
        data,
        raw=False,
        strict_map_key=False,
        object_pairs_hook=Pairs,
        ext_hook=_kept_extension,
        use_list=True,
        max_array_len=most,
        max_map_len=most,
    )


def _kept_extension(code: int, data: bytes) -> Packed:
    return Packed(bytes(msgpack.packb(msgpack.ExtType(code, data))))


def pack(tree: Any) -> bytes:
    """Encode a tree; map pairs in the order that they have."""
    if isinstance(tree, Packed):
        return tree.data
    packer = msgpack.Packer(use_bin_type=True)
    if isinstance(tree, Pairs):
        return bytes(packer.pack_map_header(len(tree))) + b"".join(pack(part) for pair in tree for part in pair)
    if isinstance(tree, list):
        return bytes(packer.pack_array_header(len(tree))) + b"".join(map(pack, tree))
    if isinstance(tree, int) and not -(1 << 63) <= tree < 1 << 64:
        tree %= 1 << 64
    return bytes(packer.pack(tree))


def change_tree(tree: Any, rng: Random) -> Any:
    """A copy with one value somewhere in it changed; leaves are likelier than what holds them."""
    places: list[tuple[Any, Any]] = []
    _collect(tree, places)
    if not places or rng.random() < 0.02:
        return _other_value(tree, rng)
    holder, key = rng.choice(places)
    if isinstance(holder, list) and rng.random() < 0.15:
        _change_list(holder, key, rng)
    elif isinstance(holder, Pairs):
        _change_pair(holder, key, rng)
    else:
        holder[key] = _other_value(holder[key], rng)
    return tree


def _collect(tree: Any, places: list[tuple[Any, Any]]) -> None:
    if not isinstance(tree, list) or len(places) > 5000:
        return
    for key, item in enumerate(tree):
        places.append((tree, key))
        _collect(item[1] if isinstance(tree, Pairs) else item, places)


def _change_pair(pairs: Pairs, key: int, rng: Random) -> None:
    name, value = pairs[key]
    if rng.random() < 0.15:
        name = _other_value(name, rng)
    else:
        value = _other_value(value, rng)
    pairs[key] = (name, value)


def _change_list(items: list[Any], key: int, rng: Random) -> None:
    choice = rng.randrange(6)
    other = rng.randrange(len(items))
    if choice == 0:
        items.insert(key, items[other])
    elif choice == 1:
        del items[key]
    elif choice == 2:
        items[key], items[other] = items[other], items[key]
    elif choice == 3:
        items.extend([items[key]] * _copies(items[key], rng, (1, 3, 70, 300)))
    elif choice == 4:
        items.sort(key=repr)
    else:
        del items[key:]


def _other_value(value: Any, rng: Random) -> Any:
    if rng.random() < 0.7:
        if type(value) is int:
            return change_int(value, 64, rng) - (rng.choice((0, 0, 0, 1 << 62, 1 << 63)))
        if isinstance(value, bytes):
            return change_bytes(value, rng)
        if isinstance(value, str):
            changed = change_bytes(value.encode("utf-8", "surrogatepass"), rng)
            return changed.decode("utf-8", "replace")
    if rng.random() < 0.35:
        return _wrapped(value, rng)
    choices = (HOSTILE, HOSTILE, HOSTILE, HOSTILE, TEXTS, INTERESTING, CONSTANTS)
    return rng.choice(rng.choice(choices))


def _wrapped(value: Any, rng: Random) -> Any:
    """The value inside others, or many times."""
    choice = rng.randrange(4)
    if choice == 0:
        return [value]
    if choice == 1:
        return Pairs([("a", value)])
    if choice == 2:
        return [value] * _copies(value, rng, (2, 9, 65, 300, 4097))
    for _ in range(rng.choice((5, 28, 30, 31, 32, 33, 40, 600))):
        value = [value] if rng.random() < 0.5 else Pairs([("k", value)])
    return value


def _copies(value: Any, rng: Random, counts: tuple[int, ...]) -> int:
    """How often to repeat a value: a large one seldom, or an input would outgrow every limit in a few changes."""
    return rng.choice(counts if _is_small(value) else counts[:2])


def _is_small(value: Any) -> bool:
    if isinstance(value, list | str | bytes | Packed):
        return (
            not isinstance(value, Packed)
            and len(value) < 8
            and all(map(_is_small, value if isinstance(value, list) else ()))
        )
    return not isinstance(value, tuple) or all(map(_is_small, value))


def change_document(data: bytes, rng: Random) -> bytes:
    """A packed document with some values changed; as bytes where it is none, and now and then anyway."""
    if rng.random() < 0.15:
        return change_bytes(data, rng)
    try:
        tree = parse(data, 8192)
    except Exception:  # whatever it is, it is not a document
        return change_bytes(data, rng)
    try:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            tree = change_tree(tree, rng)
        return pack(tree)
    except (ValueError, OverflowError, TypeError, RecursionError, UnicodeEncodeError):
        return change_bytes(data, rng)


# --- tables of lines of one fixed form


@dataclass(frozen=True)
class Lines:
    """Lines of a `struct` form in a bytes value; `pool` gives ids that a field of bytes may be replaced by."""

    form: struct.Struct

    def change(self, table: bytes, rng: Random, pool: Callable[[], Sequence[bytes]]) -> bytes:
        size = self.form.size
        lines = [table[at : at + size] for at in range(0, len(table) - size + 1, size)]
        choice = rng.randrange(12)
        if not lines or choice == 0:
            return change_bytes(table, rng)
        at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        if choice == 1:
            lines[at], lines[other] = lines[other], lines[at]
        elif choice == 2:
            lines.insert(at, lines[other])
        elif choice == 3:
            del lines[at]
        elif choice == 4:
            lines.extend([lines[at]] * rng.choice((1, 2, 50)))
        else:
            lines[at] = self._changed(lines[at], rng, pool())
        return b"".join(lines)

    def _changed(self, line: bytes, rng: Random, pool: Sequence[bytes]) -> bytes:
        fields = list(self.form.unpack(line))
        for _ in range(rng.choice((1, 1, 1, 2))):
            at = rng.randrange(len(fields))
            if isinstance(fields[at], bytes):
                fields[at] = rng.choice(pool) if pool and rng.random() < 0.7 else change_bytes(fields[at], rng)[:32]
            else:
                fields[at] = change_int(fields[at], 64, rng)
        return self._pack(fields)

    def _pack(self, fields: list[Any]) -> bytes:
        sizes = {"I": 32, "H": 16, "Q": 64, "B": 8}
        letters = [letter for letter in self.form.format.lstrip("<") if letter.isalpha()]
        fields = [
            field if isinstance(field, bytes) else field % (1 << sizes[letter])
            for letter, field in zip(letters, fields, strict=True)
        ]
        return self.form.pack(*fields)
