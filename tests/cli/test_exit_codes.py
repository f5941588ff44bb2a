"""One table of exit codes: complete, stable, and the same in help, documents and code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from torpor.cli import exit_codes
from torpor.errors import TorporError

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"

ERROR_MODULES = [
    "torpor.errors",
    "torpor.cli.errors",
    "torpor.daemon.errors",
    "torpor.memvid.errors",
    "torpor.snapshot.errors",
    "torpor.socket_api.errors",
]


def all_error_classes() -> set[type[TorporError]]:
    for module in ERROR_MODULES:
        importlib.import_module(module)
    found, waiting = {TorporError}, [TorporError]
    while waiting:
        for child in waiting.pop().__subclasses__():
            if child not in found and child.__module__.startswith("torpor."):
                found.add(child)
                waiting.append(child)
    return found


def test_every_error_code_of_every_layer_has_an_exit_status() -> None:
    codes = {error.code for error in all_error_classes()}
    assert len(codes) > 60, "the walk over the classes found too little to mean anything"
    assert codes - exit_codes.STATUS_OF_CODE.keys() == set()


def test_the_table_names_no_code_that_does_not_exist() -> None:
    codes = {error.code for error in all_error_classes()}
    assert exit_codes.STATUS_OF_CODE.keys() - codes == set()


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("error", 1),
        ("invalid_request", 2),
        ("session_not_found", 4),
        ("corrupt_block", 6),
        ("owner_mismatch", 6),
        ("truncated", 6),
        ("identity_mismatch", 7),
        ("unsupported_format", 7),
        ("session_busy", 8),
        ("engine_busy", 8),
        ("no_space", 9),
        ("no_store", 10),
        ("store_locked", 11),
        ("socket_in_use", 11),
        ("daemon_unreachable", 12),
        ("cancelled", 130),
    ],
)
def test_a_code_keeps_the_status_that_scripts_rely_on(code: str, number: int) -> None:
    assert exit_codes.exit_status_of(code) == number


def test_an_unknown_code_is_a_plain_error() -> None:
    assert exit_codes.exit_status_of("of_a_later_version") == 1


def test_a_status_is_one_line_of_the_help_on_a_narrow_terminal() -> None:
    assert all(len(line) <= 78 for line in exit_codes.describe_exit_codes().splitlines())


def test_no_code_stands_in_the_table_twice() -> None:
    listed = [code for _, codes in exit_codes._CODES for code in codes]
    assert len(listed) == len(set(listed))


def test_every_status_of_the_table_is_one_of_the_documented_ones() -> None:
    numbers = [status.number for status in exit_codes.STATUSES]
    assert numbers == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 130]
    assert set(exit_codes.STATUS_OF_CODE.values()) <= set(exit_codes.STATUSES)


def test_documents_list_every_status_with_its_meaning_and_codes() -> None:
    lines = {line.split("|")[1].strip(): line for line in DOCS.read_text().splitlines() if line.startswith("| ")}
    for status in exit_codes.STATUSES:
        line = lines[f"{status.number}"]
        assert status.name in line
        assert status.meaning in line
        for code, other in exit_codes.STATUS_OF_CODE.items():
            assert (f"`{code}`" in line) == (other is status), (code, line)
