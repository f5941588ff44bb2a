"""Which fields of requests name a session: a client's namespace completes them, and its token is for them alone."""

from __future__ import annotations

from dataclasses import fields

from torpor.daemon.api.verbs import VERBS
from torpor.socket_api.wire.naming import NAMING, within


def test_each_field_that_names_a_session_is_known() -> None:
    """One that was not would let the token of a namespace name a session of another one."""
    named = {
        each.name
        for verb in VERBS.values()
        for each in fields(verb.request)
        if "SessionText" in str(each.type) and each.name not in ("namespace", "sessions")
    }
    assert named == NAMING


def test_a_name_that_is_left_out_stays_out() -> None:
    asked = within("work", VERBS["wake"].request, {"session": "a@2", "fork": None})
    assert asked == {"session": "work/a@2", "fork": None}
