"""Remembered digests save a reading, and are never believed for a file that has changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from torpor.snapshot import digests
from torpor.snapshot.digests import FORMAT, DigestCache, default_cache_path
from torpor.snapshot.errors import ModelFilesChanging


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"weights" * 1000)
    return path


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose bytes were read."""
    read: list[str] = []
    hash_file = digests._hash_file

    def remember(path: str) -> str:
        read.append(path)
        return hash_file(path)

    monkeypatch.setattr(digests, "_hash_file", remember)
    return read


@pytest.fixture(autouse=True)
def _settled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a test are new; most tests are about such as have been there for longer than a clock's grain."""
    monkeypatch.setattr(digests, "_CLOCK_GRAIN_NS", -1)


def test_a_file_written_a_moment_ago_is_read_again_because_its_times_could_stand_still(
    file: Path, memory: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CLOCK_GRAIN_NS", 3600 * 10**9)
    DigestCache(memory).digest(file)
    DigestCache(memory).digest(file)
    assert len(readings) == 2


def test_a_digest_is_of_the_files_bytes(file: Path, memory: Path) -> None:
    assert DigestCache(memory).digest(file) == blake3(file.read_bytes()).hexdigest()


def test_a_file_larger_than_a_chunk_is_read_whole(tmp_path: Path, memory: Path) -> None:
    big = tmp_path / "big"
    big.write_bytes(os.urandom(digests._CHUNK_BYTES + 4097))
    assert DigestCache(memory).digest(big) == blake3(big.read_bytes()).hexdigest()


def test_a_file_is_read_once_and_remembered_across_processes(file: Path, memory: Path, readings: list[str]) -> None:
    first = DigestCache(memory).digest(file)
    assert DigestCache(memory).digest(file) == first
    assert len(readings) == 1


def test_an_edit_that_hides_behind_size_and_modification_time_is_found(file: Path, memory: Path) -> None:
    cache = DigestCache(memory)
    before, status = cache.digest(file), file.stat()
    with file.open("r+b") as opened:
        opened.write(b"W")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert cache.digest(file) == blake3(file.read_bytes()).hexdigest() != before


def test_another_file_moved_to_the_same_place_is_found(file: Path, memory: Path, tmp_path: Path) -> None:
    cache = DigestCache(memory)
    status = file.stat()
    cache.digest(file)
    other = tmp_path / "other"
    other.write_bytes(b"WEIGHTS" * 1000)
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)
    assert cache.digest(file) == blake3(b"WEIGHTS" * 1000).hexdigest()


def test_a_link_is_followed_to_the_file(file: Path, memory: Path, tmp_path: Path, readings: list[str]) -> None:
    """Hub downloads are links into a folder of blobs."""
    link = tmp_path / "link"
    link.symlink_to(file)
    cache = DigestCache(memory)
    assert cache.digest(link) == cache.digest(file)
    assert len(readings) == 1


def test_a_file_that_changes_while_it_is_read_is_refused_threat_58(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hash_file = digests._hash_file

    def change_meanwhile(path: str) -> str:
        digest = hash_file(path)
        with file.open("ab") as opened:
            opened.write(b"more")
        return digest

    monkeypatch.setattr(digests, "_hash_file", change_meanwhile)
    cache = DigestCache(memory)
    with pytest.raises(ModelFilesChanging, match=r"weights\.safetensors"):
        cache.digest(file)
    monkeypatch.undo()
    assert cache.digest(file) == blake3(file.read_bytes()).hexdigest(), "the half-read digest was not remembered"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b"null",
        b"[" * 100_000,
        json.dumps({"format": "torpor.digests/2", "files": {}}).encode(),
        json.dumps({"format": FORMAT, "files": []}).encode(),
        json.dumps({"format": FORMAT, "files": {"FILE": "x"}}).encode(),
        json.dumps({"format": FORMAT, "files": {"FILE": [1, 2, 3, 4, 5, "short"]}}).encode(),
        json.dumps({"format": FORMAT, "files": {"FILE": [1, 2, 3, 4, "5", "0" * 64]}}).encode(),
        json.dumps({"format": FORMAT, "files": {"FILE": []}}).encode(),
        json.dumps({"format": FORMAT, "files": {"FILE": 5}}).encode(),
    ],
)
def test_a_damaged_or_foreign_memory_is_as_good_as_none_gm11(file: Path, memory: Path, content: bytes) -> None:
    memory.parent.mkdir()
    memory.write_bytes(content.replace(b"FILE", str(file).encode()))
    assert DigestCache(memory).digest(file) == blake3(file.read_bytes()).hexdigest()
    assert json.loads(memory.read_bytes())["format"] == FORMAT, "and is replaced by a sound one"


