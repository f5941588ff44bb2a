"""A long pack is flushed and read back while it is written: nothing of it is relied on that was not."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torpor.memvid import errors
from torpor.memvid.disk import durable
from torpor.memvid.format import pack_writer
from torpor.memvid.format.frames import FrameReader
from torpor.memvid.format.pack import PackFile
from torpor.memvid.format.pack_writer import PackWriter
from torpor.memvid.store import Store
from torpor.tests.memvid import store_making as making
from torpor.tests.memvid.store_making import pack_of, sleep


@pytest.fixture
def source(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackFile]:
    """The fixture: a pack to copy. Each of its frames is long enough to be proven behind."""
    pack = pack_of(store, sleep(store, 2600))
    monkeypatch.setattr(pack_writer, "PROVEN_BEHIND_BYTES", 1)
    with PackFile(os.open(pack, os.O_RDONLY), str(pack), bytes.fromhex(pack.stem)) as file:
        assert len(file.frames) > 10
        yield file


def copied(source: PackFile, writer: PackWriter) -> None:
    for block_id in source.frames:
        writer.add_copy(source, block_id)


@pytest.mark.parametrize("in_step", [True, False])
def test_each_frame_is_flushed_then_read_back_once_and_the_pack_is_the_same(
    source: PackFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_step: bool
) -> None:
    """In step: the writer waits for what is behind it, as if the disk were fast; else it is far ahead."""
    sync, check, goes_on = durable.sync_file, FrameReader.check_block, threading.Event()
    flushed, checked = [0], list[bytes]()

    def noted_sync(fd: int, path: str) -> None:
        if not in_step:
            assert goes_on.wait(60)
        size = os.fstat(fd).st_size
        sync(fd, path)
        flushed.append(size)

    def noted_check(self: FrameReader, block_id: bytes, **how: Any) -> object:
        frame = self.frames[block_id]
        assert frame.offset + frame.frame_bytes <= flushed[-1], "it was not flushed yet"
        checked.append(block_id)
        return check(self, block_id, **how)

    monkeypatch.setattr(durable, "sync_file", noted_sync)
    monkeypatch.setattr(FrameReader, "check_block", noted_check)
    with making.temp_file(tmp_path) as temp:
        writer = PackWriter(temp)
        for block_id in source.frames:
            writer.add_copy(source, block_id)
            if in_step:
                temp._wait_behind()
        goes_on.set()
        assert writer.finish() == source.pack_id
        assert Path(temp.path).read_bytes() == Path(source.path).read_bytes()
    assert checked == list(source.frames)
    assert len(flushed) - 1 == (len(source.frames) if in_step else 2)


def test_a_byte_that_is_wrong_on_the_disk_is_found_in_each_frame(
    source: PackFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, frame in list(enumerate(source.frames.values()))[::4]:
        with making.temp_file(tmp_path) as temp:
            writer = PackWriter(temp)
            for number, block_id in enumerate(source.frames):
                writer.add_copy(source, block_id)
                temp._wait_behind()
                if number == wrong:
                    making.flip(Path(temp.path), frame.offset + frame.frame_bytes - 1)
            with pytest.raises(errors.ReadBackFailed):
                writer.finish()
    assert list(tmp_path.glob("*.tmp")) == []


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_flush_that_fails_behind_is_the_last_one(
    source: PackFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    sync, flushes = durable.sync_file, list[str]()

    def fail(fd: int, path: str) -> None:
        flushes.append(path)
        if len(flushes) > failing:
            raise errors.DurabilityLost("injected", path=path)
        sync(fd, path)

    monkeypatch.setattr(durable, "sync_file", fail)
    with making.temp_file(tmp_path) as temp:
        writer = PackWriter(temp)
        for block_id in source.frames:
            writer.add_copy(source, block_id)
            temp._wait_behind()
        with pytest.raises(errors.DurabilityLost):
            writer.finish()
    assert len(flushes) == failing + 1


def test_a_file_that_is_given_up_leaves_no_thread_and_no_name(
    source: PackFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, under_way, goes_on = durable.sync_file, threading.Event(), threading.Event()

    def slow(fd: int, path: str) -> None:
        under_way.set()
        assert goes_on.wait(60)
        sync(fd, path)

    monkeypatch.setattr(durable, "sync_file", slow)
    with making.temp_file(tmp_path) as temp:
        copied(source, PackWriter(temp))
        assert under_way.wait(60)
        threading.Timer(0.05, goes_on.set).start()
    assert list(tmp_path.glob("*.tmp")) == []
    assert not [each for each in threading.enumerate() if each.name == "torpor-sync"]


def test_where_there_is_no_thread_all_is_flushed_and_read_back_at_the_end(
    source: PackFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checked, check = list[bytes](), FrameReader.check_block
    monkeypatch.setattr(FrameReader, "check_block", lambda self, each: checked.append(each) or check(self, each))
    with making.temp_file(tmp_path) as temp, monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        writer = PackWriter(temp)
        copied(source, writer)
        assert writer.finish() == source.pack_id
    assert checked == list(source.frames)
