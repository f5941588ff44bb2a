"""`analyze` and `export-kv`: what a person is shown, what a file holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, Group
from torpor.cli.commands.analyze import render_analysis
from torpor.memvid.store import Store
from torpor.tests.cli.cli_rig import MadeStore, Torpor
from torpor.tests.memvid import store_making as making
from torpor.tests.socket_api.server_rig import ServerThread


def group(**figures: list[Any]) -> dict[str, list[Any]]:
    return figures


def array(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": "bfloat16",
        "why": None,
        "heads": 4,
        "dim": 128,
        "tokens": 600,
        "first_token": 0,
        "lossy_tokens": 0,
        "rms": group(mean=[1.0, 2.0, 3.0, 2.0], max=[4.0, 9.5, 9.5, 2.0], max_at=[3, 77, 5, 0]),
        "coherence": group(consecutive=[0.5, 0.7, None, 0.6], with_mean=[0.25, 0.25, 0.25, 0.25]),
        "spectrum": group(entropy_nats=[3.0] * 4, effective_rank=[20.0, 20.0, 20.0, 21.0]),
        "outliers": group(
            sigma=[1.0] * 4,
            count=[0, 9, 2, 5],
            share=[0.0, 0.004, 0.0, 0.0],
            channel=[None, 17, 3, 40],
            channel_count=[0, 9, 1, 5],
        ),
        "undefined": [],
    } | changes


@pytest.fixture
def document() -> dict[str, Any]:
    nothing = group(mean=[None], max=[None], max_at=[None])
    recurrent = {"name": "a0", "dtype": "float32", "why": None, "shape": [1, 4, 8], "rms": 0.5, "max_abs": 2.25}
    elements = {"max_at": 3, "outliers": {"sigma": 0.5, "count": 0, "share": 0.0}, "undefined": []}
    return {
        "session": "torpor://default/notes",
        "version": 3,
        "bundle_id": "ab" * 32,
        "model": "qwen",
        "kind": "kv-analysis",
        "labels": ["long", "qwen", "v3"],
        "token_count": 600,
        "layers": [
            {"path": "0", "kind": "kv/1", "why": None, "arrays": [array("k"), array("v", rms=nothing)]},
            {"path": "1", "kind": "arrays/1", "why": None, "arrays": [recurrent | elements]},
            {"path": "2", "kind": "kv/1", "why": "the model keeps nothing in this cache", "arrays": []},
            {
                "path": "3.1",
                "kind": "kvq/1",
                "why": None,
                "arrays": [{"name": "k", "dtype": "uint32", "why": "it cannot be told", "shape": [4, 600, 16]}],
            },
        ],
        "drift": {
            "why": None,
            "parent": {"session": "torpor://default/notes", "version": 2, "bundle_id": "cd" * 32, "token_count": 500},
            "common_tokens": 500,
            "blocks": {"common": 2, "same": 1, "same_share": 0.5},
            "arrays": [
                {"path": "0", "name": "k", "in_spans": True, "max_abs": 0.5, "relative_l2": 0.0125, "why": None}
            ],
            "logits": {"max_abs": None, "relative_l2": None, "why": None},
        },
    }


def drawn(document: dict[str, Any], width: int) -> list[str]:
    console = Console(width=width, color_system=None, force_terminal=True)
    with console.capture() as capture:
        console.print(Group(*render_analysis(document, width)))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_wide_terminal_is_shown_a_row_for_each_array(document: dict[str, Any]) -> None:
    lines = drawn(document, 120)
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ") and line.strip()}
    assert rows["ARRAY"] == ["ARRAY", "SHAPE", "RMS", "MAX", "NEXT", "MEAN", "RANK", "DRIFT", "OUTLIERS"]
    assert rows["0.k"] == (
        [
            "0.k",
            "4x600x128",
            "2.00",
            "9.50",
            "@5",
            "0.600",
            "0.250",
            "20.2",
            "0.0125",
            "0.10%",
            "h1:c17",
            "h3:c40",
            "h2:c3",
        ]
    )
    assert rows["0.v"][2:4] == ["–", "–"]
    assert rows["1.a0"] == ["1.a0", "1x4x8", "0.500", "2.25", "–", "–", "–", "–", "none"]
    assert rows["3.1.k"][1:3] == ["4x600x16", "–"]
    text = "\n".join(lines)
    assert {len(line) for line in lines if "MEAN:" in line or "RANK:" in line} <= set(range(80))
    assert "2: the model keeps nothing in this cache" in text
    assert "3.1.k: it cannot be told" in text
    assert "drift from version 2: 500 tokens in common, 1 of 2 blocks the same; the largest in 0.k, 0.0125" in text


@pytest.mark.parametrize("width", [80, 100, 120])
def test_no_row_is_broken_and_no_line_is_wider_than_the_terminal(document: dict[str, Any], width: int) -> None:
    lines = drawn(document, width)
    assert max(map(len, lines)) <= width
    assert sum(line.lstrip().startswith("0.k ") for line in lines) == 1
    assert any("h1:c17" in line for line in lines if "0.k" in line)
    assert any("DRIFT" in line for line in lines) == (width >= 100)


def test_what_has_no_drift_says_why(document: dict[str, Any]) -> None:
    document["drift"] = {"why": "it has no parent", "parent": None, "blocks": None, "arrays": []}
    assert "  no drift: it has no parent" in drawn(document, 100)


def test_more_heads_with_outliers_than_are_named_are_counted(document: dict[str, Any]) -> None:
    document["layers"][0]["arrays"][0]["outliers"]["count"] = [1, 9, 2, 5]
    document["layers"][0]["arrays"][0]["outliers"]["channel"] = [8, 17, 3, 40]
    assert any(line.endswith("h1:c17 h3:c40 h2:c3 +1") for line in drawn(document, 120))


def test_names_in_a_document_cannot_steer_the_terminal(document: dict[str, Any]) -> None:
    document["labels"] = ["\x1b[31m", "[bold]x"]
    document["model"] = "\x07"
    text = "\n".join(drawn(document, 120))
    assert "\x1b" not in text
    assert "[bold]x" in text


@pytest.fixture
def analyzed(torpor: Torpor, daemon: ServerThread, document: dict[str, Any], made_store: MadeStore) -> ServerThread:
    """A daemon with a session that slept once, and what it says of it."""
    torpor("append", "notes", "one two")
    torpor("sleep", "notes")
    daemon.service.artifact = json.dumps(document) + "\n"
    daemon.service.store = str(made_store.path)
    daemon.service.calls.clear()
    return daemon


def test_an_analysis_is_asked_of_the_daemon_and_drawn_or_given_whole(
    torpor: Torpor, analyzed: ServerThread, document: dict[str, Any]
) -> None:
    ran = torpor("analyze", "notes", "--kind", "probe", "--label", "a", "--label", "b")
    assert (ran.status, "torpor://default/notes" in ran.out, "h1:c17" in ran.out) == (0, True, True)
    assert analyzed.service.calls[-1] == ("analyze", {"session": "notes", "kind": "probe", "labels": ("a", "b")})
    found = torpor("analyze", "notes@1", "--json").document
    assert (found["artifact"], found["version"], found["awake_tokens"], found["path"]) == (document, 1, None, None)
    torpor("wake", "notes")
    torpor("append", "notes", "three")
    told = " ".join(torpor("analyze", "notes").err.split())
    assert "is awake with 3 tokens; this is version 1, with 2 tokens" in told
    assert torpor("analyze", "nobody").status == 4


def test_the_document_is_written_byte_for_byte_and_replaces_nothing_unasked(
    torpor: Torpor, analyzed: ServerThread, short_path: Path, made_store: MadeStore
) -> None:
    file = short_path / "notes.json"
    ran = torpor("analyze", "notes", "--out", file)
    assert ran.status == 0
    assert f"written to {file}" in ran.err
    assert file.read_text() == analyzed.service.artifact
    analyzed.service.artifact = "{}\n"
    analyzed.service.calls.clear()
    refused = torpor("analyze", "notes", "--out", file, "--json")
    assert (refused.status, refused.error["error"]["code"]) == (2, "target_exists")
    assert "let --overwrite replace it" in refused.error["error"]["message"]
    assert [method for method, _ in analyzed.service.calls] == ["status"], "that is told before the work"
    assert file.read_text() != "{}\n"
    analyzed.service.artifact = file.read_text() + " "
    assert torpor("analyze", "notes", "--out", file, "--overwrite", "--json").document["path"] == str(file)
    assert file.read_text() == analyzed.service.artifact
    missing = torpor("analyze", "notes", "--out", short_path / "none" / "x.json", "--json")
    assert (missing.status, missing.error["error"]["code"]) == (2, "no_target_folder")
    inside = torpor("analyze", "notes", "--out", made_store.path / "x.json", "--json")
    assert (inside.status, inside.error["error"]["code"]) == (2, "target_in_store")
    assert torpor("analyze", "notes", "--out", "-").status == 2


def test_an_export_of_tensors_tells_of_tokens_that_have_none_yet(torpor: Torpor, short_path: Path) -> None:
    path = short_path / "store"
    with Store.open(path, writable=True) as store:
        making.sleep(store, 300, unread=7)
    ran = torpor("export-kv", "agent", short_path / "x.safetensors", "--store", path)
    assert (ran.status, "of 300 tokens" in ran.out, "7 tokens behind these" in ran.err) == (0, True, True)
    ran = torpor("export-kv", "agent", short_path / "y.safetensors", "--store", path, "--json")
    assert (ran.document["token_count"], ran.document["unread_tokens"]) == (300, 7)
