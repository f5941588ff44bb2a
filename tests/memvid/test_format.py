"""docs/reference/format.md and remote.md say what the code does. T16, that stores of every released version open for
ever, is in `recovery/test_carrying_over.py`."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
import torpor
from torpor.memvid import errors, limits
from torpor.memvid.folder import marks
from torpor.memvid.folder.store_file import STORE_VERSION
from torpor.memvid.format import blocks, codecs, layout, manifest, pack, sealing
from torpor.memvid.index import index
from torpor.memvid.remote import heads
from torpor.memvid.uri import SessionUri

# --- the documents


REFERENCE = Path(torpor.__file__).parent / "docs" / "reference"
DOCUMENT = (REFERENCE / "format.md").read_text(encoding="utf-8")
OF_REMOTES = (REFERENCE / "remote.md").read_text(encoding="utf-8")


def table(section: str, nth: int = 0, document: str = DOCUMENT) -> list[list[str]]:
    """The rows of the nth table after a heading or a line of text, as lists of cells."""
    assert document.count(f"\n{section}\n") == 1, section
    after = document.split(f"\n{section}\n")[1]
    tables = re.findall(r"(?:^\|.*\n)+", after, re.MULTILINE)
    lines = tables[nth].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def number(text: str) -> int:
    found = re.fullmatch(r"([\d,]+)( KiB| MiB| GiB)?|2\^(\d+)( − 1)?", text)
    assert found, text
    if found[3]:
        return (1 << int(found[3])) - bool(found[4])
    scale = {None: 0, " KiB": 10, " MiB": 20, " GiB": 30}[found[2]]
    return int(found[1].replace(",", "")) << scale


NOT_OF_THE_FORMAT = {
    "KIB", "MIB", "GIB", "MAX_IOVECS", "MAX_OPEN_ANCESTORS", "MAX_UNSCANNED_BYTES", "MAX_CLAIMED_ELEMENTS",
    "MAX_KEEP_DAYS", "PROVEN_BEHIND_BYTES",
}  # fmt: skip
"""How the program goes about its work; nothing that is stored depends on them."""


def test_the_document_has_every_limit_with_its_value() -> None:
    told = {row[0]: number(row[1]) for row in (*table("## Limits"), *table("## Limits", document=OF_REMOTES))}
    real = {name: value for name, value in vars(limits).items() if name.isupper() and isinstance(value, int)}
    assert told == {name: value for name, value in real.items() if name not in NOT_OF_THE_FORMAT}


def fields_of(pattern: str) -> list[tuple[int, int]]:
    """Offset and bytes of each field of a struct format, padding included."""
    found, offset = [], 0
    for count, code in re.findall(r"(\d*)([a-zA-Z])", pattern):
        for _ in range(int(count or 1) if code not in "sx" else 1):
            size = struct.calcsize(f"<{count if code in 'sx' else ''}{code}")
            found.append((offset, size))
            offset += size
    return found


def told_fields(section: str, nth: int = 0) -> list[tuple[int, int]]:
    return [(int(row[0]), int(row[1])) for row in table(section, nth) if row[0].isdigit() and row[1].isdigit()]


@pytest.mark.parametrize(
    ("section", "format_", "more"),
    [
        ("## Manifest file", sealing._HEADER, [(32, 32)]),
        ("### Frame", layout._PREFIX, [(32, 32)]),
        ("A line of the storage table:", layout._STORED, []),
        ("### Trailer", pack.TRAILER.fields, [(72, 32)]),
        ("A line of the block list:", manifest._LINE, []),
        ("### Directory", pack._FRAME, []),
        ("The stored bytes are:", codecs._PLANES_HEADER, []),
    ],
    ids=["header", "frame", "storage table", "trailer", "block list", "frames", "planes"],
)  # fmt: skip
def test_the_document_has_every_field_where_it_lies(
    section: str, format_: struct.Struct, more: list[tuple[int, int]]
) -> None:
    assert told_fields(section) == fields_of(format_.format) + more


def test_the_document_has_the_order_of_the_fields() -> None:
    """One value after another is put into a structure, and must show where the document says."""
    for section, values, data in (
        (
            "### Trailer",
            {"offset of the manifest": 64, "bytes of the manifest, with its digest": 1000,
             "bytes of the directory": 100, "bytes of the whole file": 64 + 1000 + 100 + pack.TRAILER.size_bytes},
            pack.Trailer(64, 1000, 100, bytes(32)).encode(),
        ),
        (
            "A line of the block list:",
            {"start": 7, "raw bytes of all its slots": 8, "tokens": 9, "kind: 0 span, 1 state": 1},
            manifest._encode_line(blocks.BlockEntry(bytes(32), "state", 7, 9, 8)),
        ),
        (
            "### Directory",
            {"offset of the frame in the file": 64, "bytes of the frame": 128, "bytes of the frame's head": 192,
             "1: the block is stripped; else 0": 1},
            pack._FRAME.pack(bytes(32), 64, 128, 192, 1),
        ),
        (
            "A line of the storage table:",
            {"stored bytes": 77},
            layout.encode_frame_head(b"x" * 8, [layout.StoredSlot(2, 77, bytes(32))])[72:120],
        ),
    ):  # fmt: skip
        places = {row[2]: (int(row[0]), int(row[1])) for row in table(section)}
        for what, value in values.items():
            offset, size = places[what]
            assert int.from_bytes(data[offset : offset + size], "little") == value, (section, what)


def test_the_document_has_the_sizes_magics_and_versions() -> None:
    for text in (
        f"header ({sealing.HEADER_BYTES}) | frame",
        f"trailer ({pack.TRAILER.size_bytes})",
        f"blocks | bytes: the block list, {manifest.LINE_BYTES} for each block",
        f"{pack._FRAME.size} for each frame of the file",
        f"{layout.STORED_BYTES} × *s*",
        f"multiples of {layout.ALIGNMENT} bytes",
        f"at most {blocks.BLOCK_TOKENS} tokens",
        " ".join(f"{byte:02X}" for byte in sealing.MANIFEST_MAGIC),
        " ".join(f"{byte:02X}" for byte in sealing.PACK_MAGIC),
        f"a writer should take {codecs.PLANE_CHUNK_BYTES // 1024} KiB",
        f"format `torpor.store`, version {STORE_VERSION}",
        index._TAIL_MAGIC.decode(),
        f'"version":{marks.MARKS_VERSION}',
        f"format version: {sealing.FORMAT_VERSION}",
        *(f'"{domain}"' for domain in (blocks._DOMAIN, manifest._DOMAIN, pack._DOMAIN)),
        ", ".join(f"{code} {name}" for code, name in ((0, "raw"), (2, "zstd on byte planes"))),
    ):
        assert text in DOCUMENT, text
    for magic in (layout.FRAME_MAGIC, pack.TRAILER.magic):
        shown = magic.decode().replace("\0", r"\0").replace("\r", r"\r").replace("\n", r"\n")
        assert f"magic `{shown}`" in DOCUMENT
    assert codecs.CODES == (0, 2)
    dtypes = re.search(r"`dtype` is one of ([^.]*)\.", DOCUMENT)
    assert dtypes
    assert re.split(r",\s+", dtypes[1]) == list(blocks.DTYPE_BYTES)


def test_the_document_has_every_key_of_a_manifest() -> None:
    assert {row[0] for row in table("### Manifest")} == manifest._KEYS


def test_the_document_has_every_field_of_a_head() -> None:
    assert {row[0].strip("`") for row in table("## The head of a session", document=OF_REMOTES)} == heads._FIELDS
    assert heads.key_of(SessionUri("work", "MyNotes")) == "heads/work/mynotes=5"
    assert f"`{heads._DOMAIN}`" in OF_REMOTES


def test_the_document_names_every_error_that_damage_gives() -> None:
    def below(kind: type[errors.StoreError]) -> set[str]:
        return {kind.code, *(code for child in kind.__subclasses__() for code in below(child))}

    section = "## Damage: what a reader does"
    rows = (*table(section), *table(section, document=OF_REMOTES))
    told = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row[1])}
    known = below(errors.StoreError)
    assert told - {"unknown_file"} <= known, "a code that no error has"
    assert below(errors.Corruption) - {"corruption"} <= told, "damage that the document does not tell of"
