"""Files of a user that a command writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torpor.cli.reach.writing import write_whole


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("mode", [0o600, 0o640, None])
def test_a_file_has_its_text_and_its_mode_and_nothing_lies_beside_it(
    tmp_path: Path, umask: int, mode: int | None
) -> None:
    path = tmp_path / "settings"
    path.write_text("before")
    write_whole(path, "é", mode)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("é", [path])
    assert path.stat().st_mode & 0o777 == (0o666 & ~umask if mode is None else mode)


def test_a_text_that_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "settings"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("before", [path])
