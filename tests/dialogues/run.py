"""Sweep dialogues with one model: `run.py FOLDER FAMILY FIRST COUNT`. Prints what was found, as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from torpor.daemon.models.models import load_model
from torpor.snapshot.digests import DigestCache
from torpor.tests.dialogues.forms import ALL_FAMILIES
from torpor.tests.dialogues.generator import dialogue
from torpor.tests.dialogues.oracle import Findings, sweep

_TURNS = (1, 1, 1, 2)
_CONTEXT_TOKENS = 1_000_000


def swept(folder: Path, family: str, first: int, count: int) -> Findings:
    """What `count` dialogues find, from number `first` on, with the model in a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        model = load_model(family, str(folder), DigestCache(Path(scratch) / "digests"))
    made = next(each for each in ALL_FAMILIES if each.name == family)
    dialogues = (dialogue(seed, turns=_TURNS) for seed in range(first, first + count))
    return sweep(replace(model, context_tokens=_CONTEXT_TOKENS), made, dialogues)


if __name__ == "__main__":
    _, of, name, begin, number = sys.argv
    print(json.dumps(vars(swept(Path(of), name, int(begin), int(number)))))