@pytest.mark.parametrize("digest", ["short", 5, None, ["0" * 64]])
def test_a_digest_that_is_none_is_not_believed_even_for_an_unchanged_file(
    file: Path, memory: Path, digest: object
) -> None:
    honest = DigestCache(memory).digest(file)
    remembered = json.loads(memory.read_bytes())
    remembered["files"][str(file.resolve())][-1] = digest
    memory.write_text(json.dumps(remembered))
    assert DigestCache(memory).digest(file) == honest


def test_a_memory_that_is_too_large_is_not_read(
    file: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, readings: list[str]
) -> None:
    DigestCache(memory).digest(file)
    monkeypatch.setattr(digests, "MAX_CACHE_BYTES", 10)
    DigestCache(memory).digest(file)
    assert len(readings) == 2


def test_a_memory_that_is_a_folder_or_cannot_be_written_costs_only_a_reading(
    file: Path, memory: Path, readings: list[str]
) -> None:
    memory.mkdir(parents=True)
    cache = DigestCache(memory)
    assert cache.digest(file) == cache.digest(file)
    assert len(readings) == 1
    assert os.listdir(memory.parent) == [memory.name], "nothing is left behind"


def test_only_so_many_files_are_remembered_the_latest_ones(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, readings: list[str]
) -> None:
    monkeypatch.setattr(digests, "MAX_REMEMBERED_FILES", 3)
    files = [tmp_path / str(number) for number in range(5)]
    cache = DigestCache(memory)
    for path in files:
        path.write_bytes(path.name.encode())
        cache.digest(path)
    assert len(json.loads(memory.read_bytes())["files"]) == 3
    readings.clear()
    for path in reversed(files):
        cache.digest(path)
    assert [Path(path).name for path in readings] == ["1", "0"]


def test_the_memory_is_private(file: Path, memory: Path) -> None:
    DigestCache(memory).digest(file)
    assert (memory.stat().st_mode & 0o777, memory.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_missing_file_is_the_systems_error(tmp_path: Path, memory: Path) -> None:
    with pytest.raises(FileNotFoundError):
        DigestCache(memory).digest(tmp_path / "absent")


def test_the_default_place_is_a_cache_of_the_user() -> None:
    assert default_cache_path().parts[-2:] == ("torpor", "digests.json")


# --- the full check


def test_a_file_changed_unseen_is_found_and_named_by_a_full_check_only(
    file: Path, memory: Path, edit_unseen: Any
) -> None:
    old = DigestCache(memory).digest(file)
    edit_unseen(file, memory)
    new = blake3(file.read_bytes()).hexdigest()
    trusting = DigestCache(memory)
    assert trusting.digest(file) == old, "else this test tests nothing"
    assert trusting.changed_unseen == []
    full = DigestCache(memory, full=True)
    assert full.digest(file) == new
    assert full.changed_unseen == [str(file.resolve())]
    assert DigestCache(memory).digest(file) == new, "what was found is remembered"


def test_a_full_check_reads_every_file_and_finds_nothing_in_sound_ones(
    file: Path, memory: Path, readings: list[str]
) -> None:
    DigestCache(memory).digest(file)
    full = DigestCache(memory, full=True)
    full.digest(file)
    full.digest(file)
    assert len(readings) == 3
    assert full.changed_unseen == []


def test_a_file_edited_in_the_ordinary_way_is_no_surprise_to_a_full_check(file: Path, memory: Path) -> None:
    DigestCache(memory).digest(file)
    file.write_bytes(b"other")
    full = DigestCache(memory, full=True)
    assert full.digest(file) == blake3(b"other").hexdigest()
    assert full.changed_unseen == []


def test_what_a_check_puts_right_is_not_undone_by_a_process_that_remembered_it_before(
    file: Path, memory: Path, tmp_path: Path, edit_unseen: Any
) -> None:
    """A daemon that starts while another one checks."""
    DigestCache(memory).digest(file)
    starting = DigestCache(memory)
    edit_unseen(file, memory)
    DigestCache(memory, full=True).digest(file)
    (tmp_path / "other").write_bytes(b"other")
    starting.digest(tmp_path / "other")
    assert DigestCache(memory).digest(file) == blake3(file.read_bytes()).hexdigest()
    assert str(tmp_path / "other") in json.loads(memory.read_bytes())["files"]
