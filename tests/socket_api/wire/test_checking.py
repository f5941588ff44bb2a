"""What crosses the wire is a record of the table, or refused by its field."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torpor.daemon.api.sampling import Sampling
from torpor.daemon.api.verbs import VERBS
from torpor.daemon.errors import InvalidSampling
from torpor.socket_api.errors import InvalidRequest, MalformedMessage
from torpor.socket_api.wire import checking
from torpor.socket_api.wire.checking import built, load_request, load_result

NAN, INFINITY = float("nan"), float("inf")
GENERATE = {"session": "s", "max_tokens": 1}
SAID, ANSWERED = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
CHAT: dict[str, Any] = {"session": "s", "max_tokens": 1}
CALL: dict[str, Any] = {"name": "look", "arguments": {"path": "."}}
CALLED: dict[str, Any] = ANSWERED | {"tool_calls": (CALL,)}
TOOL: dict[str, Any] = {"name": "look"}
FOLD = {"session": "s", "name": "other"}
DEEP: dict[str, Any] = functools.reduce(lambda inner, _: {"x": inner}, range(33), {})


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("generate", GENERATE | {"sampling": {"temperature": NAN}}, "sampling.temperature"),
        ("generate", GENERATE | {"sampling": {"temperature": INFINITY}}, "sampling.temperature"),
        ("generate", GENERATE | {"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ("generate", GENERATE | {"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ("generate", GENERATE | {"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ("generate", GENERATE | {"sampling": {"top_p": 1.01}}, "sampling.top_p"),
        ("generate", GENERATE | {"sampling": {"top_k": -1}}, "sampling.top_k"),
        ("generate", GENERATE | {"sampling": {"top_k": 1.5}}, "sampling.top_k"),
        ("generate", GENERATE | {"sampling": {"min_p": NAN}}, "sampling.min_p"),
        ("generate", GENERATE | {"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ("generate", GENERATE | {"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
        ("generate", GENERATE | {"sampling": {"seed": -1}}, "sampling.seed"),
        ("generate", GENERATE | {"sampling": {"heat": 1}}, "sampling.heat"),
        ("generate", {"session": "s", "max_tokens": 2**63}, "max_tokens"),
        ("generate", {"session": "s", "max_tokens": 1_000_001}, "max_tokens"),
        ("generate", {"session": "s", "max_tokens": 0}, "max_tokens"),
        ("generate", {"session": "s", "max_tokens": True}, "max_tokens"),
        ("generate", {"session": "s", "max_tokens": 2.0}, "max_tokens"),
        ("generate", {"max_tokens": 1}, "session"),
        ("generate", GENERATE | {"stop": ("x",) * 17}, "stop"),
        ("generate", GENERATE | {"stop": ("",)}, "stop.0"),
        ("generate", GENERATE | {"stop": ("x" * 257,)}, "stop.0"),
        ("generate", GENERATE | {"unknown": 1}, "unknown"),
        ("generate", GENERATE | {"prove": 1}, "prove"),
        ("append", {"session": "s"}, "params"),
        ("append", {"session": "s", "text": "a", "tokens": (1,)}, "params"),
        ("append", {"session": "s", "text": ""}, "text"),
        ("append", {"session": "s", "tokens": ()}, "tokens"),
        ("append", {"session": "s", "tokens": (2**32,)}, "tokens.0"),
        ("append", {"session": "s", "tokens": (1, -1)}, "tokens.1"),
        ("append", {"session": "s", "tokens": (1.0,)}, "tokens.0"),
        ("append", {"session": "s", "tokens": "abc"}, "tokens"),
        ("append", {"session": "", "text": "a"}, "session"),
        ("append", {"session": "s" * 513, "text": "a"}, "session"),
        ("append", {"session": None, "text": "a"}, "session"),
        ("create", {"session": "s", "labels": ("x",) * 65}, "labels"),
        ("create", {"session": "s", "labels": ("x" * 257,)}, "labels.0"),
        ("create", {"session": "s", "model": "m" * 257}, "model"),
        ("chat", {"session": "s", "message": "", "max_tokens": 1}, "message"),
        ("chat", {"session": "s", "message": "x", "max_tokens": 1, "role": "emperor"}, "role"),
        ("chat", {"session": "s", "max_tokens": 1}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "message": "x", "messages": (SAID,)}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "message": "x", "on_divergence": "rewind"}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": (SAID,), "role": "tool"}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": (SAID, ANSWERED)}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": ()}, "messages"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": (SAID,) * 16_385}, "messages"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": (SAID, "x")}, "messages.1"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": ({**SAID, "role": "emperor"},)}, "messages.0.role"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": ({**SAID, "content": None},)}, "messages.0.content"),
        ("chat", CHAT | {"messages": ({**SAID, "tool_calls": (CALL,)},)}, "messages.0"),
        ("chat", CHAT | {"messages": ({**SAID, "tool_call_id": "x"},)}, "messages.0"),
        (
            "chat",
            CHAT | {"messages": (CALLED | {"tool_calls": ({"name": "x"},)}, SAID)},
            "messages.0.tool_calls.0.arguments",
        ),
        ("chat", CHAT | {"messages": (CALLED | {"tool_calls": (CALL,) * 129}, SAID)}, "messages.0.tool_calls"),
        ("chat", CHAT | {"messages": (SAID,), "tools": ({"name": ""},)}, "tools.0.name"),
        ("chat", CHAT | {"messages": (SAID,), "tools": (TOOL, TOOL)}, "params"),
        ("chat", CHAT | {"messages": (SAID,), "tools": (TOOL | {"parameters": DEEP},)}, "tools.0.parameters"),
        ("chat", CHAT | {"messages": (SAID,), "template_arguments": {"x": NAN}}, "template_arguments"),
        ("chat", CHAT | {"messages": (SAID,), "template_arguments": {"x": "y" * 600_000}}, "params"),
        ("chat", CHAT | {"message": "x", "tools": ()}, "params"),
        ("create", {"session": "s", "tools": (TOOL, TOOL)}, "params"),
        ("chat", {"session": "s", "max_tokens": 1, "messages": (SAID,), "on_divergence": "x"}, "on_divergence"),
        ("wake", {"session": "s", "version": -1}, "version"),
        ("wake", {"session": "s", "version": 2**63}, "version"),
        ("status", {"x": 1}, "x"),
        ("list", {"namespace": 5}, "namespace"),
        # --- what belongs to an operation, and nothing else
        ("maintain", {"operation": "defragment"}, "operation"),
        ("maintain", {"operation": "repair", "keep_last": 1}, "repair takes no keep_last"),
        ("maintain", {"operation": "repair", "session": "s"}, "repair takes no session"),
        ("maintain", {"operation": "repack", "keep_days": 1.0}, "repack takes no keep_days"),
        ("maintain", {"operation": "repack", "remote": True, "session": "s"}, "leave session out"),
        ("maintain", {"operation": "prune", "remote": True, "keep_last": 1}, "prune takes no remote"),
        ("maintain", {"operation": "strip"}, "strip needs the session"),
        ("maintain", {"operation": "strip", "session": "s", "keep_days": 1.0}, "strip takes no keep_days"),
        ("maintain", {"operation": "prune", "keep_last": 1, "cold_after_days": 1.0}, "prune takes no cold_after_days"),
        ("maintain", {"operation": "prune", "session": "s"}, "prune needs keep_last, keep_days or both"),
        ("maintain", {"operation": "prune", "keep_last": 0}, "keep_last"),
        ("maintain", {"operation": "prune", "keep_days": 0.0}, "keep_days"),
        ("maintain", {"operation": "prune", "keep_days": 36_501.0}, "keep_days"),
        ("maintain", {"operation": "repack", "cold_after_days": -1.0}, "cold_after_days"),
        ("maintain", {"operation": "prune", "keep_days": NAN}, "keep_days"),
        ("maintain", {"operation": "forget"}, "forget needs the session"),
        ("maintain", {"operation": "forget", "session": "s", "keep_last": 1}, "forget takes no keep_last"),
        # --- one mark at a time
        ("mark", {"session": "s"}, "params"),
        ("mark", {"session": "s", "tag": "a", "untag": "b"}, "params"),
        ("mark", {"session": "s", "tag": "a", "pinned": False}, "params"),
        ("mark", {"session": "s", "tag": ""}, "tag"),
        ("mark", {"session": "s@2", "untag": "a"}, "params"),
        ("mark", {"session": "s", "untag": "a", "move": True}, "params"),
        ("mark", {"session": "s", "pinned": 1}, "pinned"),
        # --- only an id names a bundle to import (threat 19)
        *(
            ("import_bundle", {"bundle_id": wrong}, "bundle_id")
            for wrong in ("", "ab", "AB" * 32, "ab" * 32 + "\n", "../" + "a" * 61, "ab" * 33)
        ),
        ("wake", {"session": "s@2", "version": 2}, "name the version once"),
        ("wake", {"session": "s~", "version": 2}, "name the version once"),
        ("wake", {"session": "torpor://a/s:5", "at_token": 5}, "name the place once"),
        ("fork", {"session": "s@2:5", "name": "t", "at_token": 5}, "name the place once"),
        *(("analyze", {"session": "s", "kind": wrong}, "kind") for wrong in ("", "x" * 65)),
        *(("analyze", {"session": "s", "labels": wrong}, "labels") for wrong in ("text", ("x",) * 65)),
        ("warm", {}, "params"),
        ("warm", {"namespace": "n"}, "params"),
        ("warm", {"sessions": ("",)}, "sessions.0"),
        ("warm", {"sessions": ("s",), "namespace": "n"}, "params"),
        ("clear", {"label": ""}, "label"),
        ("append", {"session": "s", "tokens": (1,), "priority": "urgent"}, "priority"),
        *(("fold", FOLD | wrong, "params") for wrong in ({}, {"summary": "x", "summarize": 1})),
        ("fold", FOLD | {"summary": ""}, "summary"),
        ("fold", FOLD | {"summarize": 0}, "summarize"),
        ("fold", FOLD | {"summary": "x", "tail": -1}, "tail"),
        ("fork", FOLD | {"at_token": 0}, "at_token"),
        ("fork", FOLD | {"labels": "text"}, "labels"),
        ("fork", FOLD | {"labels": ("",)}, "labels.0"),
        *(("load_model", {"model": wrong}, "model") for wrong in ("", 1)),
        ("subscribe", {"names": ()}, "names"),
        ("subscribe", {"names": ("",)}, "names.0"),
        ("subscribe", {"names": ("x" * 65,)}, "names.0"),
        ("subscribe", {"session": ""}, "session"),
        # --- in our words
        ("wake", {}, "session: it is missing; give it."),
        ("wake", {"session": "a", "on_event": None}, "on_event: there is no such field; leave it out."),
        ("wake", {"session": "a", "more": 1}, "more: there is no such field; leave it out."),
        ("wake", {"session": "a", "strict": 1}, "strict: it must be a valid boolean."),
        ("create", {"session": "a", "labels": "x"}, "labels: it is no list; give a list."),
        ("create", {"session": "a", "labels": {"x": 1}}, "labels: it is no list; give a list."),
        ("append", {"session": "a"}, "give either text, tokens or messages."),
        ("set", {"session": "a", "sampling": {"top_p": 2.0}}, "sampling.top_p: it must be less than or equal to 1."),
        ("chat", CHAT | {"messages": ()}, "messages: it has 0 entries; give at least 1."),
        (
            "chat",
            CHAT | {"messages": ({"role": "user", "content": ({"type": "text", "text": "hi"},)},)},
            "it is no text; give one text for each message: join a list of parts, write a tool call out.",
        ),
        ("chat", CHAT | {"messages": ({"role": "user"},)}, "messages.0.content: it is missing; give it."),
        (
            "chat",
            CHAT | {"messages": ({**SAID, "name": "x"},)},
            "messages.0.name: there is no such field; leave it out.",
        ),
        # --- of a large request, with its place
        ("append", {"session": "s", "tokens": (1,) * 99_999 + (-1,)}, "tokens.99999"),
        ("append", {"session": "s", "tokens": (1,) * 50_000 + ("x",) + (1,) * 50_000}, "tokens.50000"),
        ("append", {"session": "s", "tokens": (-1,) * 100_000}, "tokens.0"),
        ("append", {"session": "s", "tokens": (1,) * 50_000, "text": "and text"}, "params"),
        ("append", {"tokens": (1,) * 50_000}, "session"),
        ("chat", {"session": "s", "messages": ({"role": "user", "content": "x"},) * 999 + ({},)}, "messages.999.role"),
        ("chat", {"session": "s", "messages": ({"role": "assistant", "content": "x"},) * 9999}, "params"),
        ("chat", {"session": "s", "messages": ({"role": "user", "content": "x"},) * 16_385}, "messages"),
        ("status", {"tokens": (1,) * 50_000}, "tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_request_is_refused_by_its_field_threat_48(name: str, raw: dict[str, Any], said: str) -> None:
    """said: the field, or words of the message."""
    with pytest.raises(InvalidRequest) as refusal:
        load_request(VERBS[name], raw)
    if " " in said:
        assert said in refusal.value.message
    else:
        assert refusal.value.details["field"] == said
        assert said in refusal.value.message or said == "params"


def test_a_temperature_that_no_sampler_takes_is_refused_as_such() -> None:
    with pytest.raises(InvalidSampling):
        load_request(VERBS["set"], {"session": "a", "sampling": {"temperature": 1e-9}})


def test_a_sampling_names_what_was_given_the_defaults_too() -> None:
    asked: Any = load_request(VERBS["generate"], {"session": "a", "sampling": {"temperature": 0.0, "seed": 3}})
    assert asked.sampling == Sampling(seed=3)
    assert asked.sampling.named() == {"temperature": 0.0, "seed": 3}


def test_a_client_passes_over_fields_of_a_newer_daemon_and_misses_none_of_its_own() -> None:
    removed = {"session": "s", "versions_deleted": 1, "bytes_freed": 5, "newer": {"x": 1}}
    assert load_result(VERBS["delete"], removed).bytes_freed == 5  # type: ignore[attr-defined]
    with pytest.raises(MalformedMessage, match="delete is not what this client knows: bytes_freed"):
        load_result(VERBS["delete"], {name: value for name, value in removed.items() if name != "bytes_freed"})


def test_what_checks_a_verb_is_made_in_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """pydantic takes up to 30 ms for each: together they would hold a loop too long."""
    monkeypatch.setattr(checking, "_BUILT", set())
    verb = VERBS["converse"]
    assert len(list(built(verb))) == 3
    assert list(built(verb)) == []
