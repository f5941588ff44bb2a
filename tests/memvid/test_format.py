"""T16: stores of every released format version open for ever; and docs/reference/format.md says what the code does.

The files in data/ are never made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
from collections import Counter
from pathlib import Path

import pytest
import torpor
from torpor.memvid import Store, errors, limits
from torpor.memvid.folder import marks
from torpor.memvid.folder.store_file import STORE_VERSION
from torpor.memvid.format import blocks, codecs, directory, layout, manifest
from torpor.memvid.format.bundle import BundleFile
from torpor.memvid.index import schema
from torpor.tests.memvid.store_making import (
    COMPRESSIBLE,
    FORK_URI,
    HEIR_URI,
    OTHER_URI,
    PLANES_BYTES,
    PLANES_URI,
    URI,
    contents,
    expected,
    require_awake,
    sleep,
    token_ids,
)

DATA = Path(__file__).parent / "data" / "format-1"
FILES = {  # how its name begins: SHA-256 of the file, by another hand than the store's
    "40184857d565da78.mvb": "d0a64ef9413e121fd13422d20e319fb20ac90d68416e55c1b5dde39a6a26109d",
    "441d847a90309a47.mvb": "f520334e52e32f59655cc0300ab07d2fd1f69d69e6dfb58225615f466ec74038",
    "55efe3658af94993.mvb": "ea594e10bb90f1277b39bc3a0acac5982526be830b3b212c2dc5a05b5cca43b0",
    "6f21471cde936e62.mvr": "39432136970c4feb972a90449f877166dda8acce9686b6bc82583d422e555799",
    "794861a9b64a52db.mvb": "c0fb5ec867c827a683d4862ed02f986caac9d71ff6d2c45f9bd589cd1dadae74",
    "8bcffc2163271d01.mvb": "ef36fa3172c523c7646d319b41794a168699cc7effd75a1a04b3de8c23c97de9",
    "d33644099f5cdc8b.mvb": "a77d1e03405cf2b93e0207812862244cdffad13719bcb9b6a388a052afb5e10e",
    "cf86c577a62f3a0a.mvb": "3ccb2c1aa2d63480c30ed73721c449931e86461954297b976d296ae819362b47",
    "marks.json": "5617de91a1c3c92969743ba5203426efda114ad8611cf4a9124f60b784a49ce7",
    "rewrites.1": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "store.json": "e912cd999b4e233c1f6f18cc74c51d5201b69869ba7f823e8bd0571cc6752f48",
}


@pytest.fixture
def fixture_store(tmp_path: Path) -> Path:
    """A private copy, for git keeps neither modes nor empty folders."""
    path = tmp_path / "format-1"
    shutil.copytree(DATA, path)
    for item in (path, *path.rglob("*")):
        item.chmod(0o700 if item.is_dir() else 0o600)
    return path


def open_file(path: Path) -> contextlib.closing[BundleFile]:
    return contextlib.closing(BundleFile(os.open(path, os.O_RDONLY), str(path), bytes.fromhex(path.stem)))


def test_the_fixture_is_the_one_that_was_checked_in() -> None:
    files = [file for file in DATA.rglob("*") if file.is_file()]
    found = {file.stem[:16] + file.suffix: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert found == FILES


def test_the_fixture_has_everything_in_it_that_the_format_has() -> None:
    seen: Counter[str] = Counter()
    for path in sorted(DATA.glob("bundles/*/*")):
        with open_file(path) as file:
            own = {entry.id for entry in file.manifest.blocks} if file.manifest else set()
            seen["blocks only"] += file.manifest is None and path.suffix == ".mvr"
            seen["holders"] += bool(file.directory.holders)
            seen["without a parent, with holders"] += bool(
                file.manifest and file.manifest.parent is None and file.directory.holders
            )
            for block_id in file.frames:
                header, head = file.read_head(block_id)
                seen["adopted"] += bool(file.manifest and file.manifest.version > 1 and header.start == 0)
                seen[header.kind] += 1
                seen["for others"] += block_id not in own
                seen.update(f"codec {slot.codec}" for slot in head.stored)
    wanted = ("blocks only", "holders", "without a parent, with holders", "adopted", "for others", "span", "state")
    assert all(seen[what] for what in (*wanted, "codec 0", "codec 2")), seen


def require_every_byte(store: Store) -> None:
    assert [(str(row.uri), row.version, row.token_count) for row in store.index.all_rows()] == [
        (str(URI), 1, 300),
        (str(URI), 2, 600),
        (str(URI), 3, 900),
        (str(FORK_URI), 1, 700),
        (str(HEIR_URI), 1, 800),
        (str(OTHER_URI), 1, 4),
        (str(PLANES_URI), 1, 64),
    ]
    for version in (1, 2, 3):
        with store.open_session(URI, version=version) as reader:
            assert reader.tokens() == token_ids(0, 300 * version)
            assert contents(reader) == expected(300 * version)
            assert reader.manifest.session["sampling"] == {"temperature": 0.5}
    require_awake(store, 700, uri=FORK_URI)
    require_awake(store, 800, uri=HEIR_URI, seed=3)
    with store.open_session(OTHER_URI) as reader:
        assert contents(reader) == [[COMPRESSIBLE]]
    with store.open_session(PLANES_URI) as reader:
        assert contents(reader) == [list(PLANES_BYTES)]
    assert store.resolve_version("agent@before-refactor").version == 1
    assert store.marks(URI).pins == {row.bundle_id for row in store.versions(URI) if row.version == 2}
    assert store.verify(deep=True).ok


@pytest.mark.parametrize("writable", [True, False])
def test_t16_a_store_of_format_1_opens_with_every_byte(fixture_store: Path, writable: bool) -> None:
    with Store.open(fixture_store, writable=writable) as store:
        assert store.opening.index_rebuilt == "it is missing"
        require_every_byte(store)


def test_t16_a_store_of_format_1_is_written_on_and_stays_what_it_is(fixture_store: Path) -> None:
    def files() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in fixture_store.glob("bundles/*/*")}

    before = files()
    with Store.open(fixture_store, writable=True) as store:
        assert sleep(store, 1200).blocks_reused == 3, "blocks of the fixture are found by their ids"
    with Store.open(fixture_store, writable=True) as store:
        require_awake(store, 1200)
        assert store.opening.index_rebuilt is None
        assert store.verify(deep=True).ok
        store.delete_session(HEIR_URI)
    assert {path: data for path, data in files().items() if path in before}.items() <= before.items()
    assert not list(fixture_store.glob("bundles/*/*.mvr")), "what only the deleted session needed went with it"


# --- docs/reference/format.md


DOCUMENT = (Path(torpor.__file__).parent / "docs" / "reference" / "format.md").read_text(encoding="utf-8")


def table(section: str, nth: int = 0) -> list[list[str]]:
    """The rows of the nth table after a heading or a line of text, as lists of cells."""
    assert DOCUMENT.count(f"\n{section}\n") == 1, section
    after = DOCUMENT.split(f"\n{section}\n")[1]
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
    "MAX_KEEP_DAYS",
}  # fmt: skip
"""How the program goes about its work; nothing that is stored depends on them."""


def test_the_document_has_every_limit_with_its_value() -> None:
    told = {row[0]: number(row[1]) for row in table("## Limits")}
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
        ("### Header", layout._HEADER, [(32, 32)]),
        ("### Frame", layout._PREFIX, [(32, 32)]),
        ("A line of the storage table:", layout._STORED, []),
        ("### Trailer", layout._TRAILER, [(104, 32)]),
        ("A line of the block list:", manifest._LINE, []),
        ("A line of frames:", directory._FRAME, []),
        ("A place:", directory._PLACE, []),
        ("The stored bytes are:", codecs._PLANES_HEADER, []),
    ],
    ids=["header", "frame", "storage table", "trailer", "block list", "frames", "places", "planes"],
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
            {"offset of the manifest": 64, "bytes of the manifest": 1000, "bytes of the directory": 100,
             "bytes of the whole file": 64 + 1000 + 100 + layout.TRAILER_BYTES},
            layout.Trailer(64, 1000, 100, bytes(32), bytes(32)).encode(),
        ),
        (
            "A line of the block list:",
            {"start": 7, "raw bytes of all its slots": 8, "tokens": 9, "kind: 0 span, 1 state": 1},
            manifest._encode_line(blocks.BlockEntry(bytes(32), None, "state", 7, 9, 8)),
        ),
        (
            "A line of frames:",
            {"offset of the frame in the file": 64, "bytes of the frame": 128, "bytes of the frame's head": 192},
            directory._FRAME.pack(bytes(32), 64, 128, 192, 0),
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
        f"header ({layout.HEADER_BYTES}) | frame",
        f"trailer ({layout.TRAILER_BYTES})",
        f"blocks | bytes: the block list, {manifest.LINE_BYTES} for each block",
        f"frames | bytes: {directory._FRAME.size} for each frame",
        f"holders | bytes: {blocks.ID_BYTES} for each",
        f"places | bytes: {directory._PLACE.size} for each",
        f"{layout.STORED_BYTES} × *s*",
        f"multiples of {layout.ALIGNMENT} bytes",
        f"at most {blocks.BLOCK_TOKENS} tokens",
        " ".join(f"{byte:02X}" for byte in layout.HEADER_MAGIC),
        f"a writer should take {codecs.PLANE_CHUNK_BYTES // 1024} KiB",
        f"`application_id` 0x{schema.APPLICATION_ID:X}, `user_version` {schema.SCHEMA_VERSION}",
        f'"format":"torpor.store","marked":BOOLEAN,"uuid":UUID,"version":{STORE_VERSION}',
        f'"version":{marks.MARKS_VERSION}',
        f"format version: {layout.FORMAT_VERSION}",
        *(f'"{domain}"' for domain in (blocks._DOMAIN, manifest._DOMAIN, directory._DOMAIN)),
        ", ".join(f"{code} {name}" for code, name in ((0, "raw"), (2, "zstd on byte planes"))),
    ):
        assert text in DOCUMENT, text
    for magic in (layout.FRAME_MAGIC, layout.TRAILER_MAGIC):
        shown = magic.decode().replace("\0", r"\0").replace("\r", r"\r").replace("\n", r"\n")
        assert f"magic `{shown}`" in DOCUMENT
    assert codecs.CODES == (0, 2)
    dtypes = re.search(r"`dtype` is one of ([^.]*)\.", DOCUMENT)
    assert dtypes
    assert re.split(r",\s+", dtypes[1]) == list(blocks.DTYPE_BYTES)


def test_the_document_has_every_key_of_manifest_and_directory() -> None:
    assert {row[0] for row in table("### Manifest")} == manifest._KEYS
    assert {row[0] for row in table("### Directory")} == directory._KEYS


def test_the_document_names_every_error_that_damage_gives() -> None:
    def below(kind: type[errors.StoreError]) -> set[str]:
        return {kind.code, *(code for child in kind.__subclasses__() for code in below(child))}

    told = {code for row in table("## Damage: what a reader does") for code in re.findall(r"`([a-z_]+)`", row[1])}
    known = below(errors.StoreError)
    assert told - {"rival_version", "twin_file", "unknown_file", "version_lost"} <= known, "a code that no error has"
    assert below(errors.Corruption) - {"corruption"} <= told, "damage that the document does not tell of"
