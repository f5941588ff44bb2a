"""T16: stores of every released format version open for ever. The files in data/ are never made again."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
from store_making import COMPRESSIBLE, OTHER_URI, URI, contents, expected, token_ids
from torpor.memvid import Store

DATA = Path(__file__).parent / "data" / "format-1"
FILES = {  # how the bundle id begins: SHA-256 of the file, by another hand than the store's
    "f1dd0192b961940b": "754634b7067e7812525af8ac3d1c70d05b370ab3dea1feccb98decdb65d33ab2",
    "1f3bba31f9dc0a92": "fc22a1829890ea7236604a38f1564a148f2c5d2676e48a9252141ce21cff2826",
    "2d5a87893d82892f": "03e109f86d7b0c1a41341176f2751476a38e16e1544d6726d76a636f740238f5",
}


@pytest.fixture
def fixture_store(tmp_path: Path) -> Path:
    """A private copy, for git keeps neither modes nor empty folders."""
    path = tmp_path / "format-1"
    shutil.copytree(DATA, path)
    for folder in (path, *(item for item in path.rglob("*") if item.is_dir())):
        folder.chmod(0o700)
    return path


def test_the_fixture_is_the_one_that_was_checked_in() -> None:
    found = {file.stem[:16]: hashlib.sha256(file.read_bytes()).hexdigest() for file in DATA.rglob("*.mvb")}
    assert found == FILES


@pytest.mark.parametrize("writable", [True, False])
def test_t16_a_store_of_format_1_opens_with_every_byte(fixture_store: Path, writable: bool) -> None:
    with Store.open(fixture_store, writable=writable) as store:
        assert store.opening.index_rebuilt == "it is missing"
        assert [(str(row.uri), row.version, row.token_count) for row in store.iter_sessions()] == [
            (str(URI), 2, 600),
            (str(OTHER_URI), 1, 4),
        ]
        with store.open_session(URI) as reader:
            assert reader.tokens() == token_ids(0, 600)
            assert contents(reader) == expected(600)
            assert reader.manifest.session["sampling"] == {"temperature": 0.5}
        with store.open_session(URI, version=1) as reader:
            assert contents(reader) == expected(300)
        with store.open_session(OTHER_URI) as reader:
            assert contents(reader) == [[COMPRESSIBLE]]
        assert store.verify(deep=True).ok
