"""Logs of SQLite, made by hand."""

from __future__ import annotations

import struct

PAGE = 4096


def checksum(data: bytes, order: str, sums: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """SQLite's checksum as its documentation has it, a word at a time."""
    first, second = sums
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFF_FFFF
        second = (second + other + first) & 0xFFFF_FFFF
    return first, second


def one_frame_log(page: bytes, pages_of_file: int) -> bytes:
    """A log whose one frame has the file's first page, and commits."""
    header = struct.pack(">IIIIQ", 0x377F0682, 3007000, PAGE, 0, 12345)
    sums = checksum(header, "<")
    frame = struct.pack(">II", 1, pages_of_file)
    end = struct.pack(">QII", 12345, *checksum(frame + page, "<", sums))
    return header + struct.pack(">II", *sums) + frame + end + page
