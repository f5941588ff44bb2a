"""The ledger is the transcript, and what a model wrote is what is shown: see `oracle.py`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torpor.tests.changed_copy import ROOT, require_once
from torpor.tests.daemon.models.template_families import FLAGS, Family, Flags, write_family
from torpor.tests.dialogues.comparing import DIFFERENCES
from torpor.tests.dialogues.forms import ALL_FAMILIES
from torpor.tests.dialogues.planting import planted, printed
from torpor.tests.dialogues.run import swept
from torpor.tests.shares import share

PAGE = ROOT / "docs" / "reference" / "dialogue-differences.md"
IN_A_SHARE = 6
IN_ALL = 100_000
KINDS: list[tuple[str, Flags]] = [(family.name, flags) for family in ALL_FAMILIES for flags in FLAGS]
OF_NAME = {family.name: family for family in ALL_FAMILIES}

Folder = Callable[[str, Flags], Path]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory, model_writer: Callable[..., Path]) -> Folder:
    """Model folders of families, each made once."""
    root = tmp_path_factory.mktemp("families")

    def made(name: str, flags: Flags) -> Path:
        folder, family = root / f"{name}-{flags}", OF_NAME[name]
        if not folder.exists():
            write_family(folder, family, model_writer, flags=flags)
            _name_the_parser(folder, family)
        return folder

    return made


def _name_the_parser(folder: Path, family: Family) -> None:
    settings = folder / "tokenizer_config.json"
    named = {"tool_parser_type": family.parser} if family.parser == "laguna" else {}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | named, ensure_ascii=False))


@pytest.mark.one_in(1)
@pytest.mark.parametrize(("name", "flags"), KINDS)
def test_the_ledger_is_the_transcript(folder_of: Folder, name: str, flags: Flags) -> None:
    found = swept(folder_of(name, flags), name, share(), IN_A_SHARE)
    assert found.faults == []
    assert found.seen["turn by turn"] + found.seen["passed over"] == IN_A_SHARE


@pytest.mark.heavy
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_dialogues(folder_of: Folder) -> None:
    each, differences, seen = -(-IN_ALL // len(KINDS)), Counter[str](), Counter[str]()
    made = [(folder_of(*kind), kind[0], each * at) for at, kind in enumerate(KINDS)]
    faults: list[str] = []
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for found in threads.map(lambda one: told(ROOT, *one, each), made):
            faults += found["faults"]
            differences += Counter(found["differences"])
            seen += Counter(found["seen"])
    print(dict(seen), dict(differences))
    assert faults == []
    assert seen["dialogues"] > IN_ALL * 0.99
    assert differences.keys() == DIFFERENCES.keys()


def told(package: Path, folder: Path, name: str, first: int, count: int) -> dict[str, dict[str, int] | list[str]]:
    """What a process of its own finds, with the package in a folder."""
    found: dict[str, dict[str, int] | list[str]] = json.loads(
        printed(package, "run.py", str(folder), name, str(first), str(count))
    )
    return found


PLANTS: dict[str, tuple[str, str, str, str, Flags]] = {
    "unflagged names are read as control tokens": (
        "models/control_tokens.py",
        "if not each.special and is_control(each.content)",
        "if False",
        "qwen3",
        "unflagged",
    ),
    "harmless added tokens are split": (
        "models/control_tokens.py",
        "is_control(each.content)",
        "True",
        "gemma3",
        "own",
    ),
    "a quoted tag begins thinking": (
        "engine/channels.py",
        "if self._marks.reasoning and not self._said else []",
        "if self._marks.reasoning else []",
        "qwen3",
        "own",
    ),
    "an answer is compared behind its thinking": (
        "sessions/said.py",
        "core, thinking, calls = text.strip(),",
        'core, thinking, calls = text.rpartition("</think>")[2].strip(),',
        "chatml",
        "own",
    ),
    "turns of one role are not joined": (
        "models/turn_rules.py",
        "if pair in _IN_A_ROW and pair not in rules.in_a_row:",
        "if False:",
        "gemma2",
        "own",
    ),
    "later system texts are told as they are": (
        "models/turn_rules.py",
        "if not rules.later_system:",
        "if False:",
        "deepseek",
        "own",
    ),
    "a turn is closed twice": (
        "models/chat_template.py",
        "    if is_closed:\n        return rest + whole\n",
        "",
        "kimi-k3",
        "own",
    ),
    **{
        f"calls are read by mlx-lm's parser, {name}": (
            "models/call_reading.py",
            "form = _form_of(marks.parser, body)\n    if form is None:",
            "form = None\n    if form is None:",
            name,
            "own",
        )
        for name in ("glm", "qwen3-coder", "longcat", "minicpm5", "minimax-m2", "function-gemma", "muse-spark")
    },
}
"""Faults that were in the code: a file of `daemon`, what to put in place of what, and where it shows."""


@pytest.mark.one_in(1)
@pytest.mark.parametrize("plant", PLANTS)
def test_a_plant_is_found(folder_of: Folder, tmp_path: Path, plant: str) -> None:
    file, what, instead, name, flags = PLANTS[plant]
    package = planted(tmp_path, f"daemon/{file}", what, instead)
    assert told(package, folder_of(name, flags), name, 0, 60)["faults"]


def test_each_plant_fits_the_code() -> None:
    for file, what, *_ in PLANTS.values():
        require_once(ROOT / "daemon" / file, what)


def test_the_page_has_each_difference() -> None:
    rows = re.findall(r"^\| ([a-z][^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows[1:]) == dict(DIFFERENCES)
