"""What was measured is there for the next daemon, and costs nothing when it is lost; so it is with the scrub's mark."""

from __future__ import annotations

from pathlib import Path

import pytest
from torpor.memvid.errors import ReadOnlyStore
from torpor.memvid.folder.rates_file import MAX_FIGURES, MAX_SUBJECTS
from torpor.memvid.folder.scrub_mark import ScrubMark
from torpor.memvid.store import Store
from torpor.tests.memvid.store_making import OTHER_URI, sleep

MODEL = "ab" * 16
FIGURES = {MODEL: {"prefill": (1200.0, 4.5, 3)}, "cd" * 16: {"fixed": (1.0, 0.01, 16)}}


def test_figures_are_there_for_the_next_daemon_and_are_no_stranger_in_the_store(store: Store) -> None:
    assert store.load_rates() == {}
    store.save_rates({MODEL: {"decode": (1.0, 1.0, 1)}})
    store.save_rates(FIGURES)
    assert store.load_rates() == FIGURES
    sleep(store, 20, uri=OTHER_URI)
    assert store.repair().problems == ()
    assert store.verify(deep=True).ok
    assert store.forget(OTHER_URI).problems == ()


def test_the_last_subjects_are_kept(store: Store) -> None:
    many = {f"{number:032x}": {"fixed": (1.0, 1.0, 1)} for number in range(MAX_SUBJECTS + 3)}
    store.save_rates(many)
    assert list(store.load_rates()) == list(many)[3:]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff" * 100, b"[" * 5000])
@pytest.mark.parametrize("name", ["rates.json", "scrub.json"])
def test_a_file_that_is_damaged_is_as_none(store: Store, store_path: Path, name: str, damage: bytes) -> None:
    def is_as_none() -> bool:
        return store.load_rates() == {} if name == "rates.json" else store.load_scrub_mark() == ScrubMark()

    store.save_rates(FIGURES)
    store.save_scrub_mark(ScrubMark(b"ab", 5, 7))
    path = store_path / name
    data = path.read_bytes()
    assert not is_as_none()
    path.write_bytes(damage)
    assert is_as_none()
    path.write_bytes(data.replace(b"4.5", b"5.5").replace(b":7", b":8"))
    assert is_as_none()
    path.unlink()
    path.symlink_to("/dev/zero")
    assert is_as_none()


@pytest.mark.parametrize(
    "figures",
    [
        {"no digest": {"fixed": (1.0, 1.0, 1)}},
        {MODEL: {"fixed": (0.0, 1.0, 1)}},
        {MODEL: {"fixed": (1.0, -1.0, 1)}},
        {MODEL: {"fixed": (1.0, 1.0, 0)}},
        {MODEL: {"fixed": (1.0, 1.0, 1.5)}},
        {MODEL: {"fixed": (1.0, 1.0)}},
        {MODEL: {"fixed": (10**400, 1.0, 1)}},
        {MODEL: {"fixed": (1e-300, 1e300, 3)}},
        {MODEL: {"fixed": (1e308, 1e-308, 3)}},
        {MODEL: {"x" * 40: (1.0, 1.0, 1)}},
        {MODEL: {str(number): (1.0, 1.0, 1) for number in range(MAX_FIGURES + 1)}},
    ],
)
def test_what_no_daemon_measures_is_as_none(store: Store, figures: dict[str, dict[str, tuple[float, ...]]]) -> None:
    store.save_rates(figures)  # type: ignore[arg-type]
    assert store.load_rates() == {}


def test_who_only_reads_keeps_none(store: Store, store_path: Path) -> None:
    store.close()
    with Store.open(store_path, writable=False) as opened:
        for save in (lambda: opened.save_rates(FIGURES), lambda: opened.save_scrub_mark(ScrubMark(b"", 1, 1))):
            with pytest.raises(ReadOnlyStore):
                save()
