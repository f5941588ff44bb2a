"""The ribbon of `torpor blocks`: as wide as the terminal, each kind where it is, and damage never hidden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torpor.cli.commands.blocks import KINDS, _remarks, kind_of, legend, render_blocks, ribbon, stretches_of
from torpor.cli.view.markup import unmarked
from torpor.cli.view.output import Output
from torpor.daemon.api.blocks import BlockInfo, BlocksResult, Stretch
from torpor.tests.cli.cli_rig import unstyled


def block(start: int = 0, tokens: int = 256, **facts: Any) -> BlockInfo:
    told = BlockInfo(
        "ab" * 32, "span", start, tokens, {"user": tokens}, 1024, 512, "raw", None, "whole", "cd" * 32, 1, 1
    )
    return replace(told, **facts)


def found(*blocks: BlockInfo, unread: int = 0, journal: int = 0, memory: int = 0) -> BlocksResult:
    at = end = max(each.start + each.tokens for each in blocks)
    rest = list[Stretch]()
    for tokens, place in ((unread, "ledger"), (journal, "journal"), (memory, "memory")):
        rest += [Stretch(at, at := at + tokens, place)] if tokens else []  # type: ignore[arg-type]
    told, sizes = ("torpor://default/a", 3, "ef" * 32, end + unread, unread), (1024, 512, 0, 512, 0)
    return BlocksResult(*told, end + unread, tuple(rest), *sizes, False, blocks)


def signs(told: BlocksResult, width: int) -> str:
    return unmarked(ribbon(list(stretches_of(told)), width))


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({}, "alone"),
        ({"versions_needing": 9}, "alone"),
        ({"sessions_needing": 2}, "shared"),
        ({"sessions_needing": 2, "lossy_bits": 4}, "lossy"),
        ({"sessions_needing": 2, "lossy_bits": 4, "condition": "stripped"}, "stripped"),
        ({"sessions_needing": 2, "condition": "missing"}, "damaged"),
        ({"condition": "damaged"}, "damaged"),
    ],
)
def test_of_several_things_that_hold_the_one_to_know_first_is_drawn(facts: dict[str, Any], kind: str) -> None:
    assert kind_of(block(**facts)) == kind


def test_the_ribbon_shows_the_ledger_from_its_first_token_to_its_last_with_what_is_behind_it() -> None:
    told = found(
        block(0, sessions_needing=2), block(256), block(512, lossy_bits=8), unread=256, journal=256, memory=256
    )
    assert signs(told, 12) == "▒▒██≈≈++jjmm"
    assert signs(told, 6) == "▒█≈+jm"
    assert signs(found(block(0)), 5) == "█████"
    assert len({kind.sign for kind in KINDS.values()}) == len(KINDS), "without color, too, they are told apart"


def test_blocks_that_the_list_leaves_out_have_a_place_of_their_own() -> None:
    told = replace(found(block(0)), token_count=1_100_000, unread_tokens=10, common_tokens=1_100_000)
    told = replace(told, rest=(Stretch(1_099_990, 1_100_500, "memory"),))
    assert signs(told, 8) == "········"
    assert signs(replace(found(block(0)), token_count=1024, common_tokens=1024), 8) == "██······"
    assert "·· not in the list: 768 tokens" in unmarked(next(legend(told, [(256, 1024, "untold")], 80)))
    assert "untold" not in {kind for _, _, kind in stretches_of(found(block(0), unread=9))}


def test_a_memory_that_went_back_ends_in_the_midst_of_a_block_and_goes_on_behind_that(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = replace(found(block(0), block(256)), common_tokens=384, rest=(Stretch(384, 512, "journal"),))
    assert signs(told, 8) == "██████jj"
    assert [unmarked(line) for line in legend(told, list(stretches_of(told)), 80)] == [
        "██ alone: 384 tokens, 1.00 KiB   jj in the journal: 128 tokens"
    ]
    Output(as_json=False).show(render_blocks(told))
    rows = unstyled(capsys.readouterr().out).splitlines()
    assert [row.split("\t")[0] for row in rows[1:4]] == ["0–256", "256–384 of 256–512", "384–512"]
    assert "in the journal" in rows[3]
    assert any(remark.startswith("default/a has the first 384 tokens of @3") for remark in _remarks(told))
    assert not any("went back" in remark for remark in _remarks(found(block(0))))


def test_a_version_of_tokens_alone_is_not_said_to_know_no_messages() -> None:
    told = replace(found(block(0, 0)), blocks=(), rest=(Stretch(0, 47, "ledger"),))
    assert not any("messages" in remark for remark in _remarks(told))


def test_one_damaged_block_of_many_is_shown_at_any_width() -> None:
    blocks = [block(256 * number) for number in range(400)]
    blocks[250] = replace(blocks[250], condition="damaged")
    for width in (1, 60, 80, 140):
        drawn = signs(found(*blocks), width)
        assert (len(drawn), drawn.count("!") > 0) == (width, True)
        assert drawn.count("!") <= 2


def test_the_legend_names_what_there_is_in_lines_of_the_width() -> None:
    told = found(block(0, sessions_needing=2), block(256), block(512), block(768, 0, kind="state"), journal=3)
    lines = list(map(unmarked, legend(told, list(stretches_of(told)), 80)))
    assert lines == [
        "▒▒ shared: 256 tokens, 512 B   ██ alone: 512 tokens, 1.50 KiB",
        "jj in the journal: 3 tokens",
    ]
    assert len(list(map(unmarked, legend(told, list(stretches_of(told)), 30)))) == 3


def test_what_is_not_known_has_no_column(capsys: pytest.CaptureFixture[str]) -> None:
    for told, names in (
        (found(block(holds={})), "TOKENS LOGICAL STORED CODEC KEPT NEEDED BY PACK BLOCK"),
        (found(block(resident=True)), "TOKENS HOLDS LOGICAL STORED CODEC KEPT NEEDED BY MEMORY PACK BLOCK"),
        (
            found(block(resident=False, read_ns=1)),
            "TOKENS HOLDS LOGICAL STORED CODEC KEPT NEEDED BY READ BACK PACK BLOCK",
        ),
    ):
        Output(as_json=False).show(render_blocks(told))
        assert unstyled(capsys.readouterr().out).splitlines()[0].replace("\t", " ") == names
