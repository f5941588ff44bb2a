"""Errors as a caller is told them: who has one namespace is told nothing of the daemon's files."""

from __future__ import annotations

import pytest
from torpor.errors import TorporError
from torpor.memvid.errors import SessionNotFound, StoreIoError
from torpor.socket_api.http.access import Caller
from torpor.socket_api.http.errors import error_map, told_to

FILE = "/a/store/versions/ab/abcd.mvm"


@pytest.mark.parametrize(
    "error",
    [
        SessionNotFound(f"There is no session. A manifest cannot be read: {FILE}.", session="a", path=FILE),
        StoreIoError(f"{FILE} cannot be read.", path=FILE),
    ],
)
def test_the_owner_alone_is_told_of_a_file(error: TorporError) -> None:
    assert told_to(Caller("default"), error) is error
    told = told_to(Caller("team"), error)
    assert (told.code, told.details) == (error.code, {})
    assert FILE not in str(error_map(told, "openai"))


def test_what_names_no_file_is_told_to_each() -> None:
    error = SessionNotFound("There is no session a.", session="a", suggestions=[])
    assert told_to(Caller("team"), error) is error
