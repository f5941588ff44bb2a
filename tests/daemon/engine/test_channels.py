"""Text, reasoning and calls are told apart while they are written, however the tokens cut them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torpor.daemon.engine.channels import MAX_CALL_CHARS, Channels, Piece, Shown
from torpor.daemon.models.chat_template import NO_ROOT, Root
from torpor.daemon.models.control_tokens import ControlTokens
from torpor.daemon.models.marks import Marks

TOOLS = Root(
    (
        {
            "name": "look",
            "description": "",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}},
        },
    )
)
ARGUMENTS = {"path": "src/a.py", "depth": 2}


def tokenizer(**own: Any) -> Any:
    known = {
        "has_thinking": True,
        "think_start": "<think>",
        "think_end": "</think>",
        "think_start_tokens": (1,),
        "think_end_tokens": (2,),
        "has_tool_calling": False,
        "structural_markers": (),
    }
    return SimpleNamespace(**known | own)


NONE = ControlTokens({}, frozenset())
MARKS = Marks.of(tokenizer(), NONE)


def marks_of(parser: str) -> Marks:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    own = {
        "has_tool_calling": True,
        "tool_call_start": module.tool_call_start,
        "tool_call_end": module.tool_call_end,
        "tool_parser": module.parse_tool_call,
    }
    return Marks.of(tokenizer(**own), NONE)


def told(
    pieces: list[str], marks: Marks = MARKS, root: Root = TOOLS, *, thinks: bool = False, is_cut: bool = False
) -> tuple[str, str, Any]:
    """What was said as text and as reasoning, and the calls."""
    channels = Channels(marks, root, "call{}".format, thinks=thinks)

    def said() -> Iterator[Piece]:
        for piece in pieces:
            yield from channels.push(piece)
        yield from channels.finish(is_cut=is_cut)

    found = list(said())
    assert all(piece.text or piece.call for piece in found)
    text, reasoning = ("".join(each.text for each in found if each.channel == name) for name in ("text", "reasoning"))
    return text, reasoning, [(each.call.name, each.call.arguments, each.call.id) for each in found if each.call]


def call(**changed: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': ARGUMENTS, **changed})}\n</tool_call>"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("hello there \n", ("hello there \n", "", [])),
        ("<think>why\n</think>\n\nhello", ("hello", "why\n", [])),
        (f"hm\n\n{call()}", ("hm", "", [("look", ARGUMENTS, "call1")])),
        (f"{call()}\n{call()}", ("", "", [("look", ARGUMENTS, "call1"), ("look", ARGUMENTS, "call2")])),
        (f"<think>a</think>b{call()}\nc", ("bc", "a", [("look", ARGUMENTS, "call1")])),
        ("a <think>b</think> c", ("a <think>b</think> c", "", [])),
        ("\n<think>b</think> c", ("c", "b", [])),
        (f"{call()}<think>b</think>c<think>d", ("c<think>d", "b", [("look", ARGUMENTS, "call1")])),
        ("a < b, <thin and </think>", ("a < b, <thin and </think>", "", [])),
        ("<think>cut off", ("", "cut off", [])),
        ("<tool_call>{", ("<tool_call>{", "", [])),
        ("<tool_call>{not json}</tool_call> ok", ("<tool_call>{not json}</tool_call> ok", "", [])),
        (call(name="delete"), (call(name="delete"), "", [])),
        (call(arguments=[1]), (call(arguments=[1]), "", [])),
        (call(arguments=json.dumps(ARGUMENTS)), ("", "", [("look", ARGUMENTS, "call1")])),
        (call(id="functions.look:0"), ("", "", [("look", ARGUMENTS, "functions.look:0")])),
        (call(arguments={}), ("", "", [("look", {}, "call1")])),
    ],
)
def test_channels_are_told_apart(said: str, expected: tuple[str, str, Any]) -> None:
    assert told([said]) == expected
    assert told(list(said)) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", call(), "<tool_call>", "a", " \n", "<", "tool_call>"])), st.data()
)
def test_where_tokens_cut_a_text_changes_nothing(parts: list[str], data: Any) -> None:
    said = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)))))
    pieces = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    assert told(pieces) == told([said])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("<tool_call>{", ("", "", [])),
        ("<tool_ca", ("", "", [])),
        ("\n<", ("\n", "", [])),
        (f"hm\n\n{call()[:-20]}", ("hm", "", [])),
        (f"<think>a</think>{call()[:-20]}", ("", "a", [])),
        (f"{call()}\n{call()[:-20]}", ("", "", [("look", ARGUMENTS, "call1")])),
        (call()[: -len("</tool_call>")], ("", "", [("look", ARGUMENTS, "call1")])),
        ("a <", ("a <", "", [])),
        ("<think>a </th", ("", "a </th", [])),
        ("hello ", ("hello ", "", [])),
    ],
)
def test_of_an_answer_that_was_cut_off_in_a_call_the_call_is_no_text(said: str, expected: tuple[str, str, Any]) -> None:
    assert told([said], is_cut=True) == expected
    assert told(list(said), is_cut=True) == expected


def test_an_answer_may_begin_within_its_thinking() -> None:
    assert told(["why</think>\nhello"], thinks=True) == ("hello", "why", [])


def test_without_tools_a_call_is_text() -> None:
    assert told([call()], root=NO_ROOT) == (call(), "", [])


def test_a_call_without_end_is_bounded() -> None:
    said = "<tool_call>" + "x" * MAX_CALL_CHARS
    assert told([said, "y" * 10]) == (said + "y" * 10, "", [])


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("json_tools", '<tool_call>{"name": "look", "arguments": {"path": "src/a.py", "depth": 2}}</tool_call>'),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=look>\n<parameter=path>\nsrc/a.py\n</parameter>\n<parameter=depth>\n2\n</parameter>\n"
                "</function>\n</tool_call>"
            ),
        ),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"path": "src/a.py", "depth": 2}'),
        ("mistral", '[TOOL_CALLS][{"name": "look", "arguments": {"path": "src/a.py", "depth": 2}}]'),
        ("pythonic", '<|tool_call_start|>[look(path="src/a.py", depth=2)]<|tool_call_end|>'),
        (
            "kimi_k2",
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
                '{"path": "src/a.py", "depth": 2}<|tool_call_end|><|tool_calls_section_end|>'
            ),
        ),
        ("gemma4", '<|tool_call>call:look{path:<|"|>src/a.py<|"|>,depth:2}<tool_call|>'),
        ("function_gemma", "<start_function_call>call:look{path:<escape>src/a.py<escape>,depth:2}<end_function_call>"),
        (
            "longcat",
            (
                "<longcat_tool_call>look\n<longcat_arg_key>path</longcat_arg_key>\n<longcat_arg_value>src/a.py"
                "</longcat_arg_value>\n<longcat_arg_key>depth</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>"
                "</longcat_tool_call>"
            ),
        ),
        (
            "glm47",
            (
                "<tool_call>look<arg_key>path</arg_key><arg_value>src/a.py</arg_value><arg_key>depth</arg_key>"
                "<arg_value>2</arg_value></tool_call>"
            ),
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call>\n<invoke name="look">\n<parameter name="path">src/a.py</parameter>\n'
                '<parameter name="depth">2</parameter>\n</invoke>\n</minimax:tool_call>'
            ),
        ),
        (
            "minicpm5",
            '<function name="look"><param name="path">src/a.py</param><param name="depth">2</param></function>',
        ),
        (
            "muse_spark",
            (
                '<atem:function_calls><atem:invoke name="look"><atem:parameter name="path">src/a.py</atem:parameter>'
                '<atem:parameter name="depth">2</atem:parameter></atem:invoke></atem:function_calls>'
            ),
        ),
    ],
)
def test_the_calls_of_each_family_are_understood(parser: str, said: str) -> None:
    text, _, calls = told([f"I look.\n{said}"], marks_of(parser))
    assert (text, [(name, arguments) for name, arguments, _ in calls]) == ("I look.", [("look", ARGUMENTS)])


WORDS = {10: "hello", 11: " there", 20: "[CALL]", 21: "[ARGS]", 22: "[OTHER]"}
SPECIAL = {20, 21, 22}


class Words:
    """A tokenizer of a few words, some of them special."""

    has_thinking, has_tool_calling, structural_markers = False, True, ()
    tool_call_start, tool_call_end = "[CALL]", ""

    def tool_parser(self, text: str, _tools: Any) -> Any:
        name, _, rest = text.partition("[ARGS]")
        return {"name": name, "arguments": {"said": rest}}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(WORDS[token] for token in token_ids if not (skip_special_tokens and token in SPECIAL))


CONTROLS = ControlTokens({token: WORDS[token] for token in SPECIAL}, frozenset())
HELLO = Root(({"name": "hello"},))


def display_of(stop: tuple[str, ...] = (), root: Root | None = HELLO, controls: ControlTokens = CONTROLS) -> Shown:
    model: Any = SimpleNamespace(tokenizer=Words(), marks=Marks.of(Words(), controls), end_tokens=frozenset())
    return Shown(model, [], root, stop)


def shown(tokens: list[int], stop: tuple[str, ...] = (), **how: Any) -> list[Piece]:
    display = display_of(stop, **how)
    pieces = [piece for token in tokens for piece in display.push(token)]
    return [*pieces, *display.finish()]


def test_special_tokens_are_marks_and_no_text() -> None:
    pieces = shown([10, 22, 11, 20, 10, 21, 11])
    assert "".join(piece.text for piece in pieces) == "hello there"
    (called,) = [piece.call for piece in pieces if piece.call]
    assert (called.name, called.arguments, len(called.id)) == ("hello", {"said": " there"}, 9)


def test_a_stop_string_ends_the_text_and_no_call_follows() -> None:
    assert shown([10, 11, 20, 10, 21, 11], ("the",)) == [Piece("text", "hello"), Piece("text", " ")]


def test_stop_strings_count_in_the_text_alone() -> None:
    pieces = shown([10, 20, 10, 21, 11], ("there",))
    assert [piece.call.arguments for piece in pieces if piece.call] == [{"said": " there"}]


def test_a_stop_string_stands_on_no_two_sides_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may begin one is told before the call: so the pieces are those of an answer without stop strings."""
    monkeypatch.setattr(Words, "tool_call_end", "[OTHER]")
    said = [10, 20, 10, 21, 11, 22, 11]
    pieces = shown(said, ("hello there",))
    assert pieces == shown(said)
    assert [piece.text or piece.call.arguments for piece in pieces if piece.text or piece.call] == [
        *("hello", {"said": " there"}, "there")
    ]


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.channel == "text")


