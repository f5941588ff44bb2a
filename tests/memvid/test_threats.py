"""T13: every row of the threat model about the store, 1 to 38, and about those who ask, 39 to 52, 60 and 61, has a test
that says so in its name. Those about the store that span modules are here."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from unittest import mock

import pytest
from torpor.memvid.errors import StoreError, StoreIoError
from torpor.memvid.format.blocks import BlockDraft, SlotDraft, SlotSpec
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import URI, contents, raw_bytes, require_awake, sleep, token_ids, write

TESTS = Path(__file__).resolve().parents[1]
THREATS = (*range(1, 53), 60, 61)


def named_threats() -> dict[int, set[str]]:
    """The ids in the names of all tests, with the tests that carry them."""
    found: dict[int, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            for ids in re.findall(r"threats?_((?:\d+_?(?:and_)?)+)", name):
                for number in re.findall(r"\d+", ids):
                    found.setdefault(int(number), set()).add(name)
    return found


def test_t13_every_threat_has_a_test_of_its_name() -> None:
    assert set(THREATS) - named_threats().keys() == set(), "no test names these"


# --- shapes


def test_threat_13_a_size_of_zero_is_no_bytes_and_comes_back(store: Store) -> None:
    """An empty cache has such slots; nothing may be read for them."""
    spec = SlotSpec("0.k", "kv.k/1", "bfloat16", (2, 0, 4))
    draft = BlockDraft("span", 0, token_ids(0, 1), [SlotDraft(spec, [])])
    write(store, [draft], 1)
    with store.open_session(URI) as reader:
        assert reader.read_slot(reader.entries[0], 0) == b""


# --- data that wants to be code


@pytest.mark.parametrize(
    "hostile",
    [
        {"__class__": "os.system", "args": ["touch pwned"]},
        {"cache": "mlx_lm.models.cache.KVCache"},
        {"pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."},
        {"model": "__import__('os').system('touch pwned')"},
    ],
    ids=lambda value: next(iter(value)),
)
def test_threat_18_a_class_name_or_a_pickle_in_a_session_map_is_plain_data(
    store: Store, hostile: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    spec = SlotSpec("0.k", "mlx_lm.models.cache.KVCache", "uint8", (4,))
    draft = BlockDraft("span", 0, token_ids(0, 1), [SlotDraft(spec, [memoryview(raw_bytes(4, 1))])])
    write(store, [draft], 1, session=hostile)
    with store.open_session(URI) as reader:
        assert dict(reader.manifest.session) == hostile
        assert reader.read_header(reader.entries[0]).slots[0][0].kind == "mlx_lm.models.cache.KVCache"
    assert not (tmp_path / "pwned").exists()


# --- the disk goes away


def test_threat_33_a_store_that_turns_read_only_under_us_refuses_to_sleep_and_goes_on_reading(store: Store) -> None:
    before = sleep(store, 300)
    real = os.open

    def read_only(path: object, flags: int, *args: object, **kwargs: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    with mock.patch.object(os, "open", read_only):
        with pytest.raises(StoreIoError) as refusal:
            sleep(store, 600, before=before)
        assert refusal.value.errno == errno.EROFS
        require_awake(store, 300)
    sleep(store, 600, before=before)
    require_awake(store, 600)


def test_threat_33_a_store_that_is_unmounted_under_us_is_a_typed_error(store: Store, store_path: Path) -> None:
    """What an unmounted disk leaves is an empty folder of the same name."""
    before = sleep(store, 300)
    aside = store_path.with_name("unmounted")
    packs = store_path / "packs"
    packs.rename(aside)
    for path in aside.iterdir():  # the open folder itself is empty as well
        path.rename(path.with_name(path.name + ".gone"))
    try:
        with pytest.raises(StoreError), store.open_session(URI) as reader:
            contents(reader)
        with pytest.raises(StoreError):
            sleep(store, 600, before=before)
    finally:
        for path in aside.iterdir():
            path.rename(path.with_name(path.name.removesuffix(".gone")))
        aside.rename(packs)
    require_awake(store, 300)
