"""Figures as people read them."""

from __future__ import annotations

import pytest
from torpor.cli.view.formatting import format_id, format_rate, format_seconds
from torpor.memvid.units import format_bytes, format_count, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (41_418_752, "39.5 MiB"),
        (1000 << 20, "0.98 GiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3.0 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"),
        (0.00034, "340 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (9.567, "9.57 s"),
        (119.4, "119 s"),
        (125.0, "2 min 05 s"),
        (7325.0, "2 h 02 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_rates_and_ids() -> None:
    assert format_count(6912) == "6,912"
    assert format_rate(1000, 0.5) == "2,000/s"
    assert format_rate(1, 0.0) == "–"
    assert format_id("ab" * 32) == "abababababab"
    assert format_id(None) == "–"


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("1000", 1000),
        ("12B", 12),
        ("1k", 1000),
        ("1KiB", 1024),
        ("500 MB", 500_000_000),
        ("1.5gib", 1_610_612_736),
        (" 2T ", 2 * 10**12),
    ],
)
def test_a_size_is_read_as_a_person_writes_it(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "0.5", "1 PiB", "1i", "B", "1.MiB", "9" * 40, "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"size|whole"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("900", 900), ("0.5", 0.5), ("90s", 90), ("15min", 900), (" 2 h ", 7200), ("1D", 86400)]
)
def test_a_duration_is_read_as_a_person_writes_it(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0min", "-1", "1e3", "nan", "inf", "5 weeks", "min", "9" * 40, "٣"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)