@pytest.mark.parametrize("root", [HELLO, NO_ROOT, None])
@pytest.mark.parametrize("stop", [("[OTHER]",), ("never", "[OTHER]"), ("[OTHER]", "[ARGS]")])
def test_a_stop_string_that_is_a_control_token_stops(root: Root | None, stop: tuple[str, ...]) -> None:
    display = display_of(stop, root)
    pieces = [piece for token in (10, 11, 22) for piece in display.push(token)]
    assert (text_of(pieces), display.stopped_by, display.is_over) == ("hello there", "[OTHER]", True)
    assert list(display.finish()) == []


def test_a_control_token_stops_in_the_text_alone() -> None:
    pieces = shown([10, 20, 10, 21, 11], ("[ARGS]",))
    assert [piece.call.arguments for piece in pieces if piece.call] == [{"said": " there"}]


def test_a_stop_string_before_a_control_token_that_is_one_too_is_told() -> None:
    display = display_of(("there", "[OTHER]"))
    assert text_of([piece for token in (10, 11, 22) for piece in display.push(token)]) == "hello "
    assert display.stopped_by == "there"


@pytest.mark.parametrize("root", [HELLO, None])
def test_a_control_token_without_a_flag_is_shown_in_a_text(root: Root | None) -> None:
    unflagged = ControlTokens(CONTROLS.names, frozenset({22}))
    assert text_of(shown([10, 22, 11], root=root, controls=unflagged)) == "hello[OTHER] there"
    assert text_of(shown([10, 22, 11], root=root)) == "hello there"


@pytest.mark.parametrize(
    ("ledger", "thinks"),
    [([5, 1], True), ([5, 1, 2], False), ([1, 9], False), ([1, 9, 5], False), ([9, 1, 5, 5], True), ([], False)],
)
def test_an_open_turn_tells_whether_it_thinks(ledger: list[int], thinks: bool) -> None:
    assert MARKS.thinks_behind(ledger, frozenset({9})) is thinks
