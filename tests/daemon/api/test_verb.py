"""A row of the table is a method of whoever asks: typed by its record, documented, and either blocking or awaited."""

from __future__ import annotations

import inspect
import pydoc
from typing import Any

import pytest
from torpor.daemon.api.process import ShutdownRequest, StatusResult
from torpor.daemon.api.records import Request
from torpor.daemon.api.verb import Awaiting, Blocking, Opened, R, Verb
from torpor.daemon.api.verbs import SUBSCRIBE, VERBS, DaemonVerbs, Verbs
from torpor.daemon.api.waking import WakeRequest, WakeResult
from torpor.daemon.verbs import HANDLERS


class Asking(Verbs, Blocking):
    """Gives back what it is asked."""

    def ask(self, verb: Verb[Any, R], request: Request) -> R:
        return (verb, request)  # type: ignore[return-value]

    watch = Opened(WakeRequest, lambda asking, request: [asking, request], "Watched.")


class Waiting(Verbs, Awaiting):
    async def ask(self, verb: Verb[Any, R], request: Request) -> R:
        return (verb, request)  # type: ignore[return-value]


def test_a_method_makes_the_record_of_its_row_and_asks() -> None:
    assert Asking().wake("notes", at_token=3) == (VERBS["wake"], WakeRequest("notes", at_token=3))
    assert Asking.wake(Asking(), "notes") == (VERBS["wake"], WakeRequest("notes"))  # type: ignore[call-arg]


async def test_who_is_awaited_has_the_same_methods_to_await() -> None:
    assert await Waiting().wake("notes", strict=True) == (VERBS["wake"], WakeRequest("notes", strict=True))  # type: ignore[comparison-overlap]


def test_what_is_not_a_field_is_refused_and_the_session_alone_has_a_place() -> None:
    with pytest.raises(TypeError, match=r"^wake\(\) got an unexpected keyword argument 'at_tokn'"):
        Asking().wake("notes", at_tokn=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^wake\(\) takes .* positional .*; give by name: version, at_token"):
        Asking().wake("notes", 3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^watch\(\) missing .*'session'"):
        Asking().watch()  # type: ignore[call-arg]


def test_help_shows_what_a_verb_takes_and_gives() -> None:
    told = pydoc.render_doc(Asking.wake, renderer=pydoc.plaintext)
    assert "wake(self,session:str,*,version:" in "".join(told.split()), "in one line, or from Python 3.13 on in many"
    assert "at_token" in told
    assert "WakeResult" in told
    assert "nothing is prefilled again" in told
    assert "|wake(" in "".join(pydoc.render_doc(Asking, renderer=pydoc.plaintext).split())
    assert inspect.signature(Waiting.wake).return_annotation is WakeResult


def test_what_is_opened_takes_the_same_and_gives_what_its_maker_makes() -> None:
    asking = Asking()
    assert asking.watch("notes", at_token=3) == [asking, WakeRequest("notes", at_token=3)]
    assert Asking.watch.__doc__ == "Watched."
    assert inspect.signature(Asking.watch).parameters.keys() == inspect.signature(Asking.wake).parameters.keys()


def test_the_table_has_each_verb_under_its_name_on_the_wire() -> None:
    assert VERBS["list"].attribute == "list_sessions"
    assert VERBS["subscribe"] is SUBSCRIBE
    assert VERBS["status"].result is StatusResult
    assert all(name == verb.name for name, verb in VERBS.items())
    assert len({verb.request for verb in VERBS.values()}) == len(VERBS), "each has a record of its own"


def test_a_service_has_a_handler_for_each_of_its_verbs_and_no_method_without_one() -> None:
    """The end of the process is the server's, so only clients can ask for it."""
    assert {verb.request for verb in vars(Verbs).values() if isinstance(verb, Verb)} == HANDLERS.keys()
    assert not hasattr(Verbs, "shutdown")
    assert DaemonVerbs.shutdown(Asking(), force=True) == (VERBS["shutdown"], ShutdownRequest(force=True))  # type: ignore[call-arg, arg-type]
